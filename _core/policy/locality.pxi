# Where what shares a prefix runs, and in what order: see prefixes for what is known of the caches.
#
# Placement: a request that may run anywhere goes to the pool in which most of its prompt is known,
# if it can begin there at once and that is fuller than the emptiest by no more than a margin.
#
# DLPM (deficit longest prefix match, arXiv 2501.14312): a flow has a deficit, takes part while that
# is positive, and gets a quantum more once no flow that waits has any. Here the deficit is the rest
# of the quantum in which the flow's counter is: flows are ordered by the number of quanta that they
# have used up, and those with the fewest take part. That is the same, since all waiting flows were
# given equally many. A flow that returns is lifted, as under VTC, and does not keep its rest. With
# a quantum of one token DLPM is VTC. The first LOOKAHEAD flows that take part are compared, and the
# one whose head has the longest match in the pool is served first; ties go by arrival.

cdef int32_t first_in_class(Core core, int32_t pool, int32_t cls) except -2:
    """Return the least (counter, seq) of a class among those that must run in a pool and those that
    may. -1: none. O(1); where the pool cannot hold the first of a set of pools, O(LOOKAHEAD^2)."""
    cdef int32_t i = first_of_class(core, pool, cls)
    if i == NONE or not is_set(core.requests.items[i].target) or (
        core.ledger.can_hold(pool, &core.requests.items[i])
    ):
        return i
    return first_holdable(core, pool, cls)


cdef int32_t first_holdable(Core core, int32_t pool, int32_t cls) noexcept:
    """Return the first request of a class that a pool can hold or that must run there, of the
    LOOKAHEAD first; -1: none of these. Another pool can hold the others."""
    cdef int32_t found[LOOKAHEAD]
    cdef int32_t k, count = next_in_class(core, pool, cls, found, 0)
    for k in range(count):
        if core.requests.items[found[k]].target == pool or (
            core.ledger.can_hold(pool, &core.requests.items[found[k]])
        ):
            return found[k]
    return NONE


cdef int32_t first_of_class(Core core, int32_t pool, int32_t cls) except -2:
    # Whether the pool can hold a request of a set or not.
    cdef Heap own = (<Line>core.flows.candidates[pool + 1]).heap(cls)
    cdef Heap free = free_line(core.flows, pool).heap(cls)
    cdef int32_t shared = NONE, i
    if free.count:
        shared = first_head(core.flows, free, pool)
        if not core.ledger.can_hold(pool, &core.requests.items[shared]):
            shared = NONE  # another pool's
    if own.count == 0:
        return shared
    if shared == NONE:
        return first_head(core.flows, own, pool)
    i = first_of_two(core.flows, NONE, cls, pool, shift_of(core.flows, cls, pool))
    if i != shared and core.requests.items[i].target == NONE:
        # Below a node that is level with that of `shared`, and comes first by what must run here.
        if not core.ledger.can_hold(pool, &core.requests.items[i]):
            return first_head(core.flows, own, pool)
    return i


cdef int32_t next_in_class(
    Core core, int32_t pool, int32_t cls, int32_t* found, int32_t taken
) noexcept:
    """Return the next of one class, behind those that were taken."""
    return next_heads(
        core.flows, NONE, cls, pool, shift_of(core.flows, cls, pool), found, taken
    )


HASH_MASK = (1 << 64) - 1

cdef enum:
    USE_PLACEMENT = 1
    USE_ORDER = 2

cdef bytes PREFIX_KEY_NAME = b"prefix blocks"


cdef int prefix_uses(Core core) noexcept:
    """Return the choice that hashes could change now; 0: none. O(1)."""
    cdef int uses = 0
    if core.settings.prefix_blocks_max:
        if core.settings.prefix_affinity_ppm and core.ledger.count > 1:
            uses |= USE_PLACEMENT
        if core.by_prefix:
            uses |= USE_ORDER
    return uses


cdef int keep_wire_hashes(Core core, int64_t handle, const AdmitMessage* m) except -1:
    """Keep what a message says of the prompt, if that was queued. O(bytes)."""
    cdef int32_t i = core.requests.lookup(handle)
    cdef Kept* kept
    if i == NONE or core.requests.items[i].state != QUEUED:
        return 0
    kept = core.prefixes.keep(i, m.hashes, core.requests.items[i].prompt_max_tokens)
    if kept != NULL:
        read_hashes(core.prefixes, kept, m.body, adapter_of(core, &core.requests.items[i]))
    return 0


cdef int64_t keep_hashes(Core core, int64_t handle, tuple hashes) except? -1:
    """Keep the hashes of a simulator's request; return its handle. O(hashes)."""
    cdef int32_t i = core.requests.lookup(handle), k
    cdef Kept* kept
    if not hashes or not core.settings.prefix_blocks_max or i == NONE:
        return handle
    if core.requests.items[i].state != QUEUED:
        return handle
    kept = core.prefixes.keep(i, len(hashes), core.requests.items[i].prompt_max_tokens)
    if kept != NULL:
        for k in range(kept.count):
            kept.keys[k] = core.prefixes.key(
                hashes[k] & HASH_MASK, adapter_of(core, &core.requests.items[i])
            )
    return handle


