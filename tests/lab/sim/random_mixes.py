"""Draws mixes of tenants, whose gap of service is held to Stats' bound at every report.

    python -m tests.lab.sim.random_mixes --count 300
    python -m tests.lab.sim.random_mixes --seed 17 --setup tree
    python -m tests.lab.sim.random_mixes --count 100 --kv

A mix has two to eight tenants with sizes and weights of their own. Some are there from the first
moment, some come late, some come in bursts, and some clients leave while their requests wait or
run. Shims report every 0.2 or every 1 s. Each mix runs under backfill and under strict order. With
`--kv` the cache has a price, from a small part of the charge to all of it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import click

from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.overrides import override
from schedsvc_lab.sim.requests import Requests

from .audited import SECOND, Audited
from .setups import SETUPS, config_of

#: Service in tokens that an engine does in a second, about.
PACES = {"a10g-llama2-7b": 1_600, "tiny-cpu": 9_000, "cpu-tiny-llama": 20_000}
REQUESTS = 2_000  # requests of all tenants
INPUTS, OUTPUTS = (10, 1_200), (5, 600)
LEAVES = 0.08  # part of all requests
#: Prices of input, output and a token-step of the cache.
TOKENS = (1.0, 2.0, 0.0)
CACHE = ((1.0, 2.0, 0.001), (0.1, 0.2, 0.01), (0.001, 0.002, 0.01), (0.0, 0.0, 0.01))


@dataclass(frozen=True, slots=True)
class Mix:
    """Describes a random mix: who asks for what, and who leaves."""

    profile: str
    weights: Sequence[float]
    requests: Requests
    leaves: Sequence[tuple[int, int]]
    progress_ns: int
    asks: int  # output that each request asks for; 0: its own


def _between(rnd: Random, ends: tuple[int, int]) -> int:
    """Draw a size, all magnitudes alike."""
    return round(ends[0] * (ends[1] / ends[0]) ** rnd.random())


def draw(seed: int) -> Mix:
    """Draw a mix."""
    rnd = Random(seed)
    profile = rnd.choice(sorted(PACES))
    tenants = rnd.randint(2, 8)
    sizes = [(_between(rnd, INPUTS), _between(rnd, OUTPUTS)) for _ in range(tenants)]
    weights = [rnd.choice((0.5, 1.0, 1.0, 2.0, 4.0)) for _ in range(tenants)]
    cost = [prompt + 2 * output for prompt, output in sizes]
    service = REQUESTS * sum(weights) / sum(w / c for w, c in zip(weights, cost, strict=True))
    span_s = service / PACES[profile]
    rows: list[tuple[int, int, int, int]] = []
    for tenant, weight in enumerate(weights):
        count = max(4, round(service * weight / sum(weights) / cost[tenant]))
        kind = rnd.choice(("there", "there", "late", "bursts"))
        bursts = [rnd.uniform(0, span_s) for _ in range(rnd.randint(1, 6))]
        for _ in range(min(count, 3 * REQUESTS)):
            at_s = {"there": 0.0, "late": bursts[0], "bursts": rnd.choice(bursts)}[kind]
            prompt, output = (max(1, round(n * rnd.uniform(0.5, 1.5))) for n in sizes[tenant])
            rows.append((round(at_s * SECOND), tenant, min(prompt, 1_300), min(output, 700)))
    rows.sort()
    leaves = [
        (row[0] + round(rnd.uniform(0, span_s) * SECOND), at)
        for at, row in enumerate(rows)
        if rnd.random() < LEAVES
    ]
    names = tuple(f"t{tenant}" for tenant in range(tenants))
    progress_ns = rnd.choice((SECOND // 5, SECOND))
    return Mix(profile, weights, Requests(names, rows), leaves, progress_ns, rnd.choice((0, 700)))


@dataclass(frozen=True, slots=True)
class Found:
    """Holds the widest gap of a run over the bound, and what was beyond it, if anything."""

    of_bound: float
    broken: str


def play(mix: Mix, setup: str, dispatch: str, prices: Sequence[float] = TOKENS) -> Found:
    """Play a mix in virtual time."""
    priced = zip(("input", "output", "kv"), prices, strict=True)
    given = SETUPS[setup]
    profile, config = override(
        load_profile(mix.profile),
        config_of(mix.requests.clients, mix.weights, given.levels, given.policy),
        {
            "scheduler.expert.dispatch": dispatch,
            **{f"scheduler.prices.{name}": price for name, price in priced},
        },
    )
    run = Audited(
        profile, config, mix.requests, engines=given.engines, drained=given.drained,
        asks=mix.asks, progress_ns=mix.progress_ns, leaves=mix.leaves,
    )  # fmt: skip
    run.run()
    return Found(run.books.gaps.of_bound, run.books.gaps.broken or run.books.stats_broken)


@click.command()
@click.option("--seed", default=0, help="The first seed.")
@click.option("--count", default=1, help="How many mixes.")
@click.option("--setup", "setups", multiple=True, type=click.Choice(sorted(SETUPS)))
@click.option("--kv", is_flag=True, help="Give the cache a price.")
def main(seed: int, count: int, setups: Sequence[str], kv: bool) -> None:
    """Play random mixes; exit with 1 if a gap was beyond the bound."""
    broken, widest = 0, 0.0
    for each in range(seed, seed + count):
        mix = draw(each)
        for setup in setups or ("plain",):
            for dispatch in ("backfill", "strict"):
                found = play(mix, setup, dispatch, CACHE[each % len(CACHE)] if kv else TOKENS)
                widest = max(widest, found.of_bound)
                if found.broken:
                    broken += 1
                    click.echo(f"seed {each}, {setup}, {dispatch}: {found.broken}")
    click.echo(f"{count} mixes, {broken} runs beyond the bound, the widest gap {widest:.2f} of it")
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
