# Sessions of agents: the last level of the tree of shares, and what they hold of a pool's cache.
#
# A session is a conversation that a client names in its requests, of one tenant in one class. It
# has a counter of what it was served. The requests that one session has in one queue are a strand;
# the strand of the least counter gives the queue its head, see session_order.pxi. A tenant has at
# most SESSION_NODES sessions with a counter of their own; all further ones, and its requests
# without a session, share one counter: that of its rest.
#
# A session is active in a pool from its begin until SESSION_ACTIVE_NS after its last turn. Its
# footprint is the prompt and the output of that turn. A pool may cap the footprint of all its
# active sessions: then others wait, see session_cap.pxi.

cdef enum:
    SESSION_NODES = 1_024  # sessions of a tenant in a class that have their own counter
    AGENT_SESSIONS_MAX = 262_144  # sessions of all tenants; further ones have no footprint
    SESSION_LOOKS = 8  # idle sessions that one event tries to forget

cdef int64_t SESSION_ACTIVE_NS = 60_000_000_000

ctypedef struct AgentSession:
    uint64_t key_hi, key_lo  # keyed hash of its name; the number of its flow is in key_lo too
    int64_t vtc  # its counter, in the weighted micro-tokens of its flow
    int64_t footprint  # tokens of its last turn, or expected ones of the first
    int64_t turn_ns  # when its last turn ended; -1: it had none
    int32_t flow
    int32_t pool  # the pool in which it is active; -1: none
    int32_t share  # its flow's share in that pool
    int32_t open_requests  # in a queue or running
    int32_t first_strand
    int32_t first_hold
    int32_t next, prev  # among the active ones of its pool, in the order of their begins
    int32_t idle_next, idle_prev  # among the idle ones of its flow
    uint8_t has_node  # its counter is its own
    uint8_t is_idle
    uint8_t is_saved  # it has a row that outlives the process
    uint8_t retired  # it gave its place in its pool to another, and has requests open

# The requests of one session that wait for the cap of one pool.
ctypedef struct SessionHold:
    int32_t session  # -1: the record is free
    int32_t share  # its flow's share in that pool
    Chain requests
    int32_t next, prev  # among those of the share, in the order of arrival
    int32_t next_hold  # next hold of the same session

# The requests of one session in one queue, in the order of the queue.
ctypedef struct Strand:
    int32_t session, queue
    int32_t root  # root of their treap
    int32_t place  # in the line of the queue
    int32_t next_strand  # next strand of the same session

# The part of one pool that the sessions of one flow hold.
ctypedef struct SessionShare:
    int32_t flow, pool
    int64_t tokens  # tokens of the active sessions
    int32_t active
    int32_t first_hold, last_hold, held  # sessions that wait for the cap, in order of arrival

# The sessions of one flow.
ctypedef struct FlowSessions:
    int32_t rest  # the session for whatever has no node
    int32_t count, nodes  # without the rest
    int32_t first_idle, last_idle
    int64_t highest  # counter that one of them ever had
    int64_t level  # level from before a restart: a line begins with it


@cython.final
cdef class SessionLine:
    """Keeps the strands of one queue in the order of the counters of their sessions."""

    cdef Heap heap
    cdef int32_t* strands  # at each place; below -1: a free one, as in Family
    cdef int32_t count, size, first_free
    cdef int64_t level  # the highest value of its least key at a grant; it never falls

    def __cinit__(self):
        self.heap, self.first_free = Heap(), NONE

    def __dealloc__(self):
        free(self.strands)

    cdef int32_t add(self, int32_t strand) except -1:
        """Give a strand a place. O(1) amortised."""
        cdef int32_t place = self.first_free
        if place != NONE:
            self.first_free = -2 - self.strands[place]
        else:
            if self.count == self.size:
                self.size = larger(self.size, 0)
                self.strands = <int32_t*>extend(self.strands, self.size, sizeof(int32_t))
            place = self.count
            self.count += 1
        self.strands[place] = strand
        return place

    cdef void leave(self, int32_t place) noexcept:
        """Free the place of a strand. O(log n)."""
        self.heap.remove(place)
        self.strands[place] = -2 - self.first_free
        self.first_free = place


