# The peak form of the ledger's test: requests end at different times, so the cache is never asked
# for all final lengths at once (the memory test of LightLLM and S-LoRA).
#
# Of a lease that reports its progress is known what it holds and how many tokens each of its
# sequences will still make. All sequences grow by a token a step, so with the leases in descending
# order of what is left, the load just before the k-th ends is
#     sum(held[j] + width[j] * left[k] for j <= k),
# and the greatest of these is the peak. A lease that reports nothing, or is SUSPECT, counts in full
# at any time. A sequence leaves half a block unused on average, though never more than its
# reservation: so the peak is at most the sum of the reservations.

ctypedef struct Run:
    int64_t left  # tokens that each of its sequences will still make
    int64_t held  # tokens in the cache, with what its last blocks leave unused
    int64_t width  # sequences
    int64_t whole  # its reservation
    int32_t id  # of its request


cdef int64_t NEVER = <int64_t>1 << 62


# The leases of one pool that grow, in descending order of what is left. A report moves all alike,
# so the order hardly changes: it is mended by insertion when it is asked for, O(leases) where
# nothing moved far.
ctypedef struct Runs:
    Run* items
    int32_t count, size
    int64_t fixed_tokens  # reservations of the leases that are not here
    bint ordered


cdef int runs_add(Runs* runs, Requests requests, int32_t id) except -1:
    """Take in a lease; its figures follow by `put()`. O(1) amortised."""
    cdef int32_t size
    if runs.count == runs.size:
        size = max(64, runs.size * 2)
        runs.items = <Run*>grow(runs.items, runs.size, size, sizeof(Run))
        runs.size = size
    runs.items[runs.count].id = id
    requests.items[id].run = runs.count
    runs.count += 1
    return 0


cdef void runs_remove(Runs* runs, Requests requests, int32_t id) noexcept:
    """Let a lease go. O(1): the last one takes its place."""
    cdef int32_t at = requests.items[id].run
    runs.count -= 1
    runs.items[at] = runs.items[runs.count]
    requests.items[runs.items[at].id].run = at
    requests.items[id].run = NONE
    runs.ordered = False


cdef void runs_put(Runs* runs, int32_t at, const Run* run) noexcept:
    """Set the figures of a lease. O(1)."""
    cdef int32_t id = runs.items[at].id
    runs.items[at] = run[0]
    runs.items[at].id = id
    runs.ordered = False


cdef void runs_order(Runs* runs, Requests requests) noexcept:
    cdef int32_t i, at
    cdef Run run
    for i in range(1, runs.count):
        if runs.items[i].left <= runs.items[i - 1].left:
            continue
        run = runs.items[i]
        at = i
        while at > 0 and runs.items[at - 1].left < run.left:
            runs.items[at] = runs.items[at - 1]
            requests.items[runs.items[at].id].run = at
            at -= 1
        runs.items[at] = run
        requests.items[run.id].run = at
    runs.ordered = True


cdef int64_t runs_peak(Runs* runs, Requests requests, const Run* one_more) noexcept:
    """The greatest load to come, in tokens, with one more lease where it is given."""
    cdef int64_t held = 0, width = 0, most = 0
    cdef int32_t i
    cdef int64_t fixed = runs.fixed_tokens
    cdef bint is_in = one_more == NULL
    if one_more != NULL and one_more.width == 0:
        fixed += one_more.held
        is_in = True
    if not runs.ordered:
        runs_order(runs, requests)
    for i in range(runs.count):
        if not is_in and one_more.left >= runs.items[i].left:
            is_in = True
            held += one_more.held
            width += one_more.width
            most = max(most, held + width * one_more.left)
        held += runs.items[i].held
        width += runs.items[i].width
        most = max(most, held + width * runs.items[i].left)
    if not is_in:
        most = max(most, held + one_more.held + (width + one_more.width) * one_more.left)
    return most + fixed


cdef void runs_project(
    Runs* runs, Requests requests, int64_t room, int64_t* left, int64_t* spare_tokens
) noexcept:
    """After how many tokens of every sequence the reservations are within `room`, and what of
    it is spare then. NEVER: they are not while those that report nothing run."""
    cdef int64_t load = runs.fixed_tokens
    cdef int32_t i
    if not runs.ordered:
        runs_order(runs, requests)
    for i in range(runs.count):
        load += runs.items[i].whole
    i = runs.count
    left[0] = 0
    while i > 0 and (load > room or runs.items[i - 1].left == left[0]):
        i -= 1
        load -= runs.items[i].whole
        left[0] = runs.items[i].left
    if load > room:
        left[0] = NEVER
    spare_tokens[0] = max(<int64_t>0, room - load)
