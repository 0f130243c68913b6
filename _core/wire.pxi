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


ctypedef struct AdmitMessage:
    Slice request_id, tenant, key, pool, adapter, request_class
    int64_t prompt_tokens, prompt_max_tokens, prompts
    int64_t n, max_output_tokens, hashes, deadline_ms, queue_ttl_ms
    uint64_t prompts_hash
    bint reports_progress
    Cursor body  # the whole message, for what is read only where it is wanted
    int32_t flow  # whose it turned out to be; -1: nobody's


cdef inline Cursor data_cursor(bytes data) noexcept:
    cdef Cursor c
    c.at = <const uint8_t*>PyBytes_AS_STRING(data)
    c.end = c.at + PyBytes_GET_SIZE(data)
    c.bad = False
    return c


cdef inline bytes slice_bytes(Slice* s):
    return PyBytes_FromStringAndSize(<const char*>s.at, s.size)


cdef inline int64_t shortest(int64_t a, int64_t b) noexcept nogil:
    """The smaller of two times, where 0 means none."""
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
    """The next field as number * 8 + wire type; 0 at the end or where the bytes are bad."""
    cdef uint64_t tag
    if c.bad or c.at >= c.end:
        return 0
    tag = read_varint(c)
    if tag >> 3 == 0 or tag >> 32:
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


cdef inline int check_range(str field, int64_t value, int64_t low, int64_t high) except -1:
    return 0 if low <= value <= high else out_of_range(field, value, low, high)


cdef int out_of_range(str field, int64_t value, int64_t low, int64_t high) except -1:
    invalid(field, f"must be from {low:,} to {high:,}, not {value:,}")


cdef int check_output(int64_t prompt_tokens, int64_t output_max, int64_t sequences) except -1:
    check_range("max_output_tokens", output_max, 1, PROMPT_TOKENS_MAX)
    if prompt_tokens + output_max * sequences > TOKENS_MAX:
        invalid(
            "max_output_tokens",
            f"times {sequences:,} sequences, plus all input, must be at most {TOKENS_MAX:,}",
        )
    return 0


cdef int check_text(str field, Slice* s, int64_t least, int64_t most) except -1:
    if not least <= s.size <= most:
        invalid(field, f"must have {least} to {most} bytes, not {s.size:,}")
    if not is_utf8(s):
        invalid(field, "is not valid UTF-8")
    return 0


cdef inline void read_text(Cursor* c, Slice* s) noexcept:
    # The last of several counts, but none may be wrong.
    if s.size and not is_utf8(s):
        c.bad = True
    s[0] = read_slice(c)


cdef int check_id(bytes request_id) except -1:
    if not 1 <= len(request_id) <= ID_BYTES_MAX:
        invalid("request_id", f"must have 1 to {ID_BYTES_MAX} bytes, not {len(request_id):,}")
    return 0


cdef int check_whole(Cursor* c, str what) except -1:
    if c.bad:
        invalid("", f"{what} is not a valid protocol buffer message")
    return 0


cdef Usage checked_usage(int64_t input_tokens, int64_t cached, int64_t output_tokens) except *:
    cdef Usage u
    check_range("input_tokens", input_tokens, NONE, TOKENS_MAX)
    check_range("cached_input_tokens", cached, NONE, TOKENS_MAX)
    check_range("output_tokens", output_tokens, NONE, TOKENS_MAX)
    u.input_tokens = input_tokens
    u.cached_tokens = cached
    u.output_tokens = output_tokens
    return u


cdef int add_prompt(AdmitMessage* m, int64_t tokens) except -1:
    check_range(f"input_tokens[{m.prompts}]" if not 1 <= tokens <= PROMPT_TOKENS_MAX else "",
                tokens, 1, PROMPT_TOKENS_MAX)
    m.prompts += 1
    if m.prompts > SEQUENCES_MAX:
        invalid("input_tokens", f"at most {SEQUENCES_MAX:,} prompts")
    m.prompt_tokens += tokens
    m.prompt_max_tokens = max(m.prompt_max_tokens, tokens)
    m.prompts_hash = mix(m.prompts_hash, tokens)
    return 0


