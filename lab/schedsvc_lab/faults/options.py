"""Draws everything that one run chooses from its seed."""

from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any, NamedTuple

from schedsvc import _core
from schedsvc_lab.faults.auditor import (
    CREDIT_AUTO,
    LEAD_AUTO,
    NO_TREE,
    Classes,
    Limits,
    PoolLimits,
    Quotas,
    Tree,
)
from schedsvc_lab.faults.cache_price import draw_cache_price
from schedsvc_lab.faults.cluster_options import CLUSTER_FAULTS
from schedsvc_lab.faults.draws import (
    SessionOptions,
    StateOptions,
    draw_adapters,
    draw_classes,
    draw_order,
    draw_pool_limits,
    draw_sessions,
    draw_state,
    draw_tree,
    with_shares,
)
from schedsvc_lab.faults.hostile_options import (
    CLOSING,
    CLOSING_FAULTS,
    HOSTILE,
    HOSTILE_FAULTS,
    HOSTILE_TREES,
    TENANT,
    HostileOptions,
    draw_closed,
    draw_hostile,
)
from schedsvc_lab.faults.leaver_options import LEAVER_FAULTS, draw_leavers, draw_paces

_S, _MS = 1_000_000_000, 1_000_000

_SECOND, _THIRD, _FOURTH, FIFTH, SIXTH = 1 << 22, 1 << 23, 1 << 24, 1 << 40, 1 << 44
NEWEST = 1 << 46
"""Each range of seeds draws what the range below it draws, and more. From _SECOND on these are
quotas; then what outlives a restart, classes, limits of pools, adapters, dispatch delay and shares;
then deadlines, and the refusal of requests that cannot meet them; then shares in front of several
pools, acts of an operator, order by deadline, prefixes, and outputs of one length; then the credit
of a lift; then the lead and the fairness domain."""

_FIRST_FAULTS = {
    # name: (how often it is chosen, what it does)
    "shim-killed": (3, "a shim process dies with its engine, and starts again"),
    "client-leaves-queue": (6, "a client leaves while its request waits"),
    "client-leaves-run": (6, "a client leaves while its request runs"),
    "client-vanishes": (3, "a unary client dies, and its leases are never completed"),
    "scheduler-restarted": (1, "the scheduler dies and starts again, leases in flight"),
    "complete-lost": (0, "the answer to a Complete, or the call itself, is lost"),
    "complete-twice": (4, "a lease that has ended is completed again"),
    "complete-early": (2, "a Complete names a lease whose grant its holder has not seen yet"),
    "complete-after-expiry": (2, "a holder stays silent until its lease has expired, then ends it"),
    "progress-after-complete": (4, "a report is behind the end of its lease"),
    "admit-twice": (5, "the same request is asked for again, while it waits or after its grant"),
    "admit-conflict": (2, "an id is used again for another request"),
    "message-lost": (0, "a unary call or its answer is lost"),
    "message-reordered": (0, "a unary call overtakes earlier ones"),
    "message-delayed": (3, "a stream stands still for seconds"),
    "stream-cut": (3, "a connection breaks; what is under way is lost"),
    "half-open": (2, "a connection breaks, and the scheduler does not notice for seconds"),
    "partition": (1, "a shim cannot reach the scheduler for seconds"),
    "slow-reader": (2, "a shim does not read its stream"),
    "wall-clock-step": (1, "the wall clock, of which epochs are made, jumps by up to an hour"),
    "scheduler-paused": (1, "the scheduler's process stands still for up to 30 s"),
    "mass-cancellation": (1, "all that a shim has open is cancelled in one moment"),
    "burst": (2, "a hundred requests arrive in one moment"),
    "tenant-flood": (2, "requests of tenants that the scheduler does not know"),
    "too-large": (2, "a request that no pool can hold"),
    "malformed": (3, "an event that breaks a limit of the contract"),
    "garbage": (1, "bytes that are no message, or a wrong seq: the stream ends"),
    "engine-restarted": (2, "an engine starts again: a new epoch"),
    "engine-slow": (2, "an engine works ten times slower for a while"),
    "engine-sleeps": (2, "an engine produces nothing for a while"),
    "telemetry-false": (3, "an engine reports numbers that are wrong"),
    "telemetry-stale": (2, "an engine reports numbers of an earlier epoch"),
    "report-false": (3, "a shim reports absurd totals"),
    "capacity-changed": (2, "a pool is registered again, also smaller than what it has promised"),
    "weights-reloaded": (1, "tenants get other weights while their requests wait and run"),
}  # fmt: skip

