# The state of one open stream: its requests, and the answers that it has not been sent yet. The
# session layer reads it.

ctypedef struct Notice:
    int64_t lease_id
    int32_t state


cdef class SessionState:
    cdef Core core
    cdef readonly int32_t owner
    cdef int32_t principal, open_count, first
    cdef bint said_goodbye
    cdef bint is_ready, is_listed
    cdef Verdict* outbox
    cdef Notice* notices
    cdef int32_t outbox_count, outbox_taken, outbox_max, notice_count, notice_taken, notices_max
    cdef readonly bytes client_id
    cdef uint64_t incarnation  # number of the client's process; 0: unknown
    cdef list unsaved  # messages that ended leases: seq, and the row up to which to save

    def __cinit__(self):
        self.first = NONE
        self.unsaved = []

    def __dealloc__(self):
        free(self.outbox)
        free(self.notices)

    cdef int link(self, int32_t i) except -1:
        cdef Request* items = self.core.requests.items
        items[i].owner_prev = NONE
        items[i].owner_next = self.first
        if self.first != NONE:
            items[self.first].owner_prev = i
        self.first = i
        self.open_count += 1
        return 0

    cdef int unlink(self, int32_t i) except -1:
        cdef Request* items = self.core.requests.items
        cdef int32_t before = items[i].owner_prev, after = items[i].owner_next
        if before == NONE:
            self.first = after
        else:
            items[before].owner_next = after
        if after != NONE:
            items[after].owner_prev = before
        items[i].owner_next = items[i].owner_prev = NONE
        self.open_count -= 1
        return 0

    cdef int push(self, Verdict* v) except -1:
        cdef int32_t size
        if self.outbox_count == self.outbox_max:
            size = doubled(self.outbox_max, 0, 64)
            self.outbox = <Verdict*>grow(self.outbox, self.outbox_max, size, sizeof(Verdict))
            self.outbox_max = size
        self.outbox[self.outbox_count] = v[0]
        self.outbox_count += 1
        return self.wake()

    cdef int notice(self, int64_t lease_id, int state) except -1:
        cdef int32_t size
        if self.notice_count == self.notices_max:
            size = doubled(self.notices_max, 0, 64)
            self.notices = <Notice*>grow(
                self.notices, self.notices_max, size, sizeof(Notice)
            )
            self.notices_max = size
        self.notices[self.notice_count].lease_id = lease_id
        self.notices[self.notice_count].state = state
        self.notice_count += 1
        return self.wake()

    cdef int wake(self) except -1:
        self.is_ready = True
        if not self.is_listed:
            self.is_listed = True
            self.core.ready_slots.append(self.owner)
        return 0
