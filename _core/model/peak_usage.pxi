# The peak form of the ledger's test: requests end at different times, so the cache is never asked
# for all final lengths at once (the memory test of LightLLM and S-LoRA).
#
# A lease that reports its progress has known figures: the tokens that it holds, and the tokens that
# each of its sequences will still make. All sequences grow by a token a step. With the leases in
# descending order of what is left, the load just before the k-th ends is
#     sum(width[j] * ceil((each[j] + left[k]) / block) for j <= k)
# blocks, and the greatest of these is the peak. It is counted exactly. An estimate of half a block
# for each sequence would err, since sequences that began together fill their last blocks together.
# A sequence of `each` tokens has used `1 + (each - 1) % block` tokens of its last block. Within
# `left` more tokens it begins `left // block` blocks, and one more if `(each - 1) % block` and
# `left % block` together make a block. A histogram of `(each - 1) % block` counts these. With
# blocks of more than PARTS tokens it is coarser, and errs on the safe side. A lease that reports
# nothing, or is SUSPECT, counts in full at any time. No peak is above the sum of the reservations.

cdef enum:
    PARTS = 128
    GROUP = 16  # parts that are summed up together
    GROUPS = 8

ctypedef struct GrowingLease:
    int64_t tokens_left  # tokens that each of its sequences will still make
    int64_t blocks_left  # whole blocks of it
    int64_t blocks  # that its sequences have begun
    int64_t width  # sequences
    int64_t whole  # its reservation, in tokens
    int32_t part  # used part of its sequences' last blocks, of PARTS
    int32_t from_part  # which of those with it begin a block more while the rest of `left` is made
    int32_t id  # id of its request

ctypedef struct Histogram:
    int32_t parts[PARTS + GROUP]  # beyond PARTS there are none
    int32_t groups[GROUPS + 1]

# The leases of one pool that grow, in descending order of what is left. A report moves all alike,
# so the order hardly changes: it is mended by insertion when it is asked for, O(leases) where
# nothing moved far.
ctypedef struct GrowingLeases:
    GrowingLease* items
    int32_t count, size
    int64_t fixed_tokens  # reservations of the leases that are not here
    int64_t peak_blocks  # the peak of those here, in blocks; -1: to be counted again
    int64_t counted  # how often a peak was, since there is the pool
    bint ordered


cdef int growing_add(GrowingLeases* runs, Requests requests, int32_t id) except -1:
    """Take in a lease; its figures follow by `put()`. O(1) amortised."""
    cdef int32_t size
    if runs.count == runs.size:
        size = doubled(runs.size, 0, 64)
        runs.items = <GrowingLease*>grow(runs.items, runs.size, size, sizeof(GrowingLease))
        runs.size = size
    runs.items[runs.count].id = id
    requests.items[id].lease.growing_at = runs.count
    runs.count += 1
    runs.peak_blocks = -1
    return 0


cdef void growing_remove(GrowingLeases* runs, Requests requests, int32_t id) noexcept:
    """Let a lease go. O(1): the last one takes its place."""
    cdef int32_t at = requests.items[id].lease.growing_at
    runs.count -= 1
    runs.items[at] = runs.items[runs.count]
    requests.items[runs.items[at].id].lease.growing_at = at
    requests.items[id].lease.growing_at = NONE
    runs.ordered = False
    runs.peak_blocks = -1


cdef void growing_put(GrowingLeases* runs, int32_t at, const GrowingLease* run) noexcept:
    """Set the figures of a lease. O(1)."""
    cdef int32_t id = runs.items[at].id
    runs.items[at] = run[0]
    runs.items[at].id = id
    runs.ordered = False
    runs.peak_blocks = -1


cdef void growing_order(GrowingLeases* runs, Requests requests) noexcept:
    cdef int32_t i, at
    cdef GrowingLease run
    for i in range(1, runs.count):
        if runs.items[i].tokens_left <= runs.items[i - 1].tokens_left:
            continue
        run = runs.items[i]
        at = i
        while at > 0 and runs.items[at - 1].tokens_left < run.tokens_left:
            runs.items[at] = runs.items[at - 1]
            requests.items[runs.items[at].id].lease.growing_at = at
            at -= 1
        runs.items[at] = run
        requests.items[run.id].lease.growing_at = at
    runs.ordered = True


