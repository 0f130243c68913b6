"""Derives the scheduler's guarantees from the options of a run; the auditor checks them."""

from schedsvc_lab.faults.auditor import CREDIT_AUTO, LEAD_AUTO, PoolLimits, Terms
from schedsvc_lab.faults.configured import HOSTILE_WEIGHT, UNKNOWN_WEIGHT
from schedsvc_lab.faults.hostile_options import POOLS, TENANT
from schedsvc_lab.faults.jobs import draw_sets
from schedsvc_lab.faults.options import Options
from schedsvc_lab.faults.server import TICK_NS

_KEPT_PPM = 125_000


def _bypass_max(options: Options) -> int | None:
    """Return how often a head may be bypassed, if arrivals alone decide which request is the head.

    A request that a pool can no longer hold, because the pool became smaller, waits for its
    eviction and not for its turn.
    """
    core = options.core
    if core["policy"] != "fcfs" or _pools(options) > 1 or "capacity-changed" in options.faults:
        return None
    if options.quotas is not None or options.classes is not None or _reorders(options):
        return None
    if _caps_sessions(options):  # which waits in no queue, and enters one late
        return None
    return int(core["bypass_max"]) if _passes(options) else 0


def _passes(options: Options) -> bool:
    return bool(options.core.get("dispatch", "strict") == "backfill")


def _pools(options: Options) -> int:
    """Return how many pools there can be."""
    return len(options.pools) + (0 if options.hostile is None else POOLS)


def _pool_sets(options: Options) -> int:
    """Return how many sets of several pools requests can name."""
    count = len(draw_sets(options).names)
    return 2**count - count - 1 if count else 0


def _caps_sessions(options: Options) -> bool:
    return options.sessions is not None and options.sessions.max_tokens > 0


def _reorders(options: Options) -> bool:
    """Return whether the next request depends on more than arrivals and classes."""
    by_deadline = options.core.get("flow_order") == "deadline"
    has_sessions = options.sessions is not None  # whose heads need not be the oldest
    return by_deadline or has_sessions or "mode-dry-run" in options.faults


def counts_exactly(options: Options) -> bool:
    """Return whether a client that leaves its request states what that has used."""
    if options.core["policy"] not in ("vtc", "lcf") or options.core.get("lease_seed"):
        return False
    if options.reports_permille != 1_000 or options.quotas is not None:
        return False
    if _caps_sessions(options) or (options.tree.weights and options.state is not None):
        return False
    return options.classes is None


def terms_of(options: Options) -> Terms:
    """Say what the scheduler promises under these options."""
    core = options.core
    headroom = core["headroom_ppm"]
    # A core whose headroom adapts keeps more, and some for flows below their share.
    adapts = "headroom_max_ppm" in core
    limited = options.quotas is not None
    delays = "delay_factor_milli" in core or options.limits is not None
    passes = _passes(options)
    # The hostile principal may be the first to offer a pool.
    lies = not options.faults.isdisjoint({"telemetry-false", "foreign-telemetry"})
    tenants = options.tenants
    if options.hostile is not None:
        tenants = tenants | {TENANT: HOSTILE_WEIGHT}
    most = max(headroom, core["headroom_max_ppm"]) + _KEPT_PPM if adapts else headroom
    return Terms(
        tenants=tenants,
        shares_unknown=options.shares_unknown,
        queue_ttl_ns=core["queue_ttl_ns"],
        lease_ttl_ns=core["lease_ttl_ns"],
        lease_grace_ns=core["lease_grace_ns"],
        answer_ttl_ns=core["answer_ttl_ns"],
        answers_max=core["answers_max"],
        flow_queue_max=core["flow_queue_max"],
        queue_max=core["queue_max"],
        headroom_ppm=min(headroom, core.get("headroom_min_ppm", headroom)),
        headroom_most_ppm=most,
        tick_ns=TICK_NS,
        input_price=(input_price := core.get("input_price_micro", 1_000_000)),
        output_price=core.get("output_price_micro", 2_000_000),
        cached_price=input_price * core["cached_price_ppm"] // 1_000_000,
        kv_price=core.get("kv_price_micro", 0),
        sum_form=core.get("ledger", "sum") == "sum",
        # For a while the core trusts even a false report of load beyond all promises.
        work_conserving=not ((adapts and lies) or limited or delays),
        bypass_max=_bypass_max(options),
        fair=options.fair and core["policy"] == "vtc",
        passes=passes,
        credit_max=core.get("credit_max_micro", CREDIT_AUTO),
        lead_max=core.get("lead_max_micro", LEAD_AUTO),
        has_sessions=options.sessions is not None,
        unknown_weight=UNKNOWN_WEIGHT,
        pools=_pools(options),
        pool_sets=_pool_sets(options),
        quotas=options.quotas,
        classes=options.classes,
        strict_classes=options.classes is not None
        and not (
            limited
            or passes
            or _caps_sessions(options)
            or _pools(options) > 1
            or not {"capacity-changed", "mode-dry-run"}.isdisjoint(options.faults)
        ),
        limits=options.limits or PoolLimits(),
        by_deadline=core.get("flow_order") == "deadline",
        early_refusal=bool(core.get("early_refusal", True)),
        grants=None if options.hostile is None else options.hostile.grants,
        closed=frozenset() if options.hostile is None else options.hostile.closed,
        sessions_max=core.get("sessions_max", 4_096),
        leases_max=core.get("leases_max", 65_536),
        adapters_max=core.get("adapters_max", 1_024),
        ids_tell_order=not core.get("lease_seed"),
        tree=options.tree,
        sign_of_life_ns=core.get("sign_of_life_ns", 0),
        adapters={n: tokens for n, tokens in (options.adapters or {}).items() if tokens >= 0},
    )
