"""Requests of one length beyond the capacity of an engine, spread in time and not.

    python -m tests.lab.sim.lockstep_workload
    python -m tests.lab.sim.lockstep_workload --profile cpu-tiny-llama --spread 0 0.1 --json

A hog asks for half as much again as the engine can do, 512 tokens each, quiet now and then for 64.
The hog's outputs are lognormal around 256 tokens, by `--spread`. With `grant_pacing` off and on,
means over the seeds after the first fifth of each run: output tokens a second, the mean part of the
cache that is held, quiet's time to the first token, and preemptions of 1,000.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import mean

import numpy as np

from schedsvc.lab.engine import load_profile
from schedsvc.lab.sim.overrides import override
from schedsvc.lab.sim.requests import Requests
from schedsvc.lab.sim.scenario import patient_config

from .filling import Filling

SECOND = 10**9
LEARNT = 0.2
PROGRESS_NS = 20 * 10**6
PROMPT, OUTPUT, OUTPUT_MAX = 512, 256, 1_024
LIGHT = 64
PATIENT_S = 3_600.0  # no request is evicted
LIGHT_PART = 0.09  # of all requests
#: Requests a second, half as many again as are served, and how long a run is.
ARRIVALS = {"a10g-llama2-7b": (2.1, 900), "cpu-tiny-llama": (36.0, 120), "tiny-cpu": (30.0, 120)}


@dataclass(frozen=True)
class Found:
    """The result of one run, or the mean of several."""

    tokens_per_s: float
    used: float
    quiet_p50_ms: float
    quiet_p99_ms: float
    preempted_permille: float


def draw(profile: str, seed: int, spread: float) -> Requests:
    """Draw the requests of a run."""
    per_s, seconds = ARRIVALS[profile]
    rnd, rows, at_s = Random(seed), [], 0.0
    while at_s < seconds:
        at_s += rnd.expovariate(per_s)
        at_ns, of_quiet, length = round(at_s * SECOND), rnd.random() < LIGHT_PART, OUTPUT
        if of_quiet:
            rows.append((at_ns, 1, LIGHT, LIGHT))
            continue
        if spread:
            length = min(OUTPUT_MAX, max(1, round(OUTPUT * rnd.lognormvariate(0, spread))))
        rows.append((at_ns, 0, PROMPT, length))
    return Requests(["hog", "quiet"], rows)


def play(
    profile: str, seed: int, spread: float, *, grant_pacing: bool, ttl_s: float = PATIENT_S
) -> Found:
    """Play one run in virtual time."""
    requests, engine = draw(profile, seed, spread), load_profile(profile)
    own = {"scheduler.grant_pacing": grant_pacing, "scheduler.queue_ttl_ms": round(ttl_s * 1_000)}
    _, config = override(engine, patient_config(requests.clients), own)
    run = Filling(requests, engine, oracle=False, config=config, progress_ns=PROGRESS_NS)
    run.play()
    run.core.check()
    found, times = run.since(LEARNT), run.outcomes
    from_ns = round(LEARNT * run.now_ns)
    made = sum(
        tokens
        for tokens, end_ns in zip(requests.output_tokens, times.end_ns, strict=True)
        if end_ns >= from_ns
    )
    waits_ms = [
        (first_ns - arrival_ns) / 1e6
        for client, arrival_ns, first_ns in zip(
            requests.client, requests.arrival_ns, times.first_ns, strict=True
        )
        if client == 1 and arrival_ns >= from_ns and first_ns >= 0
    ]
    return Found(
        tokens_per_s=made * SECOND / (run.now_ns - from_ns),
        used=found.used,
        quiet_p50_ms=float(np.percentile(waits_ms, 50)),
        quiet_p99_ms=float(np.percentile(waits_ms, 99)),
        preempted_permille=1_000 * found.preempted / found.ended,
    )


def measure(
    profile: str,
    seeds: Sequence[int],
    spread: float,
    *,
    grant_pacing: bool,
    ttl_s: float = PATIENT_S,
) -> Found:
    """Average over several runs."""
    runs = [
        asdict(play(profile, seed, spread, grant_pacing=grant_pacing, ttl_s=ttl_s))
        for seed in seeds
    ]
    return Found(**{key: mean(run[key] for run in runs) for key in runs[0]})


def main() -> None:
    """Measure, and print a row for each spread, off and on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", choices=sorted(ARRIVALS), action="append")
    parser.add_argument("--spread", type=float, nargs="+", default=[0.0, 0.1, 0.5])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each [3]")
    parser.add_argument("--ttl", type=float, default=PATIENT_S, help="queue TTL, s [3600]")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.seeds < 1 or min(options.spread) < 0 or not 1 <= options.ttl <= 3_600:
        parser.error("--seeds has to be at least 1, --spread at least 0, --ttl 1 to 3600")
    for profile in options.profile or sorted(ARRIVALS):
        for spread in options.spread:
            for grant_pacing in (False, True):
                seeds = range(1, options.seeds + 1)
                found = asdict(
                    measure(profile, seeds, spread, grant_pacing=grant_pacing, ttl_s=options.ttl)
                )
                row = {"profile": profile, "spread": spread, "grant_pacing": grant_pacing} | found
                print(json.dumps(row) if options.json else _line(row), flush=True)


def _line(row: dict[str, object]) -> str:
    return (
        "{profile:16} spread {spread:<4g} grant_pacing {on:3} {tokens_per_s:6.0f} tokens/s, cache "
        "{used:.3f}, quiet {quiet_p50_ms:.0f} / {quiet_p99_ms:.0f} ms, "
        "{preempted_permille:.1f} preempted of 1,000"
    ).format(on="on" if row["grant_pacing"] else "off", **row)


if __name__ == "__main__":
    main()
