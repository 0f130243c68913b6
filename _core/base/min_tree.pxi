# The least of the keys of small numbers, which may be absent; of equal keys that of the lowest
# number. A tree of winners over an array, so that a key changes in one pass from its leaf to the
# root.

cdef int64_t ABSENT = 0x7FFFFFFFFFFFFFFF


@cython.final
cdef class MinTree:
    cdef int64_t* keys  # the key of each number; ABSENT: it is not there
    cdef int32_t* winners  # each node's number with the least key below it; the root is 1
    cdef int32_t size  # number of leaves, a power of two

    def __dealloc__(self):
        free(self.keys)
        free(self.winners)

    cdef inline bint has(self, int32_t number) noexcept:
        return number < self.size and self.keys[number] != ABSENT

    cdef inline int32_t first(self) noexcept:
        """Return the number of the least key; -1: there is none. O(1)."""
        if self.size == 0 or self.keys[self.winners[1]] == ABSENT:
            return NONE
        return self.winners[1]

    cdef int put(self, int32_t number, int64_t key) except -1:
        """Give a number a key, which is below ABSENT. O(log n)."""
        if number >= self.size:
            self._reach(number)
        self._set(number, key)
        return 0

    cdef void remove(self, int32_t number) noexcept:
        """Take a number out that may be there. O(log n)."""
        if self.has(number):
            self._set(number, ABSENT)

    cdef void _set(self, int32_t number, int64_t key) noexcept:
        cdef int32_t node = (number + self.size) >> 1, best = number, other = number ^ 1
        cdef int64_t its
        if self.keys[number] == key:
            return
        self.keys[number] = key
        while True:
            # `best` is the least below this side of the node, and `key` its key.
            its = self.keys[other]
            if its < key or (its == key and other < best):
                best, key = other, its
            if best != number and self.winners[node] == best:
                return  # as before, so it is above, too
            self.winners[node] = best
            if node == 1:
                return
            other = self.winners[node ^ 1]
            node >>= 1

    cdef int _reach(self, int32_t number) except -1:
        cdef int32_t size = max(2, self.size), old = self.size, k
        while size <= number:
            size *= 2
        self.keys = <int64_t*>extend(self.keys, size, sizeof(int64_t))
        self.winners = <int32_t*>extend(self.winners, size, sizeof(int32_t))
        self.size = size
        for k in range(old, size):
            self.keys[k] = ABSENT
        for k in range(size // 2, size):
            self._choose(k, 2 * k - size, 2 * k + 1 - size)
        for k in range(size // 2 - 1, 0, -1):
            self._choose(k, self.winners[2 * k], self.winners[2 * k + 1])
        return 0

    cdef inline void _choose(self, int32_t node, int32_t left, int32_t right) noexcept:
        self.winners[node] = left if self.keys[left] <= self.keys[right] else right

    cdef bint valid(self) noexcept:
        """Return whether each node names the lesser of its two. O(n)."""
        cdef int32_t k, left, right
        for k in range(1, self.size):
            left = 2 * k - self.size if 2 * k >= self.size else self.winners[2 * k]
            right = 2 * k + 1 - self.size if 2 * k >= self.size else self.winners[2 * k + 1]
            if self.winners[k] != (left if self.keys[left] <= self.keys[right] else right):
                return False
        return True
