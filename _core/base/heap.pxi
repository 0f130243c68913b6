# Indexed 4-ary min-heap by (key, tie): the least element in O(1), any element moved or removed by
# its id in O(log n). Four children a node halve the depth and share a cache line. Keys lie in the
# nodes, so that sifting touches no other memory. They are packed, because each request has one.

ctypedef packed struct Node:
    int64_t key
    int64_t tie
    int32_t id


cdef inline bint less(const Node* a, const Node* b) noexcept nogil:
    return a.key < b.key or (a.key == b.key and a.tie < b.tie)


cdef inline bint is_less(int64_t key, int64_t tie, const Node* b) noexcept nogil:
    return key < b.key or (key == b.key and tie < b.tie)


cdef inline bint is_greater(int64_t key, int64_t tie, const Node* b) noexcept nogil:
    return key > b.key or (key == b.key and tie > b.tie)


cdef inline bint less_by(Node* a, Node* b, int64_t shift) noexcept nogil:
    """Return whether a is less with a shift added to its key."""
    return a.key + shift < b.key or (a.key + shift == b.key and a.tie < b.tie)


@cython.final
cdef class Heap:
    cdef Node* nodes
    cdef int32_t* places  # id -> index in nodes, plus one; 0: not in the heap
    cdef int32_t count
    cdef int32_t nodes_max
    cdef int32_t ids_max, places_max  # ids below ids_max have a place; room of the array

    def __dealloc__(self):
        free(self.nodes)
        free(self.places)

    cdef inline bint has(self, int32_t id) noexcept:
        return id < self.ids_max and self.places[id] != 0

    cdef inline int64_t key_of(self, int32_t id) noexcept:
        """Return the key of an id that it has. O(1)."""
        return self.nodes[self.places[id] - 1].key

    cdef inline const Node* entry(self, int32_t id) noexcept:
        """Return the entry of an id that it has. O(1)."""
        return &self.nodes[self.places[id] - 1]

    cdef inline void prefetch(self, int32_t id) noexcept:
        """Fetch the place of an id that is put soon."""
        if 0 <= id < self.ids_max:
            prefetch_line(&self.places[id])

    cdef void rekey_first(self, int64_t key) noexcept:
        """Give the first entry a greater key. O(log n)."""
        self._down(0, self.nodes[0].id, key, self.nodes[0].tie)

    cdef int put(self, int32_t id, int64_t key, int64_t tie) except -1:
        """Insert id, or give it another key. O(log n)."""
        cdef int32_t at, size
        if id >= self.ids_max:
            self._reach(id)
        at = self.places[id] - 1
        if at < 0:
            if self.count == self.nodes_max:
                size = larger(self.nodes_max, 0)
                self.nodes = <Node*>extend(self.nodes, size, sizeof(Node))
                self.nodes_max = size
            at = self.count
            self.count += 1
            self._up(at, id, key, tie)
        elif is_less(key, tie, &self.nodes[at]):
            self._up(at, id, key, tie)
        else:
            self._down(at, id, key, tie)
        return 0

    cdef int _reach(self, int32_t id) except -1:
        # Ids come about in their order: so a few places at a time are written for the first time.
        cdef int32_t size
        if id >= self.places_max:
            size = larger(self.places_max, id)
            self.places = <int32_t*>extend(self.places, size, sizeof(int32_t))
            self.places_max = size
        memset(&self.places[self.ids_max], 0, (id + 1 - self.ids_max) * sizeof(int32_t))
        self.ids_max = id + 1
        return 0

    cdef void remove(self, int32_t id) noexcept:
        """Remove id if it is there. O(log n)."""
        cdef int32_t at
        cdef const Node* last
        if not self.has(id):
            return
        at = self.places[id] - 1
        self.places[id] = 0
        self.count -= 1
        if at == self.count:
            return
        last = &self.nodes[self.count]
        if less(last, &self.nodes[at]):
            self._up(at, last.id, last.key, last.tie)
        else:
            self._down(at, last.id, last.key, last.tie)

    # The fields of an entry go by value and not as a Node: a packed struct that was just written
    # field by field is read back only when all of it has left the processor's store buffer.

    cdef inline void _set(self, int32_t at, int32_t id, int64_t key, int64_t tie) noexcept:
        self.nodes[at].key, self.nodes[at].tie, self.nodes[at].id = key, tie, id
        self.places[id] = at + 1

    cdef inline void _shift(self, int32_t at, int32_t source) noexcept:
        self.nodes[at] = self.nodes[source]
        self.places[self.nodes[source].id] = at + 1

    cdef void _up(self, int32_t at, int32_t id, int64_t key, int64_t tie) noexcept:
        cdef int32_t parent
        while at > 0:
            parent = (at - 1) >> 2
            if not is_less(key, tie, &self.nodes[parent]):
                break
            self._shift(at, parent)
            at = parent
        self._set(at, id, key, tie)

    cdef void _down(self, int32_t at, int32_t id, int64_t key, int64_t tie) noexcept:
        cdef int32_t child, best, end
        while True:
            child = (at << 2) + 1
            if child >= self.count:
                break
            end = min(child + 4, self.count)
            best = child
            child += 1
            while child < end:
                if less(&self.nodes[child], &self.nodes[best]):
                    best = child
                child += 1
            if not is_greater(key, tie, &self.nodes[best]):
                break
            self._shift(at, best)
            at = best
        self._set(at, id, key, tie)

    cdef bint valid(self) noexcept:
        """Return whether order and places hold. O(n)."""
        cdef int32_t i
        for i in range(self.count):
            if i > 0 and less(&self.nodes[i], &self.nodes[(i - 1) >> 2]):
                return False
            if self.places[self.nodes[i].id] != i + 1:
                return False
        return True


