# ServedRows: what flows were served since the last look, before weights. A member of a cluster adds
# it to totals that it shares with the others. Nothing here decides anything.

ctypedef struct ServedRow:
    int64_t charged, refunded  # in micro-tokens times price
    int32_t flow
    int32_t domain  # node of the model that counts together; -1: all pools, or those without one


@cython.final
cdef class ServedRows:
    cdef bint on  # this is a member of a cluster
    cdef ServedRow* items
    cdef int32_t count, size
    cdef Table places
    cdef list ready  # rows with their names, which a flow may lose

    def __cinit__(self):
        self.places, self.ready = Table(), []

    def __dealloc__(self):
        free(self.items)

    cdef int add(self, int32_t flow, int32_t domain, int64_t micro) except -1:
        """Count service, or below 0 a refund. Expected O(1)."""
        cdef uint64_t lo = <uint64_t>(domain + 1)
        cdef int32_t at = self.places.get(<uint64_t>flow, lo), size
        if at == NONE:
            if self.count == self.size:
                size = larger(self.size, 0)
                self.items = <ServedRow*>extend(self.items, size, sizeof(ServedRow))
                self.size = size
            at = self.count
            self.places.put(<uint64_t>flow, lo, at)
            memset(&self.items[at], 0, sizeof(ServedRow))
            self.items[at].flow, self.items[at].domain = flow, domain
            self.count += 1
        if micro > 0:
            self.items[at].charged = min(VTC_MAX, self.items[at].charged + micro)
        else:
            self.items[at].refunded = min(VTC_MAX, self.items[at].refunded - micro)
        return 0

    cdef void clear(self) noexcept:
        cdef int32_t at
        for at in range(self.count):
            self.places.remove(
                <uint64_t>self.items[at].flow, <uint64_t>(self.items[at].domain + 1)
            )
        self.count = 0
