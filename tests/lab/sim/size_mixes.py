"""Measures how tenants whose requests differ in size share an engine, in the simulator.

    python -m tests.lab.sim.size_mixes
    python -m tests.lab.sim.size_mixes --profile tiny-cpu --mix 17:1 --setup tree

Every tenant has a backlog from the first moment until the measurement ends. It ends when the first
tenant has nothing queued any more. Each mix runs under strict order and under the configuration,
with a fixed headroom of 4 %, and those of `honest` with the default one. A row gives the ratio of
the largest to the least weighted service, the same under strict order, the least part of its
service under strict order that a tenant kept, the same of the total, and the widest gap of service
over Stats' bound. Service is input plus twice the output, in tokens a second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.overrides import override, parse
from schedsvc_lab.sim.requests import Requests

from .audited import Audited
from .setups import SETUPS, config_of

__all__ = ["HONEST", "MIXES", "PROFILES", "Mix", "Shares", "compare", "shares_of"]

PROFILES = ("a10g-llama2-7b", "tiny-cpu", "cpu-tiny-llama")
FIXED_HEADROOM = dict.fromkeys(
    ("scheduler.headroom", "scheduler.expert.headroom_min", "scheduler.expert.headroom_max"),
    0.04,
)
_NS = 1_000_000_000
_LARGE, _HALF = (1_000, 500), (500, 250)
_FIFTH, _TINY = (200, 100), (60, 30)


@dataclass(frozen=True, slots=True)
class Mix:
    """Holds the input and output of each tenant's requests, and its weight."""

    name: str
    sizes: Sequence[tuple[int, int]]
    weights: Sequence[int] = ()
    headroom: Mapping[str, float] = field(default_factory=lambda: FIXED_HEADROOM)

    def weight(self, tenant: int) -> int:
        """Return the weight of a tenant, 1 unless the mix has weights."""
        return self.weights[tenant] if self.weights else 1


MIXES = (
    Mix("2:1", (_LARGE, _HALF)),
    Mix("5:1", (_LARGE, _FIFTH)),
    Mix("17:1", (_LARGE, _TINY)),
    Mix("60:1", ((1_200, 600), (20, 10))),
    Mix("17:1 4+4", (_LARGE,) * 4 + (_TINY,) * 4),
    Mix("17:1 1+7", (_LARGE,) + (_TINY,) * 7),
    Mix("5:1 7+1", (_LARGE,) * 7 + (_FIFTH,)),
    Mix(
        "ladder",
        (_LARGE, (600, 300), (360, 180), (220, 110), (130, 65), (80, 40), (50, 25), (30, 15)),
    ),
    Mix("17:1 w 4:1", (_LARGE, _TINY), (4, 1)),
    Mix("17:1 w 1:4", (_LARGE, _TINY), (1, 4)),
    Mix("5:1 w 1:4", (_LARGE, _FIFTH), (1, 4)),
)
#: Prompts are equal or smaller, with hardly any output: it once took the engine of the other.
HONEST = tuple(
    Mix(f"honest {prompt}/{output}", ((300, 150), (prompt, output)), headroom={})
    for prompt, output in ((300, 16), (300, 1), (100, 8))
)


@dataclass(frozen=True, slots=True)
class Shares:
    """Holds each tenant's weighted service in a second, and how long was measured."""

    each: Sequence[float]
    weights: Sequence[int]
    seconds: float
    gap_of_bound: float

    @property
    def ratio(self) -> float:
        """Return the largest weighted service over the least."""
        return max(self.each) / min(self.each)

    @property
    def total(self) -> float:
        """Return the service of all tenants in a second."""
        return sum(rate * weight for rate, weight in zip(self.each, self.weights, strict=True))


