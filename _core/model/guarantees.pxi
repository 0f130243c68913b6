# Shares: the tokens a minute that a tenant or a group may count on while the pools are full.
#
# A node with a share has a bucket that gains its share. A request that the bucket pays for is
# within the share. A node can lend the tokens that it leaves in its bucket. The node above has a
# pool for that. The pool's bucket gains `lends` of each member. It loses the same part of the
# tokens that the member uses itself, and all tokens that another member borrows. So the pool holds
# the idle tokens of all members together. A group has a share of its own in the pool above it, up
# to the root. (The hierarchy is that of Linux's HTB; limits on lending and borrowing as in Kueue's
# cohorts.)
#
# A queue of a flow beyond its share is held if the share binds: in saturation, and while other
# queues are candidates. The flow's other queues are not held, so that a full pool keeps no flow
# from an empty pool. A held queue is no candidate. It is one again when its flow's bucket holds
# tokens, or when no other candidate is left: below saturation at once, in saturation if it can
# borrow. Below saturation a share binds no flow and books nothing, so no flow has debts when it
# begins to bind. Held queues return one at a time, in the order of the policy. So flows within
# their shares are served first, borrowers alone keep the load at the threshold, and a borrower gets
# steadily less as the owners use more. An owner that was idle finds its bucket as it left it, so
# borrowing ends with the requests that run.

cdef enum:
    PAID_NOT = -2
    PAID_FREE = -1  # beyond the share, while it did not bind
    LENDERS_SEEN = 8  # members of a pool that are asked in turn whether they lend

ctypedef struct Guarantee:
    int64_t nominal  # tokens a minute; 0: no share
    int64_t lends  # the most that it lends of them
    int64_t borrows  # beyond them at most; -1: all that there is
    Bucket unused  # the unused part of its share, and of its members' loans
    Bucket credit  # what it may still borrow
    int64_t borrowed, lent  # tokens in all
    int32_t cohort  # the node whose members it is among; -1: none
    int32_t next_member, lender  # the members of a pool form a ring; the one that is asked next


@cython.final
cdef class Guarantees:
    cdef Guarantee* items  # one guarantee for each node of the quotas
    cdef int32_t count
    cdef int32_t root  # the pool above all others; held queues wait at it
    cdef int32_t throttled  # number of queues
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
        """Have room for `count` nodes. O(1) amortised."""
        cdef int32_t node
        if count > self.count:
            self.items = <Guarantee*>grow(self.items, self.count, count, sizeof(Guarantee))
            for node in range(self.count, count):
                self.items[node].cohort = self.items[node].lender = NONE
                self.items[node].borrows = NONE
            self.count = count
        return 0
