# Open-addressing hash table from a 96-bit key to a small integer. Linear probing; a deletion shifts
# the run back, so there are no tombstones and the load stays what it is.
#
# It grows without a pause. When a table is full, a new one of twice the size is made beside it.
# Every insertion of a new key and every removal then moves the next STEP places of the former
# table, which is empty long before the new one is full. Meanwhile a key is in one of the two.
# Entries that were moved stay in the former table, and no longer count. An entry that is removed
# from it leaves a tombstone there. So its runs of places that are not empty stay as they are, and
# no key whose home lies before the run that is being moved can be in it any more.
#
# If callers choose the keys (lease ids, tags), a secret key decides their places: 3,500 colliding
# keys held the event loop for 110 ms. Keys that are keyed hashes already, or numbers that the core
# counts, need no second hash.
#
# A new table is memory that the system hands out as zeros, page by page as it is touched: so 0 is
# an empty place, and a value is held plus one.

cdef enum:
    STEP = 8  # places of the former table that one operation moves
    HELD_GONE = -1  # a tombstone

ctypedef struct Entry:
    uint64_t hi
    uint32_t lo
    int32_t held  # 0: empty


@cython.final
cdef class Table:
    cdef Entry* slots
    cdef size_t mask
    cdef size_t count
    cdef Entry* former  # NULL: none
    cdef size_t former_mask, moved  # places of it that are done
    cdef size_t open_from  # the old place where the run begins that the next place may belong to
    cdef int64_t moves  # entries that were moved to another table, ever
    cdef bint is_keyed
    cdef uint64_t k0, k1
    cdef uint64_t last_hi  # the key that was hashed last, and what it came to
    cdef uint32_t last_lo
    cdef size_t last_home

    def __cinit__(self):
        self.slots = <Entry*>calloc(64, sizeof(Entry))
        if self.slots == NULL:
            raise MemoryError()
        self.mask = 63

    def __dealloc__(self):
        free(self.slots)
        free(self.former)

    cdef void set_key(self, uint64_t k0, uint64_t k1) noexcept:
        """Compute places with a secret key. Call it before the first put()."""
        self.is_keyed, self.k0, self.k1 = True, k0, k1
        self.last_home = <size_t>sip64(k0, k1, self.last_hi, self.last_lo)

    cdef inline size_t _home(self, uint64_t hi, uint32_t lo) noexcept:
        # Keys are hashes or consecutive ids: one multiplication spreads both. Eight ids in a row
        # stay neighbours, because they are used and forgotten together. To be masked.
        cdef uint64_t spread
        if self.is_keyed:
            # A key is looked up, fetched and put within one event: hash it once.
            if hi != self.last_hi or lo != self.last_lo:
                self.last_hi, self.last_lo = hi, lo
                self.last_home = <size_t>sip64(self.k0, self.k1, hi, lo)
            return self.last_home
        spread = ((hi >> 3) ^ lo) * <uint64_t>0x9E3779B97F4A7C15
        return <size_t>((spread >> 20) & ~<uint64_t>7 | (hi & 7))

    cdef inline void prefetch(self, uint64_t hi, uint64_t lo) noexcept:
        """Fetch the slots that are looked at soon."""
        cdef size_t home = self._home(hi, <uint32_t>lo)
        prefetch_line(&self.slots[home & self.mask])
        if self._may_be_former(home):
            prefetch_line(&self.former[home & self.former_mask])

    cdef inline size_t _find(self, uint64_t hi, uint32_t lo) noexcept:
        cdef size_t i = self._home(hi, lo) & self.mask
        while self.slots[i].held != 0:
            if self.slots[i].hi == hi and self.slots[i].lo == lo:
                break
            i = (i + 1) & self.mask
        return i

    cdef inline bint _may_be_former(self, size_t home) noexcept:
        return self.former != NULL and (home & self.former_mask) >= self.open_from

    cdef Entry* _find_former(self, uint64_t hi, uint32_t lo) noexcept:
        # NULL: it is not there.
        cdef size_t i = self._home(hi, lo)
        if not self._may_be_former(i):
            return NULL
        i &= self.former_mask
        while self.former[i].held != 0:
            if self.former[i].hi == hi and self.former[i].lo == lo:
                return &self.former[i] if i >= self.moved and self.former[i].held > 0 else NULL
            i = (i + 1) & self.former_mask
        return NULL

    cdef inline int32_t get(self, uint64_t hi, uint64_t lo) noexcept:
        """Return the value of a key, or -1. Only 32 bits of the lower half of the key count.
        Expected O(1)."""
        cdef int32_t held = self.slots[self._find(hi, <uint32_t>lo)].held
        cdef Entry* entry
        if held == 0 and self.former != NULL:
            entry = self._find_former(hi, <uint32_t>lo)
            held = 0 if entry == NULL else entry.held
        return held - 1

    cdef int put(self, uint64_t hi, uint64_t lo, int32_t value) except -1:
        """Insert or replace. Expected O(1)."""
        cdef Entry* entry = &self.slots[self._find(hi, <uint32_t>lo)]
        if entry.held == 0:
            entry = self._find_former(hi, <uint32_t>lo)
            if entry == NULL:
                return self.put_new(hi, lo, value)
        entry.held = value + 1
        return 0

    cdef int put_new(self, uint64_t hi, uint64_t lo, int32_t value) except -1:
        """Insert a key that was looked up and is not here. Expected O(1)."""
        cdef Entry* entry
        if self.former != NULL:
            self._move()
        if (self.count + 1) * 10 > (self.mask + 1) * 7:
            self._grow()
        entry = &self.slots[self._find(hi, <uint32_t>lo)]
        self.count += 1
        entry.hi, entry.lo, entry.held = hi, <uint32_t>lo, value + 1
        return 0

    cdef int _grow(self) except -1:
        # The former table is gone: as many places as it had were moved within an eighth of the
        # insertions that fill this one.
        cdef size_t size = 2 * (self.mask + 1)
        cdef Entry* slots = <Entry*>calloc(size, sizeof(Entry))
        if slots == NULL:
            raise MemoryError()
        self.former, self.former_mask, self.moved = self.slots, self.mask, 0
        self.open_from = 0
        self.slots, self.mask = slots, size - 1
        return 0

    cdef void _move(self) noexcept:
        # The next places of the former table. O(STEP) expected.
        cdef size_t end = self.moved + STEP
        cdef Entry* entry
        while self.moved < end:
            entry = &self.former[self.moved]
            if entry.held > 0:
                self.slots[self._find(entry.hi, entry.lo)] = entry[0]
                self.moves += 1
            self.moved += 1
            if entry.held == 0:
                self.open_from = self.moved
        if self.moved > self.former_mask:
            free(self.former)
            self.former = NULL

    cdef void remove(self, uint64_t hi, uint64_t lo) noexcept:
        """Remove if present. Expected O(1)."""
        cdef size_t i, j, home
        cdef Entry* entry
        if self.former != NULL:
            self._move()
        i = j = self._find(hi, <uint32_t>lo)
        if self.slots[i].held == 0:
            entry = self._find_former(hi, <uint32_t>lo)
            if entry != NULL:
                entry.held = HELD_GONE
                self.count -= 1
            return
        self.count -= 1
        while True:
            j = (j + 1) & self.mask
            if self.slots[j].held == 0:
                break
            home = self._home(self.slots[j].hi, self.slots[j].lo) & self.mask
            # The entry at j may fill the hole at i only if its home is not inside (i, j].
            if ((j - home) & self.mask) >= ((j - i) & self.mask):
                self.slots[i] = self.slots[j]
                i = j
        self.slots[i].held = 0
