"""Checks that hold whenever the scheduler is at rest, and between its figures and the books."""

from collections.abc import Iterable

from schedsvc_lab.faults.auditor.ledger import Books
from schedsvc_lab.faults.auditor.peak import greatest_load, least_load
from schedsvc_lab.faults.auditor.records import (
    ENDED,
    UNKNOWN,
    Lease,
    Pool,
    Request,
    Stats,
    require,
)

_ROUND_NS = 1_000_000_000
"""The engine has begun with a request when so much time has passed, whatever is reported."""


def end_round(books: Books, now_ns: int) -> list[tuple[int, int, int]]:
    """Close one round of events: order and capacity of its grants, and what has run out.

    Returns (stream, lease, state) of the notices that a lagging stream is still owed.
    """
    books.end_resume(now_ns)
    _let_orphans_expire(books, now_ns)
    if books.lagging:  # what was decided is not known, nor in which order
        books.meters.forget()
    books.order.settle(now_ns, books)
    if books.fresh:
        if not books.lagging:
            _check_order(books)
            _check_bypasses(books)
            books.fairness.check(books.live)
            for pool in books.pools.values():
                if pool.granted and _has_to_fit(books, pool):
                    _check_capacity(books, pool)
                    _check_limits(books, pool, now_ns)
        books.meters.settle(known=not books.lagging)
        for pool in books.pools.values():
            pool.granted = False
        books.fresh.clear()
    books.dropped.clear()
    books.handles.check_round(books)
    owed = _let_unread_expire(books, now_ns) if books.lagging else []
    books.store_expired()
    while books.ended:
        oldest = next(iter(books.ended.values()))
        if oldest.forgotten_ns > now_ns:
            break
        books.forget(oldest)
    books.last_ns = now_ns
    books.resumed = False
    return owed


def _has_to_fit(books: Books, pool: Pool) -> bool:
    """Return whether the last grant of a round has to fit: what is in audit need not. O(grants)."""
    if not books.handles.was_audited:
        return True
    if not books.terms.ids_tell_order:
        return False
    leases = [r.lease for r in books.fresh if r.lease and r.lease.pool is pool]
    last = max(leases, key=lambda lease: lease.lease_id, default=None)
    return last is not None and not last.request.audited


def _let_unread_expire(books: Books, now_ns: int) -> list[tuple[int, int, int]]:
    """End the leases whose holder does not read in time; the notice is sent later."""
    life_ns = books.terms.lease_ttl_ns + books.terms.lease_grace_ns
    owed = []
    for lease in list(books.live.values()):
        if lease.request.conn in books.lagging and now_ns >= lease.renewed_ns + life_ns:
            books.expire(now_ns, lease, late=True)
            owed.append((lease.request.conn, lease.lease_id, ENDED))
    return owed


def may_be_unread(books: Books, now_ns: int, lease: Lease) -> bool:
    """Whether a lease was replayed now under the id of a grant that was not sent yet. O(queued).

    Ids are consecutive: those between the greatest known id and that of such a grant belong to
    others, and there are no more of them than requests on streams that lag. If ids are drawn, no
    caller can guess one.
    """
    is_replayed = lease.request.ask is None and lease.granted_ns == now_ns
    if not (is_replayed and books.terms.ids_tell_order):
        return False
    waiting = (r for queue in books.queues.values() for r in queue.values())
    unread = sum(r.conn in books.lagging for r in waiting)
    return not books.lease_ids.isdisjoint(range(lease.lease_id - unread, lease.lease_id))


def pushed_out(books: Books, lease_id: int, state: int) -> bool:
    """Whether answers that are not in the books may have pushed a stored answer out.

    They are the ids of leases whose grants were never read. The books are lost then.
    """
    if state != UNKNOWN or not books.lagging or lease_id not in books.ended:
        return False
    books.is_lost = True
    return True


def _check_order(books: Books) -> None:
    """Inside a flow and a target the first to come is the first to go (invariant 10).

    With sessions that holds inside of each. In order of deadlines a request may wait for a cap
    behind earlier ones: its session has given its place to another since.
    """
    terms = books.terms
    waits_for_caps = terms.by_deadline and terms.limits.sessions_max_tokens > 0
    for r in books.fresh:
        queue = books.queues.get((r.flow, r.target))
        if queue and terms.has_sessions:
            queue = {
                seq: other
                for seq, other in queue.items()
                if other.session == r.session
                and (not waits_for_caps or other.place[1] < r.place[1])
            }
        if queue:
            first = books.first_of(queue)
            require(
                first.place > r.place, "granted before one that came earlier", *first.key, *r.key
            )


