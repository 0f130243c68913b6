# Priority classes above the fair layer, and lines whose entries wait by class.
#
# Strict priority: of the classes with entries in the line, the one of the least rank is served
# first, and an exempt one before all others. Ageing keeps a class from starving. A class that has
# been in a line for its ageing time without being served is served next, once, even before better
# ones. It never overtakes an exempt one, and at most every second service is by age. So a class
# that waits is served about once in its ageing time, and delays a better one by one request then.
#
# No limit that is configured for the other classes binds an exempt class: no quota, no headroom, no
# share, no bound that their requests and leases have used up. It needs only an engine with room.

cdef enum:
    CLASSES_MAX = 16  # twice what a configuration may have: those that are gone keep their place
    RANK_MAX = 1_000
    EXEMPT_PRIORITY = -1 - RANK_MAX

cdef int64_t AGEING_NS = 5_000_000_000  # unless the configuration says otherwise

ctypedef struct Class:
    int64_t ageing_ns
    int64_t aged  # grants that overtook better classes
    int32_t rank  # the least goes first
    bint exempt
    bint gone  # no request may name it any more


@cython.final
cdef class Classes:
    cdef Class items[CLASSES_MAX]
    cdef int32_t order[CLASSES_MAX]  # best first
    cdef int32_t place[CLASSES_MAX]  # each class's place in that order
    cdef int32_t count
    cdef list names

    def __cinit__(self):
        self.names = []
        self.set(b"default", 0, AGEING_NS, False)

    cdef int32_t set(self, bytes name, int32_t rank, int64_t ageing_ns, bint exempt) except -1:
        """Add a class, or change a known one. O(classes)."""
        cdef int32_t c = self.find(name)
        if c != NONE and self.items[c].gone and self.items[c].exempt != exempt:
            self.names[c] = b""  # another one of that name
            c = NONE
        if c == NONE:
            c = self._place(name, exempt)
        if self.items[c].exempt != exempt:
            invalid("exempt", f"class {name.decode()!r} cannot change this while it runs")
        self.items[c].rank, self.items[c].ageing_ns = rank, ageing_ns
        self.items[c].gone = False
        self._sort()
        return c

    cdef int32_t _place(self, bytes name, bint exempt) except -1:
        # A class that is gone gives its place, and what still waits there, to a new one.
        cdef int32_t c
        for c in range(self.count):
            if self.items[c].gone and self.items[c].exempt == exempt:
                self.names[c] = name
                return c
        if self.count == CLASSES_MAX:
            raise CallerError(
                CODE_RESOURCE_EXHAUSTED, "classes", f"at most {CLASSES_MAX} classes"
            )
        self.names.append(name)
        self.items[self.count].exempt = exempt
        self.count += 1
        return self.count - 1

    cdef void _sort(self) noexcept:
        # Insertion sort; ties go by number.
        cdef int32_t c, k
        for c in range(self.count):
            k = c
            while k > 0 and self.priority(c) < self.priority(self.order[k - 1]):
                self.order[k] = self.order[k - 1]
                k -= 1
            self.order[k] = c
        for k in range(self.count):
            self.place[self.order[k]] = k

    cdef int32_t find(self, bytes name) except -2:
        """Return the index of a name, -1: there is no such class. O(classes)."""
        return <int32_t>self.names.index(name) if name in self.names else NONE

    cdef int32_t find_slice(self, const uint8_t* at, int64_t size) noexcept:
        """Return the same for bytes of a message; a class that is gone is not found."""
        cdef int32_t c
        cdef bytes name
        for c in range(self.count):
            name = <bytes>self.names[c]
            if PyBytes_GET_SIZE(name) == size and not self.items[c].gone:
                if memcmp(PyBytes_AS_STRING(name), at, size) == 0:
                    return c
        return NONE

    cdef inline int32_t priority(self, int32_t c) noexcept:
        """Return the priority for an engine that has priorities: less runs first."""
        return EXEMPT_PRIORITY if self.items[c].exempt else self.items[c].rank

    cdef inline bint goes_before(self, int32_t a, int32_t b) noexcept:
        return self.place[a] < self.place[b]

    cdef int32_t best_priority(self) noexcept:
        """Return the priority of the best class that is not exempt. O(classes)."""
        cdef int32_t k
        for k in range(self.count):
            if not self.items[self.order[k]].exempt:
                return self.items[self.order[k]].rank
        return 0


