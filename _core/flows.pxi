# Fair sharing by virtual token counters (Sheng et al., OSDI 2024, arXiv 2401.00588).
#
# A flow has one counter and a queue for each target: target 0 holds requests that may run in any
# pool, target p + 1 those that must run in pool p. Each target has a heap of its non-empty queues
# by (counter, sequence number of the head). Under FCFS the counter's place in the key is 0.

cdef enum:
    REFUSAL_KINDS = 13


# A counter and the largest charge (2.7 * 10^18) together stay below 2^63.
cdef int64_t VTC_REBASE = <int64_t>1 << 61
cdef int64_t VTC_MAX = <int64_t>1 << 62


cdef inline int refusal_place(int outcome) noexcept nogil:
    return outcome - 16 if outcome < 32 else outcome - 32 + 9


REFUSALS = (
    list(range(OUT_REJECTED_FLOW_QUEUE_FULL, OUT_REJECTED_LIMIT + 1))
    + list(range(OUT_EVICTED_TTL, OUT_EVICTED_TOO_LARGE + 1))
)


ctypedef struct Flow:
    int64_t vtc
    int64_t interval_ns  # moving average of the time between two grants
    int64_t granted_at_ns  # -1: never
    int64_t promised_tokens, posted_tokens
    int64_t input_tokens, cached_tokens, output_tokens
    int64_t received, granted, completed, cancelled, expired
    int64_t refusals[REFUSAL_KINDS]
    int32_t weight_milli
    int32_t queued, live
    int32_t first_queue


ctypedef struct Queue:
    Chain chain
    int32_t flow
    int32_t target
    int32_t next_queue
    int32_t ordinal  # of the next arrival


