# Which pools a dispatch looks at, and in what order: the emptiest first, ties by their number.
#
# A pool is calm if another look at it changes nothing, however late, until something touches it:
# it has no next request, and its level of load stands. Unless something waits that may run
# anywhere, a dispatch leaves out calm pools. So an event costs what the pools that it concerns
# cost, and not what all cost. Code that changes what a look at a pool depends on touches the pool.
#
# A pool rests if something waits, none of it may run there now, and another look changes nothing
# before a time that is known, see rest.pxi. A dispatch leaves out pools that rest, also while
# something waits that may run anywhere. Several pools depend on the line, and on what outputs
# taught: a change of these stirs all pools that rest. Most charges leave the line as pools saw it,
# so that only a charge of a flow that is watched stirs them.

@cython.final
cdef class PoolOrder:
    cdef MinTree open  # pools by what is promised; those served in vain leave it in first_open()
    cdef MinTree restless  # pools that are not calm and were not served in vain
    cdef MinTree resting  # pools that rest, by the time at which that ends
    cdef IndexSet calm, touched, served
    cdef int32_t touched_list[POOLS_MAX]
    cdef int32_t served_list[POOLS_MAX]  # in vain
    cdef int32_t touched_count, served_count
    cdef int32_t asleep  # resting pools that were not looked at in this round
    cdef bint stirred  # all that rest have to be looked at
    cdef int64_t watch  # the mark of flows that are watched; they are not any more once it grows

    def __cinit__(self):
        self.open, self.restless, self.resting = MinTree(), MinTree(), MinTree()
        self.watch = 1

    cdef inline void touch(self, int32_t pool) noexcept:
        """Have a pool looked at again. O(1)."""
        if not set_has(&self.touched, pool):
            set_add(&self.touched, pool)
            self.touched_list[self.touched_count] = pool
            self.touched_count += 1

    cdef inline int32_t ahead(self) noexcept:
        """Return the pool that is probably looked at next; -1: none is. O(1)."""
        if self.touched_count:
            return self.touched_list[self.touched_count - 1]
        return self.open.first()

    cdef int refresh(self, int32_t pool, int64_t promised_ppm) except -1:
        """Take up a pool that was touched, or whose rest is over. O(log pools)."""
        set_remove(&self.calm, pool)
        if self.resting.has(pool):
            self.resting.remove(pool)
            self.asleep -= not set_has(&self.served, pool)
        if set_has(&self.served, pool):
            return 0
        self.open.put(pool, promised_ppm)
        return self.restless.put(pool, promised_ppm)

    cdef int leave(self, int32_t pool, bint is_calm, int64_t rests_until_ns) except -1:
        """Leave a pool out until `open_again()`: it grants nothing. It may rest after that; -1: it
        does not. O(log pools)."""
        if is_calm:
            set_add(&self.calm, pool)
        else:
            set_remove(&self.calm, pool)
        set_add(&self.served, pool)
        self.served_list[self.served_count] = pool
        self.served_count += 1
        self.restless.remove(pool)
        return self.resting.put(pool, rests_until_ns) if rests_until_ns != NONE else 0

    cdef inline bint is_asleep(self, int32_t pool) noexcept:
        """Return whether a pool rests, and was not looked at in this round. O(1)."""
        return self.resting.has(pool) and not set_has(&self.served, pool)

    cdef inline bint is_open(self, int32_t pool) noexcept:
        """Return whether the dispatch has not served a pool in vain yet. O(1)."""
        return self.open.has(pool) and not set_has(&self.served, pool)

    cdef int32_t first_open(self) noexcept:
        """Return the emptiest pool that is not left out; -1: none. O(log pools) amortised. Few
        events ask, so those that are left out are removed here and not when they are."""
        cdef int32_t pool = self.open.first()
        while pool != NONE and set_has(&self.served, pool):
            self.open.remove(pool)
            pool = self.open.first()
        return pool

    cdef int open_again(self, int32_t pool, int64_t promised_ppm) except -1:
        """Let a pool that was left out be looked at again, unless it rests. O(log pools)."""
        set_remove(&self.served, pool)
        if self.resting.has(pool):
            self.open.remove(pool)
            self.asleep += 1
            return 0
        self.open.put(pool, promised_ppm)
        if not set_has(&self.calm, pool):
            self.restless.put(pool, promised_ppm)
        return 0
