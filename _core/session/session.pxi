# The server side of a Session stream as a state machine: bytes in, bytes out.
#
#   state      receives                          then
#   new        Hello, else INVALID_ARGUMENT       greeted
#   greeted    any event but Hello                greeted
#   any        close()                            closed: what is queued is withdrawn
#   claims     refuse() or supersede() of others  greeted, see contest.pxi
#   asked      any event                          the newcomers' claims are refused
#   asked      supersede()                        closed: another engine has its pool

cdef enum:
    ANSWERS_PER_MESSAGE = 4096  # answers of each kind


cdef tuple EVENT_NAMES = (
    "", "hello", "pool", "telemetry", "replay", "admit", "progress", "complete", "cancel",
    "goodbye", "beat",
)


@cython.final
cdef class Session(PoolOffers):
    cdef int uses_told  # the last notice about hashes of prompts
    cdef bint greeted, closed, welcome_due
    cdef bint is_superseded, is_freed
    cdef uint64_t seq
    cdef bytes message  # that is being applied; None: none
    cdef Cursor rest  # what of it is not applied yet
    cdef int events  # events of it that are applied
    cdef bint ends_leases  # it does
    cdef LateLease late  # the last one that was replayed in vain
    cdef bytes late_adapter

    def receive(self, int64_t now_ns, bytes data, int events_max=SESSION_EVENTS_MAX):
        cdef Cursor c = data_cursor(data)
        self._check_superseded()
        if self.closed:
            invalid("", "the stream is closed")
        if self.message is not None:
            raise ValueError("call receive_rest() until nothing is left of the message before")
        if self._untaken() > 2 * (self.core.settings.session_open_max + SESSION_EVENTS_MAX):
            raise CallerError(CODE_RESOURCE_EXHAUSTED, "", "too many answers wait to be read")
        enter(self.core, now_ns)
        self._check_message(c)
        if self.core.contests:
            self.answer()
        self.ends_leases = False
        self.message, self.rest, self.events = data, c, 0
        return self._apply_some(events_max)

    def receive_rest(self, int64_t now_ns, int events_max):
        self._check_superseded()
        if self.message is None:
            raise ValueError("nothing is left of a message")
        enter(self.core, now_ns)
        return self._apply_some(events_max)

    cdef bint _apply_some(self, int events_max) except -1:
        """Apply the next events of the message; return whether some may be left.
        O(events log n)."""
        cdef bint has_more = False
        try:
            has_more = self._apply_events(self.events + events_max)
        finally:  # also if the stream has to end
            if not has_more:
                # An answer acknowledges a message only once all of it is applied.
                self.message = None
                self.seq += 1
        if not has_more and self.ends_leases:
            if self.core.usage_rows.saved < self.core.usage_rows.count:
                self.unsaved.append((self.seq, self.core.usage_rows.count))
        return has_more

    cdef bint _apply_events(self, int end) except -1:
        cdef int64_t tag
        while True:
            tag = read_tag(&self.rest)
            if tag == 0:
                return False
            if tag != (2 << 3 | LENGTH):
                skip(&self.rest, tag)
                continue
            if self.events == SESSION_EVENTS_MAX:
                invalid("events", f"at most {SESSION_EVENTS_MAX:,} in a message")
            self.events += 1
            self._event(read_message(&self.rest))
            if self.events == end and end < SESSION_EVENTS_MAX:
                return True

    cdef int64_t _untaken(self) noexcept:
        return (
            self.outbox_count - self.outbox_taken + self.notice_count - self.notice_taken
            + len(self.faults) + len(self.contests)
        )

    cdef int _check_message(self, Cursor c) except -1:
        # Before anything is applied: the message is whole, and its seq is the next.
        cdef int64_t tag
        cdef uint64_t seq = 0
        while True:
            tag = read_tag(&c)
            if tag == 0:
                break
            if tag == 1 << 3 | VARINT:
                seq = read_varint(&c)
            else:
                skip(&c, tag)
        check_whole(&c, "SessionRequest")
        if seq != self.seq + 1:
            invalid("seq", f"must be {self.seq + 1}, not {seq}")
        return 0

    cdef int _event(self, Cursor c) except -1:
        cdef int64_t tag
        cdef int kind = 0
        cdef Cursor body
        while True:
            tag = read_tag(&c)
            if tag == 0:
                break
            if tag & 7 == LENGTH and tag >> 3 <= 10:
                if kind:  # no encoder writes two members of a oneof
                    c.bad = True
                body = read_message(&c)
                kind = <int>(tag >> 3)
            else:
                skip(&c, tag)
        if c.bad or kind == 0:
            self.fault(0, CODE_INVALID_ARGUMENT, "events", "an event is malformed or unknown")
            return 0
        if kind != 1 and not self.greeted:
            invalid("events", "the first event must be hello")
        # A stream begins with its Hello, its pools, its leases, and the ends of leases.
        if not self.has_replayed and kind not in (1, 2, 4, 7):
            self.replayed()
        try:
            self._apply(kind, body)
        except CallerError as e:
            field = e.field
            path = EVENT_NAMES[kind] + ("." if field else "") + field
            if kind == 1:
                raise CallerError(e.code, path, e.description) from None
            if kind == 5 and field != "tag":
                path = "admit.request" + path[5:]
            # An Admit or a Cancel has a tag, which the fault carries.
            self.fault(tag_of(body) if kind == 5 or kind == 8 else 0, e.code, path, e.description)
        return 0

    cdef int _apply(self, int kind, Cursor c) except -1:
        if kind == 1:
            return self._hello(c)
        if kind == 2:
            return self._register(c)
        if kind == 3:
            return self._telemetry(c)
        if kind == 4:
            return self._replay(c)
        if kind == 5:
            return self._admit(c)
        if kind == 6:
            return self._progress(c)
        if kind == 7:
            return self._complete(c)
        if kind == 8:
            return self._cancel(c)
        read_first(&c)  # these two hold nothing
        check_whole(&c, EVENT_NAMES[kind])
        return self._goodbye() if kind == 9 else self.wake()  # every answer acknowledges

    cdef int _goodbye(self) except -1:
        self.said_goodbye = True
        return self.wake()

    cdef int _hello(self, Cursor c) except -1:
        cdef Slice client
        cdef int64_t tag
        if self.greeted:
            invalid("", "was sent already")
        client.at, client.size = c.at, 0
        while True:
            tag = read_tag(&c)
            if tag == 0:
                break
            if tag == 1 << 3 | LENGTH:
                client = read_slice(&c)
            elif tag == 2 << 3 | VARINT:
                self.incarnation = read_varint(&c)
            elif tag == 3 << 3 | LENGTH:
                check_leadership(read_message(&c))
            else:
                skip(&c, tag)
        check_whole(&c, "hello")
        check_text("client_id", &client, 1, ID_BYTES_MAX)
        self.client_id = slice_bytes(&client)
        self.greeted = self.welcome_due = True
        return self.wake()

    cdef int _register(self, Cursor c) except -1:
        cdef Slice name
        cdef PoolFigures f
        cdef int64_t v[6]
        read_figures(&c, &name, v, 6)
        check_whole(&c, "pool")
        check_text("pool", &name, 1, ID_BYTES_MAX)
        key = slice_bytes(&name)
        if not self.core.principals.may_offer(self.principal, key):
            not_granted(self.core, self.principal, "pool", "pools")
        is_held = key in self.pools or key in self.claims
        if not is_held and self.held_pools() >= self.core.settings.session_pools_max:
            # Thousands of them in one message: an exception costs more than all else of an event.
            return self.fault(
                0, CODE_RESOURCE_EXHAUSTED, "pool.pool",
                f"a stream offers at most {self.core.settings.session_pools_max} pools",
            )
        f.epoch, f.capacity_tokens, f.block_size = v[0], v[1], v[2]
        f.max_running, f.max_model_tokens, f.principal = v[3], v[4], self.principal
        f.gates = v[5]
        check_range("gates", v[5], 0, 1 << 16)
        check_pool(key, &f)
        if self.core.settings.sign_of_life_ns and self.is_contested(key, &f):
            return self.claim(key, &f)
        if self.claims.pop(key, None) is not None:
            self.wake()  # a claim, for which it sends other figures now: its Welcome may be due
        return self.offer(key, &f)

    cdef int supersede(self) except -1:
        """End the stream, which gave no sign of life: another engine has its pool now."""
        self._leave()
        self.is_superseded = True
        return self.wake()

    cdef int _check_superseded(self) except -1:
        if self.is_superseded:
            raise CallerError(
                CODE_FAILED_PRECONDITION, "pool",
                "another engine took this stream's pool over, because the stream gave no sign of"
                f" life within {self.core.settings.sign_of_life_ns // NS_PER_MS} ms",
            )
        return 0

    cdef int _telemetry(self, Cursor c) except -1:
        cdef Slice name
        cdef int64_t v[6]
        read_figures(&c, &name, v, 6)
        check_whole(&c, "telemetry")
        pool = self.core.pool_names.get(slice_bytes(&name))
        if pool is None:
            return self.fault(0, CODE_NOT_FOUND, "telemetry.pool", "no pool of that name")
        if not may_report(self.core, pool, self.principal):
            raise CallerError(CODE_FAILED_PRECONDITION, "pool", "is offered by another caller")
        return take_telemetry(self.core, pool, v[0], v[1], v[2], v[3], v[4])

    cdef int _admit(self, Cursor c) except -1:
        cdef AdmitMessage message
        cdef Cursor body
        cdef Verdict v
        cdef uint64_t tag = 0
        cdef int64_t handle
        cdef int32_t i
        cdef int64_t field
        body.at = body.end = c.at
        body.bad = False
        while True:
            field = read_tag(&c)
            if field == 0:
                break
            if field == 1 << 3 | VARINT:
                tag = read_varint(&c)
            elif field == 2 << 3 | LENGTH:
                body = read_message(&c)
            else:
                skip(&c, field)
        check_whole(&c, "admit")
        if tag == 0:
            invalid("tag", "must not be 0")
        if self.core.tags.get(tag, <uint64_t>self.owner) != NONE:
            invalid("tag", f"{tag} is open already")
        parse_admit(&message, body)
        if self.open_count >= self.core.settings.session_open_max:
            self.core.received += 1
            message.flow = flow_of(self.core, &message.tenant, &message.key)
            message.target = target_of(self.core, &message.pool) if message.pools == 1 else NONE
            handle = -refuse(self.core, NONE, OUT_REJECTED_LIMIT, tag)
        else:
            handle = admit_message(self.core, &message, self.owner, self.principal, tag, 0)
        if handle < 0:
            fill_refusal(
                self.core, &v, message.flow, message.target, <int>-handle, tag, self.principal,
            )
            v.only_named = v.only_named and message.pools == 0
            v.tag = tag
            return self.push(&v)
        i = self.core.requests.lookup(handle)
        if self.core.requests.items[i].state != QUEUED:
            fill_grant(self.core, &v, i)
            v.tag = tag
            v.handle = 0  # a repeated telling: `close()` must not take the lease for unseen
            return self.push(&v)
        return 0

    cdef int _progress(self, Cursor c) except -1:
        cdef LeaseMessage m
        cdef int state
        read_lease(&c, &m, 3)
        check_whole(&c, "progress")
        state = progress_lease(self.core, m.lease_id, m.epoch, &m.usage, self.principal)
        if state != LS_LIVE:
            self.notice(m.lease_id, state)
        return 0

    cdef int _complete(self, Cursor c) except -1:
        cdef LeaseMessage m
        cdef int32_t i
        read_lease(&c, &m, 4)
        check_whole(&c, "complete")
        self.ends_leases = True
        self.wake()  # every answer acknowledges
        i = find_lease(self.core, m.lease_id, self.principal)
        if i == NONE and m.lease_id and m.lease_id == self.late.lease_id:
            keep_late_usage(self.core, &self.late, self.late_adapter, <int>m.outcome, &m.usage)
        if i == NONE:
            return self.notice(m.lease_id, LS_UNKNOWN)
        complete_lease(self.core, i, <int>m.outcome, &m.usage)
        return 0

    cdef int _cancel(self, Cursor c) except -1:
        cdef uint64_t tag = read_first(&c)
        cdef int32_t i
        check_whole(&c, "cancel")
        i = self.core.tags.get(tag, <uint64_t>self.owner)
        if i != NONE:
            cancel_request(self.core, i)
        return 0

    cdef int _replay(self, Cursor c) except -1:
        cdef Ask ask
        cdef Usage usage
        cdef int64_t lease_id, epoch, reserved
        cdef int state
        memset(&ask, 0, sizeof(Ask))
        ask.owner = self.owner
        ask.principal = self.principal
        self.wake()  # every answer acknowledges
        read_replay(self.core, &c, &ask, &usage, &lease_id, &epoch, &reserved)
        if ask.flow == NONE or ask.target == NONE:
            return self.notice(lease_id, LS_UNKNOWN)
        state = replay_lease(self.core, &ask, lease_id, epoch, reserved, &usage)
        if state == LS_LIVE:
            note_client_id(self.core, &ask, &ask.client_id)
        if state != LS_LIVE and note_late(self.core, &self.late, &ask, lease_id, &usage):
            self.late_adapter = slice_bytes(&ask.adapter)
        if state != LS_LIVE:
            self.notice(lease_id, state)
        return 0

    def take(self, int64_t now_ns):
        cdef Writer w = self.core.writer
        cdef size_t before
        cdef int32_t first = self.outbox_taken
        cdef int32_t last = min(self.outbox_count, first + ANSWERS_PER_MESSAGE)
        cdef int32_t first_notice = self.notice_taken
        cdef int32_t last_notice = min(self.notice_count, first_notice + ANSWERS_PER_MESSAGE)
        cdef int32_t i
        cdef int uses
        self._check_superseded()
        if self.closed or not self.is_ready:
            return None
        # A newcomer is not welcomed before it is known whether it may offer its pools.
        if self.welcome_due and self.claims and not self.contests:
            return None
        if self.core.usage_rows.is_kept:
            self._write_saved(w)
        self._write_contests(w)
        if self.welcome_due and self.claims:
            return w.take()
        uses = prefix_uses(self.core) if self.greeted else 0
        if uses != self.uses_told:
            self.uses_told = uses
            write_prefix_uses(self.core, w, uses)
        for tag, code, field, description in reversed(self.faults[:ANSWERS_PER_MESSAGE]):
            before = w.length()
            w.text(4, description)
            w.text(3, field)
            w.varint(2, code)
            w.varint(1, <int64_t><uint64_t>tag)
            w.close(5, before)
        if self.welcome_due:
            before = w.length()
            w.text(6, self.core.leadership)
            w.varint(5, 1)
            w.varint(4, self.core.settings.message_bytes_max)
            w.varint(3, self.core.settings.session_open_max)
            w.varint(2, self.core.settings.lease_ttl_ns // NS_PER_MS)
            w.fixed64(1, <uint64_t>self.core.incarnation)
            w.close(4, before)
        for i in range(last_notice - 1, first_notice - 1, -1):
            before = w.length()
            w.varint(2, self.notices[i].state)
            w.fixed64(1, <uint64_t>self.notices[i].lease_id)
            w.close(3, before)
        for i in range(last - 1, first - 1, -1):
            self._write_verdict(w, &self.outbox[i])
        w.varint(1, <int64_t>self.seq)
        del self.faults[:ANSWERS_PER_MESSAGE]
        self.welcome_due = False
        self.outbox_taken = last
        self.notice_taken = last_notice
        if last == self.outbox_count:
            self.outbox_count = self.outbox_taken = 0
        if last_notice == self.notice_count:
            self.notice_count = self.notice_taken = 0
        self.is_ready = self._untaken() > 0
        return w.take()

    cdef int _write_saved(self, Writer w) except -1:
        cdef size_t before = w.length()
        cdef uint64_t seq = self.seq
        cdef int k = 0
        for of_message, row in self.unsaved:
            if row > self.core.usage_rows.saved:
                seq = of_message - 1
                break
            k += 1
        del self.unsaved[:k]
        w.varint(1, <int64_t>seq)
        return w.close(8, before)

    cdef int _write_contests(self, Writer w) except -1:
        cdef size_t before
        for key in reversed(self.contests):
            before = w.length()
            w.text(2, self.contests[key])
            w.text(1, key)
            w.close(7, before)
        self.contests.clear()
        return 0

    cdef int _write_verdict(self, Writer w, Verdict* v) except -1:
        cdef size_t before = w.length(), inner = before
        cdef bytes name = b""
        if v.outcome == OUT_GRANTED:
            name = self.core.pool_list[v.pool]
        write_admit_response(
            w, v, name, self.core.settings.lease_ttl_ns // NS_PER_MS, self.core.quotas,
            told_quota(self.core, v),
        )
        w.close(2, inner)
        w.varint(1, <int64_t>v.tag)
        return w.close(2, before)

    def close(self, int64_t now_ns):
        if self.is_freed:
            return
        enter(self.core, now_ns)
        if not self.closed:
            self._leave()
        self.is_freed = True
        if self.is_listed:
            self.core.ready_slots.remove(self.owner)
        self.core.principals.count_session(self.principal, -1)
        self.core.sessions[self.owner] = None
        self.core.free_slots.append(self.owner)

    cdef int _leave(self) except -1:
        """Withdraw what is queued, and offer nothing any more. O(requests of it * log n)."""
        cdef int32_t i, after
        self.closed = True
        # Leases whose grant was never taken: no client runs them.
        for k in range(self.outbox_taken, self.outbox_count):
            if self.outbox[k].outcome == OUT_GRANTED:
                i = self.core.requests.lookup(self.outbox[k].handle)
                if i != NONE and self.core.requests.items[i].owner == self.owner:
                    cancel_request(self.core, i)
        i = self.first
        while i != NONE:
            after = self.core.requests.items[i].owner_next
            if self.core.requests.items[i].state == QUEUED:
                untag(self.core, i)
            self.unlink(i)
            self.core.requests.items[i].owner = NONE
            if self.core.requests.items[i].state == QUEUED:
                evict(self.core, i, OUT_EVICTED_CANCELLED)
            i = after
        for key in list(self.pools):
            self.detach(key, self.said_goodbye)
        self.claims.clear()
        return 0