@cython.final
cdef class AgentSessions:
    """Holds the records; the caller links them."""

    cdef AgentSession* items
    cdef Strand* strands
    cdef SessionHold* holds
    cdef SessionShare* shares
    cdef FlowSessions* of_flows
    cdef int32_t used, size, first_free, count
    cdef int32_t strand_used, strand_size, first_free_strand
    cdef int32_t hold_used, hold_size, first_free_hold
    cdef int32_t share_used, share_size, first_free_share
    cdef int32_t flow_used, flow_size, first_free_flow
    cdef int32_t held  # requests that wait for a cap
    cdef int64_t unnamed  # requests whose session has no record, ever
    cdef Table index, share_index
    cdef list lines, free_lines  # SessionLine of queues by number; 0 stands for none
    cdef list cap_lines  # for each pool, the shares that wait for its cap
    cdef list begun  # sessions that became active while some of their requests waited for a cap
    cdef Heap dues  # sessions that cease to be active, by when
    cdef DirtyQueue changed  # sessions whose counters are to be saved
    cdef Heap turns  # pools in which a session begins at the latest, by when
    cdef Treaps treaps

    def __cinit__(self):
        self.index, self.share_index = Table(), Table()
        self.changed = DirtyQueue()
        self.lines, self.free_lines, self.cap_lines, self.begun = [None], [], [], []
        self.dues, self.turns, self.treaps = Heap(), Heap(), Treaps()
        self.first_free = self.first_free_strand = self.first_free_share = NONE
        self.first_free_flow = self.first_free_hold = NONE
        self.flow_used = 1  # a flow without sessions has the number 0

    def __dealloc__(self):
        free(self.items)
        free(self.strands)
        free(self.holds)
        free(self.shares)
        free(self.of_flows)

    cdef int32_t add(self, int32_t flow) except -1:
        """Make a new record. O(1) amortised."""
        cdef int32_t s = self.first_free
        if s != NONE:
            self.first_free = self.items[s].next
        else:
            if self.used == self.size:
                self.size = larger(self.size, 0)
                self.items = <AgentSession*>extend(self.items, self.size, sizeof(AgentSession))
            self.changed.reserve(self.used + 1)
            s = self.used
            self.used += 1
        memset(&self.items[s], 0, sizeof(AgentSession))
        self.items[s].flow, self.items[s].turn_ns = flow, NONE
        self.items[s].pool = self.items[s].share = NONE
        self.items[s].first_strand = self.items[s].first_hold = NONE
        self.count += 1
        return s

    cdef void release(self, int32_t s) noexcept:
        self.items[s].flow = NONE
        self.items[s].next = self.first_free
        self.first_free = s
        self.count -= 1

    cdef int32_t add_flow(self) except -1:
        """Make room for the sessions of a flow. O(1) amortised."""
        cdef int32_t n = self.first_free_flow
        if n != NONE:
            self.first_free_flow = self.of_flows[n].rest
        else:
            if self.flow_used >= self.flow_size:
                self.flow_size = larger(self.flow_size, self.flow_used)
                self.of_flows = <FlowSessions*>extend(
                    self.of_flows, self.flow_size, sizeof(FlowSessions)
                )
            n = self.flow_used
            self.flow_used += 1
        memset(&self.of_flows[n], 0, sizeof(FlowSessions))
        self.of_flows[n].rest = self.of_flows[n].first_idle = self.of_flows[n].last_idle = NONE
        return n

    cdef void release_flow(self, int32_t n) noexcept:
        self.of_flows[n].rest = self.first_free_flow
        self.first_free_flow = n

    cdef int32_t add_strand(self, int32_t s, int32_t q) except -1:
        """Make a strand of a session in a queue, without requests. O(1) amortised."""
        cdef int32_t t = self.first_free_strand
        if t != NONE:
            self.first_free_strand = self.strands[t].next_strand
        else:
            if self.strand_used == self.strand_size:
                self.strand_size = larger(self.strand_size, 0)
                self.strands = <Strand*>extend(self.strands, self.strand_size, sizeof(Strand))
            t = self.strand_used
            self.strand_used += 1
        self.strands[t].session, self.strands[t].queue, self.strands[t].root = s, q, NONE
        self.strands[t].next_strand = self.items[s].first_strand
        self.items[s].first_strand = t
        return t

    cdef void release_strand(self, int32_t t) noexcept:
        """Unlink an empty strand. O(targets of the session)."""
        cdef int32_t s = self.strands[t].session, before = self.items[s].first_strand
        if before == t:
            self.items[s].first_strand = self.strands[t].next_strand
        else:
            while self.strands[before].next_strand != t:
                before = self.strands[before].next_strand
            self.strands[before].next_strand = self.strands[t].next_strand
        self.strands[t].session = NONE
        self.strands[t].next_strand = self.first_free_strand
        self.first_free_strand = t

    cdef int32_t find_strand(self, int32_t s, int32_t q) noexcept:
        """Return the strand of a session in a queue; -1: none. O(targets of the session)."""
        cdef int32_t t = self.items[s].first_strand
        while t != NONE and self.strands[t].queue != q:
            t = self.strands[t].next_strand
        return t

    cdef int32_t add_hold(self, int32_t s, int32_t share) except -1:
        """Make a record of what waits of a session for the cap of a share's pool, without requests;
        it is the last one of the share. O(1) amortised."""
        cdef int32_t n = self.first_free_hold
        cdef SessionHold* hold
        cdef SessionShare* h = &self.shares[share]
        if n != NONE:
            self.first_free_hold = self.holds[n].next
        else:
            if self.hold_used == self.hold_size:
                self.hold_size = larger(self.hold_size, 0)
                self.holds = <SessionHold*>extend(
                    self.holds, self.hold_size, sizeof(SessionHold)
                )
            n = self.hold_used
            self.hold_used += 1
        hold = &self.holds[n]
        memset(hold, 0, sizeof(SessionHold))
        hold.session, hold.share = s, share
        hold.requests.head = hold.requests.tail = NONE
        hold.next, hold.prev = NONE, h.last_hold
        if h.last_hold == NONE:
            h.first_hold = n
        else:
            self.holds[h.last_hold].next = n
        h.last_hold = n
        h.held += 1
        hold.next_hold = self.items[s].first_hold
        self.items[s].first_hold = n
        return n

    cdef void release_hold(self, int32_t n) noexcept:
        """Unlink a hold without requests. O(pools for which the session waits)."""
        cdef SessionHold* hold = &self.holds[n]
        cdef SessionShare* h = &self.shares[hold.share]
        cdef int32_t before = self.items[hold.session].first_hold
        if before == n:
            self.items[hold.session].first_hold = hold.next_hold
        else:
            while self.holds[before].next_hold != n:
                before = self.holds[before].next_hold
            self.holds[before].next_hold = hold.next_hold
        if hold.prev == NONE:
            h.first_hold = hold.next
        else:
            self.holds[hold.prev].next = hold.next
        if hold.next == NONE:
            h.last_hold = hold.prev
        else:
            self.holds[hold.next].prev = hold.prev
        h.held -= 1
        hold.session, hold.next = NONE, self.first_free_hold
        self.first_free_hold = n

    cdef int32_t find_hold(self, int32_t s, int32_t pool) noexcept:
        """Return the hold of a session for the cap of a pool; -1: none. O(pools for which the
        session waits)."""
        cdef int32_t n = self.items[s].first_hold
        while n != NONE and self.shares[self.holds[n].share].pool != pool:
            n = self.holds[n].next_hold
        return n

    cdef int32_t share_of(self, int32_t flow, int32_t pool) except -1:
        """Return the record of a flow in a pool; make it if there is none. Expected O(1)."""
        cdef int32_t n = self.share_index.get(<uint64_t>flow, <uint64_t>pool)
        if n != NONE:
            return n
        n = self.first_free_share
        if n != NONE:
            self.first_free_share = self.shares[n].first_hold
        else:
            if self.share_used == self.share_size:
                self.share_size = larger(self.share_size, 0)
                self.shares = <SessionShare*>extend(
                    self.shares, self.share_size, sizeof(SessionShare)
                )
            n = self.share_used
            self.share_used += 1
        memset(&self.shares[n], 0, sizeof(SessionShare))
        self.shares[n].flow, self.shares[n].pool = flow, pool
        self.shares[n].first_hold = self.shares[n].last_hold = NONE
        self.share_index.put(<uint64_t>flow, <uint64_t>pool, n)
        return n

    cdef void drop_share(self, int32_t n) noexcept:
        """Let a record go if none of its sessions is active or waits. Expected O(1)."""
        cdef SessionShare* h = &self.shares[n]
        if h.active or h.held:
            return
        self.share_index.remove(<uint64_t>h.flow, <uint64_t>h.pool)
        h.flow = NONE
        h.first_hold = self.first_free_share
        self.first_free_share = n

    cdef inline SessionLine line(self, int32_t number):
        return <SessionLine>self.lines[number]

    cdef int drop_line(self, int32_t number) except -1:
        """Let the number of a line without strands be free. O(1)."""
        self.lines[number] = None
        self.free_lines.append(number)
        return 0

    cdef inline void make_idle(self, FlowSessions* of, int32_t s) noexcept:
        """Put a session among the idle ones of its flow, as the last. O(1)."""
        cdef AgentSession* a = &self.items[s]
        a.is_idle = True
        a.idle_prev, a.idle_next = of.last_idle, NONE
        if of.last_idle == NONE:
            of.first_idle = s
        else:
            self.items[of.last_idle].idle_next = s
        of.last_idle = s

    cdef inline void leave_idle(self, FlowSessions* of, int32_t s) noexcept:
        cdef AgentSession* a = &self.items[s]
        a.is_idle = False
        if a.idle_prev == NONE:
            of.first_idle = a.idle_next
        else:
            self.items[a.idle_prev].idle_next = a.idle_next
        if a.idle_next == NONE:
            of.last_idle = a.idle_prev
        else:
            self.items[a.idle_next].idle_prev = a.idle_prev
