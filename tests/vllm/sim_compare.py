"""Runs the simulator beside the real vLLM: the same requests, with and without scheduler.

    python -m tests.vllm.sim_compare --workload hog-quiet --arm plain --runs 5

Each run has its own arrivals (hog-quiet), or the same slice of the LMSYS trace. The engine writes
its steps, and each run is simulated with a profile fitted to those of the other runs; `--profile`
takes another. A figure holds where the simulated throughput (output tokens until the last end) is
within 10 % of the real one, each tenant's median TTFT lies in the range of the real runs, and
preemptions within a factor of two. The engine model ends where the engine does. The time that HTTP,
API server and client add to a first token is the client's time less the engine's own
(tests/vllm/around.py). Its median in the other runs is added to the simulated TTFTs. Writes
WORKLOAD-ARM.json and the steps; status 1 if a figure does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from schedsvc.config import Config, load
from schedsvc_lab.engine import Profile, ProfileError, load_profile
from schedsvc_lab.load.generator import LoadRun, Pace
from schedsvc_lab.load.report import client_lag_ms_p99
from schedsvc_lab.load.target import Target
from schedsvc_lab.sim.fit import FitError
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Scenario, simulate
from schedsvc_lab.workload import TraceRequest, read_trace

from . import programs, recorded
from .around import added_ms, around_ms
from .pairs import arrivals
from .stack import Stack

LMSYS = programs.ROOT.parent / "shared" / "data" / "traces" / "lmsys_arena_vtc.csv"
LMSYS_FASTER = 6.0
REQUESTS_MIN = 10
"""Of a tenant, for its median to be judged."""
THROUGHPUT_OFF_MAX = 0.10
PREEMPTIONS_FACTOR_MAX = 2.0
DRAIN_S_MAX = 90.0
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


def drive(
    stack: Stack, recorder: recorded.Recorder, requests: Sequence[TraceRequest], seed: int
) -> tuple[Figures, list[str]]:
    """Send the requests to the real engine; waits until it is at rest. The figures, the steps."""
    before = stack.gauges()["num_preemptions_total"]
    pace = Pace(seed=seed, warmup_requests=3, warmup_s=0.0, drain_s=DRAIN_S_MAX)
    target = Target(url=stack.url, model=programs.MODEL)
    result = asyncio.run(LoadRun(target, list(requests), pace).run())
    stack.rest(DRAIN_S_MAX)
    done = [s for s in result.recorder.samples if s.end_s == s.end_s and s.output_tokens]
    ttft: dict[str, list[float]] = {}
    for sample in done:
        ttft.setdefault(sample.tenant, []).append(sample.ttft_ms)
    steps, finished = recorder.take()
    figures = {
        "throughput": sum(s.output_tokens for s in done) / max(s.end_s for s in done),
        "completed": len(done),
        "preemptions": stack.gauges()["num_preemptions_total"] - before,
        "ttft_ms": {tenant: median(values) for tenant, values in sorted(ttft.items())},
        "client_lag_ms_p99": client_lag_ms_p99(result),
        "first_tokens": sorted((s.intended_s, s.tenant, s.ttft_ms) for s in done),
        "added_ms": added_ms(done, finished, steps),
    }
    return figures, steps


def in_a_row(runs: Sequence[Sequence[TraceRequest]], every_s: float) -> list[TraceRequest]:
    """Put runs one after the other, each at rest before the next begins."""
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
    more_ms: float,
) -> Figures:
    """Serve the last of the runs in the simulator; the time around the engine is `more_ms`.

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
    began_ns = round((len(runs) - 1) * every_s * 1e9)
    outputs, last_ns = 0, began_ns + 1
    for at in range(len(earlier), len(requests)):
        end_ns = run.outcomes.end_ns[at]
        if end_ns < 0:
            continue
        arrival_ns = run.requests.arrival_ns[at]
        tenant = run.requests.clients[run.requests.client[at]]
        ttft_ms = (run.outcomes.first_ns[at] - arrival_ns) / 1e6 + more_ms
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
    # With less than one a run, there is no meaningful factor.
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
) -> list[Figures]:
    """Serve every run on the real engine, and keep its steps."""
    real: list[Figures] = []
    steps: list[list[str]] = []
    with _stack(arm, tenants) as (stack, recorder):
        programs.go_first()
        for seed, requests in enumerate(made):
            figures, made_steps = drive(stack, recorder, requests, seed)
            real.append(figures)
            steps.append(made_steps)
            shown = {k: v for k, v in figures.items() if k not in ("first_tokens", "added_ms")}
            sys.stderr.write(f"run {seed + 1} of {len(made)}: {shown}\n")
    recorded.save(steps, out, name)
    return real


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
        "--again", action="store_true", help="simulate again, with the real runs kept"
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
        real = earlier["real"]
        if len(real) != options.runs or not all("added_ms" in run for run in real):
            sys.exit(f"--again: {file} is not of {options.runs} such runs; run once without it")
    else:
        real = run_all(options.arm, list(counts), made, options.out, name)
        file.write_text(json.dumps({"real": real}) + "\n")
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
            around_ms(recorded.others([run["added_ms"] for run in real], number)),
        )
        for number, profile in enumerate(profiles)
    ]
    rows = judge(real, simulated, counts)
    report = {"real": real, "simulated": simulated, "rows": rows}
    file.write_text(json.dumps(report) + "\n")
    if options.json:
        print(json.dumps(report))
    for name, ours, theirs, holds in rows if not options.json else []:
        print(f"{name:42} {ours:>10} {theirs:>20}  {'holds' if holds else 'MISSED'}")
    sys.exit(0 if all(row[3] for row in rows) else 1)


if __name__ == "__main__":
    main()
