#!/bin/sh
# The figures of docs/measure/study/README.md. Needs the public traces beside the repository.
#   docs/measure/study/run.sh out/study
set -eu
out=${1:?usage: docs/measure/study/run.sh FOLDER}
here=$(dirname "$0")
traces=$here/../../../../shared/data/traces
schedsvc=$here/../../../.venv/bin/schedsvc
mkdir -p "$out"
sweep() {
    name=$1
    shift
    echo "== $name"
    "$schedsvc" sim sweep --out "$out/$name" "$@"
}

for load in long-short overload; do
    "$schedsvc" workload synth --profiles "$here/$load.yaml" --duration 600 --out "$out/$load.jsonl"
done
grep '"tenant": "short"' "$out/long-short.jsonl" > "$out/short.jsonl"

# Room for everybody: what the engine's steps alone do to a short request.
roomy="--policy engine --client short --set engine.kv_tokens=40000 --goodput ttft:1000"
sweep alone --trace "$out/short.jsonl" $roomy --vary engine.step_tokens_max=4096
sweep prefill --trace "$out/long-short.jsonl" $roomy --set engine.step_tokens_max=4096 \
    --vary engine.prefill=separate,whole,chunked
sweep chunks --trace "$out/long-short.jsonl" $roomy \
    --vary engine.step_tokens_max=128,256,512,1024,2048,4096
sweep chunks-long --trace "$out/long-short.jsonl" --policy engine --client long \
    --set engine.kv_tokens=40000 --vary engine.step_tokens_max=128,256,512,1024,2048,4096
sweep delay --trace "$out/long-short.jsonl" $roomy --set engine.prefill=separate \
    --set engine.step_tokens_max=4096 --vary engine.delay_factor_ppm=0,500000,1000000,2000000

# No room: what admission changes.
sweep admission --trace "$out/overload.jsonl" --client short --goodput ttft:1000 \
    --policy engine --policy fcfs --policy vtc --vary scheduler.expert.dispatch=strict,backfill
sweep admission-long --trace "$out/overload.jsonl" --client long \
    --policy engine --policy fcfs --policy vtc --vary scheduler.expert.dispatch=strict,backfill

# Preempted work: thrown away or swapped, at 40 us for each token and way.
sweep swap --trace "$traces/lmsys_arena_vtc.csv" --policy engine --goodput ttft:5000 \
    --set engine.swap_tokens=40000 --set cost.swap_token_ns=40000 \
    --vary engine.preemption=recompute,swap --vary engine.resume=arrival,front

sweep blocks --trace "$traces/lmsys_arena_vtc.csv" --policy engine --policy vtc \
    --goodput ttft:5000 --vary engine.block_size_tokens=1,8,16,32,64,128,256
sweep quantile --trace "$traces/lmsys_arena_vtc.csv" --policy vtc --goodput ttft:5000 \
    --vary scheduler.expert.quantile=0.5,0.7,0.8,0.9,0.95,0.99 \
    --vary scheduler.expert.ledger=sum,peak
sweep cache --trace "$traces/mooncake_conversation_trace.jsonl" --policy engine --jobs 2 \
    --set cost.prefill_token_ns=10000 --set cost.decode_kv_token_ns=20 \
    --set engine.kv_tokens=80000000 --set engine.context_tokens_max=131072 \
    --set engine.step_tokens_max=8192 --set engine.block_size_tokens=512 \
    --vary engine.cache_tokens_max=500000,2000000,8000000,60000000 \
    --vary engine.prefix_cache=lru,fifo,lfu,belady
