"""Measures what a flood leaves to a newcomer, a better class, and a light tenant, in the simulator.

    python -m tests.lab.sim.beside_floods
    python -m tests.lab.sim.beside_floods --profile tiny-cpu --only classes

A flood has requests waiting from the first moment until the end. Each run has a fixed headroom of
4 %. `newcomer`: after 30 minutes of two floods a tenant begins that sends what one of them sends;
the table has its service over that one's, minute by minute. `classes`: a flood of a high class
beside a flood of a low one; the table has the service of the high class over the same with
`dispatch: strict`, and the longest time that the low class waited for its turn. `aged`: the time to
the first token of high requests beside the heads of the low class that ageing brings forward.
`light`: the same of a tenant below its share beside a flood, over that under strict order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import click
import numpy as np

from schedsvc.config import Config
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.overrides import override
from schedsvc_lab.sim.requests import Requests

from .audited import SECOND, Audited
from .floods import Row, Size, flood, need_queue, service
from .setups import PATIENT
from .size_mixes import FIXED_HEADROOM, PROFILES

__all__ = [
    "AGEING_S",
    "CLASS_FLOODS",
    "LIGHT_FLOODS",
    "aged",
    "classes",
    "light",
    "newcomer",
]

_WAITED_S = 1_800
_MINUTES = 5
_CLASS_WARM_S, _CLASS_S = 60, 600
AGEING_S = 5
#: A request of the low class that ageing brings forward.
AGED: Size = (2_500, 500)
SEEDS = range(1, 6)
#: Sizes of the high and the low class.
CLASS_FLOODS: Sequence[tuple[Size, Size]] = (
    ((1_000, 500), (60, 30)),
    ((1_000, 500), (20, 10)),
    ((1_000, 500), (300, 1)),
    ((1_000, 500), (1_000, 500)),
    ((200, 100), (1_000, 500)),
    ((200, 100), (60, 30)),
)
_LIGHT: Size = (64, 64)
_LIGHT_RATE, _LIGHT_S = 0.5, 600
#: Tenants of each flood, and the factor by which its sizes vary around 512/256, up or down.
LIGHT_FLOODS: Mapping[str, tuple[int, float]] = {
    "one length": (1, 1.0),
    "many lengths": (1, 2.0),
    "seven tenants": (7, 2.0),
}
_FLOOD: Size = (512, 256)


def _config(tenants: Iterable[Mapping[str, Any]], classes: Sequence[str] = ()) -> Config:
    return Config.model_validate(
        {
            "listeners": [{"unix": "unused.sock"}],
            "scheduler": PATIENT,
            "unknown_tenants": "refuse",
            "tenants": list(tenants),
            "classes": [
                {"name": name, "rank": rank, "ageing_ms": AGEING_S * 1_000}
                for rank, name in enumerate(classes)
            ],
        }
    )


def _poisson(seed: int, tenant: int, size: Size, rate: float, seconds: int) -> list[Row]:
    rnd, at_s, rows = Random(seed), 0.0, list[Row]()
    while (at_s := at_s + rnd.expovariate(rate)) < seconds:
        rows.append((round(at_s * SECOND), tenant, *size))
    return rows


def _play(
    profile: str,
    config: Config,
    rows: Iterable[Row],
    settings: Mapping[str, Any],
    seconds: int,
    floods: Iterable[int],
) -> Audited:
    names = tuple(tenant.name for tenant in config.tenants)
    engine, config = override(load_profile(profile), config, {**FIXED_HEADROOM, **settings})
    run = Audited(engine, config, Requests(names, sorted(rows)))
    run.run_until(seconds * SECOND)
    need_queue(run, floods)
    return run


def newcomer(profile: str, large: Size, size: Size) -> list[float]:
    """Return a newcomer's service over that of its like, for each of its first minutes."""
    seconds = _WAITED_S + (_MINUTES + 2) * 60
    rows = flood(profile, 0, large, seconds) + flood(profile, 1, size, seconds)
    rows += flood(profile, 2, size, seconds - _WAITED_S, _WAITED_S)
    config = _config({"name": name} for name in ("large", "old", "new"))
    run = _play(profile, config, rows, {}, seconds, (0, 1, 2))
    starts = range(_WAITED_S, _WAITED_S + _MINUTES * 60, 60)
    return [
        service(run, 2, start, start + 60) / service(run, 1, start, start + 60) for start in starts
    ]


@dataclass(frozen=True)
class Classes:
    """Holds a high class's part of its service under strict order, and a low one's longest wait."""

    kept: float
    low: float  # its service over that of both
    low_waited_s: float  # the longest time between two of its grants
    longest_s: float  # from a grant to its end, of any request