@cython.final
cdef class Flows:
    cdef Flow* items
    cdef Queue* queues
    cdef int32_t count, size, queue_count, queue_size
    cdef Heap active  # flows that have something queued or in flight, by counter
    cdef list candidates  # heap of queues for each target
    cdef bint fcfs
    cdef int64_t idle_vtc  # counter of the flow that was active last
    cdef Requests requests

    def __cinit__(self, bint fcfs, Requests requests):
        self.fcfs = fcfs
        self.requests = requests
        self.active = Heap()
        self.candidates = [Heap()]

    def __dealloc__(self):
        free(self.items)
        free(self.queues)

    cdef int32_t add(self, int32_t weight_milli) except -1:
        cdef int32_t size
        if self.count == self.size:
            size = max(16, self.size * 2)
            self.items = <Flow*>grow(self.items, self.size, size, sizeof(Flow))
            self.size = size
        self.items[self.count].weight_milli = weight_milli
        self.items[self.count].first_queue = NONE
        self.items[self.count].granted_at_ns = NONE
        self.count += 1
        return self.count - 1

    cdef inline void prefetch(self, int32_t flow) noexcept:
        """Fetch a flow that is looked at soon."""
        cdef size_t at
        for at in range(0, sizeof(Flow), 64):
            prefetch_line(<uint8_t*>&self.items[flow] + at)

    cdef int32_t queue_of(self, int32_t flow, int32_t target) except -1:
        # A flow has as many queues as targets it has used: one or two.
        cdef int32_t q = self.items[flow].first_queue
        cdef int32_t size
        while q != NONE:
            if self.queues[q].target == target:
                return q
            q = self.queues[q].next_queue
        if self.queue_count == self.queue_size:
            size = max(16, self.queue_size * 2)
            self.queues = <Queue*>grow(self.queues, self.queue_size, size, sizeof(Queue))
            self.queue_size = size
        q = self.queue_count
        self.queue_count += 1
        self.queues[q].flow = flow
        self.queues[q].target = target
        self.queues[q].chain.head = self.queues[q].chain.tail = NONE
        self.queues[q].next_queue = self.items[flow].first_queue
        self.items[flow].first_queue = q
        return q

    cdef int _rank(self, int32_t q) except -1:
        """Give the queue its place among the candidates of its target. O(log n)."""
        cdef Queue* queue = &self.queues[q]
        cdef Heap heap = <Heap>self.candidates[queue.target]
        if queue.chain.count == 0:
            heap.remove(q)
            return 0
        heap.put(
            q,
            0 if self.fcfs else self.items[queue.flow].vtc,
            self.requests.items[queue.chain.head].seq,
        )
        return 0

    cdef int enqueue(self, int32_t i) except -1:
        """Queue request i at the end of its flow. O(log n)."""
        cdef Request* r = &self.requests.items[i]
        cdef int32_t q = self.queue_of(r.flow, r.target + 1)
        self.activate(r.flow)
        self.items[r.flow].queued += 1
        r.ordinal = self.queues[q].ordinal
        self.queues[q].ordinal += 1
        chain_push(&self.queues[q].chain, self.requests.items, i)
        if self.queues[q].chain.count == 1:
            self._rank(q)
        return 0

    cdef int dequeue(self, int32_t i) except -1:
        """Take request i out of its queue, wherever it stands. The flow stays active until
        `settle()`. O(log n)."""
        cdef Request* r = &self.requests.items[i]
        cdef int32_t q = self.queue_of(r.flow, r.target + 1)
        cdef bint was_head = self.queues[q].chain.head == i
        chain_remove(&self.queues[q].chain, self.requests.items, i)
        self.items[r.flow].queued -= 1
        if was_head:
            self._rank(q)
        return 0

    cdef int64_t ahead_of(self, int32_t i) except -1:
        """Requests before i in its queue; those that were withdrawn since still count."""
        cdef Request* r = &self.requests.items[i]
        cdef Queue* queue = &self.queues[self.queue_of(r.flow, r.target + 1)]
        return max(0, r.ordinal - self.requests.items[queue.chain.head].ordinal)

    cdef int activate(self, int32_t flow) except -1:
        """Lift: a flow that was idle is not served for the time it was away (section 4.1)."""
        cdef Flow* f = &self.items[flow]
        cdef int64_t least
        if f.queued or f.live:
            return 0
        least = self.active.nodes[0].key if self.active.count else self.idle_vtc
        f.vtc = max(f.vtc, least)
        self.active.put(flow, f.vtc, flow)
        return 0

    cdef void settle(self, int32_t flow) noexcept:
        """The flow may have become idle."""
        cdef Flow* f = &self.items[flow]
        if f.queued == 0 and f.live == 0 and self.active.has(flow):
            self.active.remove(flow)
            self.idle_vtc = f.vtc

    cdef int charge(self, int32_t flow, int64_t weighted_micro) except -1:
        """Add weighted service to the counter; negative: a refund. O(log n)."""
        cdef Flow* f = &self.items[flow]
        cdef int32_t q
        if weighted_micro == 0:
            return 0
        f.vtc = min(max(<int64_t>0, f.vtc + weighted_micro), VTC_MAX)
        if f.vtc > VTC_REBASE and self.active.count:
            self._rebase()
        if self.active.has(flow):
            self.active.put(flow, f.vtc, flow)
        if self.fcfs:
            return 0
        q = f.first_queue
        while q != NONE:
            if self.queues[q].chain.count:
                self._rank(q)
            q = self.queues[q].next_queue
        return 0

    cdef int _rebase(self) except -1:
        # Once in about 2^60 micro-tokens. Where one flow runs so far ahead that the others have not
        # come half as far, it is held at VTC_MAX instead, and still is the last. Idle flows below
        # the least active one would be lifted to it on their return, so cutting them at 0 changes
        # no order.
        cdef int64_t base = self.active.nodes[0].key
        cdef int32_t i
        if base < VTC_REBASE // 2:
            return 0
        for i in range(self.count):
            self.items[i].vtc = max(<int64_t>0, self.items[i].vtc - base)
            if self.active.has(i):
                self.active.put(i, self.items[i].vtc, i)
        self.idle_vtc = max(<int64_t>0, self.idle_vtc - base)
        for i in range(self.queue_count):
            if self.queues[i].chain.count:
                self._rank(i)
        return 0

    cdef void note_grant(self, int32_t flow, int64_t now_ns) noexcept:
        # Time between grants, moving average with alpha = 1/5; what Retry-After is made of.
        cdef Flow* f = &self.items[flow]
        cdef int64_t gap
        if f.granted_at_ns >= 0:
            gap = now_ns - f.granted_at_ns
            f.interval_ns += (gap - f.interval_ns) // 5 if f.interval_ns else gap
        f.granted_at_ns = now_ns

    cdef int64_t fairness_gap(self) noexcept:
        """Largest difference of counters between flows that are backlogged. O(queues)."""
        cdef int64_t low = -1, high = -1, vtc
        cdef int32_t q
        for q in range(self.queue_count):
            if self.queues[q].chain.count:
                vtc = self.items[self.queues[q].flow].vtc
                low = vtc if low < 0 else min(low, vtc)
                high = max(high, vtc)
        return high - low

    cdef void forget(self) noexcept:
        """Counters and rates as new. Only while nothing is active does order stay the same."""
        cdef int32_t i
        for i in range(self.count):
            self.items[i].interval_ns = 0
            self.items[i].granted_at_ns = NONE
            if not self.active.has(i):
                self.items[i].vtc = 0
        if self.active.count == 0:
            self.idle_vtc = 0
