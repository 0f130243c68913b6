"""Computes the rows of `Scheduler.stats()` from the twin by reading everything."""

from typing import Any

from .twin import Twin
from .twin_lengths import Asked, Lengths
from .twin_types import SUSPECT, may_run, names

# Rows of `stats()` that the twin does not have: figures of engines, and forecasts.
UNSEEN = frozenset(
    (
        "engine_running",
        "engine_waiting",
        "engine_used_tokens",
        "engine_preemptions",
        "telemetry_age_ms",
        "wait_reason",
        "open_sessions",
        "overload_state",
        "last_prefill_us",
        "prefill_tokens_per_s",
        "prefill_error_ms",
        "prefills_judged",
        "wait_expected_ms",
        "wait_error_ms",
        "waits_judged",
        "ttft_expected_ms",
        "ttft_ms",
        "ttft_judged",
        "deadline_probes_judged",
        "deadline_probes_missed",
        "predictor_judged",
        "predictor_coverage_ppm",
        "reserved_to_used_ppm",
    )
)


def view(twin: Twin, now_ns: int) -> dict[str, Any]:
    twin.note_heads()
    return {
        "pools": [_pool(twin, now_ns, p) for p in range(len(twin.pools))],
        "flows": {
            (name.decode(), _class(twin, i)): _flow(twin, now_ns, i)
            for i, name in enumerate(twin.flow_names)
        },
        "classes": twin.classes.rows(),
        "totals": _totals(twin),
        "tenants": {
            "first_sight": len(twin.tenants.born),
            "flows_max": twin.limits["flows_max"],
            "shared_requests": twin.tenants.shared_requests,
            "forgotten": twin.tenants.forgotten,
        },
        "quotas": [_quota(twin, now_ns, node) for node in _shared(twin)],
        "draining": twin.draining,
        "flow_order": "deadline" if twin.order.by_deadline else "arrival",
    }


def _class(twin: Twin, flow: int) -> str:
    return twin.classes.items[twin.flows[flow].cls].name.decode()


def wait_reasons(twin: Twin) -> list[str]:
    """Return why each pool granted nothing more at the last poll."""
    return [p.reason if twin.queued() else "NONE" for p in twin.pools]


def core_view(stats: dict[str, Any]) -> dict[str, Any]:
    """Return the same of the core's own snapshot."""

    def seen(figures: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in figures.items() if k not in UNSEEN}

    return {
        "pools": [seen(p) for p in stats["pools"]],
        "flows": {(f["tenant"], f["request_class"]): seen(f) for f in stats["flows"]},
        "classes": stats["classes"],
        "totals": seen(stats["totals"]),
        "tenants": stats["tenants"],
        "quotas": stats["quotas"],
        "draining": stats["draining"],
        "flow_order": stats["flow_order"],
    }


def _pool(twin: Twin, now_ns: int, pool: int) -> dict[str, Any]:
    p, held = twin.pools[pool], twin.leases_of(pool)
    return {
        "name": twin.pool_names[pool].decode(),
        "epoch": p.epoch,
        "capacity_tokens": p.capacity_blocks * p.block_size,
        "block_size_tokens": p.block_size,
        "promised_tokens": twin.promised(pool) * p.block_size,
        "posted_tokens": sum(r.posted_blocks for r in held) * p.block_size,
        "live_leases": len(held),
        "running_sequences": sum(r.sequences for r in held),
        "suspect_leases": sum(r.state == SUSPECT for r in held),
        "queued": len(twin.queued(lambda r: names(r.target, pool))),
        "overdrawn": twin.load(pool) > twin.allowance(pool),
        "attached": True,
        "detached_ms": 0,
        "owned_ms": 0,
        "said_goodbye": False,
        "draining": pool not in twin.serving(),
        "named_only": False,  # each of its pools is configured
        "max_running": p.max_running,
        "saturated": p.saturated,
        "headroom_tokens": p.headroom_blocks * p.block_size,
        "kept_tokens": twin.kept_tokens(pool, now_ns),
        "load_tokens": twin.load(pool),
        "engine_capacity_tokens": p.engine_tokens,
        "round_tokens": twin.round_tokens(pool, now_ns),
        "round_max_tokens": p.round_max_tokens,
        "active_adapters": len(twin.active_adapters(pool)),
        "max_loras": p.limits.get("max_loras", 0),
        "adapter_tokens": twin.adapter_tokens(pool),
        "prefix_blocks": len(p.blocks),
        "prefix_tokens": sum(p.blocks.values()),
        "prefix_asked_tokens": p.asked_tokens,
        "prefix_matched_tokens": p.matched_tokens,
        # It has no sessions of agents: `session_histories.py` models these.
        **dict.fromkeys(("sessions_active", "sessions_tokens", "sessions_waiting"), 0),
        "sessions_max_tokens": p.limits.get("sessions_max_tokens", 0),
        "fill_ppm": (twin.promised(pool) * p.block_size + p.beyond_tokens)
        * 10**6
        // (p.capacity_blocks * p.block_size),
        "drain_tokens_per_minute": p.drain.pace() * 60 // 1000,
        "output_above_limit_tokens": p.output_above_limit,
    }


def _entitled_ppm(twin: Twin, flow: int) -> int:
    recent = twin.recent_flows()
    if flow not in recent:
        return 0
    weights = sum(twin.flows[i].weight_milli for i in recent)
    return 1_000_000 * twin.flows[flow].weight_milli // weights


