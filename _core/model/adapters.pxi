# Names of LoRA adapters as small numbers, for as long as a queued or running request uses them.
#
# A caller chooses the names, so there is room for `adapters_max` of them, and the one that has been
# idle longest gives its number to a newcomer. A record that outlives the number names the adapter
# by the name's hash.

ctypedef struct Adapter:
    uint64_t hi, lo  # keyed hash of the name
    int32_t users  # requests that are queued or run with it
    int32_t principal  # whose request was the first of them
    int32_t next, prev  # neighbours among the idle ones, idle longest first
    int64_t tokens  # that it takes of a pool's cache while it is active there; -1: as usual there


@cython.final
cdef class Adapters:
    cdef Adapter* items
    cdef list names  # index -> bytes
    cdef dict weights  # name: tokens that it takes, where that is not what is usual
    cdef Table index
    cdef int32_t size, count, size_max
    cdef int32_t idle_head, idle_tail
    cdef Principals principals

    def __cinit__(self, int32_t size_max, Principals principals):
        self.size_max = size_max
        self.principals = principals
        self.names = []
        self.weights = {}
        self.index = Table()
        self.idle_head = self.idle_tail = NONE

    def __dealloc__(self):
        free(self.items)

    cdef inline int32_t find(self, Hash128* name) noexcept:
        """Return the index of a name that has one, or -1. O(1)."""
        return self.index.get(name.hi, name.lo)

    cdef inline bint has_room(self, Hash128* name, int32_t principal) noexcept:
        """Return whether `hold` would find an index for a principal's name. O(1)."""
        cdef int32_t i = self.find(name)
        if i != NONE and self.items[i].users:
            return True
        if self.principals.adapters_of(principal) >= self.principals.places(
            principal, self.size_max
        ):
            return False
        return self.count < self.size_max or self.idle_head != NONE or i != NONE

    cdef int32_t hold(self, Hash128* name, Slice* text, int32_t principal) except -2:
        """Return the index of the name, for one request more of a principal; -1 if there is no
        place. O(1) amortised."""
        cdef int32_t i = self.find(name), size
        cdef Adapter* a
        if not self.has_room(name, principal):
            return NONE
        if i == NONE and self.count < self.size_max:
            if self.count == self.size:
                size = doubled(self.size, 0, 16)
                self.items = <Adapter*>grow(self.items, self.size, size, sizeof(Adapter))
                self.size = size
            i = self.count
            self.count += 1
            self.names.append(slice_bytes(text))
            self._name(i, name)
        elif i == NONE:
            i = self.idle_head
            self._unlink(i)
            self.index.remove(self.items[i].hi, self.items[i].lo)
            self.names[i] = slice_bytes(text)
            self._name(i, name)
        else:
            a = &self.items[i]
            if a.users == 0:
                self._unlink(i)
        a = &self.items[i]
        if a.users == 0:
            a.principal = principal
            self.principals.count_adapter(principal, 1)
        a.users += 1
        return i

    cdef int weigh(self, bytes name, int64_t tokens) except -1:
        """Let an adapter of this name take so much; -1: as usual. O(adapters)."""
        cdef int32_t i
        if tokens == NONE:
            self.weights.pop(name, None)
        else:
            self.weights[name] = tokens
        for i in range(self.count):
            if self.names[i] == name:
                self.items[i].tokens = tokens
        return 0

    cdef int _name(self, int32_t i, Hash128* name) except -1:
        self.items[i].hi, self.items[i].lo = name.hi, name.lo
        self.items[i].tokens = self.weights.get(self.names[i], NONE)
        return self.index.put(name.hi, name.lo, i)

    cdef void let_go(self, int32_t i) noexcept:
        """One request less uses it. O(1)."""
        cdef Adapter* a
        if i == NONE:
            return
        a = &self.items[i]
        a.users -= 1
        if a.users == 0:
            self.principals.count_adapter(a.principal, -1)
            a.next = NONE
            a.prev = self.idle_tail
            if self.idle_tail == NONE:
                self.idle_head = i
            else:
                self.items[self.idle_tail].next = i
            self.idle_tail = i

    cdef void _unlink(self, int32_t i) noexcept:
        cdef Adapter* a = &self.items[i]
        if a.prev == NONE:
            self.idle_head = a.next
        else:
            self.items[a.prev].next = a.next
        if a.next == NONE:
            self.idle_tail = a.prev
        else:
            self.items[a.next].prev = a.prev
        a.next = a.prev = NONE
