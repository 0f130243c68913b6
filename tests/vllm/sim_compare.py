"""The simulator beside the real vLLM: the same requests, with and without the scheduler.

    python -m tests.vllm.sim_compare --workload hog-quiet --arm plain --runs 5

Each run has its own arrivals (hog-quiet), or the same slice of the LMSYS trace. The engine writes
its steps, and each run is simulated with a profile fitted to those of the other runs; `--profile`
takes another. A figure holds where the simulated throughput (output tokens until the last end) is
within 10 % of the real one, each tenant's median TTFT lies in the range of the real runs, and
preemptions within a factor of two. The engine model ends where the engine does: what HTTP, API
server and client add to a first token is measured after each run, and added to the simulated TTFTs
by the streams that run then and by what else arrives (tests/vllm/around.py): it, too, comes from
the other runs. Writes WORKLOAD-ARM.json and the steps; status 1 where a figure does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from schedsvc.config import Config, load
from schedsvc.load.generator import LoadRun, Pace
from schedsvc.load.report import client_lag_ms_p99
from schedsvc.load.target import Target
from schedsvc.sim.engine import Profile, ProfileError, load_profile
from schedsvc.sim.fit import FitError
from schedsvc.sim.requests import Requests
from schedsvc.sim.scenario import Scenario, simulate
from schedsvc.workload import TraceRequest, read_trace

from . import programs, recorded
from .around import DRAIN_S_MAX, Around, Probed, around, measure
from .pairs import arrivals
from .stack import Stack

LMSYS = programs.ROOT.parent / "shared" / "data" / "traces" / "lmsys_arena_vtc.csv"
LMSYS_FASTER = 6.0
REQUESTS_MIN = 10
"""Of a tenant, for its median to be judged."""
THROUGHPUT_OFF_MAX = 0.10
PREEMPTIONS_FACTOR_MAX = 2.0
Figures = dict[str, Any]


def workload(name: str, seed: int, seconds: float) -> list[TraceRequest]:
    """Make the requests of one run, sorted by arrival."""
    if name == "hog-quiet":
        return arrivals(seed, seconds)
    return [
        TraceRequest(r.arrival_s / LMSYS_FASTER, r.tenant, r.prompt_tokens, r.output_tokens)
        for r in read_trace(LMSYS, tenant="default")
        if r.arrival_s < seconds * LMSYS_FASTER
        and r.prompt_tokens + r.output_tokens < programs.CONTEXT_TOKENS
    ]


def drive(stack: Stack, requests: Sequence[TraceRequest], seed: int) -> Figures:
    """Send the requests to the real engine; waits until it is at rest."""
    before = stack.gauges()["num_preemptions_total"]
    pace = Pace(seed=seed, warmup_requests=3, warmup_s=0.0, drain_s=DRAIN_S_MAX)
    target = Target(url=stack.url, model=programs.MODEL)
    result = asyncio.run(LoadRun(target, list(requests), pace).run())
    stack.rest(DRAIN_S_MAX)
    done = [s for s in result.recorder.samples if s.end_s == s.end_s and s.output_tokens]
    ttft: dict[str, list[float]] = {}
    for sample in done:
        ttft.setdefault(sample.tenant, []).append(sample.ttft_ms)
    return {
        "throughput": sum(s.output_tokens for s in done) / max(s.end_s for s in done),
        "completed": len(done),
        "preemptions": stack.gauges()["num_preemptions_total"] - before,
        "ttft_ms": {tenant: median(values) for tenant, values in sorted(ttft.items())},
        "client_lag_ms_p99": client_lag_ms_p99(result),
        "first_tokens": sorted((s.intended_s, s.tenant, s.ttft_ms) for s in done),
    }


def in_a_row(runs: Sequence[Sequence[TraceRequest]], every_s: float) -> list[TraceRequest]:
    """Put runs behind each other, each at rest before the next begins."""
    return [
        replace(request, arrival_s=request.arrival_s + number * every_s)
        for number, requests in enumerate(runs)
        for request in requests
    ]


def imitate(
    runs: Sequence[Sequence[TraceRequest]],
    every_s: float,
    profile: Profile,
    policy: str,
    config: Config | None,
    beside: Around,
) -> Figures:
    """Serve the last of the runs in the simulator, and add what is around the engine.

    The runs before go first: the real scheduler had learned from them, too.
    """
    scenario = Scenario(profile, config=config)
    earlier, requests = in_a_row(runs[:-1], every_s), in_a_row(runs, every_s)
    run = simulate(scenario, Requests.from_trace(requests), policy)
    before = 0
    if earlier:
        before = simulate(scenario, Requests.from_trace(earlier), policy).preemptions
    ttft: dict[str, list[float]] = {}
    first_tokens: list[tuple[float, str, float]] = []
    begun, ended = sorted(run.outcomes.first_ns), sorted(run.outcomes.end_ns)
    began_ns = round((len(runs) - 1) * every_s * 1e9)
    arrivals_ms = [ns / 1e6 for ns in sorted(run.requests.arrival_ns[len(earlier) :])]
    outputs, last_ns = 0, began_ns + 1
    for at in range(len(earlier), len(requests)):
        end_ns = run.outcomes.end_ns[at]
        if end_ns < 0:
            continue
        first_ns = run.outcomes.first_ns[at]
        streams = bisect_left(begun, first_ns) - bisect_right(ended, first_ns)
        arrival_ns = run.requests.arrival_ns[at]
        tenant = run.requests.clients[run.requests.client[at]]
        neighbours = beside.neighbours(arrivals_ms, arrival_ns / 1e6)
        ttft_ms = (first_ns - arrival_ns) / 1e6 + beside.at(streams, neighbours)
        ttft.setdefault(tenant, []).append(ttft_ms)
        first_tokens.append(((arrival_ns - began_ns) / 1e9, tenant, ttft_ms))
        outputs += run.requests.output_tokens[at]
        last_ns = max(last_ns, end_ns)
    return {
        "throughput": outputs * 1e9 / (last_ns - began_ns),
        "completed": sum(map(len, ttft.values())),
        "preemptions": run.preemptions - before,
        "ttft_ms": {tenant: median(values) for tenant, values in sorted(ttft.items())},
        "first_tokens": sorted(first_tokens),
    }


def judge(
    real: Sequence[Figures], simulated: Sequence[Figures], counts: dict[str, int]
) -> list[tuple[str, str, str, bool]]:
    """Put each figure beside the real one: name, simulated, real, whether it holds."""
    rows = []
    ours, theirs = (fmean(r["throughput"] for r in runs) for runs in (simulated, real))
    holds = abs(ours / theirs - 1) <= THROUGHPUT_OFF_MAX
    rows.append(("output tokens/s", f"{ours:,.0f}", f"{theirs:,.0f} ({ours / theirs:.3f})", holds))
    ours, theirs = (fmean(r["preemptions"] for r in runs) for runs in (simulated, real))
    # Below one a run there is no factor to speak of.
    most, least = max(ours, theirs, 1.0), max(min(ours, theirs), 1.0)
    rows.append(
        ("preemptions", f"{ours:,.1f}", f"{theirs:,.1f}", most / least <= PREEMPTIONS_FACTOR_MAX)
    )
    for tenant, count in counts.items():
        if count < REQUESTS_MIN:
            continue
        seen = [r["ttft_ms"][tenant] for r in real if tenant in r["ttft_ms"]]
        made = [r["ttft_ms"][tenant] for r in simulated if tenant in r["ttft_ms"]]
        if not seen or not made:
            rows.append((f"median TTFT of {tenant} (ms)", "-", "-", not seen and not made))
            continue
        middle = median(made)
        span = f"{min(seen):,.0f} to {max(seen):,.0f}"
        holds = min(seen) <= middle <= max(seen)
        rows.append((f"median TTFT of {tenant} (ms)", f"{middle:,.0f}", span, holds))
    return rows


@contextlib.contextmanager
def _stack(arm: str, tenants: list[str]) -> Iterator[tuple[Stack, recorded.Recorder]]:
    with tempfile.TemporaryDirectory(prefix="v") as name:
        folder = Path(name)
        steps = folder / "steps.jsonl"
        with (
            programs.Scheduler(folder, tenants, {}) as scheduler,
            programs.vllm(
                folder,
                gated=arm == "gated",
                arguments=recorded.ARGUMENTS,
                variables=recorded.variables(steps),
            ) as server,
        ):
            yield Stack(server, scheduler), recorded.Recorder(steps)


def _config(arm: str, tenants: list[str]) -> Config | None:
    if arm == "plain":
        return None
    with tempfile.TemporaryDirectory() as name:
        programs.Scheduler(Path(name), tenants, {})
        return load(Path(name) / "scheduler.yaml")


def run_all(
    arm: str, tenants: list[str], made: Sequence[Sequence[TraceRequest]], out: Path, name: str
) -> tuple[list[Figures], list[list[Probed]]]:
    """Serve every run on the real engine, and keep its steps. The runs, and `measure`'s answers."""
    real: list[Figures] = []
    probed: list[list[Probed]] = []
    steps: list[list[str]] = []
    with _stack(arm, tenants) as (stack, recorder):
        programs.go_first()
        for seed, requests in enumerate(made):
            real.append(drive(stack, requests, seed))
            steps.append(recorder.take())
            # Not before the first: its lengths would stand for those of tenants that are unknown.
            probed.append(measure(stack, recorder))
            shown = {k: v for k, v in real[-1].items() if k != "first_tokens"}
            sys.stderr.write(f"run {seed + 1} of {len(made)}: {shown}\n")
    recorded.save(steps, out, name)
    return real, probed


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.sim_compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workload", choices=["hog-quiet", "lmsys"], default="hog-quiet")
    parser.add_argument("--arm", choices=["plain", "gated"], default="plain")
    parser.add_argument("--runs", type=int, default=5, help="real ones (default 5)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals (default 20)")
    parser.add_argument(
        "--profile", help="name, or a .yaml file (default: fitted to the steps of the other runs)"
    )
    parser.add_argument("--out", type=Path, default=Path("out/vllm-sim"), metavar="DIR")
    parser.add_argument(
        "--again", action="store_true", help="simulate anew, with the real runs kept"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    if options.runs < 1 or options.seconds <= 0:
        parser.error("--runs and --seconds must be positive")
    if options.profile:
        try:
            load_profile(options.profile)
        except ProfileError as error:
            parser.error(f"--profile: {error}")
    if not programs.installed():
        parser.error("the real vLLM is not installed; `make test-vllm` does it")
    if options.workload == "lmsys" and not LMSYS.exists():
        parser.error(f"needs {LMSYS.name}, which is not on this machine")
    return options


def main() -> None:
    """Run, compare, write, print; status 1 where a figure does not hold."""
    options = _options()
    programs.end_on_signal()
    name = f"{options.workload}-{options.arm}"
    file = options.out / f"{name}.json"
    made = [workload(options.workload, seed, options.seconds) for seed in range(options.runs)]
    counts: dict[str, int] = {}
    for requests in made:
        for request in requests:
            counts[request.tenant] = counts.get(request.tenant, 0) + 1
    counts = {tenant: count // options.runs for tenant, count in sorted(counts.items())}
    if options.again:
        if not file.exists():
            sys.exit(f"--again: there is no {file}; run once without it")
        earlier = json.loads(file.read_text())
        if "probed" not in earlier or len(earlier["real"]) != options.runs:
            sys.exit(f"--again: {file} is not of {options.runs} runs; run once without it")
        real = earlier["real"]
        probed = [[Probed(**cell) for cell in run] for run in earlier["probed"]]
    else:
        real, probed = run_all(options.arm, list(counts), made, options.out, name)
    kept = {"real": real, "probed": [[asdict(cell) for cell in run] for run in probed]}
    file.write_text(json.dumps(kept) + "\n")
    try:
        if options.profile:
            profiles = [load_profile(options.profile)] * options.runs
        else:
            profiles = recorded.profiles(options.out, name, options.runs)
    except FitError as error:
        sys.exit(str(error))
    policy = "engine" if options.arm == "plain" else "vtc"
    config = _config(options.arm, list(counts))
    every_s = options.seconds + DRAIN_S_MAX
    simulated = [
        imitate(
            made[: number + 1],
            every_s,
            profile,
            policy,
            config,
            around(recorded.others(probed, number), profile),
        )
        for number, profile in enumerate(profiles)
    ]
    rows = judge(real, simulated, counts)
    report = {"real": real, "simulated": simulated, "rows": rows}
    file.write_text(json.dumps(kept | report) + "\n")
    if options.json:
        print(json.dumps(report))
    for name, ours, theirs, holds in rows if not options.json else []:
        print(f"{name:42} {ours:>10} {theirs:>20}  {'holds' if holds else 'MISSED'}")
    sys.exit(0 if all(row[3] for row in rows) else 1)


if __name__ == "__main__":
    main()
