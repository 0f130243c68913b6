# Which session of a tenant goes first: the head of a queue is of the session with the least
# counter.
#
# One request of a queue, its head, gives the queue its place among others. Without sessions that is
# the first of its chain. Once a request with a session has come, the queue has a line of strands,
# one for each session: the strand of the least (counter, arrival) gives the head. A session that
# gets a strand is lifted to the level of the line less the credit, as flows are. The chain keeps
# the order of arrival or of deadlines for all, so what looks for places and work in it reads on.
#
# With one pool a session competes with all others of its flow, whether their requests name the
# pool or not. So the lines of a flow then have one level, and of their heads the pool takes the one
# whose session was served least. With several pools each line stands alone: a counter holds service
# in all pools, and one of a slow pool would else stay before all of a quick one.
#
# A lift leaves the strands of the same session in other queues with a key of before, until
# settle_strands() gives them their places. Such a key is too small.

cdef int64_t level_of_lines(Flows flows, int32_t flow) noexcept:
    """Return the level of all lines of a flow, which have one, as their least counter is now.
    O(targets)."""
    cdef int32_t q = flows.items[flow].first_queue
    cdef int64_t level = 0, least = NONE
    cdef SessionLine line
    while q != NONE:
        if flows.queues[q].line:
            line = flows.agents.line(flows.queues[q].line)
            level, least = max(level, line.level), first_key(<void*>line.heap, least)
        q = flows.queues[q].next_queue
    return max(level, least * flows.grain) if flows.lifts else level


cdef inline int64_t level_of_line(Flows flows, SessionLine line) noexcept:
    """Return the level of a line that stands alone, as its least counter is now. O(1)."""
    if line.heap.count and flows.order == ORDER_COUNTER and flows.lifts:
        return max(line.level, line.heap.nodes[0].key * flows.grain)
    return line.level


cdef int64_t raise_session_level(Flows flows, int32_t q) noexcept:
    """Let the level of the line of a queue follow the least counter, with those lines that have one
    level with it. It never falls. O(targets)."""
    cdef int32_t flow = flows.queues[q].flow
    cdef SessionLine line = flows.agents.line(flows.queues[q].line)
    if not has_one_order(flows, flow):
        line.level = level_of_line(flows, line)
        return line.level
    line.level = level_of_lines(flows, flow)
    q = flows.items[flow].first_queue
    while q != NONE:
        if flows.queues[q].line:
            flows.agents.line(flows.queues[q].line).level = line.level
        q = flows.queues[q].next_queue
    return line.level


cdef inline int raise_level_of_queue(Flows flows, const Request* r) except -1:
    """Let the level of the line of its queue, if it has one, follow before a grant. O(targets)."""
    cdef int32_t q = flows.find_queue(r.flow, r.target + 1)
    if flows.queues[q].line:
        raise_session_level(flows, q)
    return 0


cdef int32_t first_of_strand(Flows flows, int32_t t) noexcept:
    """Return the request that is first in a strand. O(log n) expected."""
    return flows.agents.treaps.first(flows.agents.strands[t].root)


cdef int join_strand(Flows flows, int32_t q, int32_t i) except -1:
    """Put a request into the strand of its session, a new one if there is none. O(log n)."""
    cdef AgentSessions agents = flows.agents
    cdef const Request* r = &flows.requests.items[i]
    cdef SessionLine line = agents.line(flows.queues[q].line)
    cdef int32_t s = counted_session(flows, r), t = agents.find_strand(s, q), depth
    cdef int64_t key = order_key(flows, &flows.queues[q], r)
    if t == NONE:
        depth = flows.items[r.flow].depth
        if flows.lifts:
            agents.items[s].vtc = max(
                agents.items[s].vtc, raise_session_level(flows, q) - flows.credit(depth)
            )
            note_counter(flows, s)
        t = agents.add_strand(s, q)
        agents.strands[t].place = line.add(t)
    agents.strands[t].root = agents.treaps.insert(
        agents.strands[t].root, i, key, r.seq, r.work, r.arrival_ns
    )
    return stand_strand(flows, t)


