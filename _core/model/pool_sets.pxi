# Sets of pools that requests name: such a request runs in any pool of its set.
#
# Targets have numbers: -1 stands for any pool, then come the pools, and from POOLS_MAX on the sets.
# A set is in use while a queued request names it. One that is not keeps its number until a new set
# needs it, so what an event has to say of a request that it refused can still be said.
#
# A request has an entry in the line of each pool of its set, so a set has at most SET_POOLS_MAX. A
# router names few sets, as many as it has models. So at most SETS_MAX are in use, and a flow may
# name FLOW_SETS_MAX.

cdef enum:
    SETS_MAX = 1_024
    FLOW_SETS_MAX = 16  # that the queued requests of a flow may name

ctypedef struct PoolSet:
    IndexSet members
    int32_t pools[SET_POOLS_MAX]  # ascending
    int32_t count
    int32_t users  # queued requests that name it
    int32_t next_unused, prev_unused
    uint64_t hi, lo  # its key among the sets


cdef inline bint is_set(int32_t target) noexcept nogil:
    """Return whether a target is a set of several pools. O(1)."""
    return target >= POOLS_MAX


cdef inline bint is_one_pool(int32_t target) noexcept nogil:
    return 0 <= target < POOLS_MAX


@cython.final
cdef class PoolSets:
    cdef PoolSet* items
    cdef int32_t count, size
    cdef int32_t used  # sets in use
    cdef Table numbers
    cdef int32_t first_unused, last_unused  # those that are not, the least recently used first
    cdef int32_t of_pool[POOLS_MAX]  # sets in use that have a pool

    def __cinit__(self):
        self.numbers = Table()
        self.first_unused = self.last_unused = NONE

    def __dealloc__(self):
        free(self.items)

    cdef inline PoolSet* of(self, int32_t target) noexcept:
        return &self.items[target - POOLS_MAX]

    cdef inline int32_t line_count(self, int32_t queue_target) noexcept:
        """Return in how many lines a queue stands, by its target, which is one more than that of
        its requests. O(1)."""
        return self.of(queue_target - 1).count if queue_target > POOLS_MAX else 1

    cdef inline int32_t line_at(self, int32_t queue_target, int32_t k) noexcept:
        """Return the number of one of these lines. O(1)."""
        if queue_target > POOLS_MAX:
            return self.of(queue_target - 1).pools[k] + 1
        return queue_target

    cdef int32_t target_of(self, const IndexSet* members, int32_t pools) except -2:
        """Return the target that stands for several pools, whose numbers are below `pools`; -1: all
        sets are in use. O(pools)."""
        cdef uint64_t hi = 0, lo = NAME_SALT
        cdef int32_t n, pool, words = (pools + 63) >> 6
        cdef PoolSet* s
        for n in range(words):
            if members.words[n]:
                hi = mix(mix(hi, <uint64_t>n), members.words[n])
                lo = mix(mix(lo, members.words[n]), <uint64_t>n)
        n = self.numbers.get(hi, lo)
        if n != NONE:
            for pool in range(words):
                if self.items[n].members.words[pool] != members.words[pool]:
                    return NONE
            return POOLS_MAX + n
        n = self._free_number()
        if n == NONE:
            return NONE
        s = &self.items[n]
        memset(s, 0, sizeof(PoolSet))
        s.hi, s.lo = hi, lo
        for pool in range(pools):
            if set_has(members, pool):
                set_add(&s.members, pool)
                s.pools[s.count] = pool
                s.count += 1
        self.numbers.put(hi, lo, n)
        self._add_unused(n)
        return POOLS_MAX + n

    cdef int32_t _free_number(self) except -2:
        # A new one, else that of the set which was used least recently.
        cdef int32_t n = self.first_unused, size
        if self.count < SETS_MAX:
            if self.count == self.size:
                size = min(larger(self.size, 0), <int32_t>SETS_MAX)
                self.items = <PoolSet*>extend(self.items, size, sizeof(PoolSet))
                self.size = size
            self.count += 1
            return self.count - 1
        if n != NONE:
            self._remove_unused(n)
            self._drop(n)
        return n

    cdef void _drop(self, int32_t n) noexcept:
        if self.items[n].count:
            self.numbers.remove(self.items[n].hi, self.items[n].lo)
        self.items[n].count = 0
        memset(&self.items[n].members, 0, sizeof(IndexSet))

    cdef void _add_unused(self, int32_t n) noexcept:
        self.items[n].next_unused, self.items[n].prev_unused = NONE, self.last_unused
        if self.last_unused == NONE:
            self.first_unused = n
        else:
            self.items[self.last_unused].next_unused = n
        self.last_unused = n

    cdef void _remove_unused(self, int32_t n) noexcept:
        cdef int32_t before = self.items[n].prev_unused, after = self.items[n].next_unused
        if before == NONE:
            self.first_unused = after
        else:
            self.items[before].next_unused = after
        if after == NONE:
            self.last_unused = before
        else:
            self.items[after].prev_unused = before

    cdef void hold(self, int32_t target) noexcept:
        """A request that names a set is queued. O(1), for the first O(pools of the set)."""
        cdef PoolSet* s = self.of(target)
        cdef int32_t k
        s.users += 1
        if s.users == 1:
            self._remove_unused(target - POOLS_MAX)
            self.used += 1
            for k in range(s.count):
                self.of_pool[s.pools[k]] += 1

    cdef void let_go(self, int32_t target) noexcept:
        """It is not queued any more. O(1), for the last O(pools of the set)."""
        cdef PoolSet* s = self.of(target)
        cdef int32_t k
        s.users -= 1
        if s.users == 0:
            self._add_unused(target - POOLS_MAX)
            self.used -= 1
            for k in range(s.count):
                self.of_pool[s.pools[k]] -= 1

    cdef void forget(self, int32_t pool) noexcept:
        """The number of a pool that no set in use has goes to another pool: no set may have it.
        O(sets)."""
        cdef int32_t n
        for n in range(self.count):
            if self.items[n].users == 0 and set_has(&self.items[n].members, pool):
                self._drop(n)
