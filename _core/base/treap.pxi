# A search tree over queued requests by (deadline, arrival): the place of one, the work before one.
#
# A treap (Seidel and Aragon, "Randomized search trees", 1996): a heap, too, by a hash of the
# arrival number. The hash is keyed like all hashes of the process, so that a caller who chooses
# deadlines cannot choose the depth. That is O(log n) as expected, and the same in a replay. All
# trees share one array by the requests' indices; a tree is known by its root.

# A large array begins 16 bytes into a line of the processor's cache, so of each record the first 48
# are in one: all that the way down a tree touches.
ctypedef struct Branch:
    int32_t left, right, up
    int32_t count  # nodes in this subtree
    int64_t key, seq
    int64_t work  # work of this subtree
    int64_t oldest_ns  # the first arrival of these
    int64_t arrival_ns
    uint32_t rank  # not less than its parent's
    int32_t own_work


@cython.final
cdef class Treaps:
    cdef Branch* items
    cdef int32_t size
    cdef uint64_t salt

    def __dealloc__(self):
        free(self.items)

    cdef inline bint less(self, const Branch* a, const Branch* b) noexcept:
        return a.key < b.key or (a.key == b.key and a.seq < b.seq)

    cdef int32_t insert(
        self, int32_t root, int32_t i, int64_t key, int64_t seq, int32_t work,
        int64_t arrival_ns,
    ) except -2:
        """Insert request i into a tree; returns its root. O(log n) expected."""
        cdef int32_t at = root, size
        cdef Branch* b
        cdef Branch* a
        if i >= self.size:
            size = larger(self.size, i)
            self.items = <Branch*>extend(self.items, size, sizeof(Branch))
            self.size = size
        b = &self.items[i]
        b.key, b.seq = key, seq
        b.own_work, b.arrival_ns = work, arrival_ns
        b.rank = <uint32_t>mix(self.salt, <uint64_t>seq)
        b.left = b.right = b.up = NONE
        while at != NONE:
            b.up = at
            a = &self.items[at]
            a.count += 1
            a.work += b.own_work
            a.oldest_ns = min(a.oldest_ns, b.arrival_ns)
            at = a.left if self.less(b, a) else a.right
        if b.up != NONE:
            if self.less(b, &self.items[b.up]):
                self.items[b.up].left = i
            else:
                self.items[b.up].right = i
        self._sum(i)
        while b.up != NONE and b.rank < self.items[b.up].rank:
            self._lift(i)
        return i if b.up == NONE else root

    cdef int32_t remove(self, int32_t root, int32_t i) noexcept:
        """Take request i out of its tree; returns the root, -1: it is empty. O(log n) expected."""
        cdef Branch* b = &self.items[i]
        cdef int32_t child
        while b.left != NONE and b.right != NONE:
            child = b.left
            if self.items[b.right].rank < self.items[child].rank:
                child = b.right
            self._lift(child)
            root = child if root == i else root
        child = b.right if b.left == NONE else b.left
        if child != NONE:
            self.items[child].up = b.up
        if b.up == NONE:
            return child
        self._replace(b.up, i, child)
        self._subtract(b)
        return root

    cdef int32_t first(self, int32_t root) noexcept:
        """Return the first of a tree that is not empty. O(log n) expected."""
        while self.items[root].left != NONE:
            root = self.items[root].left
        return root

    cdef int32_t before(self, int32_t i) noexcept:
        """Return the request that is next before i; -1: none. O(log n) expected."""
        cdef int32_t at = self.items[i].left
        if at != NONE:
            while self.items[at].right != NONE:
                at = self.items[at].right
            return at
        while self.items[i].up != NONE and self.items[self.items[i].up].left == i:
            i = self.items[i].up
        return self.items[i].up

    cdef int32_t place(self, int32_t i) noexcept:
        """Return how many are before i. O(log n) expected."""
        cdef int32_t count = self._count(self.items[i].left), up = self.items[i].up
        while up != NONE:
            if self.items[up].right == i:
                count += 1 + self._count(self.items[up].left)
            i, up = up, self.items[up].up
        return count

    cdef int64_t work_until(self, int32_t root, int64_t key) noexcept:
        """Return the work of all whose deadline is this one or earlier. O(log n) expected."""
        cdef int64_t work = 0
        while root != NONE:
            if self.items[root].key > key:
                root = self.items[root].left
                continue
            work += self.items[root].own_work
            if self.items[root].left != NONE:
                work += self.items[self.items[root].left].work
            root = self.items[root].right
        return work

    cdef int64_t work_before(self, int32_t i) noexcept:
        """Return the work of all before i. O(log n) expected."""
        cdef int32_t up = self.items[i].up
        cdef int64_t work = self._work(self.items[i].left)
        while up != NONE:
            if self.items[up].right == i:
                work += self.items[up].own_work + self._work(self.items[up].left)
            i, up = up, self.items[up].up
        return work

    cdef inline int64_t _work(self, int32_t i) noexcept:
        return 0 if i == NONE else self.items[i].work

    cdef inline int32_t _count(self, int32_t i) noexcept:
        return 0 if i == NONE else self.items[i].count

    cdef void _sum(self, int32_t i) noexcept:
        cdef Branch* b = &self.items[i]
        b.count, b.work, b.oldest_ns = 1, b.own_work, b.arrival_ns
        self._add(b, b.left)
        self._add(b, b.right)

    cdef inline void _add(self, Branch* b, int32_t child) noexcept:
        if child != NONE:
            b.count += self.items[child].count
            b.work += self.items[child].work
            b.oldest_ns = min(b.oldest_ns, self.items[child].oldest_ns)

    cdef void _subtract(self, const Branch* b) noexcept:
        # It is no longer below those that were above it.
        cdef int32_t at = b.up
        cdef Branch* a
        while at != NONE:
            a = &self.items[at]
            a.count -= 1
            a.work -= b.own_work
            if a.oldest_ns == b.arrival_ns:  # it may have been the oldest
                self._sum(at)
            at = a.up

    cdef inline void _replace(self, int32_t up, int32_t i, int32_t other) noexcept:
        if self.items[up].left == i:
            self.items[up].left = other
        else:
            self.items[up].right = other

    cdef void _lift(self, int32_t i) noexcept:
        # A rotation: i changes places with its parent.
        cdef Branch* b = &self.items[i]
        cdef int32_t parent = b.up, inner
        cdef Branch* p = &self.items[parent]
        if p.left == i:
            inner = b.right
            p.left, b.right = inner, parent
        else:
            inner = b.left
            p.right, b.left = inner, parent
        if inner != NONE:
            self.items[inner].up = parent
        b.up, p.up = p.up, i
        if b.up != NONE:
            self._replace(b.up, parent, i)
        self._sum(parent)
        self._sum(i)

    cdef bint valid(self, int32_t i) noexcept:
        """Whether links, ranks and sums hold in i and below. O(n)."""
        cdef Branch* b
        cdef Branch was
        if i == NONE:
            return True
        b = &self.items[i]
        was = b[0]
        self._sum(i)
        return (
            was.count == b.count and was.work == b.work and was.oldest_ns == b.oldest_ns
            and self._holds(i, b.left) and self._holds(i, b.right)
        )

    cdef bint _holds(self, int32_t i, int32_t child) noexcept:
        cdef Branch* b = &self.items[i]
        cdef Branch* below
        if child == NONE:
            return True
        below = &self.items[child]
        return (
            below.up == i and below.rank >= b.rank and self.valid(child)
            and self.less(below, b) == (child == b.left)
        )
