"""Judges random runs of the simulator, and compares each "ok" with what became of the requests.

The comparison reads no Stats: it knows when each request arrived, what became of it, and how many
tokens the engine made for it. `python -m tests.judgement.random_runs --count 2000` plays many.
"""

import math
import random
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import click
from schedsvc_client.v1 import judgement_pb2

from schedsvc import _core as core
from schedsvc.service.judgement import AGE_MAX_MS, judge
from tests.lab.sim.waits import SECOND, Tenant, Waits

from .plays import WINDOW_S, Pair, named, snapshot, stale_pool, with_facts

__all__ = ["Run", "play_run"]

#: Shares are compared beyond this doubt: tokens are counted when they are reported.
DOUBT = 0.06
EDGE_NS = SECOND // 2
AFTER_S = 25
TTL_MS = 4_000
QUOTAS: tuple[dict[str, Any], ...] = ({}, {}, {}, {"requests_per_minute": 20, "over": "refuse"})
FACTS: tuple[dict[str, Any], ...] = (
    {"state": {"problem": "disk full", "unsaved_ms": 9_000}},
    {"usage": {"problem": "locked"}},
    {"cluster": {"cluster": "c", "member": "a", "problem": "refused"}},
    {"cluster": {"member": "a", "set": {"name": "m", "leads": True, "problem": "refused"}}},
)


@dataclass(frozen=True)
class Run:
    """Holds what was judged, and what a person finds who knows every request."""

    level: int
    text: str
    #: Why it is not ok, by the requests; empty: it is.
    harm: list[str]
    #: Whether a share is so near to its bound that both answers are right.
    doubtful: bool

    @property
    def is_right(self) -> bool:
        """Return whether the judgement is ok if, and only if, nothing is wrong."""
        says_ok = self.level == judgement_pb2.JUDGEMENT_LEVEL_OK
        return self.doubtful or says_ok == (not self.harm)


def play_run(seed: int) -> Run:
    """Draw tenants, limits and troubles, and judge the last 10 s."""
    rng = random.Random(seed)
    tenants = [_drawn(rng, f"t{number}") for number in range(rng.randint(1, 4))]
    # There is always a next arrival.
    tenants[0] = replace(tenants[0], per_s=max(0.8, tenants[0].per_s), until_s=math.inf)
    own = {
        tenant.name: {"weight": rng.choice([1, 1, 1, 2, 4])}
        | ({"quota": quota} if (quota := rng.choice(QUOTAS)) else {})
        for tenant in tenants
    }
    end_s = rng.uniform(22, 34)
    world = Waits(
        tenants, end_s + AFTER_S + 30, seed=seed, config=named(*tenants, **own),
        queue_ttl_ms=TTL_MS, early_refusal=rng.random() < 0.7,
    )  # fmt: skip
    world.run_until(round((end_s - WINDOW_S) * SECOND))
    is_away = rng.random() < 0.08
    if is_away:
        stale_pool(world, "engine-2")
    then = snapshot(world)
    world.run_until(round(end_s * SECOND))
    pair = Pair(then, snapshot(world))
    harm = ["an engine is away"] if is_away else []
    if rng.random() < 0.15:
        facts = rng.choice(FACTS)
        pair = with_facts(pair, **facts)
        harm.append(f"{facts}")
    if rng.random() < 0.05:
        _let_strangers_in(pair)
        harm.append("the engine runs what was not granted")
    age_ms = rng.choice([0, 0, 0, 100, AGE_MAX_MS, AGE_MAX_MS + 1])
    if age_ms > AGE_MAX_MS:
        harm.append("the figures are old")
    found = judge(pair.then, pair.now, age_ms, WINDOW_S)
    weights = {name: float(row["weight"]) for name, row in own.items()}
    # Only a request that has ended says how fast its output came.
    world.run_until(round((end_s + AFTER_S) * SECOND))
    certain, doubtful = _hurt(world, end_s, weights)
    harm += certain
    return Run(found.level, found.text, harm or doubtful, bool(doubtful and not harm))