STATE_FAULTS = {
    "power-lost": (4, "the scheduler's machine dies, and the last writes of its state with it"),
    "disk-full": (1, "for seconds, no state can be written"),
    "state-damaged": (2, "the scheduler dies, and what it has saved is damaged"),
}
"""Faults of seeds that keep their state in a file."""

OPERATOR_FAULTS = {
    "pool-drained": (2, "an operator lets a pool grant nothing, for seconds, also over a restart"),
    "all-drained": (1, "an operator lets nothing be granted, for seconds, also over a restart"),
    "lease-revoked": (4, "an operator revokes a lease that runs, has ended, or never was"),
    "mode-dry-run": (1, "an operator lets a tenant or all in whatever it costs, for seconds"),
}
"""Acts of an operator on a scheduler that runs."""

FAULTS = _FIRST_FAULTS | STATE_FAULTS | OPERATOR_FAULTS
FAULTS |= LEAVER_FAULTS | HOSTILE_FAULTS | CLOSING_FAULTS | CLUSTER_FAULTS

FAIR_FAULTS = frozenset(
    (
        "client-leaves-queue",
        "complete-twice",
        "progress-after-complete",
        "admit-twice",
        "message-delayed",
        "burst",
        "malformed",
        "engine-slow",
        "engine-sleeps",
        "telemetry-false",
    )
)
"""Faults of runs that measure the service of each flow: none of them refunds service."""


@dataclass(frozen=True)
class PoolOptions:
    """Describes one engine and its shims."""

    name: str
    capacity_tokens: int
    block: int
    max_running: int
    max_model_tokens: int
    shims: int
    token_ns: int  # time per token of output
    prefill_ns: int = 0  # time per token of a prompt; 0: it takes as long as a part of the output
    prompt_ns: int = 0  # time for each prompt besides


@dataclass(frozen=True)
class Options:
    """Holds the options of one run. Times in ns, probabilities in thousandths."""

    seed: int
    events: int
    core: dict[str, Any]  # arguments of the core's constructor
    tenants: dict[str, int]  # weight in thousandths
    shares_unknown: bool
    pools: tuple[PoolOptions, ...]
    callers: int  # unary clients
    interval_ns: int  # between two arrivals, on average
    prompt_max: int
    output_max: int
    delay_ns: int  # delay of the network, on average
    gather_ns: int  # time for which a shim gathers events
    lost_permille: int  # lost unary messages
    reports_permille: int  # requests that report progress
    fault_ns: int  # between two faults, on average
    faults: frozenset[str]
    fair: bool  # made to compare the service of tenants
    quotas: Quotas | None = None
    state: StateOptions | None = None
    classes: Classes | None = None
    limits: PoolLimits | None = None
    adapters: dict[str, int] | None = None  # tokens that each takes; -1: the usual size
    deadlines_permille: int = 0  # requests with a deadline for their first token
    prefixes: int = 0  # families of prompts that begin alike; 0: no hashes
    alike: bool = False  # outputs of a tenant are of one length
    hostile: HostileOptions | None = None
    tree: Tree = NO_TREE  # groups with a weight
    sessions: SessionOptions | None = None  # of agents


TREES, NO_TREES = 1 << 47, 1 << 48
"""Seeds between these two draw groups with a weight, and those from HOSTILE_TREES on."""

ALIVE = 1 << 52  # from here on a newcomer waits for a sign of life of the engine that has its pool

