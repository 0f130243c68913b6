# Records of one size that keep their place in memory, for what only some requests or flows need.

cdef enum:
    SLAB_CHUNK = 256  # records


@cython.final
cdef class SlabAllocator:
    cdef void* chunks  # the newest; its first word leads to the one before
    cdef void* first_free  # whose first word leads to the next
    cdef size_t size  # bytes of a record
    cdef int32_t left  # records of the newest chunk that were never given out

    def __cinit__(self, size_t size):
        self.size = size

    def __dealloc__(self):
        cdef void* before
        while self.chunks != NULL:
            before = (<void**>self.chunks)[0]
            free(self.chunks)
            self.chunks = before

    cdef inline void prefetch(self) noexcept:
        """Fetch the record that is given out next."""
        prefetch_line(self.first_free)

    cdef void* alloc(self) except NULL:
        """Return a zeroed record. O(1), also where there is none yet."""
        cdef void* record = self.first_free
        if record != NULL:
            self.first_free = (<void**>record)[0]
        else:
            if self.left == 0:
                self._add()
            self.left -= 1
            record = <uint8_t*>self.chunks + 16 + self.left * self.size
        memset(record, 0, self.size)
        return record

    cdef int _add(self) except -1:
        cdef void* chunk = malloc(16 + SLAB_CHUNK * self.size)
        if chunk == NULL:
            raise MemoryError()
        (<void**>chunk)[0] = self.chunks
        self.chunks = chunk
        self.left = SLAB_CHUNK
        return 0

    cdef inline void free(self, void* record) noexcept:
        """Take a record back. Until it is given out again it keeps all but its first word. O(1)."""
        (<void**>record)[0] = self.first_free
        self.first_free = record
