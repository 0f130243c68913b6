# The usage of ended leases, in rows for a ledger outside the core, until the driver takes them.
#
# Rows are numbered from 1, in the order in which leases ended. The driver reports up to which row
# the ledger is saved. Until then a stream does not report the end of such a lease as saved, so its
# holder keeps the Complete, and sends it again if the scheduler restarts.

cdef enum:
    ROWS_UNTAKEN_MAX = 65_536  # a replay of a recording takes none


@cython.final
cdef class UsageRows:
    cdef bint is_kept  # a ledger takes the rows; else none are made
    cdef list rows
    cdef int64_t count, saved  # rows made so far; the last one that is saved

    def __cinit__(self):
        self.rows = []

    cdef int add(self, tuple row) except -1:
        if len(self.rows) >= ROWS_UNTAKEN_MAX:
            del self.rows[: ROWS_UNTAKEN_MAX // 2]
        self.rows.append(row)
        self.count += 1
        return 0

    cdef list take(self):
        """Return the rows that were not taken before. O(1)."""
        cdef list rows = self.rows
        if rows:
            self.rows = []
        return rows
