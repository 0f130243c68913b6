# Loops of C around the core's events, so no Python is timed. bench/inside.py compiles them behind
# the core's own files, and changes none of these. An Admit here begins where
# Scheduler.admit_wire() has read the bytes: it has the number of its flow, so no name is looked
# up. poll() handles the deadlines that have passed.

from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec


cdef inline int64_t clock_ns() noexcept:
    cdef timespec moment
    clock_gettime(CLOCK_MONOTONIC, &moment)
    return <int64_t>moment.tv_sec * 1_000_000_000 + moment.tv_nsec


cdef int ask_for(
    Scheduler core, int64_t now_ns, Ask* ask, bytes request_id, Verdict* verdict
) except -1:
    """Admit a request, and dispatch unless something is due. `verdict`: its verdict; outcome 0 if
    it waits."""
    cdef int64_t handle
    cdef int32_t first
    enter(core, now_ns)
    identify(core, ask, <const uint8_t*><const char*>request_id, len(request_id), 0, 0)
    enter_class(core, ask)
    handle = admit_request(core, ask)
    if handle < 0:
        raise ValueError("asks: one of them was refused")
    first = core.verdict_count
    verdict.outcome = 0
    if not is_due(core):
        dispatch(core)
    take_verdict(core, handle, first, verdict)
    return 0


cdef int complete_granted(
    Scheduler core, int64_t now_ns, const Verdict* verdict, Usage* used
) except -1:
    """End the lease that was just granted."""
    cdef int32_t i
    enter(core, now_ns)
    i = find_lease(core, verdict.lease_id, 0) if verdict.outcome == OUT_GRANTED else NONE
    if i == NONE:
        raise ValueError("asks: one of them was not granted at once")
    complete_lease(core, i, OUT_COMPLETED, used)
    return 0


def time_asks(
    Scheduler core, list asks, int64_t input_tokens, int64_t max_output_tokens,
    int64_t output_tokens=NONE,
):
    """Admit each (now_ns, flow, request_id), and complete it where `output_tokens` are given.

    Returns the time of each in ns; reading the clock is taken off.
    """
    cdef Ask ask
    cdef Usage used
    cdef Verdict verdict
    cdef list took_ns = []
    cdef int64_t now_ns, empty_ns, began_ns, ended_ns
    cdef bint completes = output_tokens != NONE
    cdef bytes request_id
    if completes:
        used = checked_usage(input_tokens, 0, output_tokens)
    for now_ns, flow, request_id in asks:
        memset(&ask, 0, sizeof(Ask))
        ask.flow, ask.target = flow, NONE
        ask.prompt_tokens = ask.prompt_max_tokens = <int32_t>input_tokens
        ask.output_max_tokens = <int32_t>max_output_tokens
        ask.sequences = ask.n = 1
        empty_ns = clock_ns()
        began_ns = clock_ns()
        ask_for(core, now_ns, &ask, request_id, &verdict)
        if completes:
            complete_granted(core, now_ns, &verdict, &used)
        ended_ns = clock_ns()
        took_ns.append(ended_ns - began_ns - (began_ns - empty_ns))
    return took_ns


def pick(Scheduler core, int times, int64_t input_tokens):
    """Find the flow to serve next and charge it input, `times` times. Returns the flows, in order.

    The requests stay where they are: what a grant is besides is not timed.
    """
    cdef list flows = []
    cdef bint brought
    cdef Flow* flow
    cdef Request* head
    cdef int32_t i
    cdef int _
    for _ in range(times):
        i = head_for(core, 0, &brought)
        if i == NONE:
            raise ValueError("core: nothing is queued for its first pool")
        head = &core.requests.items[i]
        flow = &core.flows.items[head.flow]
        charge_flow(
            core.flows, head.flow,
            input_tokens * core.settings.input_price_micro * 1000 // flow.weight_milli, 0,
        )
        flows.append(head.flow)
    return flows