def classes(profile: str, high: Size, low: Size, surplus: float) -> Classes:
    """Run a flood of a low class beside one of a high class."""
    config = _config(({"name": n, "class": n} for n in ("high", "low")), ("high", "low"))
    seconds = _CLASS_WARM_S + _CLASS_S
    rows = flood(profile, 0, high, seconds + 60) + flood(profile, 1, low, seconds + 60)
    span = _CLASS_WARM_S, seconds
    strict = _play(
        profile, config, rows, {"scheduler.expert.dispatch": "strict"}, seconds + 60, (0, 1)
    )
    run = _play(
        profile, config, rows, {"scheduler.expert.backfill_surplus": surplus}, seconds + 60, (0, 1)
    )
    mine, its = (service(run, tenant, *span) for tenant in (0, 1))
    out = run.outcomes
    turns = sorted(
        at_ns
        for at_ns, who in zip(out.decided_ns, run.requests.client, strict=True)
        if who and at_ns >= 0
    )
    took = [end - at for at, end in zip(out.decided_ns, out.end_ns, strict=True) if end >= 0]
    waits = np.diff([0, *turns, run.now_ns])
    return Classes(
        mine / service(strict, 0, *span),
        its / (mine + its),
        float(waits.max()) / SECOND,
        max(took) / SECOND,
    )


def _first_tokens_s(run: Audited, tenant: int, until_s: int) -> list[float]:
    """Return times to the first token of all requests that a tenant sent until then."""
    requests, out = run.requests, run.outcomes
    return [
        (first - arrival if first >= 0 else run.now_ns - arrival) / SECOND
        for who, arrival, first in zip(
            requests.client, requests.arrival_ns, out.first_ns, strict=True
        )
        if who == tenant and arrival < until_s * SECOND
    ]


def aged(profile: str, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Return p90 and p99 of the time to the first token beside heads that ageing brought."""
    config = _config(({"name": n, "class": n} for n in ("high", "low")), ("high", "low"))
    found: list[float] = []
    for seed in SEEDS:
        rows = _poisson(seed, 0, (60, 30), 3.0, _LIGHT_S)
        rows += flood(profile, 1, AGED, _LIGHT_S)
        run = _play(profile, config, rows, settings, _LIGHT_S + 60, (1,))
        found += _first_tokens_s(run, 0, _LIGHT_S)
    return float(np.quantile(found, 0.9)), float(np.quantile(found, 0.99))


def light(profile: str, kind: str, settings: Mapping[str, Any]) -> tuple[int, float]:
    """Return how many requests a light tenant sent beside a flood, and p99 of the first token."""
    tenants, spread = LIGHT_FLOODS[kind]
    config = _config({"name": f"t{number}"} for number in range(tenants + 1))
    found: list[float] = []
    for seed in SEEDS:
        rnd = Random(seed)
        rows = _poisson(seed, tenants, _LIGHT, _LIGHT_RATE, _LIGHT_S)
        for tenant in range(tenants):
            for at_ns, _, prompt, output in flood(
                profile, tenant, _FLOOD, (_LIGHT_S + 60) / tenants
            ):
                factor = spread ** rnd.uniform(-1, 1)
                rows.append((at_ns, tenant, round(prompt * factor), round(output * factor)))
        run = _play(profile, config, rows, settings, _LIGHT_S + 60, range(tenants))
        found += _first_tokens_s(run, tenants, _LIGHT_S)
    return len(found), float(np.quantile(found, 0.99))


def _show_newcomers(profile: str) -> None:
    for large, size in (((1_000, 500), (200, 100)), ((1_000, 500), (60, 30))):
        ratios = " ".join(f"{ratio:.2f}" for ratio in newcomer(profile, large, size))
        click.echo(f"newcomer {profile:16} {large} + {size}: {ratios}")


def _show_classes(profile: str) -> None:
    for surplus in (0.0, 0.1):
        for high, low in CLASS_FLOODS:
            it = classes(profile, high, low, surplus)
            click.echo(
                f"classes {profile:16} {high} / {low}, surplus {surplus}: kept {it.kept:.3f},"
                f" low {it.low:.3f}, which waited {it.low_waited_s:.1f} s at most"
                f" (requests took {it.longest_s:.1f} s)"
            )


def _show_aged(profile: str) -> None:
    if load_profile(profile).engine.context_tokens_max < sum(AGED):
        click.echo(f"aged {profile:16} left out: its context holds no request of {AGED}")
        return
    for dispatch in ("backfill", "strict"):
        p90, p99 = aged(profile, {"scheduler.expert.dispatch": dispatch})
        click.echo(f"aged {profile:16} {dispatch}: p90 {p90:.2f} s, p99 {p99:.2f} s")


def _show_light(profile: str) -> None:
    for kind in LIGHT_FLOODS:
        count, p99 = light(profile, kind, {})
        _, strict = light(profile, kind, {"scheduler.expert.dispatch": "strict"})
        click.echo(
            f"light {profile:16} {kind:14}: {count} requests, p99 {p99:.2f} s,"
            f" strict {strict:.2f} s, ratio {p99 / strict:.2f}"
        )


_SHOWS = {
    "newcomer": _show_newcomers,
    "classes": _show_classes,
    "aged": _show_aged,
    "light": _show_light,
}


@click.command()
@click.option("--profile", "profiles", multiple=True, default=PROFILES, help="Engine profile.")
@click.option("--only", "names", multiple=True, type=click.Choice(list(_SHOWS)))
def main(profiles: Sequence[str], names: Sequence[str]) -> None:
    """Print the figures of each profile."""
    for profile in profiles:
        for name in names or _SHOWS:
            _SHOWS[name](profile)


if __name__ == "__main__":
    main()
