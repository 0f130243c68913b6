# The pools of a stream: what it offers, what it claims, and what others claim of it.
#
# A stream whose pool another engine offers claims it, see contest.pxi.

cdef class PoolOffers(SessionState):
    cdef list faults  # tag, code, field, description
    cdef dict pools  # what it offers, and at which epoch
    cdef dict claims  # what it wants to offer, and another engine does; with the figures
    cdef dict contests  # to be sent: its pools that others claim, or it of others; by which client
    cdef bint has_replayed  # all leases that it runs

    def __cinit__(self):
        self.faults = []
        self.pools, self.claims, self.contests = {}, {}, {}

    cdef int64_t held_pools(self) noexcept:
        return len(self.pools) + len(self.claims)

    cdef int fault(self, uint64_t tag, int code, str field, str description) except -1:
        self.faults.append((tag, code, field.encode(), description.encode()))
        return self.wake()

    cdef int offer(self, bytes key, PoolFigures* f) except -1:
        """Register a pool, and attach it to this stream. O(1), O(leases of it) on a new epoch."""
        cdef int32_t pool = register_pool(self.core, key, f)
        if key in self.pools:
            self.core.ledger.claim(pool, self.pools[key], -1)
        else:
            self.core.ledger.pools[pool].attached += 1
            self.core.offers.setdefault(key, {})[self] = None
            self.core.ledger.order.touch(pool)
            count_replayed(self.core, pool, self.has_replayed)
        self.pools[key] = f.epoch
        self.core.ledger.claim(pool, f.epoch, 1)
        return 0

    cdef int detach(self, bytes key, bint for_good) except -1:
        """Offer a pool no more. O(1)."""
        cdef int32_t pool = self.core.pool_names[key]
        detach_pool(self.core, pool, self.pools.pop(key), for_good)
        del self.core.offers[key][self]
        if not self.core.offers[key]:
            del self.core.offers[key]
        return count_replayed(self.core, pool, -1 if self.has_replayed else 0)

    cdef int replayed(self) except -1:
        """Take note that every lease was replayed. O(pools of it)."""
        self.has_replayed = True
        for key in self.pools:
            count_replayed(self.core, self.core.pool_names[key], 1)
        return 0

    cdef bint is_contested(self, bytes key, const PoolFigures* f) except -1:
        """Return whether streams of another engine offer a pool. A former stream of this very
        process does not count: it gives the pool up. O(streams of the pool), once for each
        claim."""
        cdef const Pool* p
        cdef PoolOffers other
        known = self.core.pool_names.get(key)
        if known is None or key in self.pools:
            return False
        p = &self.core.ledger.pools[<int32_t>known]
        if p.attached == p.configured or (f.principal == p.principal and f.epoch == p.epoch):
            return False
        if key in self.claims or f.principal != p.principal:
            return True
        for each in list(self.core.offers[key]):
            other = each
            if self._is_same_process(other):
                other.detach(key, False)
        return p.attached > p.configured

    cdef bint _is_same_process(self, PoolOffers other) except -1:
        return (
            other.principal == self.principal and other.client_id == self.client_id
            and self.incarnation != 0 and other.incarnation == self.incarnation
        )

    cdef int claim(self, bytes key, const PoolFigures* f) except -1:
        """Ask the streams that offer a pool for a sign of life; until then nothing changes.
        Raises CallerError for another caller, which cannot have it anyhow. O(streams of the pool)
        for the first claim of a contest, and once a second for other callers; else O(1)."""
        cdef Pool* p = &self.core.ledger.pools[<int32_t>self.core.pool_names[key]]
        if f.principal != p.principal:
            if p.contest_told_ns == 0 or self.core.now_ns - p.contest_told_ns >= NS_PER_S:
                p.contest_told_ns = self.core.now_ns
                self._tell(key)
            raise CallerError(CODE_FAILED_PRECONDITION, "pool", rivals_text(key))
        if key not in self.core.contests:
            self._tell(key)
        if key not in self.claims:
            self.contests[key] = (<PoolOffers>next(iter(self.core.offers[key]))).client_id
        contest = self.core.contests.setdefault(
            key, (self.core.now_ns + self.core.settings.sign_of_life_ns, {})
        )
        contest[1][self] = None
        self.claims[key] = (
            f.epoch, f.capacity_tokens, f.block_size, f.max_running, f.max_model_tokens, f.gates
        )
        return self.wake()

    cdef int _tell(self, bytes key) except -1:
        cdef PoolOffers other
        for each in self.core.offers[key]:
            other = each
            other.contests[key] = self.client_id
            other.wake()
        return 0

    cdef int answer(self) except -1:
        """This stream lives, so it keeps its pools. O(contests + newcomers)."""
        for key in list(self.core.contests):
            for each in self.core.contests.pop(key)[1] if key in self.pools else ():
                if (<PoolOffers>each).claims.pop(key, None) is not None:
                    (<PoolOffers>each).refuse(key)
        return 0

    cdef int refuse(self, bytes key) except -1:
        """Refuse a newcomer a pool, which is another engine's."""
        note(self.core, "pool_contested", key, 1, f"{self.client_id.decode()} was refused")
        return self.fault(0, CODE_FAILED_PRECONDITION, "pool.pool", rivals_text(key))
