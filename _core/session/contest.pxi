# Contests: a newcomer claims a pool that streams of another engine offer.
#
# The scheduler asks these streams for a sign of life. If one of them sends any event in time, the
# newcomer is refused, and keeps trying. If none does, they are superseded: their streams end, and
# the newcomer has the pool. Until then the leases of the first engine are as they were.

cdef int end_contests(Core core) except -1:
    """Decide the contests whose time is over, or whose pool no stream offers any more.
    O(contests * streams)."""
    cdef const Pool* p
    if not core.contests:
        return 0
    for key, (due_ns, newcomers) in list(core.contests.items()):
        known = core.pool_names.get(key)
        p = NULL if known is None else &core.ledger.pools[<int32_t>known]
        if core.now_ns >= due_ns or p == NULL or p.attached == p.configured:
            del core.contests[key]
            take_over(core, key, [each for each in newcomers if key in (<Session>each).claims])
    return 0


cdef int take_over(Core core, bytes key, list newcomers) except -1:
    """Let newcomers, in the order in which they came, have a pool.
    O(streams + leases of the pool)."""
    cdef PoolFigures f
    cdef Session session
    cdef const Pool* p
    for each in list(core.offers.get(key, ())) if newcomers else ():
        session = each
        note(core, "pool_taken_over", key, 1, f"{session.client_id.decode()} was silent")
        session.supersede()
    for session in newcomers:
        f.epoch, f.capacity_tokens, f.block_size, f.max_running, f.max_model_tokens, f.gates = (
            session.claims.pop(key)
        )
        f.principal = session.principal
        session.wake()
        try:
            known = core.pool_names.get(key)
            p = NULL if known is None else &core.ledger.pools[<int32_t>known]
            if p != NULL and p.attached > p.configured and p.epoch != f.epoch:
                session.refuse(key)  # another newcomer was first
            else:
                session.offer(key, &f)
        except CallerError as e:
            session.fault(0, e.code, f"pool.{e.field}", e.description)
    return 0
