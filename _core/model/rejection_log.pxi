# Requests that were refused or evicted: the last of them, so that it can be said why.
#
# A ring with a table beside it, made at the first refusal. Nothing is decided by it, nothing of it
# is saved, and a retry of such a request is a new one as before.

cdef enum:
    REJECTIONS_MAX = 4_096  # the oldest gives way; 0.7 MB

ctypedef struct Refusal:
    uint64_t hi, lo  # what names it among the ids
    int64_t number  # counts on with each
    int64_t at_ns, waited_ns
    int32_t flow, target, prompt_tokens, output_max_tokens, sequences, principal, outcome
    uint32_t spent_us[WAITS_KINDS]


@cython.final
cdef class RejectionLog:
    cdef Refusal* items
    cdef Table places
    cdef int32_t next
    cdef int64_t count  # number of rows that were ever added

    def __cinit__(self):
        self.places = Table()

    def __dealloc__(self):
        free(self.items)

    cdef Refusal* add(self, uint64_t hi, uint64_t lo) except NULL:
        """Return a zeroed place for another refusal. O(1) amortised."""
        cdef Refusal* item
        if self.items == NULL:
            self.items = <Refusal*>calloc(REJECTIONS_MAX, sizeof(Refusal))
            if self.items == NULL:
                raise MemoryError()
        item = &self.items[self.next]
        if item.outcome and self.places.get(item.hi, item.lo) == self.next:
            self.places.remove(item.hi, item.lo)
        memset(item, 0, sizeof(Refusal))
        self.count += 1
        item.hi, item.lo, item.number = hi, lo, self.count
        self.places.put(hi, lo, self.next)
        self.next = (self.next + 1) % REJECTIONS_MAX
        return item

    cdef const Refusal* find(self, uint64_t hi, uint64_t lo, int64_t since_ns) noexcept:
        """Return the last refusal of a request, if that is not older; NULL: none. O(1)."""
        cdef int32_t place = self.places.get(hi, lo)
        if place == NONE or self.items[place].at_ns < since_ns:
            return NULL
        return &self.items[place]


cdef int log_rejection(
    RejectionLog refused, Requests requests, int32_t i, const Hash128* key, int32_t principal,
    int outcome, int64_t now_ns,
) except -1:
    """Keep what a request was that is not served. One that was never queued has not waited. O(1)
    amortised."""
    cdef const Request* r = &requests.items[i]
    cdef Refusal* item = refused.add(key.hi, key.lo)
    cdef int64_t spent_ns[WAITS_KINDS]
    cdef int k
    item.at_ns = now_ns
    item.flow, item.target, item.outcome = r.flow, r.target, outcome
    item.prompt_tokens, item.output_max_tokens = r.prompt_tokens, r.output_max_tokens
    item.sequences, item.principal = r.sequences, principal
    if r.state == QUEUED:
        item.waited_ns = now_ns - r.arrival_ns
        wait_times_until(requests, i, now_ns, spent_ns)
        for k in range(WAITS_KINDS):
            item.spent_us[k] = <uint32_t>min(spent_ns[k] // 1000, <int64_t>0xFFFFFFFF)
    return 0
