# The slab of requests. A request keeps one record from its Admit until its answer is forgotten:
# queued, then a lease, then a stored answer. A handle is the record's index and its generation.

cdef enum:  # states of a request
    FREE = 0
    QUEUED = 1
    LIVE = 2
    SUSPECT = 3
    ENDED = 4

# The part of a request that exists from its grant on, and then in its stored answer.
ctypedef struct Lease:
    int64_t lease_id
    int64_t waited_ns
    int64_t epoch  # epoch of the pool at the grant
    int64_t charged  # what the flow's counter carries for it now, in weighted micro-tokens
    int64_t kv_steps  # token-steps of the KV cache in that
    int64_t granted_tokens  # reserved at the grant
    int64_t fixed_tokens  # its part of the load unless it is among the leases that grow
    int64_t ended_ns  # once ENDED
    int32_t weight_milli  # weight of the flow at the grant
    int32_t input_tokens, cached_tokens, output_tokens  # totals as reported; input -1: not yet
    int32_t promised_output  # first prediction, of each sequence
    int32_t predicted_output  # prediction in force, of each sequence
    int32_t ahead_output  # charged at the grant, of each sequence
    int32_t matched_tokens  # input charged as cached until its end reports
    int32_t reserved_blocks, posted_blocks
    int32_t growing_at  # place among the leases that grow; -1: none
    int32_t pool_next, pool_prev
    int32_t first_us  # from its arrival to its first output; 0: none yet
    int32_t fresh_tokens  # input that is still to be computed; 0: done
    int32_t prefill_us, prefill_line  # forecast at the grant, and for how much input
    int32_t discount_ppm  # part of its work not charged to fair counters: it passed a head
    int16_t engine_priority  # sent with the grant
    uint8_t is_void  # the engine restarted: no reservation
    uint8_t in_prefill_budget  # its input has not been computed yet, as far as is known
    uint8_t outcome  # once ENDED
    uint8_t is_estimated  # its holder ended it without a count: it is charged by time
    uint8_t is_corrected  # its holder reported after it had expired: once is enough

cdef enum:
    WAITS_KINDS = 24

# Each reason for which a request has waited, and how long; see wait_times.pxi.
ctypedef struct WaitTimes:
    int64_t since_ns  # for what it waits for now
    int64_t changed_ns  # moment of the last change
    int64_t before_ns  # since when it had waited for its reason at that time
    int64_t spent_ns[WAITS_KINDS]  # before that
    int64_t round  # the dispatch in which a pool named it as its next
    int32_t pool  # that did so last; -1: none
    uint8_t before  # what that was

# The part of a request that exists once it has been the first of its queue.
ctypedef struct HeadState:
    int64_t head_ns, lined_ns  # first in its queue; then in the line, its quotas given; -1: not yet
    int64_t bypassed_ns  # when one did for the first time
    WaitTimes* wait_times  # where that is recorded, else NULL
    int32_t bypassed  # how often another was granted first while it was the head
    uint8_t waits_for  # WAITS_*, where that is recorded, see wait_times.pxi; 0: it is not

# Fields that only few requests have, while they are queued or run.
ctypedef struct RareFields:
    int64_t deadline_ns  # for its first token; 0: the caller named none
    int64_t place  # in its queue, where a function gives places
    int32_t adapter  # index of its LoRA adapter; -1: none
    int32_t session  # record of its session of an agent; -1: none
    int32_t told_output  # as the caller expects it, of each sequence
    int32_t hold  # queued, it is in no queue but waits for a cap, see session_cap.pxi; -1: not
    int64_t whole_work  # of a probe, whose work counts as 1
    uint8_t shed_watch  # 1 + DOUBT_*, let in for a probe; or UNSURE + DOUBT_*; 0: none

