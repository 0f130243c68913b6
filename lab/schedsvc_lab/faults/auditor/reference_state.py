"""Reads the messages of streams and calls as the auditor, and enters them into the books."""

from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.auditor.checks import compare, end_round, may_be_unread, pushed_out
from schedsvc_lab.faults.auditor.contests import Claim, Contests
from schedsvc_lab.faults.auditor.dues import Dues
from schedsvc_lab.faults.auditor.figures import are_wrong, totals_of
from schedsvc_lab.faults.auditor.implied_state import UNKNOWN_FLOW
from schedsvc_lab.faults.auditor.ledger import Books
from schedsvc_lab.faults.auditor.records import (
    CANCELLED,
    COMPLETED,
    ENDED,
    EVICTED_CANCELLED,
    EVICTED_DEADLINE,
    EVICTED_TOO_LARGE,
    EVICTED_TTL,
    GRANTED,
    ID_BYTES_MAX,
    LIVE,
    NAME_BYTES_MAX,
    NO_PRINCIPAL,
    REJECTED_DEADLINE,
    REJECTED_FIRST,
    REJECTED_LAST,
    REJECTED_NO_POOL,
    REJECTED_TOO_LARGE,
    UNKNOWN,
    VOID,
    Ask,
    Request,
    Stats,
    Terms,
    is_telemetry,
    require,
)
from schedsvc_lab.faults.auditor.resume import Known
from schedsvc_lab.faults.auditor.shares import Rows

_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000