def requests_of(mix: Mix, large: int) -> Requests:
    """Make a backlog in which all tenants have the same weighted service.

    `large`: the number of requests of the tenants with the largest requests.
    """
    cost = [prompt + 2 * output for prompt, output in mix.sizes]
    tenants = range(len(cost))
    at_most = max(cost)
    owners = [tenant for tenant in tenants if cost[tenant] == at_most]
    least = min(mix.weight(tenant) for tenant in owners)
    each = -(-large // len(owners)) * at_most / least
    names = tuple(f"t{tenant}" for tenant in tenants)
    rows = [
        (0, tenant, *mix.sizes[tenant])
        for tenant in tenants
        for _ in range(round(each * mix.weight(tenant) / cost[tenant]))
    ]
    return Requests(names, rows)


def measured_ns(run: Audited) -> int:
    """Find when the first tenant has an empty queue. O(requests)."""
    last = [0] * len(run.requests.clients)
    for at, tenant in enumerate(run.requests.client):
        last[tenant] = max(last[tenant], run.outcomes.decided_ns[at])
    return min(last)


def shares_of(
    profile: str, mix: Mix, settings: Mapping[str, Any], *, large: int, setup: str = "plain"
) -> Shares:
    """Run a mix and measure its shares while all tenants wait. O(requests)."""
    given = SETUPS[setup]
    requests = requests_of(mix, large * given.engines)
    weights = [mix.weight(at) for at in range(len(requests.clients))]
    engine, config = override(
        load_profile(profile),
        config_of(requests.clients, weights, given.levels, given.policy),
        {**mix.headroom, **settings},
    )
    run = Audited(engine, config, requests, engines=given.engines, drained=given.drained)
    run.run()
    ends_ns = measured_ns(run)
    served = [0.0] * len(requests.clients)
    for at, tenant in enumerate(run.requests.client):
        first, end = run.outcomes.first_ns[at], run.outcomes.end_ns[at]
        if first < ends_ns:
            part = min(1.0, (ends_ns - first) / max(1, end - first))
            served[tenant] += (
                run.requests.prompt_tokens[at] + 2 * run.requests.output_tokens[at] * part
            )
    each = [service / mix.weight(at) / ends_ns * _NS for at, service in enumerate(served)]
    return Shares(each, weights, ends_ns / _NS, run.books.gaps.of_bound)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares a mix under the settings with strict order under the same settings."""

    ratio: float
    strict_ratio: float
    least_of_strict: float
    total_of_strict: float
    gap_of_bound: float
    seconds: float


def compare(
    profile: str, mix: Mix, settings: Mapping[str, Any], *, large: int, setup: str = "plain"
) -> Comparison:
    """Run a mix twice."""
    strict, shares = (
        shares_of(profile, mix, {**settings, **more}, large=large, setup=setup)
        for more in ({"scheduler.expert.dispatch": "strict"}, {})
    )
    kept = [mine / its for mine, its in zip(shares.each, strict.each, strict=True)]
    return Comparison(
        shares.ratio,
        strict.ratio,
        min(kept),
        shares.total / strict.total,
        shares.gap_of_bound,
        shares.seconds,
    )


@click.command()
@click.option("--profile", "profiles", multiple=True, default=PROFILES, help="Engine profile.")
@click.option("--mix", "names", multiple=True, help="Only this mix; default: all.")
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="A setting.")
@click.option("--setup", default="plain", type=click.Choice(sorted(SETUPS)))
@click.option("--large", default=300, help="Requests of the tenants with the largest, together.")
def main(
    profiles: Sequence[str], names: Sequence[str], given: Sequence[str], setup: str, large: int
) -> None:
    """Print one row for each profile and mix."""
    settings = dict(parse(text) for text in given)
    columns = ("ratio", "strict", "least", "total", "gap", "s")
    click.echo(f"{'profile':16}{'mix':14}" + "".join(f"{column:>8}" for column in columns))
    for profile in profiles:
        for mix in (*MIXES, *HONEST):
            if names and mix.name not in names:
                continue
            it = compare(profile, mix, settings, large=large, setup=setup)
            click.echo(
                f"{profile:16}{mix.name:14}{it.ratio:8.2f}{it.strict_ratio:8.2f}"
                f"{it.least_of_strict:8.2f}{it.total_of_strict:8.2f}{it.gap_of_bound:8.2f}"
                f"{it.seconds:8.0f}"
            )


if __name__ == "__main__":
    main()
