"""Draws what a configuration may ask for beyond the first settings.

A state file, classes, limits of pools, adapters, shares: drawn where the seed is new enough.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from schedsvc_lab.faults.auditor import (
    DEFAULT_CLASS,
    NO_TREE,
    Classes,
    Limits,
    PoolLimits,
    PriorityClass,
    Quotas,
    Tree,
)

_S, _MS = 1_000_000_000, 1_000_000


@dataclass(frozen=True)
class StateOptions:
    """Says how the state is saved."""

    every_ns: int
    rows_at_once: int
    slice_ns: int  # between two slices, on average
    write_ns: int  # that the disk takes, on average


@dataclass(frozen=True)
class SessionOptions:
    """Describes the sessions of agents that requests name."""

    names: int  # names for each tenant
    permille: int  # requests that name one
    max_tokens: int  # that the active ones may hold of a pool; 0: no cap


def draw_sessions(seed: int, capacity_tokens: int, *, fair: bool) -> SessionOptions:
    """Draw sessions of agents, in half of the runs with a cap; `fair`: with none."""
    rnd = Random(seed ^ 0x5E55)  # noqa: S311 - no secret: one seed is one run
    size = capacity_tokens
    return SessionOptions(
        names=rnd.choice((1, 3, 12, 60)),
        permille=rnd.choice((200, 700, 1_000)),
        max_tokens=0 if fair or rnd.random() < 0.5 else rnd.choice((1, size // 6, size // 2)),
    )


def draw_state(rnd: Random) -> StateOptions:
    """Draw how the state is saved: also in slices of one row, beside a disk that is slow."""
    return StateOptions(
        every_ns=rnd.choice((20 * _MS, 200 * _MS, _S)),
        rows_at_once=rnd.choice((1, 3, 64)),
        slice_ns=rnd.choice((10_000, _MS)),
        write_ns=rnd.choice((_MS, 50 * _MS)),
    )


def draw_classes(rnd: Random, tenants: list[str]) -> Classes:
    """Draw priority classes; a tenant may have an exempt one."""
    ageing = (200 * _MS, _S, 5 * _S, 60 * _S)
    drawn = [
        PriorityClass("rush", -5, rnd.choice(ageing)),
        PriorityClass("batch", 10, rnd.choice(ageing)),
        PriorityClass("ops", 3, rnd.choice(ageing), exempt=True),
    ]
    known = [DEFAULT_CLASS, *(c for c in drawn if rnd.random() < 0.7)]
    usual = [c.name for c in known if not c.exempt]
    of_tenants = {name: rnd.choice(usual) for name in tenants}
    if len(usual) < len(known) and rnd.random() < 0.5:
        of_tenants[tenants[-1]] = "ops"
    return Classes({c.name: c for c in known}, of_tenants)


def draw_pool_limits(rnd: Random, capacity_tokens: int, *, adapters: bool) -> PoolLimits:
    """Draw what each pool may run; the smallest stop much of what arrives."""

    def some(*values: int) -> int:
        return rnd.choice(values) if rnd.random() < 0.4 else 0

    size = capacity_tokens
    return PoolLimits(
        batch_max_tokens=some(size // 20 + 1, size // 6 + 1, size),
        max_total_tokens=some(size // 2, size),
        max_running=some(2, 8, 32),
        max_request_total_tokens=some(size // 4, size // 2),
        max_request_input_tokens=some(size // 8 + 1, size // 4 + 1),
        max_loras=rnd.choice((1, 2, 0)) if adapters else 0,
        adapter_tokens=rnd.choice((0, 16, size // 16)) if adapters else 0,
    )


def draw_adapters(rnd: Random) -> dict[str, int]:
    """Draw LoRA adapters; some take more or less of the cache than is usual."""
    names = ("sql", "french", "legal", "poet", "chess")[: rnd.randrange(2, 6)]
    return {name: rnd.choice((-1, -1, 0, 40)) for name in names}


def with_shares(rnd: Random, quotas: Quotas) -> Quotas:
    """Give tenants and their group shares that others may borrow."""

    def shared(limits: Limits | None) -> Limits:
        share = rnd.choice((0, 2_000, 20_000, 200_000))
        lends = rnd.choice((-1, share // 2, 0))
        borrows = rnd.choice((-1, -1, 0, 5_000))
        return replace(limits or Limits(), share=share, lends=lends, borrows=borrows)

    tenants = {name: shared(limits) for name, limits in quotas.tenants.items()}
    group = shared(quotas.group) if quotas.members and rnd.random() < 0.5 else quotas.group
    return replace(quotas, tenants=tenants, group=group)


def draw_order(rnd: Random, core: dict[str, Any]) -> tuple[int, int]:
    """Draw who goes first inside a flow, and of prefixes; `core` gets the settings.

    Returns the number of prompt families (0: requests carry no hashes), and how many of a thousand
    requests have a deadline.
    """
    deadlines = prefixes = 0
    if rnd.random() < 0.35:
        core["flow_order"], deadlines = "deadline", rnd.choice((300, 800))
    if rnd.random() < 0.35:
        prefixes = rnd.choice((1, 3, 20))
        core["prefix_affinity_ppm"] = rnd.choice((0, 100_000, 1_000_000))
        core["prefix_blocks_max"] = rnd.choice((0, 8, 65_536))
        if rnd.random() < 0.6:
            core["policy"], core["quantum_tokens"] = "dlpm", rnd.choice((1, 200, 5_000))
    return prefixes, deadlines


def draw_duel_tree(seed: int, tenants: tuple[str, ...], hostile: str) -> Tree:
    """Draw groups of weight 1 for a duel: the hostile tenant beside, among or below the others."""
    rnd = Random(seed ^ 0x7EE6)  # noqa: S311 - no secret: one seed is one run
    first, last = tenants[0], tenants[-1]
    parents: dict[str, str] = rnd.choice(
        (
            dict.fromkeys(tenants, "org"),
            {hostile: "org", first: "org"},
            {hostile: "org"} | dict.fromkeys(tenants, "lab"),
            {"lab": "org", last: "org"} | {hostile: "lab", first: "lab"},
            {"lab": "org", hostile: "org"} | dict.fromkeys(tenants, "lab"),
        )
    )
    return Tree(dict.fromkeys(sorted({*parents.values()}), 1_000), parents)


def draw_tree(seed: int, tenants: list[str], quotas: Quotas | None) -> Tree:
    """Draw groups with a weight above tenants, three at most above one another, or none.

    A group with a quota is one of them; shares do not go with weights.
    """
    rnd = Random(seed ^ 0x7EE5)  # noqa: S311 - no secret: one seed is one run
    limits = [] if quotas is None else [*quotas.tenants.values(), quotas.group or Limits()]
    if rnd.random() < 0.2 or any(each.share for each in limits):
        return NO_TREE
    names = ("org", "lab", "team", "crew", "unit")[: rnd.randrange(1, 6)]
    heights: dict[str, int] = {}
    parents: dict[str, str] = {}
    for name in names:
        above = [other for other, height in heights.items() if height < 3]
        if above and rnd.random() < 0.7:
            parents[name] = rnd.choice(above)
        heights[name] = heights.get(parents.get(name, ""), 0) + 1
    members: frozenset[str] = frozenset()
    if quotas is not None and quotas.group is not None:
        members = quotas.members
        parents["group"] = rnd.choice([name for name in names if heights[name] < 3])
    for tenant in tenants:
        if tenant in members:
            parents[tenant] = "group"
        elif rnd.random() < 0.85:
            parents[tenant] = rnd.choice(names)
    groups = (*names, *(("group",) if "group" in parents else ()))
    weights = {name: rnd.choice((500, 1_000, 1_000, 3_000)) for name in groups}
    return Tree(weights, parents)
