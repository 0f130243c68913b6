# Shares: the tokens a minute that a tenant or a group may count on while the pools are full.
#
# A node with a share has a bucket that gains its share; who is served from it is within its share.
# What a node leaves in its bucket can be lent: at the node above there is a pool, whose bucket
# gains `lends` of each member and loses the same part of what the member uses itself, or all of
# what another member borrows. So the pool holds what is idle, whoever left it. Above a group's pool
# stands the group's own share in the pool above it; above all stands the root. (The hierarchy of
# Linux's HTB; lending and borrowing limits as in Kueue's cohorts.)
#
# A queue of a flow beyond its share is held where that matters: in saturation, and while others
# stand in the line. The flow's other queues are not, so that a full pool keeps nobody from an empty
# one. It is no candidate then, and comes back when its flow's bucket holds something, or when the
# line is empty: below saturation as it is, so that there a share binds nobody, and nothing is
# booked for it, so that nobody has debts when it begins to bind; in saturation if it can borrow.
# Held queues come back one at a time, in the order of the policy. So whoever is within its share
# goes first, borrowers alone keep the load at the threshold, and what a borrower gets falls
# steadily as the owners' use rises. An owner who comes back finds its bucket as it left it, so
# borrowing ends with the requests that run.

cdef enum:
    PAID_NOT = -2
    PAID_FREE = -1  # beyond the share, while that bound nobody
    LENDERS_SEEN = 8  # so many members of a pool are asked in turn which of them lends

ctypedef struct Guarantee:
    int64_t nominal  # tokens a minute; 0: no share
    int64_t lends  # of them at most
    int64_t borrows  # beyond them at most; -1: whatever there is
    Bucket unused  # of its share, and of what its members lend
    Bucket credit  # what it may still borrow
    int64_t borrowed, lent  # tokens in all
    int32_t cohort  # the node whose members it is among; -1: none
    int32_t next_member, lender  # the members of a pool form a ring; who is asked next to lend


@cython.final
cdef class Guarantees:
    cdef Guarantee* items  # by node of the quotas
    cdef int32_t count
    cdef int32_t root  # the pool of all: the desk at which held queues wait
    cdef int32_t throttled  # so many queues are
    cdef bint stale  # shares have changed at stale_ns
    cdef int64_t stale_ns
    cdef list throttled_for  # line of held queues, by their target
    cdef Heap dues  # the same queues by the time when their flows have something of their own

    def __cinit__(self, Classes classes):
        self.root = NONE
        self.throttled_for = [Line(classes)]
        self.dues = Heap()

    def __dealloc__(self):
        free(self.items)

    cdef int reach(self, int32_t count) except -1:
        """Have room for so many nodes. O(1) amortised."""
        cdef int32_t node
        if count > self.count:
            self.items = <Guarantee*>grow(self.items, self.count, count, sizeof(Guarantee))
            for node in range(self.count, count):
                self.items[node].cohort = self.items[node].lender = NONE
                self.items[node].borrows = NONE
            self.count = count
        return 0