cdef void set_growth(GrowingLease* run, int64_t each_tokens, int64_t block_tokens) noexcept:
    """Set what follows from what each sequence holds, from `left` and `width`. O(1)."""
    cdef int64_t used = max(each_tokens, <int64_t>1) - 1
    cdef int64_t of_part = (block_tokens + PARTS - 1) // PARTS
    run.blocks = run.width * (used // block_tokens + 1)
    run.part = <int32_t>(used % block_tokens // of_part)
    run.blocks_left = run.tokens_left // block_tokens
    run.from_part = <int32_t>((block_tokens - run.tokens_left % block_tokens) // of_part)


cdef inline int64_t beginning(const Histogram* seen, int32_t from_part) noexcept nogil:
    """Return how many sequences are at that part or beyond. O(GROUPS + GROUP)."""
    cdef int32_t group = from_part // GROUP, k
    cdef int64_t count = 0
    for k in range(group + 1, GROUPS):
        count += seen.groups[k]
    for k in range(from_part, (group + 1) * GROUP):
        count += seen.parts[k]
    return count


cdef inline void peak_with(
    Histogram* seen, const GrowingLease* run, int64_t* blocks, int64_t* width, int64_t* most
) noexcept nogil:
    # Only where all of them, beginning a block more, would be the most so far they are counted.
    cdef int64_t load
    blocks[0] += run.blocks
    width[0] += run.width
    seen.parts[run.part] += <int32_t>run.width
    seen.groups[run.part // GROUP] += <int32_t>run.width
    load = blocks[0] + width[0] * run.blocks_left
    if load + width[0] > most[0]:
        most[0] = max(most[0], load + beginning(seen, run.from_part))


cdef int64_t least_peak(const GrowingLeases* runs, const GrowingLease* one_more) noexcept nogil:
    """Return a load that the peak, in blocks, is not below: it leaves the blocks out that begin
    within the rest of `left`. Few loads are above it, so few have to be counted exactly.
    O(leases)."""
    cdef int64_t blocks = 0, width = 0, most = 0
    cdef bint is_in = one_more == NULL
    cdef const GrowingLease* run
    cdef int32_t i
    for i in range(runs.count):
        run = &runs.items[i]
        if not is_in and one_more.tokens_left >= run.tokens_left:
            is_in = True
            blocks += one_more.blocks
            width += one_more.width
            most = max(most, blocks + width * one_more.blocks_left)
        blocks += run.blocks
        width += run.width
        most = max(most, blocks + width * run.blocks_left)
    if not is_in:
        blocks += one_more.blocks
        width += one_more.width
        most = max(most, blocks + width * one_more.blocks_left)
    return most


cdef int64_t growing_peak(
    GrowingLeases* runs, Requests requests, const GrowingLease* one_more, int64_t block_tokens
) noexcept:
    """Return the greatest load to come, in tokens, with one more lease if it is given. O(leases);
    without one O(1) while nothing moves."""
    cdef Histogram seen
    cdef int64_t blocks = 0, width = 0, most
    cdef int64_t fixed = runs.fixed_tokens
    cdef bint is_alone = one_more == NULL or one_more.width == 0
    cdef bint is_in = is_alone
    cdef const GrowingLease* beside = NULL
    cdef int32_t i
    if not is_alone:
        beside = one_more
    if one_more != NULL and is_alone:
        fixed += one_more.whole
    if is_alone and runs.peak_blocks >= 0:
        return runs.peak_blocks * block_tokens + fixed
    if not runs.ordered:
        growing_order(runs, requests)
    runs.counted += 1
    most = least_peak(runs, beside)
    memset(&seen, 0, sizeof(seen))
    for i in range(runs.count):
        if not is_in and one_more.tokens_left >= runs.items[i].tokens_left:
            is_in = True
            peak_with(&seen, one_more, &blocks, &width, &most)
        peak_with(&seen, &runs.items[i], &blocks, &width, &most)
    if not is_in:
        peak_with(&seen, one_more, &blocks, &width, &most)
    if is_alone:
        runs.peak_blocks = most
    return most * block_tokens + fixed


cdef int64_t load_from(
    const GrowingLeases* runs, int64_t start, const GrowingLease* head, bint by_peak, int64_t room
) noexcept:
    """Return the greatest load, in tokens, of the leases that have more left than `start`, in their
    order, and of a head that begins then. Each is taken to reach its whole reservation. If that is
    more than `room`, any load above it. O(leases)."""
    cdef int64_t held = 0, width = 0, most = 0, fixed = runs.fixed_tokens
    cdef int64_t ends = start + head.tokens_left
    cdef bint is_in = head.width == 0 or not by_peak
    cdef const GrowingLease* run
    cdef int32_t k
    if is_in:
        fixed += head.whole
    for k in range(runs.count):
        run = &runs.items[k]
        if run.tokens_left <= start:
            break
        if not by_peak:
            most += run.whole
        else:
            if not is_in and run.tokens_left <= ends:
                is_in = True
                held += head.whole - head.width * ends
                width += head.width
                most = max(most, held + width * ends)
            held += run.whole - run.width * run.tokens_left
            width += run.width
            most = max(most, held + width * run.tokens_left)
        if fixed + most > room:
            return fixed + most
    if not is_in:
        most = max(most, held + head.whole + width * ends)
    return fixed + most


cdef int64_t growing_project(
    GrowingLeases* runs, Requests requests, const GrowingLease* head, int64_t room, bint by_peak,
    int64_t* spare_tokens,
) noexcept:
    """Return after how many tokens of every sequence a head fits into `room` beside the leases that
    still run, and what of it is spare then. NEVER: it does not while those that report nothing run.
    O(leases log leases)."""
    cdef int32_t low = 0, high = runs.count, middle
    cdef int64_t start = 0, load, found
    if not runs.ordered:
        growing_order(runs, requests)
    if high:
        start = runs.items[0].tokens_left
    found = load_from(runs, start, head, by_peak, room)
    spare_tokens[0] = 0
    if found > room:
        return NEVER
    while low < high:  # the first `low` may still run
        middle = (low + high + 1) // 2
        start = runs.items[middle].tokens_left if middle < runs.count else 0
        load = load_from(runs, start, head, by_peak, room)
        if load <= room:
            low, found = middle, load
        else:
            high = middle - 1
    spare_tokens[0] = room - found
    return runs.items[low].tokens_left if low < runs.count else 0
