# Places in the queue that outlive a leader.
#
# A leader sends the members that follow it which requests wait, and since when. The next leader
# knows them by a keyed hash of principal, tenant and request id. It gives such a request, when its
# client asks again, the place that it had. A client states nothing, so it can claim nothing.
#
# The records stand by the number of the request's record. Followers know a place by a number of its
# own, because records also hold leases and answers: so places take bounded memory at a follower.

cdef enum:
    PLACES_MAX = 100_000  # that followers get; further requests lose theirs
    PLACES_SHIFT = 1 << 20  # more than there can be former places

cdef int64_t WAITED_MAX_NS = <int64_t>1 << 50  # its us times PLACES_SHIFT fit an int64

# A queued request has one while it waits, and until followers know that it waits no more.
ctypedef struct Place:
    Hash128 key
    int64_t since_ns  # when it arrived, here or at a leader before
    int32_t number  # number for its followers; 0: they do not know it


@cython.final
cdef class Places:
    cdef bint is_kept
    cdef Place* items
    cdef int32_t size
    cdef DirtyQueue changed
    cdef list free_numbers
    cdef int32_t numbers  # that were given out, ever
    cdef Table former  # places of the earlier leader, until each is taken or their time is over
    cdef int64_t* arrivals_ns  # arrivals of these, by this core's clock
    cdef int32_t former_count, taken
    cdef int64_t began_ns, until_ns

    def __cinit__(self):
        self.changed, self.former, self.free_numbers = DirtyQueue(), Table(), []

    def __dealloc__(self):
        free(self.items)
        free(self.arrivals_ns)

    cdef int note(self, int32_t i, const Hash128* key, int64_t since_ns) except -1:
        """Note that request i is queued. O(1); the array grows once beyond 4,096 requests."""
        cdef int32_t size
        cdef Place* items
        if i >= self.size:
            # Pages of a large array are touched as they are used.
            size = larger(self.size, i)
            items = <Place*>calloc(<size_t>size, sizeof(Place))
            if items == NULL:
                raise MemoryError()
            if self.size:
                memcpy(items, self.items, <size_t>self.size * sizeof(Place))
            free(self.items)
            self.items, self.size = items, size
        self.changed.reserve(i + 1)
        self.items[i].key, self.items[i].since_ns = key[0], since_ns
        self.changed.mark(i)
        return 0

    cdef inline void left(self, int32_t i) noexcept:
        """Note that a request is not queued any more. O(1)."""
        if i < self.size:
            self.changed.mark(i)

    cdef object row(self, int32_t i, bint is_queued, int64_t now_ns):
        """Return the row of request i for followers: number, key (b"": it waits no more), and its
        wait; None: they need none. O(1)."""
        cdef Place* p = &self.items[i]
        cdef int32_t number = p.number
        if not is_queued:
            if number == 0:
                return None
            p.number = 0
            self.free_numbers.append(number)
            return number, b"", 0
        if number == 0:
            if self.free_numbers:
                number = self.free_numbers.pop()
            elif self.numbers < PLACES_MAX:
                self.numbers += 1
                number = self.numbers
            else:
                return None
            p.number = number
        return number, (<const char*>&p.key)[:sizeof(Hash128)], now_ns - p.since_ns

    cdef int begin(self, int64_t now_ns, int64_t until_ns, int32_t count) except -1:
        """Expect requests of an earlier leader until then. O(1)."""
        self.is_kept = self.changed.on = True
        self.began_ns, self.until_ns = now_ns, until_ns
        self.arrivals_ns = <int64_t*>grow(NULL, 0, max(1, count), sizeof(int64_t))
        return 0

    cdef int expect(self, const Hash128* key, int64_t waited_ns) except -1:
        """Keep the place of a request of the earlier leader. O(1)."""
        if self.former.get(key.hi, key.lo) != NONE:
            return 0
        self.arrivals_ns[self.former_count] = self.began_ns - waited_ns
        self.former.put(key.hi, key.lo, self.former_count)
        self.former_count += 1
        return 0

    cdef inline int64_t waited_ns(self, const Hash128* key, int64_t now_ns) noexcept:
        """Return for how long a request has waited since it arrived at the earlier leader; 0: it
        keeps no place. O(1)."""
        cdef int32_t k
        if self.former_count == 0 or now_ns >= self.until_ns:
            return 0
        k = self.former.get(key.hi, key.lo)
        return 0 if k == NONE else now_ns - self.arrivals_ns[k]

    cdef int64_t take(self, const Hash128* key) noexcept:
        """Take the place that `waited_ns()` found: a number below those of all arrivals of this
        term, in the order of the waits. O(1)."""
        cdef int32_t k = self.former.get(key.hi, key.lo)
        self.former.remove(key.hi, key.lo)
        self.taken += 1
        return (
            ((self.arrivals_ns[k] - self.began_ns) // 1000 - 1) * PLACES_SHIFT + self.taken
        )
