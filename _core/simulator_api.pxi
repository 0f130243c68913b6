# Calls in bulk for simulators, with the results of the methods one by one, and counters for tests.

def progress_all(Core core not None, int64_t now_ns, bytes leases not None,
                 bytes outputs not None, int64_t more=0):
    cdef const int64_t* lease = <const int64_t*><const char*>leases
    cdef const int64_t* output = <const int64_t*><const char*>outputs
    cdef Py_ssize_t count = len(outputs) // sizeof(int64_t), at
    cdef int64_t total
    cdef int32_t i
    cdef Usage u
    if len(outputs) != count * <Py_ssize_t>sizeof(int64_t) or len(leases) != 3 * len(outputs):
        invalid("leases", "must have three numbers of 8 bytes for each one of the outputs")
    enter(core, now_ns)
    for at in range(count):
        total = output[at] + more
        # The first token shows that the input has been computed; nothing earlier does.
        u = checked_usage(lease[2] if total else NONE, 0, total)
        i = core.requests.lookup(lease[0])
        if i != NONE and core.requests.items[i].state != QUEUED:
            progress_granted(core, i, lease[1], &u)
        lease += 3


def promised_tokens(Core core not None):
    cdef int64_t tokens = 0
    cdef int32_t i
    for i in range(core.ledger.count):
        tokens += core.ledger.pools[i].promised_blocks * core.ledger.pools[i].block_size
    return tokens


def moved_entries(Core core not None):
    return core.ids.moves + core.leases.moves + core.tags.moves + core.names.moves


def counted_peaks(Core core not None):
    cdef int64_t counted = 0
    cdef int32_t pool
    for pool in range(core.ledger.count):
        counted += core.ledger.pools[pool].growing.counted
    return counted