# Most of a million queued requests consist of nothing but this: REQUEST_BYTES. Fields that few of
# them have belong into RareFields, HeadState or Lease.
ctypedef struct Request:
    int64_t seq  # arrival order, over all flows
    uint64_t key_hi, key_lo  # keyed hash of its id, see request_ids.pxi
    uint64_t payload  # hash of what was asked
    uint64_t tag  # the session's name for it
    Lease* lease  # NO_LEASE while it is queued
    HeadState* head_state  # NO_HEAD_STATE until it is the first of its queue
    int64_t arrival_ns
    int64_t due_ns  # queue TTL, lease TTL, grace or answer TTL, by state
    int64_t mark  # work that was queued before it in its queue, ever
    int32_t flow
    int32_t next, prev  # neighbours in the queue, in the pool's round, or among the answers
    int32_t owner  # session slot; 0: unary; -1: its caller has left
    int32_t owner_next, owner_prev
    int32_t principal
    int32_t generation
    int32_t ordinal  # place in its queue, counted from the queue's start
    int32_t rare  # what it has of RareFields; 0: nothing
    int32_t prompt_max_tokens  # longest single prompt
    int32_t prompt_tokens  # over all prompts
    int32_t output_max_tokens  # the most output of each sequence
    int32_t bill  # what it took from its quotas; 0: nothing
    int32_t quota_output  # output of all sequences as taken from its quotas; 0: not taken
    int32_t work  # tokens that it will be charged, as forecast
    int32_t forecast_wait_us, forecast_first_us  # at its arrival; -1: not
    int16_t sequences  # prompts times n
    int16_t n  # completions of each prompt
    int16_t target  # pool it has to run in, or a set of pools; -1: any, see pool_sets.pxi
    int16_t pool  # pool of its lease
    uint8_t state
    uint8_t has_deadline  # it says how long it will wait
    uint8_t reports_progress
    uint8_t whole_answer  # no count is known before its end
    uint8_t evidence  # what its promise was made from; 0: nothing, or it has been judged
    uint8_t has_exact_input  # its caller counted the prompt's tokens as the engine does
    uint8_t was_limited  # a report of it exceeded what it can use
    uint8_t has_own_key  # its id is found under a key of its principal

REQUEST_BYTES = sizeof(Request)

# Stand for a part that a request does not have yet. They are only read.
cdef Lease NO_LEASE
cdef HeadState NO_HEAD_STATE
memset(&NO_LEASE, 0, sizeof(Lease))
NO_LEASE.input_tokens = NO_LEASE.growing_at = NO_LEASE.pool_next = NO_LEASE.pool_prev = NONE
memset(&NO_HEAD_STATE, 0, sizeof(HeadState))
NO_HEAD_STATE.head_ns = NO_HEAD_STATE.lined_ns = NONE


