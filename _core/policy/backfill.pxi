# Backfill: which request may pass a head that does not fit.
#
# EASY backfill (Lifka 1995) lets a later request go first if it fits now and does not move the
# head's projected start. That alone bounds no share: requests that are small enough always fit. So
# a request of the head's class passes only within the lead: its flow is ahead of the head's by no
# more than the head will be charged, so that it would come next after that head anyway. The two
# flows are compared as the siblings above them, the children of their lowest common node, by the
# keys that order them in this pool. Under DLPM the quantum is the least lead: flows within it take
# part alike. In a tree the request passes the head of each group between as well, so it is held to
# the lead over each of these: a group that is next lets the tenant that is next in it go first.
#
# Proof of the bound: a request that is granted has key <= key(head) + charge(head), and
# key(head) <= key(g) for each flow g that waits. So no flow gets ahead of one that waits all the
# time by more than VTC's bound and the charge of one request.
#
# A light flow has one request queued and stays below its share of the pool. It may pass a head
# whose flow is above its share even if that moves the head's start, because tokens are kept free
# for it (see headroom). Only such passes of one head are limited, by `bypass_max` and `bypass_ms`.
# A policy without counters has no lead; there these limit every pass.
#
# A better class, whose head waits behind one that ageing brought forward, is bound by the start of
# that head alone. A worse class needs the pool's surplus: a part of what heads were charged, at
# most the charge of one. With `backfill_surplus: s`, leases that passed are charged 1 - s of their
# work, so that the flow that fills gaps may get up to 1/(1 - s) of another's service.

# When the head of a pool can start.
ctypedef struct Projection:
    int64_t left  # until its start, in tokens of every running sequence
    int64_t spare_tokens  # what will then be free beside it
    bint known

# How a request may pass a head, if it fits.
ctypedef struct Right:
    int32_t side  # the child, above it, of the lowest node above both
    int64_t lead  # the greatest that was allowed, at any level
    int64_t head_work  # the head's work, see work_micro(); -1: not asked for yet
    bint light  # also if it moves the head's start, unless its flow would be above its share


cdef int32_t who_may_pass(Core core, int32_t pool, int32_t head, Plan* plan) except -2:
    """Return the first request that may pass a head, and its plan; -1: none. `plan`: why the head
    waits. O(LOOKAHEAD * levels^2); in the peak form, for each that is within the lead, O(leases of
    the pool), and once O(leases log leases) if one fits."""
    cdef int32_t found[LOOKAHEAD]
    cdef Request* first = &core.requests.items[head]
    cdef Request* r
    cdef Plan its
    cdef Projection start
    cdef Right right
    cdef int32_t k, count
    if core.flows.items[first.flow].exempt or not core.backfills:
        return NONE
    if core.flows.order != ORDER_COUNTER and has_been_passed(core, first):
        return NONE
    start.known, right.head_work = False, -1
    count = next_in_line(core, pool, core.flows.items[first.flow].cls, found)
    for k in range(count):
        r = &core.requests.items[found[k]]
        if found[k] == head or r.due_ns <= core.now_ns or not core.ledger.can_hold(pool, r):
            continue
        if not has_right_to_pass(core, pool, r, first, plan, &right):
            continue
        its = plan_for(core, pool, r)
        wake_for(core, pool, its.reason)
        if its.reason != WAIT_NONE:
            continue
        right.light = right.light and not its.above
        if not right.light and not leaves(core, pool, first, plan, r, &its, &start):
            continue
        if core.quotas.guarantees.count and must_throttle(core, found[k]):
            continue
        if not model_allows(core, found[k], pool):
            continue
        note_pass(core, pool, first, r, &right)
        plan[0] = its
        return found[k]
    return NONE


cdef inline bint has_been_passed(Core core, const Request* head) noexcept:
    """Return whether the limits of passes are used up for a head."""
    return head.head_state.bypassed >= core.settings.bypass_max or (
        head.head_state.bypassed
        and core.now_ns - head.head_state.bypassed_ns >= core.settings.bypass_ns
    )


cdef int64_t work_micro(Core core, const Request* r) noexcept:
    """Return the charge of a request at weight 1, as its flow's outputs predict it, else those of
    its group or of all flows; its most while none is known. O(1)."""
    cdef int64_t each = core.flows.items[r.flow].average_milli // 1000
    cdef Asked asked
    if each == 0:
        asked_of(core, r, &asked)
        each = core.predictor.quantile(&asked, MEDIAN)
    if each <= 0 or each > r.output_max_tokens:
        each = r.output_max_tokens
    return price_of(&core.settings, r, r.prompt_tokens, 0, each * r.sequences)


cdef void find_siblings(Flows flows, int32_t* a, int32_t* b) noexcept:
    """Go from two flows of a class up to the children of their lowest common node. O(levels)."""
    while flows.items[a[0]].depth > flows.items[b[0]].depth:
        a[0] = flows.items[a[0]].parent
    while flows.items[b[0]].depth > flows.items[a[0]].depth:
        b[0] = flows.items[b[0]].parent
    while flows.items[a[0]].parent != flows.items[b[0]].parent:
        a[0], b[0] = flows.items[a[0]].parent, flows.items[b[0]].parent


cdef inline int64_t lead_allowed(Core core, int32_t of_head, int64_t work) noexcept:
    """Return how far a sibling may be ahead of the side of a head of this work and still pass it.
    O(1)."""
    return max(
        core.flows.grain if core.by_prefix else 0,
        weighted_by(work, core.flows.items[of_head].weight_milli),
    )


