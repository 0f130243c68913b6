# Budgets: tokens of a calendar day or month, which quotas of tenants and groups may have.
#
# The core knows no calendar. The driver reports each period with its number and its end, and what
# was used in it before the start. A period that is not later than the known one opens nothing, so
# a wall clock that is set back refills no budget. Members of a cluster state what they spent in the
# same period; the sum of the others counts until the period ends.

cdef enum:
    BUDGET_DAY = 0
    BUDGET_MONTH = 1
    BUDGETS = 2

ctypedef struct Budget:
    int64_t limit  # tokens; 0: none
    int64_t spent  # in the period, and what stands on open bills
    int64_t elsewhere  # spent in the period at other members of a cluster
    int64_t period  # its number; 0: none was reported yet
    int64_t ends_ns


cdef inline int64_t budget_due_ns(const Budget* b, int64_t tokens, int64_t now_ns) noexcept nogil:
    """Return when the tokens fit: 0 if they do now, else the end of the period. O(1)."""
    if b.limit == 0 or b.spent + b.elsewhere + min(tokens, b.limit) <= b.limit:
        return 0
    # The driver reports the next period a moment after its begin.
    return max(b.ends_ns, now_ns + NS_PER_S)


cdef inline int64_t budget_left(const Budget* b) noexcept nogil:
    return max(<int64_t>0, b.limit - b.spent - b.elsewhere)


cdef bint budget_turn(Budget* b, int64_t period, int64_t ends_ns, int64_t spent) noexcept nogil:
    """Begin a period in which so much is spent already; whether it is a later one. O(1)."""
    if period < b.period:
        return False
    b.ends_ns = ends_ns
    if period == b.period:
        return False
    b.period, b.spent, b.elsewhere = period, spent, 0
    return True
