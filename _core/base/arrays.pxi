# Arrays that grow.

cdef void* grow(void* old, size_t old_count, size_t new_count, size_t size) except NULL:
    # Zeroes what is new.
    cdef void* new = realloc(old, new_count * size)
    if new == NULL:
        raise MemoryError()
    memset(<uint8_t*>new + old_count * size, 0, (new_count - old_count) * size)
    return new


cdef extern from *:
    """
    #ifndef SCHEDSVC_GROW_BY_ONE
    #define SCHEDSVC_GROW_BY_ONE 0
    #endif
    """
    # The fuzzers' core sets it: each element that is added moves its array, so a pointer into it
    # that is used afterwards points into freed memory.
    const bint GROWS_BY_ONE "SCHEDSVC_GROW_BY_ONE"


cdef enum:
    SIZE_FIRST = 64
    SIZE_COPIED = 4096  # a larger array gets room for SIZE_AT_ONCE at once
    SIZE_AT_ONCE = 1 << 20


cdef inline int32_t larger(int32_t size, int32_t number) noexcept nogil:
    """Return how large an array becomes that has no place for a number. Only small ones are ever
    copied: what an array does not use yet is memory that was never touched, and costs nothing.
    Beyond SIZE_AT_ONCE the C library maps the pages elsewhere."""
    cdef int64_t wanted = max(<int64_t>SIZE_FIRST, max(2 * <int64_t>size, <int64_t>number + 1))
    if GROWS_BY_ONE:
        return max(size, number) + 1
    if SIZE_COPIED < wanted < SIZE_AT_ONCE:
        wanted = SIZE_AT_ONCE
    return <int32_t>min(wanted, <int64_t>0x7FFFFFFF)


cdef inline int32_t doubled(int32_t size, int32_t number, int32_t first) noexcept nogil:
    """Return the same for an array that is zeroed as it grows. Room that is not used would take
    memory."""
    if GROWS_BY_ONE:
        return max(size, number) + 1
    return max(first, max(2 * size, number + 1))


cdef void* extend(void* old, size_t count, size_t size) except NULL:
    """Grow as `grow()` does, but leave new items as they are: they hold anything."""
    cdef void* new = realloc(old, count * size)
    if new == NULL:
        raise MemoryError()
    return new