cdef inline int stand_strand(Flows flows, int32_t t) except -1:
    """Give a strand its place in its line. O(log n)."""
    cdef const Strand* strand = &flows.agents.strands[t]
    return flows.agents.line(flows.queues[strand.queue].line).heap.put(
        strand.place, session_key(flows, strand.session),
        flows.requests.items[first_of_strand(flows, t)].seq,
    )


cdef inline void note_counter(Flows flows, int32_t s) noexcept:
    """A counter has changed: it may be the highest of its flow, and is to be saved, that of the
    rest with the flow's. O(1)."""
    cdef FlowSessions* of = &flows.agents.of_flows[
        flows.items[flows.agents.items[s].flow].agents
    ]
    of.highest = max(of.highest, flows.agents.items[s].vtc)
    flows.changed.mark(flows.agents.items[s].flow)
    if flows.agents.items[s].has_node:
        flows.agents.changed.mark(s)


cdef int leave_strand(Flows flows, int32_t q, int32_t i) except -1:
    """Take a request out of its strand. O(log n)."""
    cdef AgentSessions agents = flows.agents
    cdef int32_t t = agents.find_strand(
        counted_session(flows, &flows.requests.items[i]), q
    )
    cdef Strand* strand = &agents.strands[t]
    strand.root = agents.treaps.remove(strand.root, i)
    if strand.root != NONE:
        return stand_strand(flows, t)
    agents.line(flows.queues[q].line).leave(strand.place)
    agents.release_strand(t)
    return 0


cdef int enter_line(Flows flows, int32_t q, int32_t i) except -1:
    """A request has come into the chain of a queue: put it into its strand, if the queue has any.
    The first request with a session makes the line, and those that have one level with it:
    O(queued there * log n) once, else O(targets + log n)."""
    cdef int32_t flow = flows.queues[q].flow, other
    cdef bint has_session = (
        flows.requests.rare_of(&flows.requests.items[i]).session != NONE
    )
    if flows.queues[q].line:
        return join_strand(flows, q, i)
    if not has_one_order(flows, flow):
        return make_line(flows, q) if has_session else 0
    if not has_session and not has_line(flows, flow):
        return 0
    other = flows.items[flow].first_queue
    while other != NONE:  # what waits in them was there before
        if other != q and flows.queues[other].chain.count and not flows.queues[other].line:
            make_line(flows, other)
        other = flows.queues[other].next_queue
    return make_line(flows, q)


cdef inline bint has_line(Flows flows, int32_t flow) noexcept:
    """Return whether a queue of a flow has a line. O(targets)."""
    cdef int32_t q = flows.items[flow].first_queue
    while q != NONE and flows.queues[q].line == 0:
        q = flows.queues[q].next_queue
    return q != NONE


cdef int make_line(Flows flows, int32_t q) except -1:
    """Put all requests of a queue into strands. O(queued there * log n)."""
    cdef Queue* queue = &flows.queues[q]
    cdef int32_t i = queue.chain.head
    queue.line = new_line(flows.agents)
    flows.agents.line(queue.line).level = flows.agents.of_flows[
        flows.items[queue.flow].agents
    ].level
    while i != NONE:
        join_strand(flows, q, i)
        i = flows.requests.items[i].next
    return 0


cdef int end_line(Flows flows, int32_t q) except -1:
    """Nothing is queued any more for a set of pools: its queue may be the next set's. So its line
    ends, and lines that begin later have its level at least. O(1)."""
    cdef AgentSessions agents = flows.agents
    cdef FlowSessions* of = &agents.of_flows[flows.items[flows.queues[q].flow].agents]
    of.level = max(of.level, agents.line(flows.queues[q].line).level)
    agents.drop_line(flows.queues[q].line)
    flows.queues[q].line = 0
    flows.changed.mark(flows.queues[q].flow)
    return 0


cdef int32_t new_line(AgentSessions agents) except -1:
    if agents.free_lines:
        number = agents.free_lines.pop()
        agents.lines[number] = SessionLine()
        return number
    agents.lines.append(SessionLine())
    return <int32_t>len(agents.lines) - 1


