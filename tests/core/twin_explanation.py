"""Makes the rows of `Scheduler.explain()` for the twin's requests."""

from collections import Counter
from typing import Any

from schedsvc import _core as core

from .twin import Twin
from .twin_estimate import Turn
from .twin_types import ENDED, QUEUED, Request

SCAN_MAX = 32
MICRO = 10**6


def story(twin: Twin, now_ns: int, r: Request) -> dict[str, Any]:
    """Return the row of `Scheduler.explain()` for a request."""
    granted_ns = r.arrival_ns + r.waited_ns
    until_ns = now_ns if r.state == QUEUED else granted_ns
    since_ns = {QUEUED: r.arrival_ns, ENDED: r.ended_ns}.get(r.state, granted_ns)
    kind, kind_ns = twin.why.now.get(r.seq, ("QUEUE", r.arrival_ns))
    spent = Counter(twin.why.spent.get(r.seq, {}))
    if r.state == QUEUED and kind != twin.why.waits_for(r):
        spent[kind] += twin.now_ns - kind_ns
        kind, kind_ns = twin.why.waits_for(r), twin.now_ns
    if until_ns > r.arrival_ns:
        spent[kind] += until_ns - kind_ns
    pool = r.target if r.state == QUEUED else r.pool
    f = twin.flows[r.flow]
    found = {
        "tenant": twin.flow_names[r.flow].decode(),
        "request_class": twin.classes.items[f.cls].name.decode(),
        "state": r.state.upper(),
        "is_void": r.is_void,
        "outcome": {QUEUED: 0, ENDED: r.outcome}.get(r.state, core.GRANTED),
        "pool": twin.pool_names[pool].decode() if pool >= 0 else "",
        "state_ms": (now_ns - since_ns) // MICRO,
        "age_ms": (now_ns - r.arrival_ns) // MICRO,
        "prompt_tokens": r.prompt_tokens,
        "max_output_tokens": r.output_max_tokens,
        "sequences": r.sequences,
        "queue_duration_us": (until_ns - r.arrival_ns) // 1000,
        "waited": [
            {"reason": core.WAITS.index(name), "time_us": spent[name] // 1000}
            for name in sorted(spent, key=core.WAITS.index)
            if spent[name] > 0
        ],
        "session": None,  # the twin has none
        **_estimate(twin, now_ns, r),
    }
    if r.state == QUEUED:
        queue = twin.order.queue(r.flow, r.target)
        found["place"] = {
            "reason": core.WAITS.index(kind),
            "reason_ms": (now_ns - kind_ns) // MICRO,
            "queue_ahead": queue.index(r),
            "flows_ahead": _flows_ahead(twin, r),
            "work_ahead_tokens": _own_work(twin, r) + twin.work_before(r.flow, r.target),
            "evicted_in_ms": max(0, r.due_ns - now_ns) // MICRO,
        }
        pools = [p for p in range(len(twin.pools)) if r.target in (-1, p)]
        found["pools"] = [_pool(twin, r, p) for p in pools]
        found["limit"] = _limit(twin, now_ns, r, kind)
    return found


def refused_story(twin: Twin, now_ns: int, r: Request, outcome: int, at_ns: int) -> dict[str, Any]:
    """Return the row for one that was not served, without the reasons of its wait."""
    waited_ns = at_ns - r.arrival_ns
    return {
        "tenant": twin.flow_names[r.flow].decode(),
        "request_class": twin.classes.items[twin.flows[r.flow].cls].name.decode(),
        "state": "REFUSED",
        "outcome": outcome,
        "pool": twin.pool_names[r.target].decode() if r.target >= 0 else "",
        "state_ms": (now_ns - at_ns) // MICRO,
        "age_ms": (now_ns - r.arrival_ns) // MICRO,
        "prompt_tokens": r.prompt_tokens,
        "max_output_tokens": r.output_max_tokens,
        "sequences": r.sequences,
        "queue_duration_us": waited_ns // 1000,
        "wait_told_ms": -1,
        "ttft_told_ms": -1,
        "wait_left_ms": -1,
        "ttft_expected_ms": -1,
    }


def _own_work(twin: Twin, r: Request) -> int:
    """Work before it in its queue; in order of arrival, withdrawn requests still count."""
    queue = twin.order.queue(r.flow, r.target)
    if twin.order.by_deadline:
        return sum(q.work for q in queue[: queue.index(r)])
    return r.mark - queue[0].mark


def _flows_ahead(twin: Twin, r: Request) -> int:
    cls = twin.flows[r.flow].cls
    others = [q for target in {-1, r.target} for q in twin.heads(target) if q.flow != r.flow]
    mine = twin.rank(r, r.target)
    alike = [q for q in others if twin.flows[q.flow].cls == cls and twin.rank(q, r.target) < mine]
    return min(SCAN_MAX + 1, len(alike))


def _estimate(twin: Twin, now_ns: int, r: Request) -> dict[str, int]:
    f, left_ns, first_ns = twin.flows[r.flow], -1, -1
    pools = [p for i, p in enumerate(twin.pools) if r.target in (-1, i)]
    if r.state == QUEUED:
        left_ns = 0
        if twin.has_to_wait(r.target):
            turn = Turn(r.flow, r.target, r.work)
            left_ns = twin.wait_from(turn, _own_work(twin, r))
        chain = [] if r.seq in twin.quotas.bills else twin.quotas.chain_of(r.flow)
        dues = [twin.quotas.due_ns(node, r) - twin.now_ns for node in chain]
        left_ns = left_ns if left_ns < 0 else max([left_ns, *dues])
        if left_ns >= 0:
            serving = [twin.pools[p] for p in twin.serving(r.target)]
            prefill = min((twin.prefill_ns(p, twin.fresh(r)) for p in serving), default=0)
            first_ns = twin.now_ns - r.arrival_ns + left_ns + prefill
            left_ns = max(0, left_ns - (now_ns - twin.now_ns))
    elif not r.first_us and r.state != ENDED:
        first_ns = r.waited_ns + r.prefill_us * 1000
    error_ns = max(p.prefill_error_ns for p in pools)
    told = r.foretold_wait_us >= 0
    return {
        "wait_told_ms": r.foretold_wait_us // 1000 if told else -1,
        "ttft_told_ms": r.foretold_first_us // 1000 if told else -1,
        "wait_left_ms": left_ns // MICRO if left_ns >= 0 else -1,
        "wait_error_ms": f.wait_error_ns // MICRO,
        "ttft_expected_ms": first_ns // MICRO if first_ns >= 0 else -1,
        "ttft_error_ms": (f.wait_error_ns + error_ns) // MICRO,
        "ttft_ms": r.first_us // 1000,
    }


def _pool(twin: Twin, r: Request, pool: int) -> dict[str, Any]:
    p, (head, _) = twin.pools[pool], twin.head_for(pool)
    plan = twin.reservation(pool, r)
    reason = "MODEL_QUOTA" if p.reason == "QUOTA" else p.reason
    adapter = twin.adapter_tokens(pool, r.adapter) - twin.adapter_tokens(pool)
    lease = twin.figures(pool, r, plan.blocks, plan.output)
    row = {
        "pool": twin.pool_names[pool].decode(),
        "attached": True,
        "reason": 0 if reason == "NONE" else core.WAITS.index(reason),
        "is_next": head is r,
        "can_hold": twin.can_hold(pool, r),
        "need_tokens": plan.blocks * p.block_size + adapter,
        "load_tokens": twin.load(pool, lease, plan.blocks, r.adapter),
        "load_max_tokens": twin.limit(pool, plan.above),
    }
    if head and head is not r:
        its, mine = twin.flows[head.flow], twin.flows[r.flow]
        row["next_tenant"] = twin.flow_names[head.flow].decode()
        row["next_class"] = twin.classes.items[its.cls].name.decode()
        if its.cls == mine.cls and twin.policy not in ("fcfs", "sif"):
            counter_at = twin.positions.counter_at
            lead = counter_at(r.flow, pool) - counter_at(head.flow, pool)
            row["next_lead_tokens"] = abs(lead) // MICRO * (1 if lead > 0 else -1)
    return row


def _limit(twin: Twin, now_ns: int, r: Request, kind: str) -> dict[str, Any] | None:
    quotas = twin.quotas
    if kind == "SHARE" and quotas.shares.share_of(r.flow) != -1:
        return _held(twin, now_ns, r)
    if kind == "QUOTA":
        if r.flow in quotas.waits:
            node = quotas.waits[r.flow].node
        else:
            short = (n for n in quotas.chain_of(r.flow) if not quotas.fits(n, r))
            node = next(short, -1)
    elif kind == "MODEL_QUOTA":
        found = twin.why.by_pool(r)
        node = quotas.models.get(twin.pool_names[found[0]], -1) if found else -1
    else:
        return None
    return None if node == -1 else _quota(twin, now_ns, node, r)


def _quota(twin: Twin, now_ns: int, node: int, r: Request) -> dict[str, Any]:
    quotas, n = twin.quotas, twin.quotas.nodes[node]
    needs = quotas.needs(r)
    short = {which: b.due_ns(needs[which]) for which, b in n.buckets.items()}
    short = {which: due_ns for which, due_ns in short.items() if due_ns > now_ns}
    row: dict[str, Any] = {"quota": _name(twin, node), "behind_others": not short}
    if n.concurrency and quotas.live(node) >= n.concurrency:
        row |= {"kind": 7, "limit": n.concurrency, "needs": 1, "due_ms": -1}
        row["behind_others"] = False
    elif short:
        last = max(short, key=lambda which: (short[which], -which))
        row |= {
            "kind": 3 + last,
            "limit": n.buckets[last].rate,
            "remaining": max(0, n.buckets[last].level_at(now_ns) // MICRO),
            "needs": needs[last] // MICRO,
            "due_ms": -(-(short[last] - now_ns) // MICRO),
        }
    return row


def _held(twin: Twin, now_ns: int, r: Request) -> dict[str, Any]:
    shares = twin.quotas.shares
    node, due_ns = shares.share_of(r.flow), shares.holds[r.seq].due_ns
    n = shares.items[node]
    return {
        "quota": _name(twin, node),
        "limit": n.nominal,
        "remaining": max(0, n.unused.level_at(now_ns) // MICRO),
        "due_ms": -1 if due_ns is None else max(0, due_ns - now_ns) // MICRO,
    }


def _name(twin: Twin, node: int) -> str:
    names = {n: name for name, n in twin.quotas.names.items()}
    return names.get(node, b"").decode()
