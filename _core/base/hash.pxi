# SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, 2012): keyed, so that a caller
# who chooses names cannot choose collisions.

ctypedef struct Sip:
    uint64_t v0, v1, v2, v3

ctypedef struct Hash128:
    uint64_t hi, lo


cdef inline uint64_t rotl(uint64_t x, int b) noexcept nogil:
    return (x << b) | (x >> (64 - b))


cdef inline void sip_round(Sip* s) noexcept nogil:
    s.v0 += s.v1
    s.v1 = rotl(s.v1, 13) ^ s.v0
    s.v0 = rotl(s.v0, 32)
    s.v2 += s.v3
    s.v3 = rotl(s.v3, 16) ^ s.v2
    s.v0 += s.v3
    s.v3 = rotl(s.v3, 21) ^ s.v0
    s.v2 += s.v1
    s.v1 = rotl(s.v1, 17) ^ s.v2
    s.v2 = rotl(s.v2, 32)


cdef inline void sip_word(Sip* s, uint64_t m) noexcept nogil:
    s.v3 ^= m
    sip_round(s)
    sip_round(s)
    s.v0 ^= m


cdef Hash128 sip128(uint64_t k0, uint64_t k1, const uint8_t* data, size_t n) noexcept nogil:
    cdef Sip s
    cdef Hash128 out
    cdef uint64_t m
    cdef size_t i = 0
    cdef int j
    s.v0 = k0 ^ <uint64_t>0x736F6D6570736575
    s.v1 = k1 ^ <uint64_t>0x646F72616E646F6D ^ 0xEE
    s.v2 = k0 ^ <uint64_t>0x6C7967656E657261
    s.v3 = k1 ^ <uint64_t>0x7465646279746573
    while i + 8 <= n:
        memcpy(&m, data + i, 8)
        sip_word(&s, m)
        i += 8
    m = <uint64_t>n << 56
    j = 0
    while i < n:
        m |= <uint64_t>data[i] << (8 * j)
        i += 1
        j += 1
    sip_word(&s, m)
    s.v2 ^= 0xEE
    for j in range(4):
        sip_round(&s)
    out.hi = s.v0 ^ s.v1 ^ s.v2 ^ s.v3
    s.v1 ^= 0xDD
    for j in range(4):
        sip_round(&s)
    out.lo = s.v0 ^ s.v1 ^ s.v2 ^ s.v3
    return out


cdef inline uint64_t sip64(uint64_t k0, uint64_t k1, uint64_t hi, uint64_t lo) noexcept nogil:
    """Return SipHash-1-3 of 16 bytes, for places in a hash table: callers never see the value."""
    cdef Sip s
    cdef int j
    s.v0 = k0 ^ <uint64_t>0x736F6D6570736575
    s.v1 = k1 ^ <uint64_t>0x646F72616E646F6D
    s.v2 = k0 ^ <uint64_t>0x6C7967656E657261
    s.v3 = k1 ^ <uint64_t>0x7465646279746573
    s.v3 ^= hi
    sip_round(&s)
    s.v0 ^= hi
    s.v3 ^= lo
    sip_round(&s)
    s.v0 ^= lo
    s.v3 ^= <uint64_t>16 << 56
    sip_round(&s)
    s.v0 ^= <uint64_t>16 << 56
    s.v2 ^= 0xFF
    for j in range(3):
        sip_round(&s)
    return s.v0 ^ s.v1 ^ s.v2 ^ s.v3


cdef inline uint64_t mix(uint64_t h, uint64_t x) noexcept nogil:
    # One step of a running 64-bit digest (the finaliser of SplitMix64).
    h = (h ^ x) + <uint64_t>0x9E3779B97F4A7C15
    h = (h ^ (h >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * <uint64_t>0x94D049BB133111EB
    return h ^ (h >> 31)