def _flow(twin: Twin, now_ns: int, flow: int) -> dict[str, Any]:
    f = twin.flows[flow]
    queued = twin.queued(lambda r: r.flow == flow)
    live = twin.leases(lambda r: r.flow == flow)
    asked = Asked(flow, b"", len(live), len(twin.leases()))
    sizes = [(r, twin.pools[r.pool].block_size) for r in live]
    return {
        "tenant": twin.flow_names[flow].decode(),
        "request_class": _class(twin, flow),
        "weight_milli": f.weight_milli,
        "entitled_ppm": _entitled_ppm(twin, flow),
        "vtc_micro": f.vtc,
        "queued": len(queued),
        "queued_input_tokens": sum(r.prompt_tokens for r in queued),
        "live_leases": len(live),
        "promised_tokens": sum(r.reserved_blocks * size for r, size in sizes),
        "posted_tokens": sum(r.posted_blocks * size for r, size in sizes),
        "input_tokens": f.input_tokens,
        "cached_input_tokens": f.cached_input_tokens,
        "output_tokens": f.output_tokens,
        "kv_token_steps": f.kv_token_steps,
        "received": f.received,
        "granted": f.granted,
        "completed": f.completed,
        "cancelled": f.cancelled,
        "expired": f.expired,
        "oldest_queued_ms": (now_ns - min((r.arrival_ns for r in queued), default=now_ns)) // 10**6,
        "longest_wait_ms": twin.limits["queue_ttl_ns"] // 10**6,
        "refusals": dict(f.refusals),
        "quotas": twin.quotas.rows(flow, now_ns),
        **dict.fromkeys(("sessions", "sessions_sharing", "held_by_session_cap"), 0),
        "waits_for_quota": flow in twin.quotas.waits,
        **twin.quotas.shares.row(flow, now_ns),
        "audit": flow in twin.audit.flows,
        "audited_refusals": dict(twin.audit.refusals.get(flow, {})),
        "audited_waits": twin.audit.waits[flow],
        "predicted_p50_tokens": twin.predictor.median(asked) or 0,
        "predicted_quantile_tokens": twin.predictor.quantile(asked) or 0,
        "predictor_level_ppm": _level(twin, twin.predictor.flows.get(flow)),
    }


def _shared(twin: Twin) -> list[int]:
    """Yield nodes of groups and models with limits, and the root while any tenant has a share."""
    quotas, shares = twin.quotas, twin.quotas.shares
    shares.know()
    nodes = [*quotas.names.values(), *([shares.root] if shares.root != -1 else [])]
    return [
        node
        for node in sorted(nodes)
        if quotas.nodes[node].buckets
        or quotas.nodes[node].concurrency
        or shares.has(node)
        or (node == shares.root and shares.items[node].unused.rate)
    ]


def _quota(twin: Twin, now_ns: int, node: int) -> dict[str, Any]:
    quotas, shares, pools = twin.quotas, twin.quotas.shares, twin.pool_names
    names = {n: name.decode() for name, n in quotas.names.items()}
    held = {hold.request.flow for hold in shares.holds.values()}
    waits = [wait.node for wait in quotas.waits.values()]
    if twin.queued():
        waits += [
            quotas.models.get(pools[i]) for i, p in enumerate(twin.pools) if p.reason == "QUOTA"
        ]
    return {
        "name": names.get(node, ""),
        "parent": names.get(quotas.nodes[node].parent, ""),
        "limits": quotas.limits_of([node], now_ns),
        "open_requests": quotas.live(node),
        "waiting": waits.count(node),
        **shares.figures(node, now_ns),
        "held_flows": sum(node in shares.above(shares.share_of(flow)) for flow in held),
    }


def _level(twin: Twin, lengths: Lengths | None) -> int:
    """The quantile that promises are, once there is evidence enough."""
    known = lengths is not None and lengths.samples >= twin.predictor.enough
    return lengths.level if lengths and known else 0


def _totals(twin: Twin) -> dict[str, Any]:
    heads = [r for i in range(len(twin.flows)) for r in twin.quotas.heads(i)]
    backlogged = [r for r in heads if twin.quotas.is_candidate(r)]
    counters = [
        [
            twin.positions.counter_at(r.flow, pool)
            for r in backlogged
            if twin.flows[r.flow].cls == cls and (pool == -1 or may_run(r.target, pool))
        ]
        for cls in twin.classes.order()
        for pool in (range(len(twin.pools)) if twin.positions.local else [-1])
    ]
    prices = twin.limits["input_price_micro"], twin.limits["output_price_micro"]
    batch = sum(p.capacity_blocks * p.block_size for p in twin.pools)
    each = prices[1] + twin.output_seen * twin.limits["kv_price_micro"]
    longest = max(twin.prompt_seen * prices[0], batch * each)
    weight = min((f.weight_milli for f in twin.flows), default=10**9)
    p = twin.predictor
    counted = ("received", "granted", "completed", "cancelled", "expired", "rejected", "evicted")
    counted += ("replays_refused", "reports_limited")
    return {name: twin.totals[name] for name in counted} | {
        "flows": len(twin.flows),
        "refusals": {},  # every request of the twin has a flow
        "queued": len(twin.queued()),
        "queued_input_tokens": sum(r.prompt_tokens for r in twin.queued()),
        "live_leases": len(twin.leases()),
        "promised_tokens": sum(
            twin.promised(i) * pool.block_size for i, pool in enumerate(twin.pools)
        ),
        "fairness_gap_micro": max((max(c) - min(c) for c in counters if c), default=0),
        "fairness_bound_micro": (
            2 * longest * 1000 // weight
            + (2 * twin.grain if twin.policy == "dlpm" else 0)
            + twin.credit
            + twin.lead_given
            if twin.positions.by_counter and twin.positions.lifted
            else 0
        ),
        "predictor_samples": p.overall.samples,
        "predictor_level_ppm": _level(twin, p.overall),
        "stored_answers": len(twin.answers),
    }
