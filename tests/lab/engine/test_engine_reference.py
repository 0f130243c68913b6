"""Compares the model with the published measurements of the VTC paper's artifact."""

import csv
from collections import deque
from pathlib import Path

import pytest

from schedsvc_lab.engine import Engine, EngineRequest, load_profile

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT.parent / "shared" / "data" / "reference" / "vtc_a10g"
POOL_TOKENS = 10_000
# The artifact admits at most this number of input tokens at once, every ten decode steps.
ROUND_TOKENS_MAX = 3_072
ROUND_STEPS = 10


def read_requests(name):
    path = REFERENCE / name
    if not path.exists():
        pytest.skip(f"needs {path}, which is not on this machine")
    with path.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    rows.sort(key=lambda row: float(row["arrival_s"]))
    return [
        (round(float(r["arrival_s"]) * 1e9), int(r["prompt_tokens"]), int(r["output_tokens"]))
        for r in rows
    ]


def peak_fits(running, prompt, output):
    """Test as the artifact does: no moment of the requests' joint future exceeds the pool."""
    futures = [(s.known_tokens, s.output_tokens - s.produced_tokens) for s in running]
    futures.append((prompt, output))
    futures.sort(key=lambda future: -future[1])
    used = 0
    for count, (now, left) in enumerate(futures, 1):
        used += now
        if used + left * count >= POOL_TOKENS:
            return False
    return True


def serve_fcfs(requests):
    """Serve in order of arrival as the artifact does. Returns the time in ns and the gauges."""
    profile = load_profile("a10g-llama2-7b")
    config = profile.config(
        kv_tokens=POOL_TOKENS,
        block_size_tokens=1,
        step_tokens_max=2 * ROUND_TOKENS_MAX,
        prefill="separate",
    )
    engine = Engine(config, profile.step_cost(config.sequences_max))
    arrivals, queue, now_ns, number = deque(requests), deque(), 0, 0
    while arrivals or queue or engine.running():
        while arrivals and arrivals[0][0] <= now_ns:
            queue.append(arrivals.popleft())
        if not queue and not engine.running():
            now_ns = arrivals[0][0]
            continue
        batch_tokens = 0
        admitted = engine.running()
        while queue and batch_tokens + queue[0][1] <= ROUND_TOKENS_MAX:
            _, prompt, output = queue[0]
            if not peak_fits(admitted, prompt, output):
                break
            queue.popleft()
            admitted += engine.add(EngineRequest(number, prompt, (output,)))
            number += 1
            batch_tokens += prompt
        if batch_tokens:
            now_ns += engine.step().duration_ns
        steps = 0
        while steps < ROUND_STEPS and (run := engine.run_decodes(ROUND_STEPS - steps)):
            now_ns += run.duration_ns
            steps += run.tokens
    engine.check()
    assert engine.gauges().preemptions == 0
    return now_ns, engine.gauges()


@pytest.mark.parametrize(
    ("name", "tokens_per_s"), [("fcfs_overload.csv", 876), ("fcfs_poisson_short_long.csv", 1475)]
)
def test_fcfs_throughput_is_the_measured_one(name, tokens_per_s):
    requests = read_requests(name)
    total_ns, gauges = serve_fcfs(requests)
    tokens = gauges.prompt_tokens + gauges.generation_tokens
    assert tokens == sum(prompt + output for _, prompt, output in requests)
    assert tokens / (total_ns / 1e9) == pytest.approx(tokens_per_s, rel=0.05)
