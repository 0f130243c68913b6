# Principals: what each caller may name, and how much of each bounded table it may hold.
#
# A principal is a caller that proves who it is by token or certificate, or a listener without
# authentication. The driver gives each a number. A number without grants here may do everything.
#
# A name is compared with the patterns of a principal once. The answer is kept: for tenants by flow,
# for classes by index. Pools are named so rarely that nothing is kept for them. The names of
# unknown tenants share one flow, so they are compared each time.

cdef enum:
    MAY_UNKNOWN = 0
    MAY_YES = 1
    MAY_NOT = 2

cdef enum:
    PRINCIPALS_MAX = 65_536

cdef int64_t SHARE_PPM = 1_000_000

ctypedef struct Principal:
    int32_t requests[5]  # that it has, by state; a free record has none
    int64_t queued_tokens  # input of its queued requests
    int32_t sessions  # that it has open
    int32_t adapters  # that it was the first to use, while they are in use
    int32_t tenants  # at first sight that it was the first to name
    bint sees_all  # Stats, and so how full each pool is
    bint is_limited  # it has grants of its own, or a share below all
    int64_t share_ppm  # its part of each bounded table; 0: all of it
    uint8_t* flows  # for each tenant's flow: MAY_*
    int32_t flow_count
    uint32_t classes_known, classes_allowed


cdef bint matches(const uint8_t* pattern, size_t size, const uint8_t* name, size_t length) noexcept:
    """Return whether a name fits a pattern, in which * stands for any text. O(size * length)."""
    cdef size_t p = 0, n = 0, star = size, resume = 0
    while n < length:
        if p < size and pattern[p] == c'*':
            star, resume = p, n
            p += 1
        elif p < size and pattern[p] == name[n]:
            p += 1
            n += 1
        elif star < size:  # the last star takes one character more
            p = star + 1
            resume += 1
            n = resume
        else:
            return False
    while p < size and pattern[p] == c'*':
        p += 1
    return p == size


cdef bint fits_any(list patterns, const uint8_t* name, size_t length) except -1:
    """Return whether a name fits one of some patterns; no list stands for all names."""
    if patterns is None:
        return True
    for pattern in patterns:
        if matches(
            <const uint8_t*>PyBytes_AS_STRING(pattern), PyBytes_GET_SIZE(pattern), name, length
        ):
            return True
    return False


