# Where flows stand in each pool, while there are several. Service is global: what a flow is served
# in one pool counts in all pools of a fairness domain. Its position is local: each pool has a level
# of its own, lifts flows to it, and lets no flow fall far behind the others there because of what
# it was served elsewhere. With one counter for all pools, a flow that was served in a quick pool
# starved in a slow one until the others had caught up.

# A counter and the largest charge (2.7 * 10^18) together stay below 2^63.
cdef int64_t VTC_REBASE = <int64_t>1 << 61
cdef int64_t VTC_MAX = <int64_t>1 << 62

ctypedef struct Position:
    int64_t key  # the counter of its flow as this pool sees it, in weighted micro-tokens
    int64_t foreign  # the part of it served in other pools since it was queued here
    int64_t wait_lift  # the node's lift when it began to wait there
    int32_t flow, pool
    int32_t next_position  # next position of the same flow; -1: none
    int32_t waits_at  # quota node for which all wait that it has queued here; -1: none
    int32_t backlogged  # below a node: 1 while the flow is; of a node: number of such children


cdef inline int32_t remote_pool(int32_t node) noexcept:
    """Return the name that stands for the pools of a model, (-1) of none, at other members of a
    cluster."""
    return -4 - node


@cython.final
cdef class Positions:
    cdef Position* items
    cdef int32_t count, size, first_free
    cdef int64_t* levels  # by class and pool: the level to which backlogged flows are lifted
    cdef int64_t* shifts  # for each class and pool, see local_position.pxi
    cdef int64_t* pace  # what a pool serves in a second, in micro-tokens
    cdef int32_t* model  # each pool's model; -1: none
    cdef int domain  # DOMAIN_*
    cdef int64_t lead_max  # in micro-tokens; LEAD_AUTO
    cdef int64_t forgiven  # service elsewhere that the lead has forgiven, ever
    # What waiting positions were lifted by in all, by node, class and pool: few nodes have any.
    cdef Table lift_places
    cdef int64_t* lifts
    cdef int32_t lift_count, lift_size

    def __cinit__(self):
        cdef int32_t pool
        # `calloc()` maps large arrays without touching them: only pools in use take memory.
        self.lift_places = Table()
        self.first_free = NONE
        self.levels = <int64_t*>calloc(CLASSES_MAX * POOLS_MAX, sizeof(int64_t))
        self.shifts = <int64_t*>calloc(CLASSES_MAX * POOLS_MAX, sizeof(int64_t))
        self.pace = <int64_t*>calloc(POOLS_MAX, sizeof(int64_t))
        self.model = <int32_t*>calloc(POOLS_MAX, sizeof(int32_t))
        if (
            self.levels == NULL or self.shifts == NULL or self.pace == NULL or self.model == NULL
        ):
            raise MemoryError()
        for pool in range(POOLS_MAX):
            self.model[pool] = NONE

    def __dealloc__(self):
        free(self.items)
        free(self.lifts)
        free(self.levels)
        free(self.shifts)
        free(self.pace)
        free(self.model)

    cdef inline int64_t* level(self, int32_t cls, int32_t pool) noexcept:
        return &self.levels[cls * POOLS_MAX + pool]

    cdef inline int64_t* shift(self, int32_t cls, int32_t pool) noexcept:
        return &self.shifts[cls * POOLS_MAX + pool]

    cdef void forget(self, int32_t cls, int32_t pools) noexcept:
        """Begin the levels of a class at 0. O(pools)."""
        memset(self.level(cls, 0), 0, pools * sizeof(int64_t))
        memset(self.shift(cls, 0), 0, pools * sizeof(int64_t))

    cdef int32_t add(self, int32_t flow, int32_t pool, int64_t key) except -1:
        """Make a position of a flow that has none in this pool; the caller links it. O(1)."""
        cdef int32_t size, n = self.first_free
        if n != NONE:
            self.first_free = self.items[n].next_position
        else:
            n = self.count
            if n == self.size:
                size = larger(self.size, 0)
                self.items = <Position*>extend(self.items, size, sizeof(Position))
                self.size = size
            self.count += 1
        memset(&self.items[n], 0, sizeof(Position))
        self.items[n].flow, self.items[n].pool, self.items[n].key = flow, pool, key
        self.items[n].next_position = self.items[n].waits_at = NONE
        return n

    cdef int32_t find(self, int32_t n, int32_t pool) noexcept:
        """Return the position in a pool, among those of a flow from its first on; -1: none.
        O(pools)."""
        while n != NONE and self.items[n].pool != pool:
            n = self.items[n].next_position
        return n

    cdef void release(self, int32_t first) noexcept:
        """Let all positions of a flow go. O(positions of the flow)."""
        cdef int32_t n
        while first != NONE:
            n, first = first, self.items[first].next_position
            self.items[n].flow = NONE
            self.items[n].next_position = self.first_free
            self.first_free = n

    cdef int64_t lift_of(self, int32_t node, int32_t cls, int32_t pool) noexcept:
        """Return the lift in a pool of positions of a class that wait at a node. Expected O(1)."""
        cdef int32_t at = self.lift_places.get(<uint64_t>node, <uint64_t>(cls * POOLS_MAX + pool))
        return 0 if at == NONE else self.lifts[at]

    cdef int add_lift(self, int32_t node, int32_t cls, int32_t pool, int64_t more) except -1:
        """Lift those that wait at a node by so much more. Expected O(1)."""
        cdef uint64_t lo = <uint64_t>(cls * POOLS_MAX + pool)
        cdef int32_t at = self.lift_places.get(<uint64_t>node, lo), size
        if at == NONE:
            if self.lift_count == self.lift_size:
                size = larger(self.lift_size, 0)
                self.lifts = <int64_t*>grow(
                    self.lifts, self.lift_size, size, sizeof(int64_t)
                )
                self.lift_size = size
            at = self.lift_count
            self.lift_places.put(<uint64_t>node, lo, at)
            self.lift_count += 1
        self.lifts[at] = min(self.lifts[at] + more, VTC_MAX)
        return 0

    cdef inline bint counts(self, int32_t pool, int32_t served_in) noexcept:
        """Return whether service in one pool counts in another."""
        if pool == served_in:
            return True
        if served_in < NONE:
            if self.domain == DOMAIN_MODEL:
                return remote_pool(self.model[pool]) == served_in
            return self.domain == DOMAIN_ALL
        if self.domain == DOMAIN_MODEL:
            return self.model[pool] == self.model[served_in]
        return self.domain == DOMAIN_ALL
