"""Derives the figures of a run from its samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.virtual_shards.fair import fair_parts
from bench.virtual_shards.plan import MEAN_CHARGE, MOST_CHARGE, Outage, Plan
from bench.virtual_shards.world import World

__all__ = ["INTERVAL_S", "measure", "shares"]

Floats = NDArray[np.float64]
#: The longest time between two exchanges; a total of another member is at most about so old.
INTERVAL_S = 5.0
#: The store may take this part of a core, as in `python -m bench.shards`.
_STORE_PART = 0.05
#: The picture shows the service of this many seconds.
_RECENT_S = 5


class _Shared:
    """The service of active tenants between two samples, and their fair parts of it."""

    def __init__(self, world: World, from_s: int, until_s: int) -> None:
        plan, tenants = world.plan, world.tenants
        active = plan.active
        first, last = world.seen.tenants[from_s - 1], world.seen.tenants[until_s - 1]
        served = world.seen.shards[until_s - 1] - world.seen.shards[from_s - 1]
        self.got = last - first
        self.fair = fair_parts(
            tenants.first[:active],
            tenants.second[:active],
            tenants.thin,
            tenants.weight[:active].astype(float),
            tenants.thin_rate * MEAN_CHARGE * (until_s - from_s),
            served,
        )
        self.rate = self.fair / (until_s - from_s)


def shares(world: World, from_s: int, until_s: int) -> dict[str, float]:
    """Return how far the active tenants' service is from their fair parts in some seconds."""
    part, tenants = _Shared(world, from_s, until_s), world.tenants
    ratio = part.got / part.fair
    error = np.abs(ratio - 1)
    kinds = [
        ratio[tenants.thin == thin][tenants.weight[: world.plan.active][tenants.thin == thin] == w]
        for thin in (False, True)
        for w in np.unique(tenants.weight)
    ]
    bound = MOST_CHARGE + part.rate * INTERVAL_S
    return {
        "error_median": round(float(np.median(error)), 4),
        "error_p99": round(float(np.quantile(error, 0.99)), 4),
        "error_max": round(float(error.max()), 4),
        "kinds_error_max": round(max(abs(float(k.mean()) - 1) for k in kinds if k.size), 4),
        "thin": round(float(ratio[tenants.thin].mean()), 4),
        "full": round(float(ratio[~tenants.thin].mean()), 4),
        "of_bound_p99": round(float(np.quantile(np.abs(part.got - part.fair) / bound, 0.99)), 3),
    }


def _distances(world: World) -> dict[str, list[float]]:
    """Return, by second, how far tenants are from their fair part since the warm-up.

    They are in seconds of that part. The others are the recent service of tenants with much and
    with little demand at one shard, divided by the fair one.
    """
    plan, tenants = world.plan, world.tenants
    part = _Shared(world, plan.warm_s, plan.end_s)
    of_all = part.fair / part.fair.sum()
    found: dict[str, list[float]] = {name: [] for name in ("at_s", "median", "p99", "thin", "full")}
    first = world.seen.tenants[plan.warm_s - 1]
    for at in range(plan.warm_s + 1, plan.end_s + 1):
        got = world.seen.tenants[at - 1] - first
        distance = np.abs(got - of_all * got.sum()) / part.rate
        late = world.seen.tenants[at - 1] - world.seen.tenants[max(at - _RECENT_S, 1) - 1]
        ratio = late / (of_all * late.sum())
        for name, value in (
            ("at_s", at),
            ("median", np.median(distance)),
            ("p99", np.quantile(distance, 0.99)),
            ("thin", ratio[tenants.thin].mean()),
            ("full", ratio[~tenants.thin].mean()),
        ):
            found[name].append(round(float(value), 3))
    return found


def _back_s(values: Sequence[tuple[float, float]], outage: Outage, bound: float) -> float | None:
    """Return how long after an outage a value is within its bound again; None: it is not."""
    for at, value in values:
        if at >= outage.until_s and value <= bound:
            return at - outage.until_s
    return None


