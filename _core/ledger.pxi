# The KV ledger: blocks promised to leases, pool by pool (sum form).
#
# promised = sum of the reservations of live leases; posted is the part that is materialised. A
# grant needs promised + need <= capacity - headroom. Growth, replay or a smaller capacity may
# push promised beyond capacity: the pool is then OVERDRAWN and grants nothing.

cdef enum:  # why a pool grants nothing
    WAIT_NONE = 0
    WAIT_KV = 1
    WAIT_MAX_RUNNING = 2
    WAIT_OVERDRAWN = 3
    WAIT_DETACHED = 4
    WAIT_LIMIT = 5
    WAIT_STRICT = 6

WAIT_REASONS = ["NONE", "KV", "MAX_RUNNING", "OVERDRAWN", "DETACHED", "LIMIT", "STRICT"]


ctypedef struct Pool:
    int64_t epoch
    int64_t capacity_blocks, headroom_blocks
    int64_t promised_blocks, posted_blocks
    int64_t block_size
    int64_t max_running, max_model_tokens
    int64_t live, suspect
    int64_t running_sequences
    int32_t first_lease  # chain through pool_next and pool_prev
    int32_t attached  # sessions that offer it, plus one where it is configured
    int32_t configured
    int32_t principal  # who offers it
    int32_t reason
    int64_t engine_running, engine_waiting, engine_used_tokens, engine_preemptions
    int64_t telemetry_at_ns


cdef inline int64_t blocks_for(const Pool* p, int64_t tokens, int64_t sequences) noexcept nogil:
    # Each sequence may leave its last block partly filled.
    return (tokens + p.block_size - 1) // p.block_size + sequences - 1


@cython.final
cdef class Ledger:
    cdef Pool pools[POOLS_MAX]
    cdef int32_t count
    cdef int64_t headroom_ppm
    cdef Requests requests
    cdef Flows flows
    cdef Fuse fuse

    def __cinit__(
        self, int64_t headroom_ppm, Requests requests, Flows flows, Fuse fuse
    ):
        self.headroom_ppm = headroom_ppm
        self.requests = requests
        self.flows = flows
        self.fuse = fuse

    cdef int32_t add(self) except -1:
        self.clear(self.count)
        self.count += 1
        return self.count - 1

    cdef void clear(self, int32_t pool) noexcept:
        memset(&self.pools[pool], 0, sizeof(Pool))
        self.pools[pool].first_lease = NONE
        self.pools[pool].telemetry_at_ns = NONE

    cdef void size(
        self, int32_t pool, int64_t capacity_tokens, int64_t block_size, int64_t max_running,
        int64_t max_model_tokens,
    ) noexcept:
        cdef Pool* p = &self.pools[pool]
        p.block_size = block_size
        p.capacity_blocks = capacity_tokens // block_size
        p.headroom_blocks = p.capacity_blocks * self.headroom_ppm // 1_000_000
        p.max_running = max_running
        p.max_model_tokens = max_model_tokens

    cdef bint can_hold(self, int32_t pool, const Request* r) noexcept:
        """Whether the request could ever run in the pool, all its output counted."""
        cdef const Pool* p = &self.pools[pool]
        if p.max_model_tokens and r.prompt_max_tokens + r.output_max_tokens > p.max_model_tokens:
            return False
        if p.max_running and r.sequences > p.max_running:
            return False
        return self.need(pool, r, r.output_max_tokens) <= p.capacity_blocks

    cdef int64_t need(self, int32_t pool, const Request* r, int64_t output_tokens) noexcept:
        """Blocks for so much output of each sequence, and a copy of its prompt for each."""
        return blocks_for(
            &self.pools[pool],
            <int64_t>r.prompt_tokens * r.n + output_tokens * r.sequences,
            r.sequences,
        )

    cdef int verdict(self, int32_t pool, const Request* r, int64_t blocks) noexcept:
        """Why the request cannot be granted now; WAIT_NONE where it can. O(1)."""
        cdef const Pool* p = &self.pools[pool]
        if p.attached == 0:
            return WAIT_DETACHED
        if p.promised_blocks > p.capacity_blocks:
            return WAIT_OVERDRAWN
        if p.max_running and p.running_sequences + r.sequences > p.max_running:
            return WAIT_MAX_RUNNING
        # Headroom is for growth; what is alone in the pool may use it all.
        if p.live and p.promised_blocks + blocks > p.capacity_blocks - p.headroom_blocks:
            return WAIT_KV
        return WAIT_NONE

    cdef int reserve(self, int32_t i, int64_t blocks) except -1:
        """Open the reservation of a lease in its pool. O(1)."""
        cdef Request* r = &self.requests.items[i]
        cdef Pool* p = &self.pools[r.pool]
        r.pool_prev = NONE
        r.pool_next = p.first_lease
        if p.first_lease != NONE:
            self.requests.items[p.first_lease].pool_prev = i
        p.first_lease = i
        p.live += 1
        p.running_sequences += r.sequences
        return self.resize(i, blocks, 0)

    cdef int resize(self, int32_t i, int64_t reserved, int64_t posted) except -1:
        """Let a lease hold `reserved` blocks, `posted` of them materialised. O(1)."""
        cdef Request* r = &self.requests.items[i]
        cdef Pool* p = &self.pools[r.pool]
        cdef Flow* f = &self.flows.items[r.flow]
        cdef int64_t more = reserved - r.reserved_blocks, filled = posted - r.posted_blocks
        p.promised_blocks += more
        p.posted_blocks += filled
        f.promised_tokens += more * p.block_size
        f.posted_tokens += filled * p.block_size
        r.reserved_blocks = <int32_t>reserved
        r.posted_blocks = <int32_t>posted
        if p.promised_blocks < 0 or p.posted_blocks < 0 or f.promised_tokens < 0 or posted < 0:
            raise self.fuse.blow("ledger: a sum of reservations is negative")
        if posted > reserved:
            raise self.fuse.blow("ledger: a lease has posted more than it reserved")
        return 0

    cdef int release(self, int32_t i) except -1:
        """Give a lease's reservation back. O(1)."""
        cdef Request* r = &self.requests.items[i]
        cdef Pool* p = &self.pools[r.pool]
        self.resize(i, 0, 0)
        if r.pool_prev == NONE:
            p.first_lease = r.pool_next
        else:
            self.requests.items[r.pool_prev].pool_next = r.pool_next
        if r.pool_next != NONE:
            self.requests.items[r.pool_next].pool_prev = r.pool_prev
        r.pool_next = r.pool_prev = NONE
        p.live -= 1
        p.running_sequences -= r.sequences
        if p.live < 0 or p.running_sequences < 0:
            raise self.fuse.blow("ledger: more leases released than reserved")
        return 0