cdef bint is_near(
    Core core, int32_t pool, const Request* r, const Request* head, int64_t work, Right* right
) noexcept:
    """Return whether a request is within the lead over another of its class, which has this work.
    O(levels)."""
    cdef int32_t of_head = head.flow
    cdef int64_t most
    right.side = r.flow
    find_siblings(core.flows, &right.side, &of_head)
    if right.side == of_head:
        return True
    most = lead_allowed(core, of_head, work)
    right.lead = max(right.lead, most)
    return (
        counter_in_pool(core, right.side, r.target, pool)
        - counter_in_pool(core, of_head, head.target, pool)
    ) <= most


cdef bint is_within_lead(
    Core core, int32_t pool, const Request* r, const Request* head, Right* right
) noexcept:
    """Return whether a request of the head's class is near enough behind it to pass it, and behind
    the head of each node below which both do not stand. O(levels^2)."""
    cdef Flows flows = core.flows
    cdef int32_t cls = flows.items[r.flow].cls, node = flows.items[r.flow].parent, side, first
    cdef const Request* other
    if flows.order != ORDER_COUNTER:
        return True
    if right.head_work < 0:
        right.head_work = work_micro(core, head)
    if not is_near(core, pool, r, head, right.head_work, right):
        return False
    side = right.side
    if node != NONE and side != r.flow:
        while True:
            first = first_of_two(flows, node, cls, pool, shift_of(flows, cls, pool))
            if first != NONE:
                other = &core.requests.items[first]
                if not is_near(core, pool, r, other, work_micro(core, other), right):
                    return False
            if node == side:
                break
            node = flows.items[node].parent
    right.side = side
    return True


cdef bint has_right_to_pass(
    Core core, int32_t pool, const Request* r, const Request* head, const Plan* plan,
    Right* right,
) noexcept:
    """Return whether the order lets a request pass a head that waits as `plan` says, if it fits.
    O(levels^2)."""
    cdef int32_t cls = core.flows.items[r.flow].cls, first = core.flows.items[head.flow].cls
    right.light, right.lead, right.side = False, 0, r.flow
    if cls == first:
        if not is_within_lead(core, pool, r, head, right):
            return False
        right.light = (
            plan.above and core.flows.items[right.side].queued == 1
            and not has_been_passed(core, head)
        )
        return True
    if core.classes.goes_before(cls, first):
        return True
    return core.ledger.pools[pool].surplus_micro >= work_micro(core, r)


cdef int note_pass(
    Core core, int32_t pool, Request* head, const Request* r, const Right* right
) except -1:
    """Count a pass that the limits of passes concern, and let a worse class pay for its own."""
    cdef int32_t cls = core.flows.items[r.flow].cls, first = core.flows.items[head.flow].cls
    if right.light or core.flows.order != ORDER_COUNTER:
        if head.head_state.bypassed == 0:
            head.head_state.bypassed_ns = core.now_ns
        head.head_state.bypassed += 1
    if cls == first:
        core.flows.lead_given_max = max(core.flows.lead_given_max, right.lead)
        core.save_rest = True
    elif core.classes.goes_before(first, cls):
        core.ledger.pools[pool].surplus_micro -= work_micro(core, r)
    return 0


cdef void note_turn(Core core, int32_t pool, const Request* head, bint aged) noexcept:
    """A head is granted. Its class is due again when it has waited as long as now, and worse
    classes may use a part of its charge. O(1)."""
    cdef int32_t cls = core.flows.items[head.flow].cls
    cdef Pool* p = &core.ledger.pools[pool]
    cdef int64_t work
    cdef int32_t line = 0 if head.target == NONE else pool + 1
    (<Line>core.flows.candidates[line]).since_ns[cls] = core.now_ns
    p.aged = aged
    core.classes.items[cls].aged += aged
    if core.settings.backfill_surplus_ppm:
        work = work_micro(core, head)
        p.surplus_micro = min(
            work,
            p.surplus_micro
            + <int64_t>(<wide>work * core.settings.backfill_surplus_ppm // 1_000_000),
        )


cdef void project(
    Core core, int32_t pool, const Request* head, const Plan* plan, Projection* start
) noexcept:
    """Find when the head fits beside what still runs then, by the ledger's own form. O(leases log
    leases)."""
    cdef Pool* p = &core.ledger.pools[pool]
    cdef GrowingLease run = core.ledger.figures(pool, head, plan.blocks, plan.output_tokens)
    cdef int64_t room = (p.capacity_blocks - p.headroom_blocks) * p.block_size
    room -= plan.tokens - run.whole  # its adapter
    room -= unaccounted_tokens(p) + p.loras.tokens
    if plan.above:
        room -= kept_tokens(p, core.now_ns)
    start.left = growing_project(
        &p.growing, core.requests, &run, room, core.ledger.by_peak, &start.spare_tokens
    )
    start.known = True


cdef bint leaves(
    Core core, int32_t pool, const Request* head, const Plan* plan, const Request* r,
    const Plan* its, Projection* start,
) noexcept:
    """Return whether the head still starts when it would: the request ends before, or fits beside
    it. The projection is made for the first request that asks."""
    if not start.known:
        project(core, pool, head, plan, start)
    if its.tokens <= start.spare_tokens:
        return True
    return start.left == NEVER or (r.reports_progress and its.output_tokens <= start.left)
