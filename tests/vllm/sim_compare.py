"""The simulator beside the real vLLM: the same requests, with and without the scheduler.

    python -m tests.vllm.sim_compare --workload hog-quiet --arm plain --runs 5

Each run has its own arrivals (hog-quiet), or the same slice of the LMSYS trace. The engine writes
its steps, and each run is simulated with a profile fitted to those of the other runs; `--profile`
takes another. A figure holds where the simulated throughput (output tokens until the last end) is
within 10 % of the real one, each tenant's median TTFT lies in the range of the real runs, and
preemptions within a factor of two. The engine model ends where the engine does: what HTTP, API
server and client add to a first token is measured on single requests and added to the simulated
TTFTs. Writes WORKLOAD-ARM.json and the steps; status 1 where a figure does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
from .pairs import arrivals
from .stack import Stack

LMSYS = programs.ROOT.parent / "shared" / "data" / "traces" / "lmsys_arena_vtc.csv"
LMSYS_FASTER = 6.0
REQUESTS_MIN = 10
"""Of a tenant, for its median to be judged."""
THROUGHPUT_OFF_MAX = 0.10
PREEMPTIONS_FACTOR_MAX = 2.0
DRAIN_S_MAX = 90.0
ALONE, ALONE_EVERY_S, ALONE_TOKENS = 20, 0.15, 64
"""Requests that come one by one, to see what is around the engine."""

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
    }


def alone_ms(stack: Stack) -> float:
    """Measure the time to the first token of single requests."""
    tenant = next(iter(arrivals(0, 1.0))).tenant
    alone = [TraceRequest(n * ALONE_EVERY_S, tenant, ALONE_TOKENS, 2) for n in range(ALONE)]
    return float(drive(stack, alone, 0)["ttft_ms"][tenant])


def around_ms(measured_ms: float, profile: Profile) -> float:
    """Return what that is beyond the step in the engine model."""
    step_ns = profile.step_cost(1).duration_ns(ALONE_TOKENS, 0, 0)
    return max(0.0, measured_ms - step_ns / 1e6)


def imitate(
    requests: Sequence[TraceRequest],
    profile: Profile,
    policy: str,
    config: Config | None,
    add_ms: float,
) -> Figures:
    """Serve the same requests in the simulator; `add_ms` is what is around the engine."""
    scenario = Scenario(profile, config=config)
    run = simulate(scenario, Requests.from_trace(requests), policy)
    ttft: dict[str, list[float]] = {}
    outputs, last_ns = 0, 1
    for at, end_ns in enumerate(run.outcomes.end_ns):
        if end_ns < 0:
            continue
        waited_ns = run.outcomes.first_ns[at] - run.requests.arrival_ns[at]
        tenant = run.requests.clients[run.requests.client[at]]
        ttft.setdefault(tenant, []).append(waited_ns / 1e6 + add_ms)
        outputs += run.requests.output_tokens[at]
        last_ns = max(last_ns, end_ns)
    return {
        "throughput": outputs * 1e9 / last_ns,
        "completed": sum(map(len, ttft.values())),
        "preemptions": run.preemptions,
        "ttft_ms": {tenant: median(values) for tenant, values in sorted(ttft.items())},
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
) -> tuple[list[Figures], float]:
    """Serve every run on the real engine, and keep its steps. The runs, and a request alone."""
    real: list[Figures] = []
    steps: list[list[str]] = []
    with _stack(arm, tenants) as (stack, recorder):
        programs.go_first()
        measured_ms = alone_ms(stack)
        recorder.take()
        for seed, requests in enumerate(made):
            real.append(drive(stack, requests, seed))
            steps.append(recorder.take())
            sys.stderr.write(f"run {seed + 1} of {len(made)}: {real[-1]}\n")
    recorded.save(steps, out, name)
    return real, measured_ms


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
        real, measured_ms = earlier["real"], earlier["alone_ms"]
    else:
        real, measured_ms = run_all(options.arm, list(counts), made, options.out, name)
    try:
        if options.profile:
            profiles = [load_profile(options.profile)] * options.runs
        else:
            profiles = recorded.profiles(options.out, name, options.runs)
    except FitError as error:
        sys.exit(str(error))
    policy = "engine" if options.arm == "plain" else "vtc"
    config = _config(options.arm, list(counts))
    simulated = [
        imitate(requests, profile, policy, config, around_ms(measured_ms, profile))
        for requests, profile in zip(made, profiles, strict=True)
    ]
    rows = judge(real, simulated, counts)
    report = {"alone_ms": measured_ms, "real": real, "simulated": simulated, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")
    if options.json:
        print(json.dumps(report))
    for name, ours, theirs, holds in rows if not options.json else []:
        print(f"{name:42} {ours:>10} {theirs:>20}  {'holds' if holds else 'MISSED'}")
    sys.exit(0 if all(row[3] for row in rows) else 1)


if __name__ == "__main__":
    main()
