# Open-addressing hash table from a 128-bit key to a small integer. Linear probing; a deletion
# shifts the run back, so there are no tombstones and the load stays what it is.

ctypedef struct Entry:
    uint64_t hi
    uint64_t lo
    int32_t value  # -1: empty


@cython.final
cdef class Table:
    cdef Entry* slots
    cdef size_t mask
    cdef size_t count

    def __cinit__(self):
        self.slots = NULL
        self.count = 0
        self._allocate(64)

    def __dealloc__(self):
        free(self.slots)

    cdef int _allocate(self, size_t size) except -1:
        cdef size_t i
        cdef Entry* slots = <Entry*>malloc(size * sizeof(Entry))
        if slots == NULL:
            raise MemoryError()
        for i in range(size):
            slots[i].value = NONE
        self.slots = slots
        self.mask = size - 1
        return 0

    cdef inline size_t _home(self, uint64_t hi, uint64_t lo) noexcept:
        # Keys are hashes or consecutive ids: one multiplication spreads both. Eight ids in a row
        # stay neighbours, because they are used and forgotten together.
        cdef uint64_t spread = ((hi >> 3) ^ lo) * <uint64_t>0x9E3779B97F4A7C15
        return <size_t>((spread >> 20) & ~<uint64_t>7 | (hi & 7)) & self.mask

    cdef inline void prefetch(self, uint64_t hi, uint64_t lo) noexcept:
        """Fetch the slot that is looked at soon."""
        cdef Entry* slot = &self.slots[self._home(hi, lo)]
        prefetch_line(slot)
        prefetch_line(slot + 1)  # it may lie across two lines

    cdef inline size_t _find(self, uint64_t hi, uint64_t lo) noexcept:
        cdef size_t i = self._home(hi, lo)
        while self.slots[i].value != NONE:
            if self.slots[i].lo == lo and self.slots[i].hi == hi:
                break
            i = (i + 1) & self.mask
        return i

    cdef inline int32_t get(self, uint64_t hi, uint64_t lo) noexcept:
        """Value, or -1. Expected O(1)."""
        return self.slots[self._find(hi, lo)].value

    cdef int put(self, uint64_t hi, uint64_t lo, int32_t value) except -1:
        """Insert or replace. Expected O(1) amortised."""
        cdef size_t i = self._find(hi, lo)
        if self.slots[i].value == NONE:
            if (self.count + 1) * 10 > (self.mask + 1) * 7:
                self._rehash()
                i = self._find(hi, lo)
            self.count += 1
            self.slots[i].hi = hi
            self.slots[i].lo = lo
        self.slots[i].value = value
        return 0

    cdef int _rehash(self) except -1:
        cdef Entry* old = self.slots
        cdef size_t size = self.mask + 1
        cdef size_t i
        self._allocate(size * 2)
        for i in range(size):
            if old[i].value != NONE:
                self.slots[self._find(old[i].hi, old[i].lo)] = old[i]
        free(old)
        return 0

    cdef void remove(self, uint64_t hi, uint64_t lo) noexcept:
        """Remove if present. Expected O(1)."""
        cdef size_t i = self._find(hi, lo)
        cdef size_t j = i
        cdef size_t home
        if self.slots[i].value == NONE:
            return
        self.count -= 1
        while True:
            j = (j + 1) & self.mask
            if self.slots[j].value == NONE:
                break
            home = self._home(self.slots[j].hi, self.slots[j].lo)
            # The entry at j may fill the hole at i only if its home is not inside (i, j].
            if ((j - home) & self.mask) >= ((j - i) & self.mask):
                self.slots[i] = self.slots[j]
                i = j
        self.slots[i].value = NONE
