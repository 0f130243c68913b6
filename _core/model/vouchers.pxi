# The places in a tenant's queue, divided between the principals that vouch for the tenant.
#
# A principal that may name a tenant could fill the tenant's queue, and keep out the requests of
# other principals. So a full queue still has a place for a principal that has less than its part
# there: the places, divided by the principals that have requests in the queue. While the queue is
# not full, no principal is held to its part. Requests that wait already are never evicted for it.
# So a queue that k principals share has at most 1 + 1/2 + ... + 1/k times its places.
#
# Mostly one principal vouches for a tenant. Its requests have no record: they are those that no
# record of another principal counts.

ctypedef struct Voucher:
    int64_t tokens  # input that it has queued
    int32_t queued  # in a free record, the next free one


@cython.final
cdef class Vouchers:
    """Counts the queued requests of each flow by principal, except those of the first principal of
    that flow."""

    cdef Table found  # keys are flow and principal
    cdef Voucher* items
    cdef int32_t size, used, first_free

    def __cinit__(self):
        self.found, self.first_free = Table(), NONE

    def __dealloc__(self):
        free(self.items)

    cdef int count(self, int32_t flow, int32_t principal, int more, int64_t tokens) except -2:
        """Count one more or one less, with its tokens of input. Returns how many records that
        makes more or less. O(1)."""
        cdef int32_t n = self.found.get(<uint64_t>flow, <uint64_t>principal)
        cdef int made = n == NONE
        if made:
            n = self.open(flow, principal)
        self.items[n].queued += more
        self.items[n].tokens += tokens
        if self.items[n].queued:
            return made
        self.found.remove(<uint64_t>flow, <uint64_t>principal)
        self.items[n].queued, self.first_free = self.first_free, n
        return made - 1

    cdef int32_t open(self, int32_t flow, int32_t principal) except -1:
        cdef int32_t n = self.first_free
        if n != NONE:
            self.first_free = self.items[n].queued
        else:
            if self.used == self.size:
                self.size = larger(self.size, 0)
                self.items = <Voucher*>extend(self.items, self.size, sizeof(Voucher))
            n = self.used
            self.used += 1
        memset(&self.items[n], 0, sizeof(Voucher))
        self.found.put_new(<uint64_t>flow, <uint64_t>principal, n)
        return n

    cdef Voucher of(self, int32_t flow, int32_t principal) noexcept:
        """Return the record of a principal at a flow; an empty one if it has none. O(1)."""
        cdef Voucher nothing
        cdef int32_t n = self.found.get(<uint64_t>flow, <uint64_t>principal)
        if n != NONE:
            return self.items[n]
        nothing.tokens = nothing.queued = 0
        return nothing
