# The kinds of rows in which the state is saved.

cdef bytes FLOW_ROW = b"f"
cdef bytes NODE_ROW = b"n"
cdef bytes LENGTHS_ROW = b"l"
cdef bytes TENANT_QUOTA_ROW = b"t"
cdef bytes QUOTA_ROW = b"q"
cdef bytes POOL_ROW = b"p"
cdef bytes OVERALL_ROW = b"o"
cdef bytes SESSION_ROW = b"s"
cdef int64_t AGE_MAX_NS = <int64_t>1 << 58  # nine years
cdef int64_t LEVEL_MIN = -(<int64_t>1 << 62)  # the least level of a bucket

cdef enum:  # how a flow stands
    STANDS_IDLE = 0
    STANDS_ACTIVE = 1
    STANDS_WAITING = 2  # plus the level


cdef bytes flow_name(Core core, int32_t flow):
    """Return the name of a flow in saved rows."""
    cdef int32_t cls = core.flows.items[flow].cls
    cdef bytes name = <bytes>core.classes.names[cls] if cls else b""
    return bytes((len(name) >> 8, len(name) & 255)) + name + <bytes>core.flow_list[flow]


cdef bytes session_key_of(Core core, int32_t s):
    """Return the key of the row of a session: its name's hash, and its flow."""
    cdef const AgentSession* a = &core.flows.agents.items[s]
    cdef uint64_t words[2]
    words[0], words[1] = a.key_hi, a.key_lo ^ <uint64_t>a.flow
    return SESSION_ROW + PyBytes_FromStringAndSize(<const char*>words, 16) + flow_name(core, a.flow)


cdef inline int64_t zigzag(int64_t value) noexcept nogil:
    return <int64_t>(<uint64_t>value << 1) ^ (value >> 63)  # C leaves << of negatives undefined


cdef inline int64_t unzigzag(uint64_t value) noexcept nogil:
    return <int64_t>(value >> 1) ^ -<int64_t>(value & 1)