SESSIONS = 3 << 52
"""Seeds from here on draw sessions of agents; of these, up to CLOSING, only the odd ones have a
hostile principal, so that the others show who is served how much."""


def draw(seed: int, events: int, faults: frozenset[str] | None = None) -> Options:
    """Draw a run. `faults` are those that may happen; None: what the seed draws."""
    options = _draw(seed, events, faults)
    if HOSTILE <= seed < SESSIONS or seed >= CLOSING or (seed >= SESSIONS and seed % 2):
        options = _with_hostile(options, faults)
    if seed >= SESSIONS:
        options = _with_sessions(options)
    if faults is None:
        options = replace(options, faults=options.faults | draw_leavers(seed, fair=options.fair))
    paces = zip(options.pools, draw_paces(seed, len(options.pools)), strict=True)
    options = replace(options, pools=tuple(replace(pool, **pace) for pool, pace in paces))
    later = draw_cache_price(seed, fair=options.fair)
    if seed >= ALIVE:
        later["sign_of_life_ns"] = (_S // 2, _S, 3 * _S)[seed % 3]
    options = replace(options, core=options.core | later)
    if seed >= HOSTILE_TREES:
        options = _with_group_quotas(options)
    has_tree = TREES <= seed < NO_TREES or seed >= HOSTILE_TREES
    if has_tree:
        names = [*options.tenants, *(() if options.hostile is None else (TENANT,))]
        options = replace(options, tree=draw_tree(seed, names, options.quotas))
    rnd = Random(seed ^ 0xA11CE)  # noqa: S311 - no secret: one seed is one run
    is_alike = seed >= FIFTH and not options.fair and rnd.random() < 0.25
    return _of_one_length(options) if is_alike else options


def _with_hostile(options: Options, faults: frozenset[str] | None) -> Options:
    """Add a principal that acts against all others."""
    hostile, core = draw_hostile(options.seed, fair=options.fair)
    drawn = options.faults
    if faults is None:
        rnd = Random(options.seed ^ 0xFA17)  # noqa: S311 - no secret: one seed is one run
        drawn |= {name for name in HOSTILE_FAULTS if rnd.random() < 0.8}
    if options.seed >= CLOSING and not options.fair:
        names = [pool.name for pool in options.pools]
        hostile = replace(hostile, closed=draw_closed(options.seed, hostile.grants, names))
        drawn |= CLOSING_FAULTS.keys() if faults is None else frozenset()
    return replace(options, hostile=hostile, core=options.core | core, faults=drawn)


def _with_sessions(options: Options) -> Options:
    """Let requests name sessions of agents, and cap what these may hold of a pool."""
    smallest = min(pool.capacity_tokens for pool in options.pools)
    sessions = draw_sessions(options.seed, smallest, fair=options.fair)
    limits = options.limits
    if sessions.max_tokens:
        limits = replace(limits or PoolLimits(), sessions_max_tokens=sessions.max_tokens)
    return replace(options, sessions=sessions, limits=limits)


def _with_group_quotas(options: Options) -> Options:
    """Give more of the runs a group with a quota, which other groups then stand above."""
    rnd = Random(options.seed ^ 0x6A0F)  # noqa: S311 - no secret: one seed is one run
    if options.fair or options.quotas is not None or rnd.random() < 0.6:
        return options
    quotas = draw_quotas(rnd, list(options.tenants), options.pools)
    return replace(options, quotas=quotas)


def _of_one_length(options: Options) -> Options:
    """Give a tenant's outputs one length, with short gaps, so that the core learns it."""
    core = {"ledger": "peak", "samples_min": 1, "queue_max": 10_000, "flow_queue_max": 1_000}
    return replace(
        options,
        alike=True,
        interval_ns=options.interval_ns // 10,
        reports_permille=1_000,
        pools=tuple(replace(pool, max_running=0, token_ns=_MS) for pool in options.pools),
        core=options.core | {name: value for name, value in core.items() if knows(name, value)},
    )


def _draw(seed: int, events: int, faults: frozenset[str] | None) -> Options:
    rnd = Random(seed)  # noqa: S311 - no secret: one seed is one run
    # Every fifth run is made for one property that faults of other kinds would hide.
    fair = rnd.random() < 0.2
    tenants = {
        name: 1_000 if rnd.random() < 0.5 else rnd.randrange(200, 5_000)
        for name in ("ada", "bob", "cyd", "dee", "eve", "fay")[: rnd.randrange(1, 7)]
    }
    pools = draw_pools(rnd, fair=fair, seed=seed)
    smallest = min(pool.capacity_tokens for pool in pools)
    drawn = frozenset(name for name in _FIRST_FAULTS if rnd.random() < 0.7)
    core = draw_core(rnd)
    if fair:
        tenants = dict.fromkeys(("ada", "bob", "cyd")[: rnd.randrange(2, 4)], 1_000)
        core |= {"policy": "vtc", "queue_ttl_ns": 30 * _S}
        core |= {"flow_queue_max": 1_000, "queue_max": 10_000}
        core |= {name: "strict" for name in ("dispatch",) if name in core and seed < NEWEST}
        drawn &= FAIR_FAULTS
    quotas = None
    if seed >= _SECOND:
        more = Random(seed ^ 0x0DDB)  # noqa: S311 - no secret: one seed is one run
        if fair:
            if more.random() < 0.5:
                tenants = {name: more.randrange(500, 3_000) for name in tenants}
        elif more.random() < 0.3:
            quotas = draw_quotas(more, list(tenants), pools)
    later = Later(quotas=quotas)
    if seed >= _THIRD and not fair:
        more = Random(seed ^ 0x57A7E)  # noqa: S311 - no secret: one seed is one run
        later = draw_later(more, core, list(tenants), pools, quotas, several=seed >= FIFTH)
        drawn |= later.faults
    deadlines = 0
    if seed >= _FOURTH and not fair and seed % 2:
        deadlines = 500
        core |= {"early_refusal": 1, "refusal_samples_min": (0, 1, 5)[seed // 2 % 3]}
    prefixes = 0
    if seed >= FIFTH and not fair:
        done, prefixes, wanted = draw_fifth(seed, core)
        drawn, deadlines = drawn | done, max(deadlines, wanted)
    core |= draw_credit(seed, several=fair and len(pools) > 1)
    may = drawn if faults is None else faults
    return Options(
        seed=seed,
        events=events,
        core=core,
        tenants=tenants,
        shares_unknown=rnd.random() < 0.7,
        pools=pools,
        callers=rnd.randrange(0, 4),
        interval_ns=round(10 ** rnd.uniform(6.3, 7.0 if fair else 7.7)),
        prompt_max=rnd.randrange(20, max(40, smallest // 6)),
        output_max=rnd.randrange(10, max(20, smallest // 6)),
        delay_ns=rnd.choice((100_000, _MS, 10 * _MS)),
        gather_ns=rnd.choice((0, 0, _MS, 5 * _MS)),
        lost_permille=rnd.choice((20, 100)) if "message-lost" in may else 0,
        reports_permille=1_000 if fair else max(later.reports, rnd.choice((0, 500, 1_000, 1_000))),
        fault_ns=round(10 ** rnd.uniform(6.8, 8.3)),
        faults=may,
        fair=fair,
        quotas=later.quotas,
        state=later.state,
        classes=later.classes,
        limits=later.limits,
        adapters=later.adapters,
        deadlines_permille=deadlines,
        prefixes=prefixes,
    )


def draw_fifth(seed: int, core: dict[str, Any]) -> tuple[frozenset[str], int, int]:
    """Draw what an operator does, and with `draw_order()` what that returns."""
    rnd = Random(seed ^ 0x0FE7A)  # noqa: S311 - no secret: one seed is one run
    done: frozenset[str] = frozenset()
    if rnd.random() < 0.6:
        done = frozenset(name for name in OPERATOR_FAULTS if rnd.random() < 0.7)
    return done, *draw_order(rnd, core)


def draw_credit(seed: int, *, several: bool) -> dict[str, Any]:
    """Draw a lift's credit, and how far ahead other pools may keep a flow; mostly defaults.

    `several`: the service in each of several pools is compared.
    """
    rnd = Random(seed ^ 0xC4ED17)  # noqa: S311 - no secret: one seed is one run
    if seed < SIXTH or (rnd.random() < 0.1 and not several):
        return {"credit_max_micro": 0}
    micro = round(10 ** rnd.uniform(6, 10))  # a token or less, ten thousand or more
    credit = {"credit_max_micro": rnd.choice((CREDIT_AUTO, CREDIT_AUTO, 0, micro))}
    if seed < NEWEST:
        return credit
    lead = round(10 ** rnd.uniform(6, 10))
    return credit | {
        "lead_max_micro": rnd.choice((0, lead) if several else (LEAD_AUTO, LEAD_AUTO, 0, lead)),
        "fairness_domain": 0 if several else rnd.choice((0, 1, 2)),
    }


class Later(NamedTuple):
    """Holds further options that later seeds draw."""

    quotas: Quotas | None
    state: StateOptions | None = None
    classes: Classes | None = None
    limits: PoolLimits | None = None
    adapters: dict[str, int] | None = None
    faults: frozenset[str] = frozenset()
    reports: int = 0  # least number of a thousand requests that report progress


def draw_later(
    rnd: Random, core: dict[str, Any], tenants: list[str], pools: tuple[PoolOptions, ...],
    quotas: Quotas | None, *, several: bool,
) -> Later:  # fmt: skip
    """Draw what a configuration may also ask for; `core` gets what is a setting of the core.

    If `several`, there may be shares in front of several pools, too.
    """
    drawn = Later(quotas)
    if rnd.random() < 0.6:
        faults = frozenset(name for name in STATE_FAULTS if rnd.random() < 0.7)
        drawn = drawn._replace(state=draw_state(rnd), faults=faults)
        if rnd.random() < 0.5:  # messages show every change of a counter
            core["policy"] = rnd.choice(("vtc", "vtc", "lcf"))
            drawn = drawn._replace(quotas=None, reports=1_000)
    if not drawn.reports and rnd.random() < 0.4:
        drawn = drawn._replace(classes=draw_classes(rnd, tenants))
    if rnd.random() < 0.3:
        drawn = drawn._replace(adapters=draw_adapters(rnd))
    if drawn.adapters or rnd.random() < 0.3:
        size = min(pool.capacity_tokens for pool in pools)
        limits = draw_pool_limits(rnd, size, adapters=drawn.adapters is not None)
        drawn = drawn._replace(limits=limits)
    if rnd.random() < 0.15:
        core["delay_factor_milli"] = rnd.choice((500, 1_000, 3_000))
    if drawn.quotas is not None and (len(pools) == 1 or several) and rnd.random() < 0.7:
        drawn = drawn._replace(quotas=with_shares(rnd, drawn.quotas))
    return drawn


def draw_limits(rnd: Random, pools: tuple[PoolOptions, ...]) -> Limits:
    """Draw the limits of one node; the smallest stop much of what arrives."""

    def some(*values: int) -> int:
        return rnd.choice(values) if rnd.random() < 0.4 else 0

    tokens = min(pool.capacity_tokens for pool in pools)
    return Limits(
        requests=some(30, 300, 3_000),
        input_tokens=some(2 * tokens, 20 * tokens),
        output_tokens=some(2 * tokens, 20 * tokens),
        total_tokens=some(4 * tokens, 40 * tokens),
        concurrency=some(1, 2, 8),
    )


def draw_quotas(rnd: Random, tenants: list[str], pools: tuple[PoolOptions, ...]) -> Quotas:
    """Draw the quotas of tenants, of a group of them, and of the model on the first pool."""
    members = frozenset(name for name in tenants if rnd.random() < 0.6)
    return Quotas(
        tenants={name: draw_limits(rnd, pools) for name in tenants if rnd.random() < 0.6},
        refusing=frozenset(name for name in tenants if rnd.random() < 0.3),
        members=members,
        group=draw_limits(rnd, pools) if members and rnd.random() < 0.6 else None,
        model=draw_limits(rnd, pools) if rnd.random() < 0.4 else None,
        model_pool=pools[0].name,
    )


def of_equal_pools(seed: int, first: PoolOptions) -> tuple[PoolOptions, ...]:
    """Draw several engines that each take every request, and differ in their pace."""
    rnd = Random(seed ^ 0x9001)  # noqa: S311 - no secret: one seed is one run
    return tuple(
        replace(
            first, name=f"gpu-{number}", max_model_tokens=0, token_ns=rnd.choice((1, 2, 10)) * _MS
        )
        for number in range(rnd.choice((1, 2, 3)))
    )


def draw_pools(rnd: Random, *, fair: bool, seed: int) -> tuple[PoolOptions, ...]:
    """Draw the engines. A small engine soon shows which flow gets more than its share."""
    block = rnd.choice((1, 4, 16, 16, 32))
    pools = tuple(
        PoolOptions(
            name=f"gpu-{number}",
            capacity_tokens=(10 if fair else rnd.randrange(40, 400)) * 16,
            block=block if rnd.random() < 0.8 and not fair else 16,
            max_running=rnd.choice((0, 0, 4, 16, 64)) if not fair else 0,
            max_model_tokens=rnd.choice((0, 0, 600)),
            shims=1 if rnd.random() < 0.7 else 2,
            token_ns=rnd.choice((200_000, _MS, 5 * _MS)) if not fair else 2 * _MS,
        )
        for number in range(1 if fair else rnd.choice((1, 1, 2, 3)))
    )
    return of_equal_pools(seed, pools[0]) if fair and seed >= NEWEST else pools


# Settings that a core may have or not, with the values that are drawn for them.
_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "ledger": ("sum", "peak"),
    "dispatch": ("strict", "backfill"),
    "bypass_max": (1, 3, 16),
    "headroom_min_ppm": (0, -300_000),
    "headroom_max_ppm": (100_000, 300_000),
}
_POLICIES = ("vtc", "vtc", "vtc", "fcfs", "lcf")


@cache
def knows(name: str, value: Any) -> bool:
    """Return whether this core has the setting, with this value."""
    try:
        _core.Scheduler(**{name: value})
    except _core.CallerError:
        return False
    return True


def draw_core(rnd: Random) -> dict[str, Any]:
    """Draw the settings of the scheduler itself."""
    # If more than `work_max` answers run out together, the others are forgotten one poll later.
    work_max = rnd.choice((4, 64, 65_536, 65_536))
    answer_ttls = (5 * _S, 60 * _S, 300 * _S) if work_max == 65_536 else (3_600 * _S,)
    policy = rnd.choice(_POLICIES)
    drawn = {name: rnd.choice(values) for name, values in _OPTIONAL.items()}
    return {
        "policy": policy if knows("policy", policy) else "vtc",
        "queue_ttl_ns": rnd.choice((_S, 5 * _S, 30 * _S)),
        "lease_ttl_ns": rnd.choice((3 * _S, 5 * _S, 10 * _S)),
        "lease_grace_ns": rnd.choice((0, 2 * _S, 5 * _S, 20 * _S)),
        "answer_ttl_ns": rnd.choice(answer_ttls),
        "answers_max": 100_000 if rnd.random() < 0.9 else 0,
        "flow_queue_max": rnd.choice((5, 50, 1_000)),
        "queue_max": rnd.choice((20, 10_000)),
        "headroom_ppm": rnd.choice((0, 20_000, 100_000)),
        "quantile_ppm": rnd.choice((500_000, 900_000, 990_000)),
        "samples_min": rnd.choice((1, 10)),
        "cached_price_ppm": rnd.choice((0, 100_000, 1_000_000)),
        "work_max": work_max,
    } | {name: value for name, value in drawn.items() if knows(name, value)}
