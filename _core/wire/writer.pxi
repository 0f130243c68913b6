# Writes messages of the contract.

@cython.final
cdef class Writer:
    cdef uint8_t* buffer
    cdef size_t size
    cdef size_t at  # the message is buffer[at:size]

    def __dealloc__(self):
        free(self.buffer)

    cdef inline size_t length(self) noexcept:
        return self.size - self.at

    cdef bytes take(self):
        cdef bytes data = PyBytes_FromStringAndSize(
            <const char*>self.buffer + self.at, self.size - self.at
        )
        self.at = self.size
        return data

    cdef int room(self, size_t n) except -1:
        cdef uint8_t* new
        cdef size_t size
        if self.at >= n:
            return 0
        size = max(<size_t>512, 2 * self.size + n)
        new = <uint8_t*>malloc(size)
        if new == NULL:
            raise MemoryError()
        if self.length():  # else there may be no buffer yet
            memcpy(new + size - self.length(), self.buffer + self.at, self.length())
        free(self.buffer)
        self.at = size - self.length()
        self.buffer = new
        self.size = size
        return 0

    cdef inline void _raw_varint(self, uint64_t value) noexcept:
        cdef int n = 1
        cdef uint64_t rest = value >> 7
        cdef uint8_t* p
        while rest:
            n += 1
            rest >>= 7
        self.at -= n
        p = self.buffer + self.at
        while value >= 0x80:
            p[0] = <uint8_t>(value | 0x80)
            value >>= 7
            p += 1
        p[0] = <uint8_t>value

    cdef inline int varint(self, int field, int64_t value) except -1:
        """Write a number; 0 is proto3's default and is not written."""
        if value:
            self.room(16)
            self._raw_varint(<uint64_t>value)
            self._raw_varint(field << 3 | VARINT)
        return 0

    cdef inline int number(self, uint64_t value) except -1:
        """Write a number of a packed field."""
        self.room(16)
        self._raw_varint(value)
        return 0

    cdef inline int fixed64(self, int field, uint64_t value) except -1:
        self.room(16)
        self.at -= 8
        memcpy(self.buffer + self.at, &value, 8)
        self._raw_varint(field << 3 | FIXED64)
        return 0

    cdef inline int text(self, int field, bytes value) except -1:
        cdef size_t n = <size_t>PyBytes_GET_SIZE(value)
        if n:
            self.room(n + 16)
            self.at -= n
            memcpy(self.buffer + self.at, PyBytes_AS_STRING(value), n)
            self._raw_varint(n)
            self._raw_varint(field << 3 | LENGTH)
        return 0

    cdef inline int close(self, int field, size_t length_before) except -1:
        """Write the head of a nested message, whose fields were written since `length_before`."""
        cdef size_t n = self.length() - length_before
        self.room(16)
        self._raw_varint(n)
        self._raw_varint(field << 3 | LENGTH)
        return 0
