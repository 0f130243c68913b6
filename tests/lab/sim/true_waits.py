"""Measures what Stats expects of a flood's waits, and the effects of early refusal and its clients.

Each flood runs three times in virtual time with the defaults: without early refusal, with it, and
with it and clients that obey Retry-After.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median
from typing import Any

import click

from schedsvc import _core as core

from .waits import FLOOD, SECOND, Tenant, Waits

#: From then on the flood is steady.
STEADY_S = 60
END_S = 360
#: A refusal is early if it comes so soon.
EARLY_S = 1.0
#: The figures of each kind of run.
Figures = dict[str, dict[str, float]]
_EPILOG = """\b
Example:
  python -m tests.lab.sim.true_waits --rate 6 --first-seed 13

What has to hold, over all seeds: the expected wait is within a factor of 1.5 of the real one for
80 % of the requests, or both are below a second; 90 % of the refusals come within a second; of the
probes 10 % could have been served; total service, each tenant's part and the KV cache in use are
within 1 % of those without early refusal; less than 0.9 of the mean cache is in use in at most 5 %
more of the seconds, and never for longer than 5 s with a queue shorter than a tenth of its mean;
none is refused early whose tenant has nothing queued. Exit status 1 where one does not.
"""


@dataclass(frozen=True)
class Run:
    """Holds the figures of one run, from STEADY_S on."""

    service: Counter[str]
    kv_tokens: list[int]  # in use, once a second
    queued: list[int]  # at the same times
    refused: int
    early: int
    told: int
    true: int
    probes: int
    served_probes: int
    uncalled: int
    retries: int
    admitted: int
    retry_s: float

    @property
    def total(self) -> int:
        """Return the service of all tenants."""
        return self.service.total()


def play(tenants: Sequence[Tenant], seed: int, obeys: float = 0.0, **scheduler: Any) -> Run:
    """Play a flood once."""
    world = Waits(tenants, END_S, seed=seed, obeys=obeys, **scheduler)
    world.run_until(END_S * SECOND)
    world.core.check()
    outcomes, requests, told = world.outcomes, world.requests, world.clients.told
    known = [
        i
        for i in range(len(requests))
        if outcomes.outcome[i] and requests.arrival_ns[i] >= STEADY_S * SECOND
    ]
    refused = [i for i in known if outcomes.outcome[i] != core.GRANTED]
    early = [i for i in refused if world.waited_s(i) <= EARLY_S]
    waited = [i for i in known if i not in set(early)]
    retries = [i for i in known if i in world.retry_of]
    rows = [world.core.flow_stats(world.now_ns, flow) for flow in range(len(tenants))]
    judged = sum(row["deadline_probes_judged"] for row in rows)
    samples = [each for each in world.occupancy if each.at_ns >= STEADY_S * SECOND]
    return Run(
        service=_service(world),
        kv_tokens=[each.used for each in samples],
        queued=_queued(world, [each.at_ns for each in samples]),
        refused=len(refused),
        early=len(early),
        told=len(waited),
        true=sum(is_true(told[i].stats_ms / 1_000, world.waited_s(i)) for i in waited),
        probes=judged,
        served_probes=judged - sum(row["deadline_probes_missed"] for row in rows),
        uncalled=sum(told[i].queued == 0 for i in early),
        retries=len(retries),
        admitted=sum(
            outcomes.outcome[i] == core.GRANTED or world.waited_s(i) > EARLY_S for i in retries
        ),
        retry_s=median([told[i].retry_ms / 1_000 for i in refused] or [0.0]),
    )


def is_true(told_s: float, real_s: float) -> bool:
    """Return whether an expected wait is within a factor of 1.5 of the real one, or both are below
    a second."""
    if max(told_s, real_s) < 1:
        return told_s >= 0
    return real_s / 1.5 <= told_s <= real_s * 1.5


def _queued(world: Waits, times_ns: Sequence[int]) -> list[int]:
    """Count the requests that wait at each of the times."""
    count, outcomes = len(world.requests), world.outcomes
    came = sorted(world.requests.arrival_ns[i] for i in range(count))
    left = sorted(outcomes.decided_ns[i] for i in range(count) if outcomes.outcome[i])
    return [bisect_right(came, at_ns) - bisect_right(left, at_ns) for at_ns in times_ns]


def _service(world: Waits) -> Counter[str]:
    """Sum up the service of each tenant, twice the output and the input."""
    found: Counter[str] = Counter()
    outcomes, requests, begins = world.outcomes, world.requests, STEADY_S * SECOND
    for i in range(len(requests)):
        first_ns, end_ns = outcomes.first_ns[i], outcomes.end_ns[i]
        if first_ns < 0:
            continue
        end_ns = end_ns if end_ns >= 0 else world.now_ns
        inside = max(0, end_ns - max(first_ns, begins)) / max(1, end_ns - first_ns)
        tenant = requests.clients[requests.client[i]]
        found[tenant] += requests.prompt_tokens[i] * (first_ns >= begins)
        found[tenant] += round(2 * requests.output_tokens[i] * inside)
    return found


def longest(seconds: Sequence[bool]) -> int:
    """Return how many in a row are true."""
    at = [-1, *(i for i, each in enumerate(seconds) if not each), len(seconds)]
    return max(b - a - 1 for a, b in pairwise(at))


def starved(run: Run, plain: Run) -> list[bool]:
    """Return for each second whether less than 0.9 of the cache is in use and less than a tenth as
    many requests wait, compared with the means of a plain run. A full queue whose first request
    is large leaves cache unused as well, with and without early refusal."""
    least, few = 0.9 * mean(plain.kv_tokens), 0.1 * mean(plain.queued)
    return [
        used < least and waiting < few
        for used, waiting in zip(run.kv_tokens, run.queued, strict=True)
    ]


def compare(rate: float, seeds: Iterable[int], *, equal: bool = False) -> Figures:
    """Play a flood of `rate` requests a second, and sum up each kind of run over all seeds. With
    `equal`, the requests of each tenant have one size."""
    tenants = (replace(FLOOD[0], per_s=rate), *FLOOD[1:])
    if equal:
        tenants = tuple(replace(tenant, sigma=0.0) for tenant in tenants)
    seeds = list(seeds)
    kinds: dict[str, dict[str, Any]] = {
        "without": {"early_refusal": False}, "early": {}, "obedient": {"obeys": 1.0},
    }  # fmt: skip
    runs = {
        kind: [play(tenants, seed, **options) for seed in seeds] for kind, options in kinds.items()
    }
    return {kind: _figures(each, runs["without"]) for kind, each in runs.items()}


def _figures(runs: list[Run], plain: list[Run]) -> dict[str, float]:
    total, total_plain = sum(run.total for run in runs), sum(run.total for run in plain)
    served, served_plain = (sum((r.service for r in each), Counter()) for each in (runs, plain))
    refused = sum(run.refused for run in runs)
    probes, retries = sum(run.probes for run in runs), sum(run.retries for run in runs)
    return {
        "refused": refused,
        "early": sum(run.early for run in runs) / max(1, refused),
        "true": sum(run.true for run in runs) / sum(run.told for run in runs),
        "probes": probes,
        "served_probes": sum(run.served_probes for run in runs) / max(1, probes),
        "total": total / total_plain,
        "share": max(abs(served[t] / total - served_plain[t] / total_plain) for t in served),
        "uncalled": sum(run.uncalled for run in runs),
        "kv": mean(mean(run.kv_tokens) for run in runs)
        / mean(mean(run.kv_tokens) for run in plain),
        "below": mean(
            mean(used < 0.9 * mean(of.kv_tokens) for used in run.kv_tokens)
            for run, of in zip(runs, plain, strict=True)
        ),
        "starved_s": max(longest(starved(*pair)) for pair in zip(runs, plain, strict=True)),
        "retries": retries,
        "admitted": sum(run.admitted for run in runs) / max(1, retries),
        "retry_s": mean(run.retry_s for run in runs),
    }


def broken(found: Figures) -> list[str]:
    """Name what does not hold."""
    return [
        f"{kind}: {name}"
        for kind, row in found.items()
        for name, holds in {
            "true": row["true"] >= 0.8,
            "early": row["early"] >= 0.9,
            "served_probes": row["served_probes"] <= 0.1,
            "total": abs(row["total"] - 1) <= 0.01,
            "share": row["share"] <= 0.01,
            "uncalled": row["uncalled"] == 0,
            "kv": row["kv"] >= 0.99,
            "below": row["below"] <= found["without"]["below"] + 0.05,
            "starved_s": row["starved_s"] <= 5,
        }.items()
        if not holds and (kind != "without" or name == "true")
    ]


@click.command(epilog=_EPILOG)
@click.option("--rate", default=6.0, show_default=True, help="Requests a second of the flood.")
@click.option("--seeds", default=48, show_default=True, help="Runs of each kind.")
@click.option("--first-seed", default=1, show_default=True, help="The first run's seed.")
@click.option("--equal", is_flag=True, help="Let the requests of each tenant have one size.")
def main(rate: float, seeds: int, first_seed: int, *, equal: bool) -> None:
    """Measure waits and early refusal under a flood of more than twice what is served."""
    found = compare(rate, range(first_seed, first_seed + seeds), equal=equal)
    for kind, row in found.items():
        click.echo(json.dumps({"kind": kind} | {k: round(v, 3) for k, v in row.items()}))
    if wrong := broken(found):
        click.echo(f"does not hold: {', '.join(wrong)}")
        raise SystemExit(1)


if __name__ == "__main__":
    main(prog_name="python -m tests.lab.sim.true_waits")