cdef int32_t next_head(Flows flows, int32_t q) noexcept:
    """Return the request that has to be the head of a queue; -1: it is empty. O(log n)
    amortised."""
    cdef Queue* queue = &flows.queues[q]
    cdef SessionLine line
    cdef int32_t t
    cdef int64_t key
    if queue.line == 0 or queue.chain.count == 0:
        return queue.chain.head
    line = flows.agents.line(queue.line)
    while True:
        t = line.strands[line.heap.nodes[0].id]
        key = session_key(flows, flows.agents.strands[t].session)
        if key <= line.heap.nodes[0].key:
            return first_of_strand(flows, t)
        line.heap.rekey_first(key)


cdef int32_t choose_head(Flows flows, int32_t q) except -2:
    """Let the right request be the head of a queue; returns the one that it displaces, -1: none.
    O(levels * log n)."""
    cdef int32_t old = flows.queues[q].head, head = next_head(flows, q)
    if head == old:
        return NONE
    flows.queues[q].head = head
    if old != NONE:
        displace(flows, q, old)
    rank_queue(flows, q)
    return old


cdef int32_t rekey_session(Flows flows, int32_t s, int32_t t) except -2:
    """The counter of a session has changed: give its strand t its place; the head that is displaced
    in that queue, -1: none. O(levels * log n)."""
    cdef const Strand* strand = &flows.agents.strands[t]
    cdef Heap heap = flows.agents.line(flows.queues[strand.queue].line).heap
    heap.put(strand.place, session_key(flows, s), heap.entry(strand.place).tie)
    return choose_head(flows, strand.queue)


cdef int raise_to_highest(Flows flows, int32_t flow) noexcept:
    """Nothing of a flow waits or runs: let the levels of its lines pass all counters of its
    sessions, so that each returns as a newcomer. O(targets)."""
    cdef FlowSessions* of = &flows.agents.of_flows[flows.items[flow].agents]
    cdef int32_t q = flows.items[flow].first_queue
    cdef int64_t passed = of.highest + flows.credit(flows.items[flow].depth)
    cdef SessionLine line
    flows.changed.mark(flow)
    if of.level:
        of.level = max(of.level, passed)
    while q != NONE:
        if flows.queues[q].line:
            line = flows.agents.line(flows.queues[q].line)
            line.level = max(line.level, passed)
        q = flows.queues[q].next_queue
    return 0


cdef bint is_newcomer(Flows flows, int32_t s) noexcept:
    """Return whether a session's counter is at a newcomer's or below in each line of its flow.
    O(targets)."""
    cdef const AgentSession* a = &flows.agents.items[s]
    cdef int32_t q = flows.items[a.flow].first_queue
    cdef int64_t credit = flows.credit(flows.items[a.flow].depth)
    cdef int64_t level = flows.agents.of_flows[flows.items[a.flow].agents].level
    cdef bint has_line = False
    if not flows.lifts:
        return a.vtc == 0
    while q != NONE:
        if flows.queues[q].line:
            has_line = True
            if a.vtc > max(<int64_t>0, flows.agents.line(flows.queues[q].line).level - credit):
                return False
        q = flows.queues[q].next_queue
    return has_line or level == 0 or a.vtc <= max(<int64_t>0, level - credit)


cdef int64_t level_to_save(Flows flows, int32_t flow) noexcept:
    """Return the level with which the lines of a flow begin after a restart: the highest of them,
    and of the least counter that waits. So no session gains by a restart. O(targets)."""
    cdef int64_t level = flows.agents.of_flows[flows.items[flow].agents].level
    cdef int32_t q = flows.items[flow].first_queue
    if has_one_order(flows, flow):
        return max(level, level_of_lines(flows, flow))
    while q != NONE:
        if flows.queues[q].line:
            level = max(level, level_of_line(flows, flows.agents.line(flows.queues[q].line)))
        q = flows.queues[q].next_queue
    return level