@cython.final
cdef class Principals:
    cdef Principal* items
    cdef int32_t count, size  # numbers below `count` have a record
    cdef list names  # each number's name
    cdef list pools, tenants, classes  # patterns by number; None: all

    def __cinit__(self):
        self.names, self.pools, self.tenants, self.classes = [], [], [], []

    def __dealloc__(self):
        cdef int32_t i
        for i in range(self.count):
            free(self.items[i].flows)
        free(self.items)

    cdef int extend_to(self, int32_t count) except -1:
        """Make records of all numbers below `count`, without limits. O(count)."""
        cdef int32_t size
        if count > self.size:
            size = doubled(self.size, count - 1, 16)
            self.items = <Principal*>grow(self.items, self.size, size, sizeof(Principal))
            self.size = size
        while self.count < count:
            memset(&self.items[self.count], 0, sizeof(Principal))
            self.names.append(b"")
            for patterns in (self.pools, self.tenants, self.classes):
                patterns.append(None)
            self.count += 1
        return 0

    cdef int grant(
        self, int32_t number, bytes name, list pools, list tenants, list classes,
        int64_t share_ppm, bint sees_all,
    ) except -1:
        """Replace the grants of a principal that has a record. O(1)."""
        cdef Principal* p = &self.items[number]
        self.names[number] = name
        self.pools[number], self.tenants[number] = pools, tenants
        self.classes[number] = classes
        p.sees_all = sees_all
        p.share_ppm = 0 if share_ppm == SHARE_PPM else share_ppm
        p.is_limited = (
            p.share_ppm > 0 or pools is not None or tenants is not None or classes is not None
        )
        free(p.flows)
        p.flows = NULL
        p.flow_count = 0
        p.classes_known = p.classes_allowed = 0
        return 0

    cdef inline bint is_limited(self, int32_t number) noexcept:
        return 0 <= number < self.count and self.items[number].is_limited

    cdef bint may_name_tenant(
        self, int32_t number, int32_t flow, const uint8_t* name, size_t length
    ) except -1:
        """Return whether a limited principal may vouch for a tenant. O(1), the first time
        O(name)."""
        cdef Principal* p = &self.items[number]
        cdef int32_t size
        if self.tenants[number] is None:
            return True
        if flow >= p.flow_count:
            size = doubled(p.flow_count, flow, 64)
            p.flows = <uint8_t*>grow(p.flows, p.flow_count, size, 1)
            p.flow_count = size
        if p.flows[flow] == MAY_UNKNOWN:
            p.flows[flow] = MAY_YES if fits_any(self.tenants[number], name, length) else MAY_NOT
        return p.flows[flow] == MAY_YES

    cdef bint may_name_class(self, int32_t number, int32_t cls, bytes name) except -1:
        """Return whether a limited principal may name a class. O(1), the first time O(name)."""
        cdef Principal* p = &self.items[number]
        cdef uint32_t bit = <uint32_t>1 << cls
        if not p.classes_known & bit:
            p.classes_known |= bit
            if fits_any(self.classes[number], <const uint8_t*>PyBytes_AS_STRING(name), len(name)):
                p.classes_allowed |= bit
        return (p.classes_allowed & bit) != 0

    cdef bint may_offer(self, int32_t number, bytes pool) except -1:
        """Return whether a principal may register a pool, replay into it and report of it.
        O(patterns)."""
        if not self.is_limited(number):
            return True
        return fits_any(
            self.pools[number], <const uint8_t*>PyBytes_AS_STRING(pool), len(pool)
        )

    cdef bint bars(self, int32_t number, bytes pool) except -1:
        """Return whether a principal may ask, and may not offer a pool. O(patterns)."""
        if not self.is_limited(number) or self.tenants[number] == []:
            return False
        return not self.may_offer(number, pool)

    cdef bint some_bar(self, bytes pool) except -1:
        """Return whether some principal may ask, and may not offer a pool. O(principals *
        patterns)."""
        cdef int32_t number
        for number in range(self.count):
            if self.bars(number, pool):
                return True
        return False

    cdef bint sees_pool(self, int32_t number, bytes pool) except -1:
        """Return whether a principal may know how full a pool is: one of its own, or all.
        O(patterns)."""
        return self.may_offer(number, pool) or self.items[number].sees_all

    cdef inline int64_t places(self, int32_t number, int64_t most) noexcept:
        """Return how much of a table with `most` places a principal may hold: at least one.
        O(1)."""
        cdef int64_t share_ppm = 0
        if 0 <= number < self.count:
            share_ppm = self.items[number].share_ppm
        if share_ppm == 0:
            return most
        return max(<int64_t>1, most * share_ppm // SHARE_PPM)

    cdef inline void move(
        self, int32_t number, int before, int after, int64_t more_queued_tokens
    ) noexcept:
        """A request of a principal goes from one state to another; 0 is no state. O(1)."""
        cdef Principal* p
        if not 0 <= number < self.count:
            return
        p = &self.items[number]
        if before:
            p.requests[before] -= 1
        if after:
            p.requests[after] += 1
        p.queued_tokens += more_queued_tokens

    cdef inline void count_session(self, int32_t number, int more) noexcept:
        if 0 <= number < self.count:
            self.items[number].sessions += more

    cdef inline int32_t sessions_of(self, int32_t number) noexcept:
        return self.items[number].sessions if 0 <= number < self.count else 0

    cdef inline int32_t adapters_of(self, int32_t number) noexcept:
        return self.items[number].adapters if 0 <= number < self.count else 0

    cdef inline void count_tenant(self, int32_t number, int more) noexcept:
        if 0 <= number < self.count:
            self.items[number].tenants += more

    cdef inline void count_adapter(self, int32_t number, int more) noexcept:
        if 0 <= number < self.count:
            self.items[number].adapters += more
