# Numbers (of flows, of quotas) that changed since they were last saved, each queued once.

@cython.final
cdef class DirtyQueue:
    cdef int32_t* line  # line[taken:count], the oldest first
    cdef uint8_t* marks  # whether a number is in the line
    cdef int32_t taken, count, numbers_max
    cdef bint on  # changes are saved

    def __dealloc__(self):
        free(self.line)
        free(self.marks)

    cdef int reserve(self, int32_t numbers) except -1:
        """Make room for the numbers below this one, so that `mark()` needs none. O(1) amortised."""
        cdef int32_t size = doubled(self.numbers_max, numbers - 1, 64)
        if numbers <= self.numbers_max:
            return 0
        self.marks = <uint8_t*>grow(self.marks, self.numbers_max, size, 1)
        self.line = <int32_t*>grow(self.line, 2 * self.numbers_max, 2 * size, sizeof(int32_t))
        self.numbers_max = size
        return 0

    cdef inline void mark(self, int32_t number) noexcept:
        """Have it saved. O(1) amortised; does nothing if changes are not saved."""
        if self.on and not self.marks[number]:
            self._push(number)

    cdef void _push(self, int32_t number) noexcept:
        # The line has room for twice what can stand in it.
        cdef int32_t k
        if self.count == 2 * self.numbers_max:
            for k in range(self.taken, self.count):
                self.line[k - self.taken] = self.line[k]
            self.count -= self.taken
            self.taken = 0
        self.marks[number] = 1
        self.line[self.count] = number
        self.count += 1

    cdef void mark_all(self, int32_t numbers) noexcept:
        cdef int32_t k
        for k in range(numbers):
            self.mark(k)

    cdef int32_t take(self) noexcept:
        """Return the number that has been queued for longest; -1: none is. O(1)."""
        cdef int32_t number
        if self.taken == self.count:
            return NONE
        number = self.line[self.taken]
        self.taken += 1
        self.marks[number] = 0
        if self.taken == self.count:
            self.taken = self.count = 0
        return number
