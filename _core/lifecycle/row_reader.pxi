# The common parts of rows in the state file.

cdef int read_numbers(Cursor* c, int64_t* values, int count) except -1:
    """Read fields 1 to `count` that are numbers, and skip others. The bytes have to be whole."""
    cdef int64_t tag
    memset(values, 0, count * sizeof(int64_t))
    while True:
        tag = read_tag(c)
        if tag == 0:
            return check_whole(c, "it")
        if tag & 7 == VARINT and 1 <= tag >> 3 <= count:
            values[(tag >> 3) - 1] = <int64_t>read_varint(c)
        else:
            skip(c, tag)


cdef int32_t read_of_class(Core core, Cursor c, str what, int64_t* value) except -2:
    """Read a number and its class; returns the class, -1 if it is unknown."""
    cdef Slice name
    cdef int64_t tag
    value[0] = 0
    name.at, name.size = c.at, 0
    while True:
        tag = read_tag(&c)
        if tag == 0:
            break
        if tag == 1 << 3 | VARINT:
            value[0] = <int64_t>read_varint(&c)
        elif tag == 2 << 3 | LENGTH:
            name = read_slice(&c)
        else:
            skip(&c, tag)
    check_whole(&c, "it")
    check_range(what, value[0], 0, VTC_MAX)
    check_range("class", name.size, 0, NAME_BYTES_MAX)
    return core.classes.find_slice(name.at, name.size)


cdef int check_pool_name(const Slice* name) except -1:
    """Refuse a name of a pool that no caller could have offered. O(bytes)."""
    check_range("pool", name.size, 1, ID_BYTES_MAX)
    if not is_utf8(name) or has_control(name):
        invalid("pool", "must be UTF-8 without control characters")
    return 0