cdef inline int64_t matched_tokens(Core core, int32_t pool, int32_t i) noexcept:
    """Return the tokens of a queued request's prompt that a pool probably has. O(log hashes)."""
    cdef const Kept* kept = core.prefixes.of(i)
    if kept == NULL:
        return 0
    return min(
        <int64_t>core.prefixes.index(pool).match(kept) * kept.tokens,
        <int64_t>core.requests.items[i].prompt_max_tokens,
    )


cdef int note_prefix(Core core, int32_t i, int32_t pool) except -1:
    """Request i is granted in a pool, which will have its prompt. O(hashes) amortised."""
    cdef const Kept* kept = core.prefixes.of(i)
    cdef Request* r = &core.requests.items[i]
    cdef Pool* p = &core.ledger.pools[pool]
    cdef PrefixIndex index = core.prefixes.index(pool)
    cdef int64_t matched = matched_tokens(core, pool, i)
    if kept == NULL:
        return 0
    index.asked_tokens += r.prompt_tokens
    index.matched_tokens += matched
    if core.flows.grain > 1:
        r.lease.matched_tokens = <int32_t>matched
    index.take(kept, core.settings.prefix_blocks_max, p.capacity_blocks * p.block_size)
    core.prefixes.drop(i)
    return 0


cdef int32_t head_in_class(Core core, int32_t pool, int32_t cls) except -2:
    """Return the next head of a class for a pool; -1: none. O(1), under DLPM O(LOOKAHEAD log
    hashes)."""
    cdef int32_t first = first_in_class(core, pool, cls)
    if first == NONE or core.flows.grain == 1 or core.prefixes.queued == 0:
        return first
    return longest_match(core, pool, cls, first)


cdef int64_t quanta_of(Core core, int32_t i, int32_t pool) noexcept:
    """Return how many quanta the flow of a request has used up, as a pool sees it."""
    return counter_of_head(core, i, pool) // core.flows.grain


cdef inline int64_t counter_of_head(Core core, int32_t i, int32_t pool) noexcept:
    """Return the counter that the flow of a request stands with in a pool. O(pools)."""
    cdef const Request* r = &core.requests.items[i]
    return counter_in_pool(core, r.flow, r.target, pool)


cdef int64_t counter_in_pool(Core core, int32_t flow, int32_t target, int32_t pool) noexcept:
    """Return the counter that a flow, or a node above it, stands with in a pool for its requests
    for a target. O(pools)."""
    cdef const Flow* f = &core.flows.items[flow]
    if target == NONE and core.flows.one_line:
        return f.vtc + shift_of(core.flows, f.cls, pool) * core.flows.grain
    return core.flows.counter_at(flow, pool)


cdef int32_t longest_match(
    Core core, int32_t pool, int32_t cls, int32_t first
) noexcept:
    """Return, among the heads of a class whose flows take part as that of the first does, the one
    of whose prompt a pool has most. O(LOOKAHEAD^2 + LOOKAHEAD log hashes)."""
    cdef int32_t found[LOOKAHEAD]
    cdef int32_t k, count = next_in_class(core, pool, cls, found, 0), best = first
    cdef int64_t quanta = quanta_of(core, first, pool), match
    cdef int64_t longest = matched_tokens(core, pool, first)
    cdef int32_t parent = core.flows.items[core.requests.items[first].flow].parent
    for k in range(count):
        if quanta_of(core, found[k], pool) != quanta:
            continue
        if core.flows.items[core.requests.items[found[k]].flow].parent != parent:
            continue
        match = matched_tokens(core, pool, found[k])
        if match > longest and core.ledger.can_hold(pool, &core.requests.items[found[k]]):
            best, longest = found[k], match
    return best


cdef int set_grain(Core core) except -1:
    """Set the grain of the order: a micro-token, under DLPM a quantum. O(queues log n) if that has
    changed."""
    cdef int64_t grain = core.settings.quantum_tokens * 1_000_000 if core.by_prefix else 1
    cdef int32_t flow
    if core.flows.grain == grain:
        return 0
    core.flows.grain = grain
    for flow in range(core.flows.count):
        if core.flows.items[flow].queued:
            rank_flow(core.flows, flow)
    return place_all_nodes(core.flows)


cdef int check_prefixes(Core core) except -1:
    """Check that queued requests alone keep hashes, and that indices are right. O(n)."""
    cdef PrefixIndex index
    cdef int32_t i, k, count
    cdef int64_t queued = 0, tokens
    for i in range(core.requests.used):
        if core.prefixes.of(i) != NULL:
            queued += core.prefixes.of(i).count
            check_invariant(
                core, core.requests.items[i].state == QUEUED, "hashes of what is queued alone"
            )
    check_invariant(core, queued == core.prefixes.queued, "hashes of queued requests")
    for index in core.prefixes.pools:
        k, count, tokens = index.oldest, 0, 0
        while k != NONE:
            check_invariant(
                core, index.places.get(index.blocks[k].key, 0) == k, "a key finds its block"
            )
            count += 1
            tokens += index.blocks[k].tokens
            k = index.blocks[k].newer
        check_invariant(
            core, count == <int32_t>index.places.count and tokens == index.tokens
            and count <= core.settings.prefix_blocks_max,
            "blocks of a prefix index",
        )
    return 0


cdef int limit_prefixes(Core core) except -1:
    """Let no index have more blocks than may be. O(blocks forgotten)."""
    cdef int32_t pool
    for pool in range(core.ledger.count):
        core.prefixes.index(pool).trim(core.settings.prefix_blocks_max, <int64_t>1 << 62)
    return 0