def _outages(world: World, series: dict[str, list[float]]) -> list[dict[str, Any]]:
    plan, found = world.plan, []
    quiet_s = plan.outages[0].from_s
    all_p99 = list(zip(series["at_s"], series["p99"], strict=True))
    all_unsynced = [(at, most) for at, (most, _) in enumerate(world.seen.unsynced_s, 1)]
    bound = max(p99 for at, p99 in all_p99 if at <= quiet_s)
    synced = max(most for at, most in all_unsynced if plan.warm_s < at <= quiet_s)
    ends = [each.from_s for each in plan.outages[1:]] + [plan.end_s]
    for each, end_s in zip(plan.outages, ends, strict=True):
        p99s = [(at, p99) for at, p99 in all_p99 if each.from_s <= at <= end_s]
        unsynced = [(at, most) for at, most in all_unsynced if each.from_s <= at <= end_s]
        found.append(
            {
                "name": each.name,
                "from_s": each.from_s,
                "until_s": each.until_s,
                "p99_before_s": bound,
                "p99_greatest_s": max(p99 for _, p99 in p99s),
                "catch_up_s": _back_s(p99s, each, bound),
                "exchanged_s": _back_s(unsynced, each, synced),
                "unsynced_s": round(max(most for _, most in unsynced), 1),
            }
        )
    return found


def _store(world: World) -> dict[str, float]:
    """Return what the store has to do: on average before the first outage, and at most."""
    plan, load = world.plan, world.load
    quiet = slice(plan.warm_s, int(plan.outages[0].from_s))
    busy = float(load.busy_s[quiet].mean())
    bytes_ = load.written[quiet] + load.read[quiet]
    by_member = sum(load.by_member.values()) / plan.end_s / plan.members
    return {
        "calls_per_s": round(float(load.calls[quiet].mean()), 1),
        "totals_per_s": round(float(load.totals[quiet].mean())),
        "totals_per_s_peak": round(float(load.totals.max())),
        "written_bytes_per_s": round(float(load.written[quiet].mean())),
        "read_bytes_per_s": round(float(load.read[quiet].mean())),
        "member_bytes_per_s": round(float(bytes_.mean()) / plan.members),
        "member_bytes_per_s_all": round(by_member),
        "core": round(busy, 3),
        "core_peak": round(float(load.busy_s.max()), 3),
        "stores_at_5_percent": int(-(-busy // _STORE_PART)),
        "interval_s_at_5_percent": round(INTERVAL_S * busy / _STORE_PART, 1),
    }


def _passing(world: World) -> dict[str, float]:
    """Return how the tenants were served that are not active."""
    plan, active = world.plan, world.plan.active
    both = world.tenants.ended[active:] == 2
    used = np.zeros((2, active), bool)
    for number, shard in enumerate(world.shards):
        here = np.array(shard.tenants[: shard.active], int)
        served = np.array(shard.used) > 0
        used[0, here[served]] |= world.tenants.first[here[served]] == number
        used[1, here[served]] |= world.tenants.second[here[served]] == number
    waits = np.concatenate([np.array(shard.waits_s) for shard in world.shards])
    return {
        "served_at_both": int(both.sum() + used.all(axis=0).sum()),
        "of_tenants": plan.tenants,
        "wait_median_s": round(float(np.median(waits)), 2) if waits.size else 0.0,
        "wait_p99_s": round(float(np.quantile(waits, 0.99)), 2) if waits.size else 0.0,
        "wait_max_s": round(float(waits.max()), 2) if waits.size else 0.0,
    }


def measure(world: World) -> dict[str, Any]:
    """Return the figures of a run. O(seconds * active tenants)."""
    plan: Plan = world.plan
    series = _distances(world)
    found: dict[str, Any] = {
        "requests": sum(shard.requests for shard in world.shards),
        "digest": world.digest,
        "passing": _passing(world),
        "forgiven_tokens": sum(s.core.forgiven_micro() for s in world.shards) // 1_000_000,
        "all": shares(world, plan.warm_s, plan.end_s),
        "series": series,
    }
    if not plan.has_store:
        return found
    quiet_s = int(plan.outages[0].from_s)
    unsynced = world.seen.unsynced_s[plan.warm_s : quiet_s]
    found["quiet"] = shares(world, plan.warm_s, quiet_s)
    found["outages"] = _outages(world, series)
    found["store"] = _store(world)
    found["unsynced_s"] = {
        "mean": round(sum(mean for _, mean in unsynced) / len(unsynced), 2),
        "greatest": round(max(most for most, _ in unsynced), 2),
    }
    series["totals"] = world.load.totals[: plan.end_s].tolist()
    series["core"] = [round(busy, 4) for busy in world.load.busy_s[: plan.end_s].tolist()]
    series["unsynced"] = [round(most, 2) for most, _ in world.seen.unsynced_s]
    return found