def _check_bypasses(books: Books) -> None:
    """Hold the bypasses of a request to `bypass_max` (invariant 9). O(queued) for each round.

    A request that was evicted in the round may have been next before any of its grants; no message
    reports that.
    """
    most = books.terms.bypass_max
    if most is None:
        return
    # Lease ids give the order of the grants: requests that were granted later still waited.
    granted = sorted(books.fresh, key=lambda r: r.lease.lease_id if r.lease else 0)
    still = [r for queue in books.queues.values() for r in queue.values()]
    first = min(still, key=lambda r: r.seq, default=None)
    if first is not None and not books.holds(first):  # it may be skipped
        first = min(filter(books.holds, still), key=lambda r: r.seq, default=None)
    dropped = min((r.seq for r in books.dropped), default=books.seq + 1)
    for at, r in enumerate(granted):
        head = min(granted[at + 1 :], key=lambda r: r.seq, default=first)
        if first is not None and head is not None and first.seq < head.seq:
            head = first
        if head is not None and head.seq < min(r.seq, dropped):
            head.bypassed += 1
            require(head.bypassed <= most, "bypassed too often", *head.key, head.bypassed, most)


def _check_capacity(books: Books, pool: Pool) -> None:
    """No grant is made while the ledger's test fails (invariant 1). O(leases of the pool)."""
    terms = books.terms
    headroom = pool.capacity_blocks * terms.headroom_ppm // 1_000_000
    is_alone = len(pool.leases) <= 1 and not pool.owed_low
    limit = (pool.capacity_blocks - (0 if is_alone else headroom)) * pool.block
    if terms.sum_form:
        load = pool.low * pool.block
    else:  # what had missed its TTL when the last round ended, was suspect in this one
        load = least_load(pool, books.last_ns - terms.lease_ttl_ns)
    load += pool.owed_low + pool.adapter_tokens()
    require(load <= limit, "granted above the capacity", pool.name, load, limit)
    if pool.max_running:
        running = sum(lease.request.sequences for lease in pool.leases.values())
        require(running <= pool.max_running, "granted above max_running", pool.name, running)


def _check_limits(books: Books, pool: Pool, now_ns: int) -> None:
    """No grant is made beyond what an operator allows a pool. O(leases of the pool)."""
    limits, leases = books.terms.limits, pool.leases.values()
    if not (limits.max_loras or limits.batch_max_tokens):
        return
    own = [r for r in books.fresh if r.lease and r.lease.pool is pool]
    fresh = {r.seq for r in own if not r.audited}
    if limits.max_loras:
        before = {lease.request.adapter for lease in leases if lease.request.seq not in fresh}
        active = pool.adapters()
        few = len(active) <= limits.max_loras or active <= before
        require(few, "granted above max_loras", pool.name, len(active))
    if limits.batch_max_tokens:
        round_ = [
            lease.request
            for lease in leases
            if lease.request.reports_progress and lease.request.ask is not None
            and lease.output_tokens == 0 and lease.input_tokens < lease.request.prompt_tokens
            and now_ns < lease.granted_ns + _ROUND_NS
        ]  # fmt: skip
        tokens = sum(r.prompt_tokens for r in round_)
        is_one = len(round_) <= 1 or not any(r.seq in fresh for r in round_)
        fits = is_one or tokens <= limits.batch_max_tokens
        require(fits, "granted above batch_max_tokens", pool.name, tokens)


def _let_orphans_expire(books: Books, now_ns: int) -> None:
    """End the expired leases that no stream listens for; no message reports them."""
    if books.orphans:
        life_ns = books.terms.lease_ttl_ns + books.terms.lease_grace_ns
        for lease in list(books.orphans.values()):
            if now_ns >= lease.renewed_ns + life_ns:
                books.expire(now_ns, lease)


def hold_usage(books: Books, flow: str, row: Stats) -> None:
    """Hold a flow's totals to those of the books, and learn what leases by time were charged."""
    told = [row["input_tokens"], row["cached_input_tokens"], row["output_tokens"]]
    used = books.usage.get(flow, [0, 0, 0])
    unsure = (*books.unsure.pop(flow, (0, 0)), 0)
    more = [now - then for now, then in zip(told, used, strict=True)]
    fits = all(0 <= each <= most for each, most in zip(more, unsure, strict=True))
    require(fits, f"the usage of {row['tenant']} is wrong", told, used, unsure)
    used[:] = told


