"""Keeps the auditor's books: what each event of the contract does to requests and pools."""

from typing import Any

from schedsvc_lab.faults.auditor.classes import ClassOrder
from schedsvc_lab.faults.auditor.fair import Fairness
from schedsvc_lab.faults.auditor.implied_state import ImpliedState
from schedsvc_lab.faults.auditor.operator_actions import OperatorActions
from schedsvc_lab.faults.auditor.quotas import Meters
from schedsvc_lab.faults.auditor.records import (
    CANCELLED,
    COMPLETED,
    DEFAULT_CLASS,
    ENDED,
    EXPIRED,
    LIVE,
    NO_PRINCIPAL,
    UNKNOWN,
    VOID,
    Ask,
    Lease,
    Pool,
    PriorityClass,
    Request,
    Stats,
    Terms,
    require,
)
from schedsvc_lab.faults.auditor.resume import ANY_TOKENS, Known, Owed
from schedsvc_lab.faults.auditor.shares import Shares

_NEVER = -1  # epoch of a pool that no shim has offered


class Books(ImpliedState):
    """Keeps a scheduler's state as messages imply it. Times are the scheduler's clock, in ns.

    `lagging` holds the streams that have verdicts which were not sent yet: while there are any, the
    books are behind, and nothing that needs them exact is checked. If such a verdict is never seen,
    its request is repeated, or its lease id is replayed meanwhile, the books are lost (`is_lost`)
    until the next process.
    """

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self.lease_ids: set[int] = set()  # ever granted, by any process
        self.fairness = Fairness(terms)
        classes = 1 if terms.classes is None else len(terms.classes.known)
        self.meters = Meters(terms.quotas, (terms.pools + 1 + terms.pool_sets) * classes)
        self.order = ClassOrder(terms)
        self.handles = OperatorActions()
        self.shares = Shares(terms)
        self.resumed = False  # the process was paused since the last round
        self.restart(0)

    def restart(self, now_ns: int) -> None:
        """Begin another process, which knows nothing."""
        self.forget_all()
        self.shares.restart()
        self.fairness.restart()
        self.order.restart()
        self.meters.restart(now_ns)
        self.handles.restart(frozenset(), closed=False)
        # The load of an earlier process in pools that no shim has offered yet; None: any load.
        self.awaited: dict[str, Owed] | None = {}
        self.resume_until_ns = 0

    def resume(self, now_ns: int, known: Known, credit_ns: int) -> None:
        """Go on where an earlier process was; buckets are credited for the time away."""
        self.resume_until_ns = now_ns + self.terms.lease_ttl_ns + self.terms.lease_grace_ns
        self.awaited = None if known.pools is None else dict(known.pools)
        self.meters.resume(known.levels, credit_ns)
        self.handles.restart(known.drained, closed=known.closed)
        for name in sorted(known.drained):
            self.expect(name)

    def end_resume(self, now_ns: int) -> None:
        """Expect no more leases of an earlier process, once they have had their time."""
        if self.resume_until_ns and now_ns >= self.resume_until_ns:
            self.resume_until_ns = 0
            for pool in self.pools.values():
                pool.owed_low = pool.owed_high = 0

    def expect(self, name: str) -> None:
        """Record a pool that is drained before any shim has offered it."""
        self.pools[name] = Pool(name, _NEVER, 1, 1, 0, 0, NO_PRINCIPAL, {}, {}, self.terms)

    def known(self, now_ns: int, *, is_behind: bool) -> Known:
        """Return what would outlive the process; `is_behind`: drains alone are known. O(leases)."""
        drained, closed = frozenset(self.handles.drained), self.handles.closed
        if is_behind:
            return Known(drained=drained, closed=closed)
        is_late = self.resume_until_ns != 0 and now_ns >= self.resume_until_ns
        pools = None if self.awaited is None else dict(self.awaited)
        if pools is not None:
            for pool in self.pools.values():
                if pool.epoch == _NEVER:
                    continue
                low = pool.low * pool.block + (0 if is_late else pool.owed_low)
                pools[pool.name] = Owed(pool.epoch, low, pool.high * pool.block + pool.owed_high)
        return Known(pools, self.meters.state(now_ns), drained, closed)

    def class_of(self, tenant: str, named: str) -> PriorityClass:
        """Return the class of a tenant's request."""
        classes = self.terms.classes
        return DEFAULT_CLASS if classes is None else classes.find(tenant, named)

    def flow_of(self, base: str, cls: PriorityClass) -> str:
        """Return the name of a tenant's flow in a class."""
        return base if self.terms.classes is None else f"{base}/{cls.name}"

    def flow_of_row(self, row: Stats) -> str:
        """Return the name of the flow that a row of Stats describes."""
        classes = self.terms.classes
        if classes is None:
            return str(row["tenant"])
        return self.flow_of(row["tenant"], classes.known[row["request_class"]])

    # Requests.

    def admit(
        self, now_ns: int, principal: int, conn: int, tag: int, ask: Ask, ttl_ns: int, reports: bool
    ) -> Request | None:
        """Take a request in, or find the one that it repeats; None: it contradicts that one."""
        base, unknown_name = self.flow_names(ask.tenant)
        known_flow = base == ask.tenant
        flow = self.flow_of(base, ask.request_class)
        hopeless = (not known_flow and not self.terms.shares_unknown) or (
            ask.pools != () and self.pools.keys().isdisjoint(ask.pools)
        )
        key = (base, unknown_name, ask.request_id, principal)
        r = None if hopeless else self.requests.get(key)
        if r is not None:
            # While its stream lags, it may already have a verdict.
            self.is_lost = self.is_lost or (r.queued and r.conn in self.lagging)
            if r.ask is not None and r.ask != ask:
                return None
            if r.queued and conn > 0 and r.conn == conn:
                return None
            if conn != r.conn and (r.lease is None or not r.lease.outcome):
                self._adopt(r, conn, tag)
            return r
        self.seq += 1
        self.counts["received"] += 1
        is_urgent = ttl_ns and self.terms.by_deadline
        ttl_ns = min(ttl_ns or self.terms.queue_ttl_ns, self.terms.queue_ttl_ns)
        r = Request(
            ask, key, flow, principal, self.seq, now_ns, now_ns + ttl_ns, conn, tag, reports,
            sum(ask.prompts), len(ask.prompts) * ask.n, ask.n, ask.max_output_tokens,
            ask.adapter, ask.request_class, session=ask.session,
            target=tuple(name for name in ask.pools if name in self.pools) or ask.pools,
        )  # fmt: skip
        r.place = (r.due_ns if is_urgent else ANY_TOKENS, r.seq)
        if not hopeless:
            self.requests[key] = r
            self.queues.setdefault((flow, r.target), {})[r.seq] = r
            self.queued += 1
            self.fairness.arrived(r)
        return r

    def hand_over(self, r: Request, conn: int) -> None:
        """Let another stream hold a lease: the stream that replayed it."""
        self._adopt(r, conn, 0)

    def _adopt(self, r: Request, conn: int, tag: int) -> None:
        """Move the request to its latest caller, which gets the verdict."""
        if r.queued and r.conn > 0:
            self.tags.pop((r.conn, r.tag), None)
        r.conn, r.tag = conn, tag
        if r.lease is not None:
            self._owned(r.lease)

    def _owned(self, lease: Lease) -> None:
        if lease.request.conn < 0:
            self.orphans[lease.lease_id] = lease
        else:
            self.orphans.pop(lease.lease_id, None)

    def unqueue(self, r: Request) -> None:
        """Take a request out of its queue, if it stands in one."""
        r.queued = False
        queue = self.queues.get((r.flow, r.target))
        if queue is not None and queue.pop(r.seq, None) is not None:
            self.queued -= 1
            self.fairness.left(r)

    def withdraw(self, r: Request) -> None:
        """Note that its caller withdraws it: it leaves its queue at once, answered or not."""
        r.withdrawn = True

    def refuse(self, r: Request, count: str) -> None:
        """Forget a request that was rejected or evicted: a repeat is a new try."""
        require(r.queued and r.lease is None, "a request got a second verdict", *r.key)
        if count != "rejected" and not r.withdrawn:
            self.dropped.append(r)
        self.unqueue(r)
        self.counts[count] += 1
        if self.requests.get(r.key) is r:
            del self.requests[r.key]

    # Leases.

    def grant(
        self, now_ns: int, r: Request, lease_id: int, pool: Pool, reserved_tokens: int, *,
        late: bool,
    ) -> Lease:  # fmt: skip
        """Turn a queued request into a lease; `late`: an earlier round did."""
        require(r.queued, "a request that does not wait was granted", *r.key)
        require(lease_id not in self.lease_ids, "a lease id was used again", lease_id)
        self.lease_ids.add(lease_id)
        self.unqueue(r)
        self.counts["granted"] += 1
        lease = self._open(now_ns, r, lease_id, pool, reserved_tokens)
        self.shares.note(lease)
        self.fairness.charge(lease, final=False)
        self.fairness.granted(lease)
        self.meters.grant(now_ns, lease, late=late)
        if not late:
            pool.granted = True
            self.fresh.append(r)
        return lease

    def _open(
        self, now_ns: int, r: Request, lease_id: int, pool: Pool, reserved_tokens: int
    ) -> Lease:
        weight = self.weights[r.key[0]]
        lease = Lease(lease_id, r, pool, pool.epoch, now_ns, weight, reserved_tokens, now_ns)
        lease.input_billed = r.prompt_tokens
        r.lease = lease
        self.live[lease_id] = lease
        pool.leases[lease_id] = lease
        blocks = -(-reserved_tokens // pool.block)
        self.hold(lease, blocks, blocks)
        self._owned(lease)
        return lease

    def accepts_replay(self, now_ns: int, principal: int, pool: Pool) -> bool:
        """Return whether the scheduler accepts a replay of an unknown lease; if not, count it."""
        holds = principal == pool.principal and now_ns < pool.replays_until_ns
        holds = holds and self.shares.may_offer(principal, pool.name)
        self.counts["replays_refused"] += not holds
        return holds

    def lacks_replay(self, principal: int, pool: Pool, tenant: str, replay: Any) -> bool:
        """Return whether a replay finds no place, or exceeds the possible grants; count it."""
        audited = tenant in self.handles.audited
        return self.shares.lacks_replay(self, principal, pool, replay, audited=audited)

    def restore(
        self, now_ns: int, r: Request, lease_id: int, pool: Pool, reserved_tokens: int
    ) -> None:
        """Take over a lease of an earlier process, as its holder reports it."""
        self.lease_ids.add(lease_id)
        self.counts["received"] += 1
        self.counts["granted"] += 1
        r.queued = False
        self.requests[r.key] = r
        lease = self._open(now_ns, r, lease_id, pool, reserved_tokens)
        self.fairness.charge(lease, final=False)
        self.meters.hold(lease)

    def told_of(self, now_ns: int, lease: Lease) -> None:
        """Let a lease take over its part of the earlier leases' holdings and charges."""
        if now_ns < self.resume_until_ns:
            pool = lease.pool
            pool.owed_low = max(0, pool.owed_low - lease.high * pool.block)
            pool.owed_high = max(0, pool.owed_high - lease.low * pool.block)

    def state(self, lease_id: int, principal: int, epoch: int) -> int:
        """Say what a report on this lease is answered."""
        lease = self.live.get(lease_id)
        if lease is not None and lease.request.principal == principal:
            return VOID if lease.is_void or epoch != lease.epoch else LIVE
        lease = self.ended.get(lease_id)
        if lease is not None and lease.request.principal == principal:
            return ENDED
        return UNKNOWN

    def report(self, now_ns: int, lease: Lease, epoch: int, totals: tuple[int, int, int]) -> None:
        """Take running totals: they only grow, and they renew. -1: absent."""
        input_tokens, cached, output_tokens = self._limited(lease, totals, is_final=False)
        usage = self._usage(lease)
        if input_tokens > max(0, lease.input_tokens):
            usage[0] += input_tokens - max(0, lease.input_tokens)
            lease.input_tokens = input_tokens
            lease.input_billed = max(lease.input_billed, input_tokens)
        known = lease.input_tokens if lease.input_tokens >= 0 else lease.request.prompt_tokens
        if cached > lease.cached_tokens:
            usage[1] += min(cached, known) - lease.cached_tokens
            lease.cached_tokens = min(cached, known)
        if output_tokens > lease.output_tokens:
            self.note_prefill(now_ns, lease)
            usage[2] += output_tokens - lease.output_tokens
            lease.output_tokens = output_tokens
        self.fairness.charge(lease, final=False)
        if lease.is_void:
            lease.renewed_ns = now_ns
        elif epoch == lease.epoch:
            lease.renewed_ns = now_ns
            self._grow(lease)

    def _limited(
        self, lease: Lease, totals: tuple[int, int, int], *, is_final: bool
    ) -> tuple[int, int, int]:
        """Return what a report may charge, and count reports that state more."""
        limited, above = lease.limited(totals, is_final=is_final)
        self.above_limit[lease.pool.name] += above
        self.counts["reports_limited"] += limited != totals and not lease.was_limited
        lease.was_limited = lease.was_limited or limited != totals
        return limited

    def _usage(self, lease: Lease) -> list[int]:
        return self.usage.setdefault(lease.request.flow, [0, 0, 0])

    def _grow(self, lease: Lease) -> None:
        """Raise the bounds of a lease that outlives its prediction; no message gives its size."""
        r, pool = lease.request, lease.pool
        input_tokens = r.prompt_tokens if lease.output_tokens else max(0, lease.input_tokens)
        held = input_tokens * r.n + lease.output_tokens
        most = min(pool.capacity_blocks, 1 << 30)
        low = max(lease.low, min(pool.blocks(held, r.sequences), most) if held else 0)
        each = -(-lease.output_tokens // r.sequences)
        # The least prediction for which this number of blocks is reserved.
        room = (-(-lease.reserved_tokens // pool.block) - r.sequences) * pool.block
        predicted = (room - r.prompt_tokens * r.n) // r.sequences + 1
        high = max(lease.high, low)
        if each > predicted:
            high = max(high, min(pool.need(r, max(each, r.max_output_tokens)), most))
        self.hold(lease, low, high)

    def complete(
        self, now_ns: int, lease: Lease, outcome: int, totals: tuple[int, int, int], *,
        has_run: bool = True,
    ) -> None:  # fmt: skip
        """End a lease as its holder says. Final totals are the truth."""
        input_tokens, cached, output_tokens = self._limited(lease, totals, is_final=True)
        usage = self._usage(lease)
        for at, value in enumerate(lease.usage()):
            usage[at] -= value
        if input_tokens >= 0:
            lease.input_tokens = input_tokens
        known = lease.input_tokens if lease.input_tokens >= 0 else lease.request.prompt_tokens
        lease.cached_tokens = min(cached if cached >= 0 else lease.cached_tokens, known)
        if output_tokens >= 0:
            lease.output_tokens = output_tokens
        for at, value in enumerate(lease.usage()):
            usage[at] += value
        self.end(now_ns, lease, outcome, has_run=has_run)

    def end(self, now_ns: int, lease: Lease, outcome: int, *, has_run: bool = True) -> None:
        """Close a lease's books, and keep its answer for a while."""
        lease.outcome = outcome
        if lease.input_tokens < 0:
            lease.input_tokens = lease.request.prompt_tokens
            if outcome == CANCELLED and lease.output_tokens == 0:
                self.charge_by_time(now_ns, lease)
            self._usage(lease)[0] += lease.input_tokens
        self.fairness.charge(lease, final=True)
        self.meters.end(now_ns, lease, has_run=has_run)
        self.release(lease)
        self.orphans.pop(lease.lease_id, None)
        del self.live[lease.lease_id]
        name = {COMPLETED: "completed", CANCELLED: "cancelled", EXPIRED: "expired"}[outcome]
        self.counts[name] += 1
        lease.forgotten_ns = now_ns + self.terms.answer_ttl_ns
        if outcome == EXPIRED:
            self.expired.append(lease)
        else:
            self.store(lease)

    def store_expired(self) -> None:
        """Store the answers of leases that expired in this round, in the order of their times.

        The streams report these ends one by one and in another order, and some ends have no reader.
        """
        self.expired.sort(key=lambda lease: (lease.renewed_ns, lease.request.seq))
        for lease in self.expired:
            self.store(lease)
        self.expired.clear()

    def store(self, lease: Lease) -> None:
        """Keep the answer of an ended lease, and forget the oldest one beyond the limits."""
        self.ended[lease.lease_id] = lease
        self.shares.answers += self.shares.is_limited(lease.request.principal)
        if self.shares.has_all_answers(lease):
            self.forget(lease)
        elif len(self.ended) > self.terms.answers_max:
            self.forget(next(iter(self.ended.values())))

    def forget(self, lease: Lease) -> None:
        """Forget the answer of an ended lease."""
        if self.ended.pop(lease.lease_id, None) is not None:
            self.shares.answers -= self.shares.is_limited(lease.request.principal)
            self.requests.pop(lease.request.key, None)

    def take_back(self, now_ns: int, lease: Lease) -> None:
        """Cancel a grant that its caller never saw: nothing was used, and a repeat is a new try."""
        self.complete(now_ns, lease, CANCELLED, (0, 0, 0), has_run=False)
        self.forget(lease)

    def expire(self, now_ns: int, lease: Lease, *, late: bool = False) -> None:
        """End a lease without a renewal: not before its time, nor more than one tick after."""
        due_ns = lease.renewed_ns + self.terms.lease_ttl_ns + self.terms.lease_grace_ns
        require(now_ns >= due_ns, "a lease was released before its TTL and grace", due_ns - now_ns)
        # The time of a grant that was reported late is known to the microsecond.
        in_time = late or self.resumed or now_ns <= due_ns + self.terms.tick_ns + 1_000
        require(in_time, "a lease outlived its TTL and grace", now_ns - due_ns)
        self.end(now_ns, lease, EXPIRED)

    # Pools and streams.

    def register(
        self, now_ns: int, conn: int, principal: int, name: str, epoch: int, capacity: int,
        block: int, max_running: int, max_model_tokens: int,
    ) -> bool:  # fmt: skip
        """Let a stream offer a pool, or give it new figures. False: it may not."""
        if not self.shares.may_register(self, now_ns, conn, principal, name):
            return False
        pool = self.pools.get(name)
        if pool is None or pool.epoch == _NEVER:
            pool = Pool(name, epoch, 1, 1, 0, 0, principal, {}, {}, self.terms)
            self.pools[name] = pool
            pool.replays_until_ns = now_ns + self.terms.lease_ttl_ns + self.terms.lease_grace_ns
            self._find_owed(now_ns, pool)
        else:
            if principal != pool.principal and (pool.offers or now_ns < pool.owned_until_ns):
                return False
            if epoch < pool.epoch and pool.epoch in pool.offers.values():
                return False
            if principal != pool.principal:
                pool.prefills.clear()
            if epoch != pool.epoch:
                self._void(pool)
                pool.owed_low, pool.owed_high, pool.debt, pool.replayed = 0, 0, (0, 0), (0, 0)
            elif pool.leases and block != pool.block:
                return False
        pool.epoch, pool.max_model_tokens, pool.principal = epoch, max_model_tokens, principal
        pool.size(capacity, block, max_running)
        pool.offers[conn] = epoch
        return True

    def _find_owed(self, now_ns: int, pool: Pool) -> None:
        """Hold what leases of an earlier process have in a pool that is offered again."""
        owed = Owed(pool.epoch, 0, ANY_TOKENS)
        if self.awaited is not None:
            owed = self.awaited.pop(pool.name, Owed(pool.epoch, 0, 0))
        if owed.epoch == pool.epoch and now_ns < self.resume_until_ns:
            pool.owed_low, pool.owed_high = pool.debt = owed.low, owed.high

    def _void(self, pool: Pool) -> None:
        for lease in list(pool.leases.values()):
            self.void(lease)

    def close_stream(self, now_ns: int, conn: int, evicted: int) -> None:
        """Close a stream: its queued requests are withdrawn, its leases continue.

        `evicted` is how many the core withdrew. Any other request in the books, on a stream that
        lagged, got a verdict that was not read.
        """
        open_requests = [r for r in self.requests.values() if r.conn == conn]
        waiting = [r for r in open_requests if r.queued]
        untold = len(waiting) - evicted
        require(untold >= 0, "more was withdrawn than waited on a stream", evicted, len(waiting))
        lagged = conn in self.lagging
        require(untold == 0 or lagged, "a stream left requests in the queue", untold)
        self.is_lost = self.is_lost or untold > 0
        for r in waiting:
            self.refuse(r, "evicted")
        for r in open_requests:
            r.conn = -1
            if r.lease is not None and not r.lease.outcome:
                self._owned(r.lease)
        for place in [place for place in self.tags if place[0] == conn]:
            # This request was refused at once (no other verdict was possible), but the verdict was
            # not read.
            self.is_lost = self.is_lost or self.tags[place].queued
            del self.tags[place]
        for pool in self.pools.values():
            if pool.offers.pop(conn, None) is not None and not pool.offers:
                life_ns = self.terms.lease_ttl_ns + self.terms.lease_grace_ns
                pool.owned_until_ns = now_ns + (0 if conn in self.said_goodbye else life_ns)
        self.said_goodbye.discard(conn)
        self.lagging.discard(conn)
