# A set of small numbers as bits: pools, or targets of requests.

cdef enum:
    SET_WORDS = POOLS_MAX // 64 + 1  # for the targets too, one more than pools

ctypedef struct IndexSet:
    uint64_t words[SET_WORDS]


cdef inline void set_clear(IndexSet* s, int32_t count) noexcept nogil:
    """Empty a set of numbers below `count`, which the caller does not exceed. O(count / 64)."""
    cdef int32_t k
    for k in range((count + 63) >> 6):
        s.words[k] = 0


cdef inline bint set_has(const IndexSet* s, int32_t number) noexcept nogil:
    return (s.words[number >> 6] >> (number & 63)) & 1


cdef inline void set_add(IndexSet* s, int32_t number) noexcept nogil:
    s.words[number >> 6] |= <uint64_t>1 << (number & 63)


cdef inline void set_remove(IndexSet* s, int32_t number) noexcept nogil:
    s.words[number >> 6] &= ~(<uint64_t>1 << (number & 63))