@cython.final
cdef class Line:
    """Holds entries that wait for the same thing, in a heap for each class. Ids are numbered by
    class."""

    cdef Classes classes
    cdef list heaps  # keeps them
    cdef int32_t count  # over all classes
    cdef bint aged  # ageing brought forward the entry that it served last
    cdef void* heap_at[CLASSES_MAX]  # the heaps: events read some, and a list is two loads more
    cdef int64_t since_ns[CLASSES_MAX]  # when a class came, or was last served

    def __cinit__(self, Classes classes):
        cdef int32_t c
        self.classes = classes
        self.heaps = [Heap() for _ in range(CLASSES_MAX)]
        for c in range(CLASSES_MAX):
            self.heap_at[c] = <void*>self.heaps[c]

    cdef inline Heap heap(self, int32_t c):
        return <Heap>self.heap_at[c]

    cdef inline bint has(self, int32_t c, int32_t id) noexcept:
        return (<Heap>self.heap_at[c]).has(id)

    cdef int put(self, int32_t c, int32_t id, int64_t key, int64_t tie, int64_t now_ns) except -1:
        """Add an entry to a class, or give it another place there. O(log n)."""
        cdef Heap heap = <Heap>self.heap_at[c]
        if heap.count == 0:
            self.since_ns[c] = now_ns
        if not heap.has(id):
            self.count += 1
        return heap.put(id, key, tie)

    cdef void remove(self, int32_t c, int32_t id) noexcept:
        """Remove an entry if it is there. O(log n)."""
        cdef Heap heap = <Heap>self.heap_at[c]
        self.count -= heap.has(id)
        heap.remove(id)

    cdef inline int64_t due_ns(self, int32_t c) noexcept:
        """Return when a class that is here overtakes better ones."""
        return self.since_ns[c] + self.classes.items[c].ageing_ns

    cdef int32_t best(self) noexcept:
        """Return the best class that is here; -1: none is. O(classes)."""
        cdef int32_t k
        for k in range(self.classes.count):
            if (<Heap>self.heap_at[self.classes.order[k]]).count:
                return self.classes.order[k]
        return NONE

    cdef int32_t first(self, int64_t now_ns) noexcept:
        """Return the class that is served next; -1: the line is empty. O(classes)."""
        cdef int32_t k, c, best = self.best(), first = best
        cdef int64_t due_ns = now_ns + 1
        if (
            best == NONE
            or (<Heap>self.heap_at[best]).count == self.count
            or self.aged
            or self.classes.items[best].exempt
        ):
            return best
        for k in range(self.classes.count):
            c = self.classes.order[k]
            if c != best and (<Heap>self.heap_at[c]).count and self.due_ns(c) < due_ns:
                first, due_ns = c, self.due_ns(c)
        return first

    cdef bint holds_up(self, int32_t cls, int64_t now_ns) noexcept:
        """Return whether an entry of a class that is not here would wait for others. O(classes)."""
        cdef int32_t c
        for c in range(self.classes.count):
            if (<Heap>self.heap_at[c]).count:
                if self.classes.goes_before(c, cls):
                    return True
                if self.due_ns(c) <= now_ns and not (
                    self.aged or self.classes.items[cls].exempt
                ):
                    return True
        return False

    cdef int64_t next_due_ns(self, int32_t first, int64_t now_ns) noexcept:
        """Return when another class than the first may become it because of its age; -1: not to
        come. O(classes)."""
        cdef int32_t c
        cdef int64_t next_ns = NONE
        if (<Heap>self.heap_at[first]).count == self.count:
            return NONE
        for c in range(self.classes.count):
            if c != first and (<Heap>self.heap_at[c]).count and self.due_ns(c) > now_ns:
                next_ns = self.due_ns(c) if next_ns == NONE else min(next_ns, self.due_ns(c))
        return next_ns

    cdef void served(self, int32_t c, int64_t now_ns) noexcept:
        """An entry of a class is served next. O(classes)."""
        cdef int32_t best = self.best()
        self.since_ns[c] = now_ns
        self.aged = best != NONE and self.classes.goes_before(best, c)