def compare(books: Books, stats: Stats) -> None:
    """Hold the scheduler's figures to those of the books (invariants 1, 2, 6, 7, 8, 13)."""
    totals = stats["totals"]
    for name, count in books.counts.items():
        least = count - (books.replays_unsure if name == "replays_refused" else 0)
        fits = least <= totals[name] <= count
        require(fits, f"the count of {name} is wrong", totals[name], count)
    held = {"queued": books.queued, "live_leases": len(books.live)}
    held["stored_answers"] = len(books.ended)
    for name, count in held.items():
        require(totals[name] == count, f"the gauge {name} is wrong", totals[name], count)
    # Exempt requests have as many places of their own.
    bounded = books.handles.bounded(books)
    require(bounded <= 2 * books.terms.queue_max, "the queues are too long", bounded)
    books.handles.compare(stats)
    for row in stats["pools"]:
        only = row["name"] in books.closed
        require(row["named_only"] == only, f"{row['name']} takes other requests than it shows")
    books.shares.check(books)
    for row in stats["pools"]:
        if row["name"] in books.pools:
            _compare_pool(books, books.pools[row["name"]], row, stats)
    for row in stats["flows"]:
        flow = books.flow_of_row(row)
        hold_usage(books, flow, row)
        is_bounded = (
            row["audit"]
            or row["queued"] <= books.terms.flow_queue_max
            or row["queued"] <= books.handles.places(books, row["tenant"], flow)
        )
        require(is_bounded, f"the queue of {row['tenant']} is too long", row["queued"])


def _compare_pool(books: Books, pool: Pool, row: Stats, stats: Stats) -> None:
    live, promised = row["live_leases"], row["promised_tokens"]
    require(live == len(pool.leases), f"leases of {pool.name}", live, len(pool.leases))
    low, high = pool.low * pool.block, pool.high * pool.block
    require(low <= promised <= high, f"promised of {pool.name}", low, promised, high)
    above = (row["output_above_limit_tokens"], books.above_limit[pool.name])
    require(above[0] == above[1], f"output above the limit of {pool.name}", *above)
    attached = bool(pool.offers)
    require(row["attached"] == attached, f"{pool.name} is attached", row["attached"], attached)
    if row["queued"] and row["wait_reason"] == "NONE":
        waiting = {books.flow_of_row(f) for f in stats["flows"] if f["waits_for_quota"]}
        flows = {flow for (flow, target), q in books.queues.items() if q and target == (pool.name,)}
        require(flows <= waiting, f"{pool.name} waits for no reason", *(flows - waiting))
    if books.queued and books.terms.work_conserving and books.handles.serves(pool):
        _check_work(pool, list(_waiting(books, pool)), row["wait_reason"], books)


def _waiting(books: Books, pool: Pool) -> Iterable[Request]:
    for (_, target), queue in books.queues.items():
        if books.takes(pool, target):
            yield from queue.values()


def _check_work(pool: Pool, waiting: list[Request], reason: str, books: Books) -> None:
    """Check that no request waits while there is room for it (invariant 7)."""
    if not waiting or not all(pool.can_hold(r) for r in waiting):
        return  # the next request may be one that only another pool can hold
    require(
        len(pool.leases) > 0 or pool.owed_high > 0,
        "an idle engine while requests wait",
        pool.name,
        len(waiting),
    )
    if reason == "SESSION_CAP":
        capped = books.terms.limits.sessions_max_tokens > 0
        require(capped, f"{pool.name} holds sessions back without a cap", len(waiting))
        return
    headroom = pool.capacity_blocks * books.terms.headroom_most_ppm // 1_000_000
    load = pool.high
    if not books.terms.sum_form:
        load = -(-greatest_load(pool, books.last_ns - books.terms.lease_ttl_ns) // pool.block)
    room = pool.capacity_blocks - headroom - load - -(-pool.owed_high // pool.block)
    running = sum(lease.request.sequences for lease in pool.leases.values())
    fits = all(pool.need(r, r.max_output_tokens) <= room for r in waiting) and (
        not pool.max_running or all(running + r.sequences <= pool.max_running for r in waiting)
    )
    require(not fits, "requests wait for room that is there", pool.name, len(waiting), room)