@cython.final
cdef class Requests:
    cdef Request* items
    cdef int32_t size, used, first_free
    cdef RareFields* rare  # at 0, that of the requests that have none
    cdef int32_t rare_size, rare_used, rare_open, first_free_rare
    cdef int32_t states[5]  # how many in each state
    cdef SlabAllocator lease_slab, head_state_slab, wait_times_slab
    cdef Principals principals
    cdef PoolSets sets

    def __cinit__(self, Principals principals):
        self.first_free = NONE
        self.principals, self.sets = principals, PoolSets()
        self.open_rare_fields()
        self.rare_open = 0
        self.lease_slab = SlabAllocator(sizeof(Lease))
        self.head_state_slab = SlabAllocator(sizeof(HeadState))
        self.wait_times_slab = SlabAllocator(sizeof(WaitTimes))

    def __dealloc__(self):
        free(self.items)
        free(self.rare)

    cdef inline void prefetch(self) noexcept:
        """Fetch the record that is given out next."""
        if self.first_free != NONE:
            prefetch_record(&self.items[self.first_free], sizeof(Request))

    cdef int32_t allocate(self) except -1:
        """Return a zeroed record. O(1)."""
        cdef int32_t i, generation = 0, size
        cdef Request* r
        if self.first_free != NONE:
            i = self.first_free
            self.first_free = self.items[i].next
            generation = self.items[i].generation
        else:
            if self.used == self.size:
                size = larger(self.size, 0)
                self.items = <Request*>extend(self.items, size, sizeof(Request))
                self.size = size
            i = self.used
            self.used += 1
        r = &self.items[i]
        memset(r, 0, sizeof(Request))
        r.generation = generation + 1 if generation < 0x7FFFFFFF else 1
        r.next = r.prev = r.owner_next = r.owner_prev = NONE
        r.pool = NONE
        r.lease, r.head_state = &NO_LEASE, &NO_HEAD_STATE
        self.states[FREE] += 1
        return i

    cdef Lease* open_lease(self, int32_t i) except NULL:
        """Give a request its lease. O(1)."""
        cdef Lease* lease = <Lease*>self.lease_slab.alloc()
        lease.input_tokens = lease.growing_at = lease.pool_next = lease.pool_prev = NONE
        self.items[i].lease = lease
        return lease

    cdef inline const RareFields* rare_of(self, const Request* r) noexcept:
        """Return the rare fields of a request, to be read. It moves when another one gets some."""
        return &self.rare[r.rare]

    cdef RareFields* own_rare(self, int32_t i) except NULL:
        """Return the same record for writing; make it if needed. O(1) amortised."""
        if self.items[i].rare == 0:
            self.items[i].rare = self.open_rare_fields()
        return &self.rare[self.items[i].rare]

    cdef int32_t open_rare_fields(self) except -1:
        cdef int32_t n = self.first_free_rare
        if n:
            self.first_free_rare = self.rare[n].told_output
        else:
            if self.rare_used == self.rare_size:
                self.rare_size = larger(self.rare_size, 0)
                self.rare = <RareFields*>extend(self.rare, self.rare_size, sizeof(RareFields))
            n = self.rare_used
            self.rare_used += 1
        memset(&self.rare[n], 0, sizeof(RareFields))
        self.rare[n].adapter = self.rare[n].session = self.rare[n].hold = NONE
        self.rare_open += 1
        return n

    cdef inline void drop_rare(self, Request* r) noexcept:
        """A request is neither queued nor running any more. O(1)."""
        if r.rare:
            self.rare[r.rare].told_output = self.first_free_rare
            self.first_free_rare = r.rare
            r.rare = 0
            self.rare_open -= 1

    cdef HeadState* head_state_of(self, int32_t i) except NULL:
        """Return the state of a request that is the first of its queue; make it if needed. O(1)."""
        cdef HeadState* head_state = self.items[i].head_state
        if head_state == &NO_HEAD_STATE:
            head_state = self.items[i].head_state = <HeadState*>self.head_state_slab.alloc()
            head_state.head_ns = head_state.lined_ns = NONE
        return head_state

    cdef void release(self, int32_t i) noexcept:
        """Let a record go. Until the next is given out, all but its lease_id and
        its rare fields can be read. O(1)."""
        cdef Request* r = &self.items[i]
        if r.lease != &NO_LEASE:
            self.lease_slab.free(r.lease)
        self.drop_rare(r)
        if r.head_state != &NO_HEAD_STATE:
            if r.head_state.wait_times != NULL:
                self.wait_times_slab.free(r.head_state.wait_times)
            self.head_state_slab.free(r.head_state)
        if r.state == QUEUED and is_set(r.target):
            self.sets.let_go(r.target)
        self.states[r.state] -= 1
        self.principals.move(
            r.principal, r.state, FREE, -(<int64_t>r.prompt_tokens) if r.state == QUEUED else 0
        )
        r.state = FREE
        r.next = self.first_free
        self.first_free = i

    cdef inline void enter(self, int32_t i, int state) noexcept:
        cdef Request* r = &self.items[i]
        self.states[r.state] -= 1
        self.states[state] += 1
        self.principals.move(
            r.principal, r.state, state,
            (<int64_t>(state == QUEUED) - (r.state == QUEUED)) * r.prompt_tokens,
        )
        if is_set(r.target):
            self._enter_set(r, state)
        r.state = state

    cdef void _enter_set(self, Request* r, int state) noexcept:
        # One that is granted runs in a pool, and its set may become another one.
        if state == QUEUED:
            self.sets.hold(r.target)
        elif r.state == QUEUED:
            self.sets.let_go(r.target)
            r.target = r.pool

    cdef inline int64_t handle(self, int32_t i) noexcept:
        return (<int64_t>self.items[i].generation << 32) | i

    cdef inline int32_t lookup(self, int64_t handle) noexcept:
        """Return the index of a handle's record, or -1 if it is gone."""
        cdef int64_t i = handle & <int64_t>0xFFFFFFFF  # without the cast, a Python integer
        if handle <= 0 or i >= self.used or self.items[i].state == FREE:
            return NONE
        return <int32_t>i if self.items[i].generation == handle >> 32 else NONE


ctypedef struct Chain:
    # Ends of a doubly linked list through next and prev of the records.
    int32_t head, tail, count


cdef inline void chain_push(Chain* c, Request* items, int32_t i) noexcept nogil:
    items[i].next = NONE
    items[i].prev = c.tail
    if c.tail == NONE:
        c.head = i
    else:
        items[c.tail].next = i
    c.tail = i
    c.count += 1


cdef inline void chain_insert(Chain* c, Request* items, int32_t before, int32_t i) noexcept nogil:
    """Insert i behind another one; -1: as the first."""
    cdef int32_t after = c.head if before == NONE else items[before].next
    if after == NONE:
        chain_push(c, items, i)
        return
    items[i].prev, items[i].next = before, after
    items[after].prev = i
    if before == NONE:
        c.head = i
    else:
        items[before].next = i
    c.count += 1


cdef inline void chain_remove(Chain* c, Request* items, int32_t i) noexcept nogil:
    cdef int32_t before = items[i].prev, after = items[i].next
    if before == NONE:
        c.head = after
    else:
        items[before].next = after
    if after == NONE:
        c.tail = before
    else:
        items[after].prev = before
    items[i].next = items[i].prev = NONE
    c.count -= 1
