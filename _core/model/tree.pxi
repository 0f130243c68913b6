# The tree of shares: organisations, teams, tenants. A group with a weight is a node.
#
# A node is a flow without requests of its own. In each class it has a counter, a weight and a
# family: its children, which are flows of tenants and further nodes. Siblings share what their node
# gets by their weights. So the same rules hold at each level: the least counter goes first, ties go
# by arrival; a child that becomes backlogged is lifted to the level of its family less the credit;
# the level never falls. A node is backlogged while a child is. Service of a tenant's flow is
# charged to each node above it, by the weight of that node.
#
# With several pools a node has a position in each of them, as a flow has, and a family has a level
# for each: what a node was served in all pools counts, and its children stand in each pool by their
# positions there, see local_position.pxi.
#
# A flow without a parent stands at the root, in the heaps of its class. In a family a child has a
# place, which numbers it in the family's heaps: they are no larger than the family.

cdef enum:
    TREE_LEVELS = QUOTA_DEPTH  # a tenant's flow and the nodes above it
    NARROW_WEIGHT = 1 << 23  # its product with NARROW_SERVICE is 2^63

cdef int64_t NARROW_SERVICE = <int64_t>1 << 40


@cython.final
cdef class Family:
    """Holds the children of a node in one class. The caller keeps the places that `add()` gives
    out."""

    cdef int32_t* members  # flow of each place; below -1: a free one, see `add()`
    cdef int32_t count, size, first_free
    cdef Heap no_line
    cdef Heap active  # places of children that have something queued, by counter
    cdef list lines  # for each target: places of children by the key and arrival of their heads
    cdef list anywhere  # for each pool, in its order: places whose heads may run in any
    cdef int64_t level
    cdef int64_t levels[POOLS_ORDERED]  # in each pool
    cdef int32_t positions[POOLS_ORDERED]  # the node's own in each pool; -1: it has none
    cdef int64_t recent_weight  # weight of children that are or were lately active; count
    cdef int32_t recent_count
    cdef int64_t queued_weight, deep_weight  # weight of children with a queued request; several
    cdef bint is_stale  # the node was charged and not placed since, see tree_lines.pxi
    cdef bint is_noted  # it is in the chain of those that `place_nodes()` places
    cdef int32_t next_stale  # in this chain, one for each depth; -1: none

    def __cinit__(self):
        self.first_free = NONE
        self.active, self.no_line, self.lines, self.anywhere = Heap(), Heap(), [], []
        self.forget_positions()

    def __dealloc__(self):
        free(self.members)

    cdef void forget_positions(self) noexcept:
        """The node has none any more. O(pools)."""
        cdef int32_t pool
        for pool in range(POOLS_ORDERED):
            self.positions[pool] = NONE

    cdef int32_t add(self, int32_t flow) except -1:
        """Give a child a place, a free one first. O(1) amortised."""
        cdef int32_t place = self.first_free
        if place != NONE:
            self.first_free = -2 - self.members[place]
        else:
            if self.count == self.size:
                self.size = larger(self.size, 0)
                self.members = <int32_t*>extend(self.members, self.size, sizeof(int32_t))
            place = self.count
            self.count += 1
        self.members[place] = flow
        return place

    cdef void leave(self, int32_t place) noexcept:
        """Free the place of a child that stands nowhere any more. O(1)."""
        self.members[place] = -2 - self.first_free
        self.first_free = place

    cdef inline Heap line(self, int32_t target):
        """Return the heap of a target; make it if there is none. O(1) amortised."""
        return <Heap>self.line_at(target)

    cdef inline void* line_at(self, int32_t target) except NULL:
        """Return the same heap, borrowed."""
        if <int32_t>len(self.lines) <= target:
            self._reach(target)
        return <void*>self.lines[target]

    cdef int _reach(self, int32_t target) except -1:
        while <int32_t>len(self.lines) <= target:
            self.lines.append(Heap())
        return 0

    cdef inline Heap line_of(self, int32_t target):
        """Return the same heap for reading; for a target without one, one that is always empty.
        O(1)."""
        if not 0 <= target < <int32_t>len(self.lines):
            return self.no_line
        return <Heap>self.lines[target]

    cdef Heap free_line(self, int32_t pool):
        """Return the heap, in the order of a pool, of children whose heads may run in any; make it
        if there is none. O(1) amortised."""
        while <int32_t>len(self.anywhere) <= pool:
            self.anywhere.append(Heap())
        return <Heap>self.anywhere[pool]

    cdef inline Heap free_line_of(self, int32_t pool):
        """Return the same heap for reading. O(1)."""
        if pool >= <int32_t>len(self.anywhere):
            return self.no_line
        return <Heap>self.anywhere[pool]

    cdef inline bint stands_in(self, int32_t pool) noexcept:
        """Return whether a child is in a line of a pool, and so the node. O(1)."""
        return (
            pool < <int32_t>len(self.anywhere) and (<Heap>self.anywhere[pool]).count > 0
        ) or (
            pool + 1 < <int32_t>len(self.lines) and (<Heap>self.lines[pool + 1]).count > 0
        )

    cdef inline int64_t least_key(self, int32_t pool) noexcept:
        """Return the least key in the two lines of a pool; -1: both are empty. O(1)."""
        cdef int64_t least = NONE, key
        if pool + 1 < <int32_t>len(self.lines) and (<Heap>self.lines[pool + 1]).count:
            least = (<Heap>self.lines[pool + 1]).nodes[0].key
        if pool < <int32_t>len(self.anywhere) and (<Heap>self.anywhere[pool]).count:
            key = (<Heap>self.anywhere[pool]).nodes[0].key
            if least < 0 or key < least:
                least = key
        return least


cdef inline int64_t reweighed(int64_t weighted, int32_t weight_milli, int32_t to_milli) noexcept:
    """Return weighted service of one weight as that of another. Most needs no division of 128 bits,
    which costs as much as a place in a line."""
    if weight_milli == to_milli:
        return weighted
    if 0 <= weighted < NARROW_SERVICE and weight_milli < NARROW_WEIGHT:
        return <int64_t>(<uint64_t>weighted * <uint64_t>weight_milli // <uint64_t>to_milli)
    return <int64_t>(<wide>weighted * weight_milli // to_milli)
