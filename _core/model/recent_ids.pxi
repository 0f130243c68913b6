# The ids of the last requests as their callers wrote them, so that a person who looks for one can
# choose it. All other records have only keyed hashes of ids.

cdef enum:
    RECENT_IDS = 256
    RECENT_ID_BYTES = 64  # a longer id is left out

ctypedef struct RecentId:
    int32_t principal
    int32_t size
    uint8_t text[RECENT_ID_BYTES]


@cython.final
cdef class RecentIds:
    cdef RecentId items[RECENT_IDS]
    cdef int64_t noted  # in all

    cdef inline void note(self, const uint8_t* id, int64_t size, int32_t principal) noexcept:
        """Replace the oldest id by this one. O(1)."""
        cdef RecentId* item = &self.items[self.noted % RECENT_IDS]
        if size > RECENT_ID_BYTES:
            return
        item.principal, item.size = principal, <int32_t>size
        memcpy(item.text, id, <size_t>size)
        self.noted += 1

    cdef list rows(self, int32_t principal):
        """Return the ids of one principal (-1: of all), the latest first. O(RECENT_IDS)."""
        cdef int64_t k
        cdef const RecentId* item
        found = []
        for k in range(self.noted - 1, max(<int64_t>-1, self.noted - 1 - RECENT_IDS), -1):
            item = &self.items[k % RECENT_IDS]
            if principal == NONE or item.principal == principal:
                found.append(PyBytes_FromStringAndSize(<const char*>item.text, item.size))
        return found
