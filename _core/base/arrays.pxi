# Arrays that grow.

cdef void* grow(void* old, size_t old_count, size_t new_count, size_t size) except NULL:
    # Zeroes what is new.
    cdef void* new = realloc(old, new_count * size)
    if new == NULL:
        raise MemoryError()
    memset(<uint8_t*>new + old_count * size, 0, (new_count - old_count) * size)
    return new


cdef enum:
    SIZE_FIRST = 64
    SIZE_COPIED = 4096  # a larger array gets room for SIZE_AT_ONCE at once
    SIZE_AT_ONCE = 1 << 20


cdef inline int32_t larger(int32_t size, int32_t number) noexcept nogil:
    """How large an array becomes that has no place for a number. Only small ones are ever copied:
    what an array does not use yet is memory that was never touched, and costs nothing. Beyond
    SIZE_AT_ONCE the C library maps the pages elsewhere."""
    cdef int64_t wanted = max(<int64_t>SIZE_FIRST, max(2 * <int64_t>size, <int64_t>number + 1))
    if SIZE_COPIED < wanted < SIZE_AT_ONCE:
        wanted = SIZE_AT_ONCE
    return <int32_t>min(wanted, <int64_t>0x7FFFFFFF)


cdef void* extend(void* old, size_t count, size_t size) except NULL:
    """Like `grow()`, but what is new holds anything, and is not touched."""
    cdef void* new = realloc(old, count * size)
    if new == NULL:
        raise MemoryError()
    return new
