# The contract's messages as bytes: a reader and a writer of protocol buffers for the messages of
# the hot path. As protobuf demands, unknown fields are skipped, the last value of a field wins,
# and a known field with another wire type counts as unknown.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

cdef enum:
    VARINT = 0
    FIXED64 = 1
    LENGTH = 2
    FIXED32 = 5
    SESSION_EVENTS_MAX = 4096
    HASHES_MAX = 4096

ctypedef struct Cursor:
    const uint8_t* at
    const uint8_t* end
    bint bad

ctypedef struct Slice:
    const uint8_t* at
    int64_t size


cdef inline Cursor data_cursor(bytes data) noexcept:
    cdef Cursor c
    c.at = <const uint8_t*>PyBytes_AS_STRING(data)
    c.end = c.at + PyBytes_GET_SIZE(data)
    c.bad = False
    return c


cdef inline bytes slice_bytes(Slice* s):
    return PyBytes_FromStringAndSize(<const char*>s.at, s.size)


cdef inline int64_t shortest(int64_t a, int64_t b) noexcept nogil:
    """Return the smaller of two times; 0 means none."""
    if a == 0 or b == 0:
        return a + b
    return min(a, b)


cdef inline uint64_t read_varint(Cursor* c) noexcept nogil:
    cdef uint64_t value = 0
    cdef int shift = 0
    cdef uint8_t byte
    while c.at < c.end and shift < 70:
        byte = c.at[0]
        c.at += 1
        if shift < 64:
            value |= <uint64_t>(byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
    c.bad = True
    return 0


cdef inline uint64_t read_fixed64(Cursor* c) noexcept nogil:
    cdef uint64_t value = 0
    if c.end - c.at < 8:
        c.bad = True
        return 0
    memcpy(&value, c.at, 8)
    c.at += 8
    return value


cdef inline Slice read_slice(Cursor* c) noexcept nogil:
    cdef Slice s
    cdef uint64_t n = read_varint(c)
    s.at = c.at
    s.size = 0
    if c.bad or n > <uint64_t>(c.end - c.at):
        c.bad = True
        return s
    s.size = <int64_t>n
    c.at += n
    return s


cdef inline Cursor read_message(Cursor* c) noexcept nogil:
    cdef Slice s = read_slice(c)
    cdef Cursor inner
    inner.at = s.at
    inner.end = s.at + s.size
    inner.bad = c.bad
    return inner


cdef inline int64_t read_tag(Cursor* c) noexcept nogil:
    """Return the next field as number * 8 + wire type; 0 at the end or if the bytes are bad.

    A tag has at most five bytes, as in protobuf's own reader, even if the further ones add nothing.
    """
    cdef uint64_t tag
    cdef const uint8_t* start = c.at
    if c.bad or c.at >= c.end:
        return 0
    tag = read_varint(c)
    if tag >> 3 == 0 or tag >> 32 or c.at - start > 5:
        c.bad = True
        return 0
    return <int64_t>tag


cdef void skip(Cursor* c, int64_t tag) noexcept nogil:
    cdef int kind = <int>(tag & 7)
    if kind == VARINT:
        read_varint(c)
    elif kind == FIXED64:
        read_fixed64(c)
    elif kind == LENGTH:
        read_slice(c)
    elif kind == FIXED32 and c.end - c.at >= 4:
        c.at += 4
    else:  # groups are not part of the contract
        c.bad = True


cdef bint is_utf8(const Slice* s) noexcept nogil:
    cdef const uint8_t* p = s.at
    cdef const uint8_t* end = s.at + s.size
    cdef int more
    cdef uint32_t code, least
    while p < end:
        if p[0] < 0x80:
            p += 1
            continue
        if p[0] & 0xE0 == 0xC0:
            more, code, least = 1, p[0] & 0x1F, 0x80
        elif p[0] & 0xF0 == 0xE0:
            more, code, least = 2, p[0] & 0x0F, 0x800
        elif p[0] & 0xF8 == 0xF0:
            more, code, least = 3, p[0] & 0x07, 0x10000
        else:
            return False
        p += 1
        while more:
            if p >= end or p[0] & 0xC0 != 0x80:
                return False
            code = (code << 6) | (p[0] & 0x3F)
            p += 1
            more -= 1
        if code < least or code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            return False
    return True


cdef bint has_control(const Slice* s) noexcept nogil:
    """Return whether UTF-8 holds what a terminal obeys: a control character (U+0000 to U+001F,
    U+007F to U+009F), a separator of lines, or an override of the direction (U+2028 to U+202E,
    U+2066 to U+2069). O(bytes)."""
    cdef const uint8_t* p = s.at
    cdef const uint8_t* end = s.at + s.size
    while p < end:
        if p[0] < 0x20 or p[0] == 0x7F:
            return True
        if p[0] == 0xC2 and p[1] < 0xA0:
            return True
        if p[0] == 0xE2 and (
            (p[1] == 0x80 and 0xA8 <= p[2] <= 0xAE) or (p[1] == 0x81 and 0xA6 <= p[2] <= 0xA9)
        ):
            return True
        p += 1
    return False


cdef inline int check_range(str field, int64_t value, int64_t low, int64_t high) except -1:
    return 0 if low <= value <= high else out_of_range(field, value, low, high)


cdef int out_of_range(str field, int64_t value, int64_t low, int64_t high) except -1:
    invalid(field, f"must be from {low:,} to {high:,}, not {value:,}")


cdef int check_whole(Cursor* c, str what) except -1:
    if c.bad:
        invalid("", f"{what} is not a valid protocol buffer message")
    return 0