def _drawn(rng: random.Random, name: str) -> Tenant:
    per_s = rng.choice([0.2, 0.4, 0.8, 1.5, 3.0, 8.0])
    tenant = Tenant(name, per_s, rng.choice([40, 150, 400]), rng.choice([30, 90, 200]))
    if rng.random() < 0.15:
        return replace(tenant, until_s=rng.uniform(5, 20))
    return replace(tenant, from_s=rng.uniform(0, 25) if rng.random() < 0.2 else 0.0)


def _let_strangers_in(pair: Pair) -> None:
    assert pair.then is not None
    for each in (pair.then, pair.now):
        pool = each.pools[0]
        pool.engine_running = 2 * pool.live_leases + 9
        pool.telemetry_age_ms = 100


def _hurt(world: Waits, end_s: float, weights: dict[str, float]) -> tuple[list[str], list[str]]:
    """Return the tenants that were refused though within their shares, and those in doubt.

    O(requests).
    """
    begin_ns, end_ns = (round(at_s * SECOND) for at_s in (end_s - WINDOW_S, end_s))
    names, outcomes, requests = world.requests.clients, world.outcomes, world.requests
    refused: Counter[str] = Counter()
    over_limit: Counter[str] = Counter()
    #: When a tenant was last active; one that ended 10 s ago counts for a share or not.
    last_ns: Counter[str] = Counter()
    for index, arrived_ns in enumerate(requests.arrival_ns):
        name, outcome = names[requests.client[index]], outcomes.outcome[index]
        if arrived_ns > end_ns:
            continue
        ended_ns = outcomes.end_ns[index] if outcome == core.GRANTED else outcomes.decided_ns[index]
        is_open = not 0 <= ended_ns <= end_ns
        last_ns[name] = max(last_ns[name], end_ns if is_open else ended_ns)
        if outcome and outcome != core.GRANTED and begin_ns < outcomes.decided_ns[index] <= end_ns:
            refused[name] += 1
            over_limit[name] += outcome == core.REJECTED_QUOTA
    served = _served(world, begin_ns, end_ns)
    harm, doubtful = [], []
    whole = sum(served.values())
    rivals = [
        sum(weights[name] for name, at_ns in last_ns.items() if at_ns > begin_ns + edge_ns)
        for edge_ns in (-EDGE_NS, EDGE_NS)
    ]
    for name, count in refused.items():
        if over_limit[name]:
            harm.append(f"{name} is over its limit")
        if count == over_limit[name]:
            continue
        part = served[name] / max(1.0, whole)
        least, most = (weights[name] / max(weights[name], rival) for rival in rivals)
        text = f"{name} is refused at {part:.2f} of {least:.2f}"
        if part <= (1.1 - DOUBT) * least - 0.01:
            harm.append(text)
        elif part <= (1.1 + DOUBT) * most + 0.01:
            doubtful.append(text)
    return harm, doubtful


def _served(world: Waits, begin_ns: int, end_ns: int) -> Counter[str]:
    """Sum up the input and twice the output that each tenant got in a time."""
    found: Counter[str] = Counter()
    outcomes, requests = world.outcomes, world.requests
    for index in range(len(requests)):
        first_ns, last_ns = outcomes.first_ns[index], outcomes.end_ns[index]
        # Input counts with the first report of output.
        if outcomes.outcome[index] != core.GRANTED or not 0 <= first_ns <= end_ns:
            continue
        name = requests.clients[requests.client[index]]
        if begin_ns < first_ns:
            found[name] += requests.prompt_tokens[index]
        output = requests.output_tokens[index]
        last_ns = last_ns if last_ns >= 0 else world.now_ns
        length_ns = max(1, last_ns - first_ns)
        inside_ns = max(0, min(last_ns, end_ns) - max(first_ns, begin_ns))
        found[name] += round(2 * output * inside_ns / length_ns)
    return found


@click.command()
@click.option("--count", default=2_000, show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(count: int, seed: int) -> None:
    """Play random runs, and print those that are judged wrong."""
    levels: Counter[str] = Counter()
    wrong = doubtful = 0
    for each in range(seed, seed + count):
        run = play_run(each)
        levels[judgement_pb2.JudgementLevel.Name(run.level)] += 1
        doubtful += run.doubtful
        if not run.is_right:
            wrong += 1
            click.echo(f"seed {each}: {run.text} But: {run.harm}")
    click.echo(f"{count} runs, {wrong} judged wrong, {doubtful} in doubt; {dict(levels)}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
