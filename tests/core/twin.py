"""Runs a dumb twin of the core: lists, scans and sorts instead of heaps, chains and sums.

Written from `schedsvc/_core.pyi` and the algorithms it names, as a second implementation. It has
no sessions and no bytes, and does all that is due in one poll (`work_max` without end).
"""

from schedsvc import _core as core

from .twin_remote import RemoteService
from .twin_types import ENDED, LIVE, QUEUED, SUSPECT, Request, Target, TwinError, Verdict, target_of


class Twin(RemoteService):
    """Has the methods, arguments and results of the core's Scheduler; a handle is a seq."""

    def _target_of(self, pool: int, pools: tuple[int, ...]) -> Target:
        if not all(p == pools[0] or self.positions.counts(p, pools[0]) for p in pools):
            raise TwinError(3, "pools")
        return target_of(pool, pools)

    def admit(
        self,
        now_ns: int,
        flow: int,
        request_id: bytes,
        input_tokens: int,
        max_output_tokens: int,
        pool: int = -1,
        sequences: int = 1,
        queue_ttl_ns: int = 0,
        deadline_ns: int = 0,
        reports_progress: bool = False,
        principal: int = 0,
        tag: int = 0,
        n: int = 1,
        adapter: bytes = b"",
        told_output: int = 0,
        request_class: bytes = b"",
        prefix_block_hashes: tuple[int, ...] = (),
        input_estimated: bool = True,
        whole_answer: bool = False,
        pools: tuple[int, ...] = (),
    ) -> int:
        self.enter(now_ns)
        target = self._target_of(pool, pools)
        cls, base = self.classes.of(flow, request_class), flow
        flow, longest = self.classes.flow(base, cls), -(-input_tokens // (sequences // n))
        payload = (input_tokens, longest, max_output_tokens, sequences, n, target, adapter, cls)
        for known in self.known():
            if self.names_of(known) == (principal, base, request_id):
                if known.payload not in (None, payload):
                    raise TwinError(6, "request_id")
                if not known.told and known.state != ENDED:  # a restored lease has a holder again
                    known.told, known.tag = True, tag
                return self.keep_hashes(known, prefix_block_hashes)
        stated = [ns for ns in (queue_ttl_ns, deadline_ns) if ns]
        due_ns = now_ns + min(self.limits["queue_ttl_ns"], *stated, 1 << 62)
        r = Request(
            self.seq + 1,
            flow,
            request_id,
            payload,
            target,
            input_tokens,
            longest,
            max_output_tokens,
            sequences,
            n,
            principal,
            tag,
            reports_progress,
            now_ns,
            due_ns,
            adapter,
        )
        r.deadline_ns = now_ns + deadline_ns if deadline_ns else None
        r.told_output, r.stated_ns = told_output, due_ns if stated else None
        r.has_exact_input, r.whole_answer = not input_estimated, whole_answer
        self.flows[flow].received += 1
        self.totals["received"] += 1
        self.tenants.fade(flow)
        r.work = self.work_of(r)
        refused = self._reason_to_refuse(r) or self.quotas.refusal(r) or self._refused_early(r)
        if refused := self.audit.outcome(r, refused):
            return self._refuse(r, refused)
        self.seq += 1
        self.prompt_seen = max(self.prompt_seen, input_tokens)
        self.output_seen = max(self.output_seen, r.output_max_tokens)
        self._line_up(r)
        return self.keep_hashes(r, prefix_block_hashes)

    def _line_up(self, r: Request) -> None:
        self.lift(r.flow)
        self.positions.begin(r)
        before = self.order.join(r)
        if r.flow in self.quotas.refusing or r.flow in self.audit.flows:
            self.quotas.bill_chain(r)
        self.quotas.look(r.flow)
        self.order.note_displaced(before)
        self.positions.look()
        self.positions.bring_back(r.flow)

    def poll(self, now_ns: int) -> list[Verdict]:
        self.enter(now_ns)
        self.quotas.shares.run_dues()
        while due := [r for r in self.requests if r.due_ns <= now_ns]:
            self._time_out(min(due, key=lambda r: (r.due_ns, r.seq)))
        self.answers = [r for r in self.answers if r.due_ns > now_ns]
        self.sweep()
        self._dispatch()
        told, self.verdicts = self.verdicts, []
        return told

    def _time_out(self, r: Request) -> None:
        if r.state == QUEUED:
            self._evict_late(r)
        elif r.state == LIVE and self.limits["lease_grace_ns"]:
            r.state = SUSPECT
            r.due_ns += self.limits["lease_grace_ns"]
        else:
            self._end(r, core.EXPIRED)

    def next_due(self) -> int:
        """Return when something has to be done at the latest; -1: never."""
        dues = [r.due_ns for r in self.requests]
        dues += [due for due in (self.quotas.next_due(), *self.pool_due.values()) if due >= 0]
        dues += [self.restart.until_ns] if self.restart.until_ns else []
        return min(dues, default=-1)

    # The life of a lease.

    def progress(
        self,
        now_ns: int,
        lease_id: int,
        pool_epoch: int,
        input_tokens: int = -1,
        cached_input_tokens: int = -1,
        output_tokens: int = -1,
        principal: int = 0,
    ) -> int:
        self.enter(now_ns)
        r = self.find_lease(lease_id, principal)
        if r is None:
            return core.LEASE_UNKNOWN
        if r.state == ENDED:
            return core.LEASE_ENDED
        input_tokens, output_tokens = self.limited(r, input_tokens, output_tokens)
        self._account(
            r,
            input_tokens if input_tokens > (r.input_tokens or 0) else r.input_tokens,
            max(cached_input_tokens, r.cached_tokens),
            max(output_tokens, r.output_tokens),
        )
        self.recharge(
            r,
            max(r.prompt_tokens, r.input_tokens or 0),
            max(r.cached_tokens, r.matched_tokens),
            max(r.output_tokens, r.ahead_output * r.sequences),
        )
        self.quotas.report(r)
        if r.is_void or pool_epoch == r.epoch:
            r.state, r.due_ns = LIVE, now_ns + self.limits["lease_ttl_ns"]
        if r.is_void or pool_epoch != r.epoch:
            return core.LEASE_VOID
        self._grow(r)
        return core.LEASE_LIVE

    def _account(self, r: Request, inputs: int | None, cached: int, outputs: int) -> None:
        """Set new totals of a lease, and so of its flow. Only input that came can be cached."""
        f = self.flows[r.flow]
        f.input_tokens -= r.input_tokens or 0
        f.cached_input_tokens -= r.cached_tokens
        f.output_tokens -= r.output_tokens
        r.input_tokens = inputs
        r.cached_tokens = min(cached, r.prompt_tokens if inputs is None else inputs)
        r.output_tokens = outputs
        f.input_tokens += r.input_tokens or 0
        f.cached_input_tokens += r.cached_tokens
        f.output_tokens += r.output_tokens

    def post_input(self, r: Request) -> None:
        """Count the input of a lease whose caller will not report when it is in the cache."""
        if r.whole_answer or not r.reports_progress:
            full = self.blocks(r.pool, r.prompt_tokens * r.n, r.sequences)
            r.posted_blocks = min(r.reserved_blocks, full)

    def _grow(self, r: Request) -> None:
        each = -(-r.output_tokens // r.sequences)
        most = self.pools[r.pool].capacity_blocks  # however wrong a report is
        if each > r.predicted_output:
            self.predictor.judge(r.flow, r.adapter, r.evidence, False)
            r.evidence = 0
            more = min(self.predictor.beyond(self.asked(r), each), r.output_max_tokens)
            r.predicted_output = max(each, more)
            tokens = r.prompt_tokens * r.n + r.predicted_output * r.sequences
            need = self.blocks(r.pool, tokens, r.sequences)
            r.reserved_blocks = max(r.reserved_blocks, min(need, most))
        computed = r.prompt_tokens if r.output_tokens else r.input_tokens or 0
        held = computed * r.n + r.output_tokens
        if held:
            full = self.blocks(r.pool, held, r.sequences)
            r.posted_blocks = max(r.posted_blocks, min(full, most))
        r.reserved_blocks = max(r.reserved_blocks, r.posted_blocks)

    def complete(
        self,
        now_ns: int,
        lease_id: int,
        pool_epoch: int,
        outcome: int = core.COMPLETED,
        input_tokens: int = -1,
        cached_input_tokens: int = -1,
        output_tokens: int = -1,
        principal: int = 0,
    ) -> tuple[int, int, int, int, bool] | None:
        self.enter(now_ns)
        r = self.find_lease(lease_id, principal)
        if r is None:
            return None
        outcome = outcome or core.COMPLETED
        if outcome not in (core.COMPLETED, core.CANCELLED):
            raise TwinError(3, "outcome")
        repeated = r.state == ENDED
        if not repeated:
            input_tokens, output_tokens = self.limited(
                r, input_tokens, output_tokens, is_final=True
            )
            # The final totals are the truth, even if they are smaller.
            self._account(
                r,
                input_tokens if input_tokens >= 0 else r.input_tokens,
                cached_input_tokens if cached_input_tokens >= 0 else r.cached_tokens,
                output_tokens if output_tokens >= 0 else r.output_tokens,
            )
            if outcome == core.CANCELLED:
                self._estimate(r, is_final=output_tokens >= 0)
            self._end(r, outcome)
        return r.outcome, r.input_tokens or 0, r.cached_tokens, r.output_tokens, repeated

    def _estimate(self, r: Request, *, is_final: bool) -> None:
        """Take the core's word for what a lease that was given up has used unseen.

        The twin holds it to what the lease may have used.
        """
        _, inputs, _, outputs, _ = self.core_says
        if not (is_final or r.output_tokens) and r.whole_answer and r.payload is not None:
            assert 0 <= outputs <= r.output_max_tokens * r.sequences
            self._account(r, r.input_tokens, r.cached_tokens, outputs)
        if r.input_tokens is None and not r.output_tokens and r.payload is not None:
            assert 0 < inputs <= r.prompt_tokens
            self._account(r, inputs, r.cached_tokens, r.output_tokens)

    def _end(self, r: Request, outcome: int) -> None:
        f = self.flows[r.flow]
        if r.input_tokens is None:  # output means that all was computed, and so does an end
            self._account(r, r.prompt_tokens, r.cached_tokens, r.output_tokens)
        self.recharge(r, r.input_tokens or 0, r.cached_tokens, r.output_tokens)
        self.note_charge(r)
        self.quotas.correct(r, r.input_tokens or 0, r.output_tokens)
        self.quotas.close(r, True)
        if outcome == core.COMPLETED:
            each = -(-r.output_tokens // r.sequences)
            f.completed += 1
            average = f.average_milli
            f.average_milli = (4 * average + each * 1000) // 5 if average else each * 1000
            self.predictor.judge(r.flow, r.adapter, r.evidence, each <= r.promised_output)
            self.predictor.learn(r.flow, r.adapter, each)
            self.pools[r.pool].served += not r.is_void
        elif outcome == core.CANCELLED:
            f.cancelled += 1
        else:
            f.expired += 1
            self._tell_expiry(r)
        self.totals[
            {core.COMPLETED: "completed", core.CANCELLED: "cancelled"}.get(outcome, "expired")
        ] += 1
        r.state, r.outcome = ENDED, outcome
        r.reserved_blocks = r.posted_blocks = 0
        r.ended_ns, r.due_ns = self.now_ns, self.now_ns + self.limits["answer_ttl_ns"]
        self.requests.remove(r)
        self.answers.append(r)
        self.settle(r.flow)
        if len(self.answers) > self.limits["answers_max"]:
            self.answers.pop(0)

    def _tell_expiry(self, r: Request) -> None:
        if r.told:
            self.verdicts.append(
                Verdict(
                    r.seq,
                    r.tag,
                    core.EXPIRED,
                    r.lease_id,
                    r.pool,
                    r.epoch,
                    r.granted_tokens,
                    waited_ns=r.waited_ns,
                    flow=r.flow,
                    engine_priority=r.engine_priority,
                )
            )

    def cancel(self, now_ns: int, handle: int) -> bool:
        self.enter(now_ns)
        r = self.find(handle)
        if r is None or r.state == ENDED:
            return False
        if r.state == QUEUED:
            self._evict(r, core.EVICTED_CANCELLED)
            return True
        self._account(r, 0, 0, 0)
        self.quotas.close(r, False)
        self._end(r, core.CANCELLED)
        if r in self.answers:
            self.answers.remove(r)
        return True

    def replay(
        self,
        now_ns: int,
        flow: int,
        request_id: bytes,
        lease_id: int,
        pool: int,
        pool_epoch: int,
        reserved_tokens: int,
        prompt_tokens: int,
        max_output_tokens: int,
        input_tokens: int = 0,
        cached_input_tokens: int = 0,
        output_tokens: int = 0,
        sequences: int = 1,
        principal: int = 0,
        adapter: bytes = b"",
        request_class: bytes = b"",
        whole_answer: bool = False,
    ) -> int:
        self.enter(now_ns)
        cls = self.classes.replayed(flow, request_class)
        if is_new := self.find_lease(lease_id, principal) is None:
            if pool_epoch != self.pools[pool].epoch:
                return core.LEASE_VOID
            if now_ns >= self.pools[pool].replays_until_ns:
                self.totals["replays_refused"] += 1
                return core.LEASE_UNKNOWN
            names = principal, flow, request_id
            if self._is_taken(lease_id, names) or not self.has_room(adapter):
                return core.LEASE_UNKNOWN
            if self.is_full(flow := self.classes.flow(flow, cls)):
                return core.LEASE_UNKNOWN
            if flow not in self.audit.flows:
                least = min(self.limits["headroom_ppm"], self.limits["headroom_min_ppm"])
                if not self.pools[pool].holds_replay(reserved_tokens, sequences, least):
                    self.totals["replays_refused"] += 1
                    return core.LEASE_UNKNOWN
                tokens, count = self.pools[pool].replayed
                self.pools[pool].replayed = tokens + reserved_tokens, count + sequences
            self.seq += 1
            r = Request(
                self.seq, flow, request_id, None, pool, prompt_tokens, prompt_tokens,
                max_output_tokens, sequences, 1, principal, 0, True, now_ns, 0, adapter,
            )  # fmt: skip
            r.engine_priority = self.classes.priority(cls, False)
            r.told, r.state, r.lease_id = False, LIVE, lease_id
            r.pool, r.epoch, r.weight_milli = pool, pool_epoch, self.flows[flow].weight_milli
            r.promised_output = r.predicted_output = max_output_tokens
            r.reserved_blocks = -(-reserved_tokens // self.pools[pool].block_size)
            r.granted_tokens = r.reserved_blocks * self.pools[pool].block_size
            r.whole_answer = whole_answer
            r.discount_ppm = self.restart.discounts.pop(lease_id, 0)
            self.post_input(r)
            self.quotas.bill_chain(r, with_model=True)
            self.requests.append(r)
            self.flows[flow].received += 1
            self.flows[flow].granted += 1
            self.totals.update(received=1, granted=1)
            self.lease_next = max(self.lease_next, lease_id + 1)
        usage = (input_tokens, cached_input_tokens, output_tokens)
        state = self.progress(now_ns, lease_id, pool_epoch, *usage, principal)
        if is_new:
            self.restart.resume(r)
        return state

    def names_of(self, r: Request) -> tuple[int, int, bytes]:
        return r.principal, self.flows[r.flow].base, r.request_id

    def _is_taken(self, lease_id: int, names: tuple[int, int, bytes]) -> bool:
        return any(r.lease_id == lease_id or self.names_of(r) == names for r in self.known())

    def drain(self, now_ns: int) -> None:
        self.enter(now_ns)
        self.draining = True

    def evict_queued(self, now_ns: int) -> int:
        self.enter(now_ns)
        queued = self.queued()
        for r in queued:
            self._evict(r, core.EVICTED_DRAINING)
        return len(queued)