cdef int parse_admit(AdmitMessage* m, Cursor c) except -1:
    """Read and check an AdmitRequest. O(bytes)."""
    cdef Cursor packed
    cdef int64_t tag
    memset(m, 0, sizeof(AdmitMessage))
    m.body = c
    while True:
        tag = read_tag(&c)
        if tag == 0:
            break
        if tag == 1 << 3 | LENGTH:
            read_text(&c, &m.request_id)
        elif tag == 2 << 3 | LENGTH:
            read_text(&c, &m.tenant)
        elif tag == 3 << 3 | LENGTH:
            m.key = read_slice(&c)
        elif tag == 4 << 3 | LENGTH:
            read_text(&c, &m.pool)
        elif tag == 5 << 3 | LENGTH:
            packed = read_message(&c)
            while packed.at < packed.end and not packed.bad:
                add_prompt(m, <int64_t>read_varint(&packed))
            c.bad = c.bad or packed.bad
        elif tag == 5 << 3 | VARINT:
            add_prompt(m, <int64_t>read_varint(&c))
        elif tag == 6 << 3 | VARINT:
            m.n = <int32_t>read_varint(&c)
        elif tag == 7 << 3 | VARINT:
            m.max_output_tokens = <int64_t>read_varint(&c)
        elif tag == 8 << 3 | LENGTH:
            packed = read_message(&c)
            m.hashes += (packed.end - packed.at) >> 3
            c.bad = c.bad or packed.bad or (packed.end - packed.at) & 7 != 0
        elif tag == 8 << 3 | FIXED64:
            read_fixed64(&c)
            m.hashes += 1
        elif tag == 9 << 3 | LENGTH:
            read_text(&c, &m.adapter)
        elif tag == 10 << 3 | LENGTH:
            read_text(&c, &m.request_class)
        elif tag == 11 << 3 | VARINT:
            m.deadline_ms = <int64_t>read_varint(&c)
        elif tag == 12 << 3 | VARINT:
            m.queue_ttl_ms = <int64_t>read_varint(&c)
        elif tag == 13 << 3 | VARINT:
            m.reports_progress = read_varint(&c) != 0
        else:
            skip(&c, tag)
    check_whole(&c, "AdmitRequest")
    return check_admit(m)


cdef int check_admit(AdmitMessage* m) except -1:
    check_text("request_id", &m.request_id, 1, ID_BYTES_MAX)
    check_text("tenant", &m.tenant, 0, NAME_BYTES_MAX)
    check_text("pool", &m.pool, 0, ID_BYTES_MAX)
    check_text("adapter", &m.adapter, 0, NAME_BYTES_MAX)
    check_text("request_class", &m.request_class, 0, NAME_BYTES_MAX)
    if m.key.size != 0 and m.key.size != 32:
        invalid("api_key_sha256", f"must have 32 bytes, not {m.key.size:,}")
    if m.prompts == 0:
        invalid("input_tokens", "is missing: give one entry for each prompt")
    check_range("n", m.n, 0, 128)
    m.n = max(<int64_t>1, m.n)
    if m.prompts * m.n > SEQUENCES_MAX:
        invalid("n", f"prompts times n must be at most {SEQUENCES_MAX:,}")
    check_range("input_tokens", m.prompt_tokens * m.n, 1, TOKENS_MAX)
    check_output(m.prompt_tokens * m.n, m.max_output_tokens, m.prompts * m.n)
    check_range("prefix_block_hashes", m.hashes, 0, HASHES_MAX)
    check_range("deadline_ms", m.deadline_ms, 0, <int64_t>1 << 40)
    check_range("queue_ttl_ms", m.queue_ttl_ms, 0, <int64_t>1 << 40)
    return 0