cdef inline int64_t earlier(int64_t a, int64_t b) noexcept nogil:
    """Return the earlier of two times; -1 stands for none."""
    if a < 0 or b < 0:
        return max(a, b)
    return min(a, b)


cdef inline int64_t first_key(void* heap, int64_t other) noexcept:
    """Return the lesser of a Heap's least key and another one, of which -1 stands for none. The
    Heap is borrowed: counting references costs more than the rest."""
    if (<Heap>heap).count == 0 or 0 <= other <= (<Heap>heap).nodes[0].key:
        return other
    return (<Heap>heap).nodes[0].key


cdef enum:
    LOOKAHEAD = 8  # heads of flows that are looked at


cdef int32_t best_first(
    Heap own, Heap free, int64_t shift, int32_t* found, bint* found_free, int32_t taken
) noexcept:
    """Find the first ids of two heaps together, with a shift added to the keys of the second, and
    which are of the second: those behind the ones that were taken, LOOKAHEAD at most with them.
    O(LOOKAHEAD^2)."""
    cdef Node* open[4 * LOOKAHEAD + 2]  # candidates for the next place
    cdef bint is_free[4 * LOOKAHEAD + 2]
    cdef Node* base
    cdef int32_t count = 0, k, best, at, child, size
    if own.count:
        open[count], is_free[count] = own.nodes, False
        count += 1
    if free.count:
        open[count], is_free[count] = free.nodes, True
        count += 1
    while count and taken < LOOKAHEAD:
        best = 0
        for k in range(1, count):
            if less_by(open[k], open[best], shift * (is_free[k] - is_free[best])):
                best = k
        base, size = (free.nodes, free.count) if is_free[best] else (own.nodes, own.count)
        at = <int32_t>(open[best] - base)
        found[taken], found_free[taken] = open[best].id, is_free[best]
        taken += 1
        count -= 1
        k = is_free[best]
        open[best], is_free[best] = open[count], is_free[count]
        for child in range(4 * at + 1, min(4 * at + 5, size)):
            open[count], is_free[count] = &base[child], k
            count += 1
    return taken