class Auditor:
    """Sits at the scheduler's door, which every message passes.

    All times are the scheduler's own clock. Each method raises ViolationError if a promise of the
    contract is broken. O(1) amortised for each event; `snapshot()` is O(open requests and leases).
    """

    def __init__(self, terms: Terms) -> None:
        self.books = Books(terms)
        self.events = 0  # events of the contract, in both directions
        self._dues = Dues()
        self._stale: set[int] = set()  # leases that were reported with another epoch
        self._contests = Contests(terms.sign_of_life_ns)

    @property
    def is_asleep(self) -> bool:
        """Return whether nothing can be judged before the next process: see `Books.is_lost`."""
        return self.books.is_lost

    def restart(self, now_ns: int, known: Known | None = None, credit_ns: int = 0) -> None:
        """Begin another process: it knows what an earlier one saved, or nothing.

        `credit_ns`: the most that buckets are credited for the time away.
        """
        self.books.restart(now_ns)
        if known is not None:
            self.books.resume(now_ns, known, credit_ns)
        self._dues.restart()
        self._stale.clear()
        self._contests.restart()

    def known(self, now_ns: int) -> Known:
        """Return what would outlive the process: everything has just been saved. O(leases)."""
        return self.books.known(now_ns, is_behind=self.books.is_lost or bool(self.books.lagging))

    def forget(self, now_ns: int) -> None:
        """Hear that the scheduler, which is at rest, forgot what it had learned and counted."""
        self.books.meters.restart(now_ns)

    def reweigh(self, weights: dict[str, int]) -> None:
        """Hear that tenants have other weights from now on."""
        self.books.weights.update(weights)

    # An operator.

    def drain(self, pool: str, *, draining: bool) -> None:
        """Hear that a pool, or ("") everything, is drained, or serves again."""
        self.events += 1
        if pool and draining and pool not in self.books.pools:
            self.books.expect(pool)
        self.books.handles.drain(pool, draining=draining)

    def no_pool(self, pool: str, told: str) -> None:
        """Note that a pool could not be drained because the scheduler does not know it."""
        require(pool not in self.books.pools, "a pool could not be drained", pool, told)

    def revoke(self, lease_id: int) -> int:
        """Void a lease. Returns its expected state."""
        self.events += 1
        if self.books.is_lost:
            return UNKNOWN
        state = self.books.handles.revoke(self.books, lease_id)
        self._owe_void()
        return state

    def say_mode(self, tenant: str, *, dry_run: bool) -> None:
        """Hear that a tenant is in a dry run, or not any more."""
        self.events += 1
        self.books.handles.say(self.books, tenant, dry_run=dry_run)

    # Streams.

    def request(self, now_ns: int, conn: int, principal: int, data: bytes) -> None:
        """Read a stream's message, before the scheduler reads it."""
        if self.books.is_lost:
            return
        self._dues.blame(*self._contests.heard(self.books, conn))
        for event in pb.SessionRequest.FromString(data).events:
            self.events += 1
            kind = event.WhichOneof("event")
            if kind == "admit":
                wrong = not self._admit(now_ns, conn, principal, event.admit)
            elif kind == "progress":
                wrong = not self._progress(now_ns, conn, principal, event.progress)
            elif kind == "complete":
                wrong = not self._complete(now_ns, conn, principal, event.complete)
            elif kind == "cancel":
                r = self.books.tags.get((conn, event.cancel.tag))
                wrong = False
                if r is not None:
                    self.books.withdraw(r)
            elif kind == "replay":
                wrong = not self._replay(now_ns, conn, principal, event.replay)
            elif kind == "pool":
                wrong = not self._register(now_ns, conn, principal, event.pool)
            elif kind == "telemetry":
                wrong = self._telemetry_is_wrong(principal, event.telemetry)
            elif kind == "goodbye":
                self.books.said_goodbye.add(conn)
                wrong = False
            elif kind == "hello":
                wrong = self._contests.greet(conn, principal, event.hello)
            else:
                wrong = kind is None
            if wrong:
                self._dues.blame(conn)

    def due(self, now_ns: int) -> list[int]:
        """Record a poll of the scheduler; return the streams that it ends."""
        if self.books.is_lost:
            return []
        self.books.begin_round(now_ns)
        superseded, refused = self._contests.due(self.books, now_ns)
        for conn in superseded:
            self._dues.forget(conn)
        self._dues.blame(*refused)
        self._owe_void()
        return superseded

    def _register(self, now_ns: int, conn: int, principal: int, p: Any) -> bool:
        claim = Claim(
            conn, principal, p.pool, p.epoch, p.capacity_tokens, p.block_size_tokens,
            p.max_running, p.max_model_tokens,
        )  # fmt: skip
        taken = self._contests.register(self.books, now_ns, claim)
        self._owe_void()
        return taken

    def _owe_void(self) -> None:
        for lease in self.books.voided:
            if lease.request.conn > 0:
                self._dues.owe(lease.request.conn, lease.lease_id, VOID)
        self.books.voided.clear()

    def _admit(self, now_ns: int, conn: int, principal: int, admit: Any) -> bool:
        tag = admit.tag
        if tag == 0 or (conn, tag) in self.books.tags:
            return False
        r = self._ask(now_ns, conn, principal, tag, admit.request, 0)
        if r is None:
            return False
        self.books.tags[conn, tag] = r
        return True

    def _ask(
        self, now_ns: int, conn: int, principal: int, tag: int, request: Any, ttl_ns: int
    ) -> Request | None:
        """Enter a request; None: it breaks a limit of the contract, or contradicts another."""
        # Each field is read once: to read one costs more than most checks of it.
        tenant, request_id, n = request.tenant, request.request_id, request.n
        prompts, output = tuple(request.input_tokens), request.max_output_tokens
        queue_ttl_ms, deadline_ms = request.queue_ttl_ms, request.deadline_ms
        if (
            not 1 <= len(request_id.encode()) <= ID_BYTES_MAX
            or len(tenant.encode()) > NAME_BYTES_MAX
            or queue_ttl_ms < 0
            or deadline_ms < 0
            or are_wrong(prompts, n, output)
            or not self.books.shares.may_name(principal, tenant)
        ):
            return None
        n = n or 1
        ask = Ask(
            tenant, request_id, tuple(sorted(request.pools)), prompts, n, output, request.adapter,
            self.books.class_of(tenant, request.request_class), request.session,
        )  # fmt: skip
        if queue_ttl_ms or deadline_ms:
            waits = [w * _NS_PER_MS for w in (queue_ttl_ms, deadline_ms) if w]
            ttl_ns = min(*waits, ttl_ns or waits[0])
        r = self.books.admit(now_ns, principal, conn, tag, ask, ttl_ns, request.reports_progress)
        if r is not None and r.seq == self.books.seq:  # else it repeats an earlier one
            r.has_deadline = deadline_ms > 0
            r.is_due_by_deadline = 0 < deadline_ms * _NS_PER_MS <= r.due_ns - now_ns
            r.has_exact_input = request.HasField("input_estimated") > request.input_estimated
        return r

    def _progress(self, now_ns: int, conn: int, principal: int, p: Any) -> bool:
        totals = totals_of(p)
        if totals is None:
            return False
        state = self._report(now_ns, p.lease_id, principal, p.pool_epoch, totals)
        if state != LIVE:
            self._dues.owe(conn, p.lease_id, state)
        return True

    def _report(
        self, now_ns: int, lease_id: int, principal: int, epoch: int, totals: tuple[int, int, int]
    ) -> int:
        state = self.books.state(lease_id, principal, epoch)
        if state in (LIVE, VOID):
            if state == VOID:
                self._stale.add(lease_id)
            self.books.report(now_ns, self.books.live[lease_id], epoch, totals)
        return state

    def _complete(self, now_ns: int, conn: int, principal: int, c: Any) -> bool:
        totals = totals_of(c)
        if totals is None:
            return False
        state = self.books.state(c.lease_id, principal, c.pool_epoch)
        if state == UNKNOWN:
            self._dues.owe(conn, c.lease_id, UNKNOWN)
            return True
        if c.outcome not in (0, COMPLETED, CANCELLED):
            return False
        if state != ENDED:
            lease = self.books.live[c.lease_id]
            self.books.complete(now_ns, lease, c.outcome or COMPLETED, totals)
        return True

    def _replay(self, now_ns: int, conn: int, principal: int, p: Any) -> bool:
        books = self.books
        lease_id = p.lease_id
        totals = (p.input_tokens, p.cached_input_tokens, p.output_tokens)
        is_named = books.shares.may_name(principal, p.tenant)
        tenant, unknown_name = books.flow_names(p.tenant) if is_named else (UNKNOWN_FLOW, p.tenant)
        pool = books.pools.get(p.pool)
        state = books.state(lease_id, principal, p.pool_epoch)
        if pool is None or (unknown_name and not books.terms.shares_unknown):
            self._dues.owe(conn, lease_id, UNKNOWN)
            return True
        key = (tenant, unknown_name, p.request_id, principal)
        if state == UNKNOWN:
            if p.pool_epoch != pool.epoch:
                self._stale.add(lease_id)
                self._dues.owe(conn, lease_id, VOID)
                return True
            is_taken = lease_id in books.live or lease_id in books.ended or key in books.requests
            if (
                not books.accepts_replay(now_ns, principal, pool)
                or is_taken
                or books.lacks_replay(principal, pool, tenant, p)
            ):
                self._dues.owe(conn, lease_id, UNKNOWN)
                return True
            books.seq += 1
            cls = books.class_of(tenant, p.request_class)
            r = Request(
                None, key, books.flow_of(key[0], cls), principal, books.seq, now_ns, now_ns, conn,
                0, True, p.prompt_tokens, max(1, p.sequences), 1, p.max_output_tokens,
                p.adapter, cls, session=p.session,
            )  # fmt: skip
            books.restore(now_ns, r, lease_id, pool, p.reserved_tokens)
        elif state != ENDED:
            r = books.live[lease_id].request
            if r.conn != conn:
                books.hand_over(r, conn)
        answer = self._report(now_ns, lease_id, principal, p.pool_epoch, totals)
        if state == UNKNOWN:
            books.told_of(now_ns, books.live[lease_id])
        if answer != LIVE:
            self._dues.owe(conn, lease_id, answer)
        return True

    def _telemetry_is_wrong(self, principal: int, t: Any) -> bool:
        pool = self.books.pools.get(t.pool)
        if pool is None or not is_telemetry(t):
            return True
        if pool.principal == NO_PRINCIPAL:
            return not self.books.shares.may_offer(principal, t.pool)
        return pool.principal != principal

    def response(self, now_ns: int, conn: int, principal: int, message: Any) -> None:
        """Read what the scheduler says on a stream."""
        if self.books.is_lost:
            return
        for verdict in message.verdicts:
            self.events += 1
            r = self.books.tags.pop((conn, verdict.tag), None)
            require(r is not None, "a verdict for a tag that is not open", conn, verdict.tag)
            if r is not None:
                self.verdict(now_ns, r, verdict.response)
        for status in message.leases:
            self.events += 1
            self._notice(now_ns, conn, principal, status.lease_id, status.state)
        for fault in message.faults:
            self.events += 1
            require(self._dues.fault(conn), "a fault without a wrong event", fault)

    def _notice(self, now_ns: int, conn: int, principal: int, lease_id: int, state: int) -> None:
        lease = self.books.live.get(lease_id)
        if self._dues.notice((conn, lease_id, state)) or pushed_out(self.books, lease_id, state):
            return
        require(lease is not None, "a notice of a lease that is not live", lease_id, state)
        if lease is None:
            return
        require(lease.request.conn == conn, "a notice to a stream that does not hold the lease")
        if state == UNKNOWN and may_be_unread(self.books, now_ns, lease):
            self.books.is_lost = True  # the scheduler did not restore it
        elif state == ENDED:
            self.books.expire(now_ns, lease, late=conn in self.books.lagging)
        else:
            void = state == VOID and (lease.is_void or lease_id in self._stale)
            require(void, "a live lease was called otherwise", lease_id, state)

    def verdict(self, now_ns: int, r: Request, response: Any) -> None:
        """Take note of the answer to one request."""
        if self.books.is_lost:
            return
        outcome, books = response.outcome, self.books
        late = bool(books.lagging)  # it may have fallen some time ago
        asked_ns = r.asked_ns + response.queue_duration_us * _NS_PER_US
        if outcome == GRANTED:
            grant = response.grant
            ttl_ms = books.terms.lease_ttl_ns // _NS_PER_MS
            require(grant.ttl_ms == ttl_ms, "a grant gives a wrong TTL", grant.ttl_ms)
            if r.lease is not None:
                told = (grant.lease_id, grant.pool, grant.pool_epoch, grant.reserved_tokens)
                lease = r.lease
                known = (lease.lease_id, lease.pool.name, lease.epoch, lease.reserved_tokens)
                require(r.ask is None or told == known, "a repeat got another answer", told, known)
                return
            self._granted(now_ns, r, grant, books.granted_at(asked_ns), late=late)
            return
        refused = REJECTED_FIRST <= outcome <= REJECTED_LAST
        overdue = r.is_due_by_deadline and (late or now_ns >= r.due_ns)
        if not late and not refused:
            waited = now_ns - _NS_PER_US <= asked_ns <= now_ns
            require(waited, "a verdict gives a wrong wait", now_ns - r.asked_ns, *r.key)
        if outcome == EVICTED_TTL:
            require(late or now_ns >= r.due_ns, "evicted before its TTL", r.due_ns - now_ns)
            require(not r.is_due_by_deadline, "its deadline was over, not its TTL", *r.key)
        elif outcome == EVICTED_CANCELLED:
            require(r.withdrawn, "evicted as withdrawn, but not withdrawn", *r.key)
        elif outcome in (REJECTED_DEADLINE, EVICTED_DEADLINE):
            may = books.terms.early_refusal and (r.has_deadline or outcome == REJECTED_DEADLINE)
            may = may or (outcome == EVICTED_DEADLINE and overdue)
            require(may, "refused early, or for a deadline that it does not have", *r.key)
        elif outcome in (REJECTED_TOO_LARGE, EVICTED_TOO_LARGE, REJECTED_NO_POOL) and not late:
            pools = [p for p in books.pools.values() if r.ask and books.takes(p, r.target)]
            fits = any(p.can_hold(r) and (p.offers or outcome > REJECTED_LAST) for p in pools)
            require(not fits, "refused as too large, or without pool, but one could hold it")
        if not late:
            books.handles.check_refusal(books, r, outcome, overdue=overdue)
        books.refuse(r, "rejected" if refused else "evicted")

    def _granted(self, now_ns: int, r: Request, grant: Any, granted_ns: int, *, late: bool) -> None:
        books = self.books
        pool = books.pools.get(grant.pool)
        require(pool is not None, "a grant in a pool that was never offered", grant.pool)
        if pool is None or r.ask is None:
            return
        require(books.takes(pool, r.target, late=late), "a grant in another pool", *r.key)
        require(granted_ns < r.due_ns, "granted after its TTL", granted_ns - r.due_ns)
        if not late:
            require(bool(pool.offers), "a grant in a pool that no stream offers", pool.name)
            require(books.handles.serves(pool), "a grant in a pool that is drained", pool.name)
            require(grant.pool_epoch == pool.epoch, "a grant of an old epoch", grant.pool_epoch)
            require(granted_ns > now_ns - 2 * _NS_PER_US, "a grant gives a wrong wait", *r.key)
            granted_ns = now_ns
        blocks = grant.reserved_tokens // pool.block
        least = pool.need(r, 0)
        if r.key[0] in books.handles.audited:
            r.audited = books.handles.was_audited = True
            least = min(least, pool.capacity_blocks)
        fits = least <= blocks <= pool.need(r, r.max_output_tokens)
        require(late or fits, "a reservation does not suit its request", blocks, *r.key)
        lease = books.grant(granted_ns, r, grant.lease_id, pool, grant.reserved_tokens, late=late)
        if grant.pool_epoch != pool.epoch:  # its engine restarted before the grant was sent
            lease.epoch = grant.pool_epoch
            books.void(lease)
            self._owe_void()

    # Unary calls.

    def ask(self, now_ns: int, principal: int, request: Any, ttl_ns: int) -> Request | None:
        """Read an Admit call, before the scheduler does. None: it has to be refused as wrong."""
        self.events += 1
        self.books.begin_round(now_ns)
        return self._ask(now_ns, 0, principal, 0, request, ttl_ns)

    def withdraw(self, now_ns: int, r: Request) -> None:
        """Take note that the last call that waited for a request has left."""
        if self.books.is_lost:
            return
        self.books.withdraw(r)
        if r.lease is not None and not r.lease.outcome:
            self.books.take_back(now_ns, r.lease)

    def progress(
        self, now_ns: int, principal: int, lease_id: int, epoch: int, totals: tuple[int, int, int]
    ) -> int:
        """Take a Progress call. Returns the state that the answer has to have."""
        self.events += 1
        return self._report(now_ns, lease_id, principal, epoch, totals)

    def complete(
        self, now_ns: int, principal: int, lease_id: int, epoch: int, outcome: int,
        totals: tuple[int, int, int],
    ) -> tuple[int, int, int, int, bool] | None:  # fmt: skip
        """Take a Complete call. Returns the answer that it has to have; None: NOT_FOUND."""
        self.events += 1
        books = self.books
        state = books.state(lease_id, principal, epoch)
        if state == UNKNOWN:
            return None
        if state == ENDED:
            lease = books.ended[lease_id]
        else:
            lease = books.live[lease_id]
            books.complete(now_ns, lease, outcome, totals)
        return (lease.outcome, *lease.usage(), state == ENDED)

    def expired(self, now_ns: int, lease_id: int) -> None:
        """Hear from the scheduler that a lease of a unary call has expired."""
        if self.books.is_lost:
            return
        lease = self.books.live.get(lease_id)
        require(lease is not None, "a lease expired that is not live", lease_id)
        if lease is not None:
            require(lease.request.conn == 0, "an expiry was reported to another than its holder")
            self.books.expire(now_ns, lease)

    # The books as a whole.

    def stream_opened(self, conn: int, principal: int) -> None:
        """Hear that a stream has begun."""
        self.books.shares.opened(conn, principal)

    def stream_refused(self, principal: int) -> None:
        """Hear that a stream was refused, because too many are open."""
        self.books.shares.refused(principal)

    def unchanged(self, before: Rows, after: Rows, *, dispatched: bool = False) -> None:
        """Compare the figures before and after an event of the principal with grants."""
        if not self.books.is_lost:
            self.books.shares.unchanged(self.books, before, after, dispatched=dispatched)

    def stream_closed(self, now_ns: int, conn: int, evicted: int) -> None:
        """Close a stream; `evicted` are the requests that the scheduler withdrew with it."""
        self.books.shares.closed(conn)
        if self.books.is_lost:
            return
        self.books.close_stream(now_ns, conn, evicted)
        self._contests.closed(conn)
        self._dues.forget(conn)

    def settled(self, now_ns: int) -> None:
        """Close a round: the scheduler has done and sent all that was due."""
        if self.books.is_lost:
            return
        if not self.books.lagging:
            self._dues.settled(self._contests.waiting())
        for place in end_round(self.books, now_ns):
            self._dues.owe(*place)
        self._stale.clear()

    def snapshot(self, stats: Stats) -> None:
        """Compare the scheduler's own figures with the books. O(open requests and leases)."""
        if not (self.books.lagging or self.books.is_lost):
            compare(self.books, stats)


__all__ = ["Auditor", "Terms"]
