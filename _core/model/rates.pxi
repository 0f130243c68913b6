# How fast things go: work over time, in windows of which each next one weighs the older ones by
# 15/16. So a rate looks back on some 16 windows: fewer would vary by more than waits do.
#
# Work is counted in tokens as they are charged; outputs are the flow's average at the time when the
# request is queued. A rate counts only while it runs: a pool's while requests wait for room, a
# flow's while it is backlogged. So it measures how much can be drained, not how much is asked for.

cdef enum:
    WINDOW_GRANTS = 4  # a window has at least these grants and this length
    WINDOWS_KEPT = 16
    WORK_MAX = 1 << 30

cdef int64_t WINDOW_NS = 1_000_000_000
cdef int64_t MILLI_NS_PER_S = 1_000_000_000 * <int64_t>1_000
cdef int64_t WAIT_MAX_NS = <int64_t>1 << 52  # 52 days stand for any longer wait
cdef int64_t LONG_AGO_NS = -(<int64_t>1 << 60)

ctypedef struct Rate:
    int64_t work, time_ns  # sums over windows, the older ones weighed; 0: none has ended
    int64_t deep_work  # the part of flows that went on waiting
    int64_t open_work, open_deep, open_ns  # sums of the open window
    int64_t since_ns  # it runs since then, and `open_ns` is what it ran before
    int32_t open_grants
    bint runs

cdef enum:  # why a request is expected to miss its deadline
    SHED_WAIT = 0  # at its arrival
    SHED_PREFILL = 1  # when its turn has come
    SHED_KINDS = 2

# How far forecasts that a request will be too late are believed, see deadline_shedding.pxi.
ctypedef struct ShedAccuracy:
    int32_t score  # of SHED_PREFILL: up for each that was, far down for each that was not
    int32_t since[SHED_KINDS]  # how many were sent away since one was let in all the same
    int64_t judged, missed  # of those let in: how many showed it, and how many missed


cdef inline int64_t averaged(int64_t old, int64_t new) noexcept nogil:
    return (4 * old + new) // 5


cdef inline void rate_run(Rate* r, int64_t now_ns, bint runs) noexcept nogil:
    """Let it run or stand still from now on. O(1)."""
    if runs and not r.runs:
        r.since_ns = now_ns
    elif r.runs and not runs:
        r.open_ns += now_ns - r.since_ns
    r.runs = runs


cdef inline void rate_add(Rate* r, int64_t now_ns, int64_t work, bint is_deep) noexcept nogil:
    """So much was granted, and its flow has more in its queue or not. O(1)."""
    cdef int64_t open_ns
    if not r.runs:
        return
    r.open_work += work
    r.open_deep += work * is_deep
    r.open_grants += 1
    open_ns = r.open_ns + now_ns - r.since_ns
    if open_ns < WINDOW_NS or r.open_grants < WINDOW_GRANTS:
        return
    r.work += r.open_work - r.work // WINDOWS_KEPT
    r.deep_work += r.open_deep - r.deep_work // WINDOWS_KEPT
    r.time_ns += open_ns - r.time_ns // WINDOWS_KEPT
    r.open_work = r.open_deep = r.open_ns = r.open_grants = 0
    r.since_ns = now_ns


cdef inline void rate_forget(Rate* r, int64_t now_ns) noexcept nogil:
    cdef bint runs = r.runs
    memset(r, 0, sizeof(Rate))
    rate_run(r, now_ns, runs)


cdef inline int64_t pace_milli(const Rate* r, int64_t work) noexcept nogil:
    """Return the thousandths of tokens a second that `work` of its work comes to; 0: unknown."""
    return <int64_t>(<wide>work * MILLI_NS_PER_S // r.time_ns) if r.time_ns else 0


cdef inline int64_t pace_micro(const Rate* r) noexcept nogil:
    """Return the millionths of tokens a second of all its work; 0: unknown."""
    return <int64_t>min(<wide>1 << 60, <wide>pace_milli(r, r.work) * 1_000)


cdef inline int64_t time_for(int64_t work, int64_t pace) noexcept nogil:
    """Return how long this much work takes at a pace that is known."""
    return <int64_t>min(<wide>WAIT_MAX_NS, <wide>work * MILLI_NS_PER_S // pace)
