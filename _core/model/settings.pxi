# Settings of a scheduler with their bounds, and what a caller asks for.

# A request as its caller sent it, checked, with names resolved.
ctypedef struct Ask:
    Hash128 key
    uint64_t payload
    uint64_t tag
    Hash128 adapter_key
    Hash128 place  # keyed hash of principal, tenant and id, if places are kept
    int64_t waited_ns  # at an earlier leader, which confirms it
    Slice adapter  # its name; empty: none
    Slice client_id  # of a replay: as its client knows the request; empty: as the scheduler does
    Slice session  # of an agent; empty: none
    int64_t queue_ttl_ns  # 0: the default
    int64_t deadline_ns  # for the first token; 0: none
    int32_t flow  # in the default class, until `enter_class()`
    int32_t cls
    int32_t target  # pool, -1: any
    int32_t prompt_tokens, prompt_max_tokens, output_max_tokens, sequences, n
    int32_t owner, principal
    int32_t told_output  # of each sequence, by an oracle
    bint reports_progress
    bint whole_answer  # no count is known before its end
    bint has_exact_input  # the caller counted the prompt's tokens as the engine does
    bint has_own_key  # another principal used this id of the tenant first

cdef enum:  # order of the heads
    ORDER_ARRIVAL = 0
    ORDER_INPUT = 1
    ORDER_COUNTER = 2

cdef enum:
    CREDIT_AUTO = -1  # the credit is what one request is charged, on average
    LEAD_AUTO = -1  # the lead is two of these, and what the pool serves in a second

cdef enum:  # where service counts
    DOMAIN_ALL = 0
    DOMAIN_MODEL = 1
    DOMAIN_POOL = 2

cdef enum:  # the output that is charged at the grant, before a Progress reports it
    AHEAD_NONE = 0
    AHEAD_AVERAGE = 1  # moving average of the flow's outputs
    AHEAD_TOLD = 2  # the length that the caller states: an oracle, in simulations

# A policy is data: the order of heads, whether a returning flow is lifted, what of the output is
# charged ahead, and whether flows are ordered by quanta (longest match first within a quantum).
# Sources: VTC, its variants with prediction and with an oracle, LCF (least counter first: VTC
# without lift) and FCFS, arXiv 2401.00588; DLPM, arXiv 2501.14312 (see locality); SIF: shortest
# input first.
POLICIES = {
    "vtc": (ORDER_COUNTER, True, AHEAD_NONE, False),
    "vtc-predict": (ORDER_COUNTER, True, AHEAD_AVERAGE, False),
    "vtc-oracle": (ORDER_COUNTER, True, AHEAD_TOLD, False),
    "dlpm": (ORDER_COUNTER, True, AHEAD_NONE, True),
    "lcf": (ORDER_COUNTER, False, AHEAD_NONE, False),
    "fcfs": (ORDER_ARRIVAL, True, AHEAD_NONE, False),
    "sif": (ORDER_INPUT, True, AHEAD_NONE, False),
}

LEDGER_FORMS = ("sum", "peak")
DISPATCH_ORDERS = ("strict", "backfill")

# Settings of the constructor: default, least and greatest value.
cdef dict LIMITS = {
    "lease_id_base": (1, 1, 1 << 62),
    "queue_ttl_ns": (30 * NS_PER_S, 1, 1 << 60),
    "lease_ttl_ns": (10 * NS_PER_S, 1, 1 << 60),
    "lease_grace_ns": (20 * NS_PER_S, 0, 1 << 60),
    "sign_of_life_ns": (0, 0, 1 << 60),  # 0: a newcomer takes a pool at once
    "flow_queue_max": (1_000, 1, 1 << 24),
    "queue_max": (10_000, 1, 1 << 24),
    "flow_queue_tokens_max": (0, 0, <int64_t>1 << 40),
    "queue_tokens_max": (0, 0, <int64_t>1 << 40),
    "queue_target_ns": (2 * NS_PER_S, 1, 1 << 60),
    "overload_hold_ns": (5 * NS_PER_S, 1, 1 << 60),
    "saturation_ppm": (800_000, 1, 1_000_000),
    "early_refusal": (0, 0, 1),
    "refusal_samples_min": (10, 0, 1_000),
    "leases_max": (65_536, 1, 1 << 24),
    "flows_max": (200_000, 1, 1 << 24),
    "adapters_max": (1_024, 1, ADAPTERS_MAX),
    "answers_max": (100_000, 0, 1 << 24),
    "answer_ttl_ns": (300 * NS_PER_S, 1, 1 << 60),
    "input_price_micro": (1_000_000, 0, PRICE_MICRO_MAX),
    "output_price_micro": (2_000_000, 0, PRICE_MICRO_MAX),
    "cached_price_ppm": (100_000, 0, 1_000_000),
    "bypass_max": (32, 0, 1 << 20),
    "bypass_ns": (5 * NS_PER_S, 0, 1 << 60),
    "backfill_surplus_ppm": (0, 0, 900_000),
    "headroom_ppm": (20_000, 0, 900_000),
    "headroom_min_ppm": (-300_000, -900_000, 900_000),
    "headroom_max_ppm": (300_000, 0, 900_000),
    "quantile_ppm": (900_000, 1, 1_000_000),
    "saturation_band_ppm": (50_000, 0, 1_000_000),
    "samples_min": (10, 1, 1_000),
    # The defaults are those of recordings that do not name them; the configuration raises both.
    "pools_max": (64, 1, POOLS_MAX),
    "session_pools_max": (8, 1, POOLS_MAX),
    "session_open_max": (16_384, 1, 1 << 20),
    "sessions_max": (4_096, 1, 1 << 20),
    "message_bytes_max": (0, 0, 1 << 30),  # of the transport, stated in the Welcome; 0: not stated
    "delay_factor_milli": (0, 0, 10_000),
    "adapter_affinity_ppm": (100_000, 0, 1_000_000),
    "prefix_affinity_ppm": (100_000, 0, 1_000_000),
    "prefix_blocks_max": (65_536, 0, PREFIX_BLOCKS_MAX),
    "quantum_tokens": (10_000, 1, TOKENS_MAX),
    "credit_max_micro": (CREDIT_AUTO, CREDIT_AUTO, <int64_t>1 << 50),
    "lead_max_micro": (LEAD_AUTO, LEAD_AUTO, <int64_t>1 << 50),
    "fairness_domain": (DOMAIN_MODEL, DOMAIN_ALL, DOMAIN_POOL),
    "work_max": (1_024, 1, 1 << 30),
}


cdef dict checked_limits(dict given):
    cdef dict limits = {}
    for name in given:
        if name not in LIMITS:
            invalid(name, f"unknown setting; known: {', '.join(LIMITS)}")
    for name, (default, low, high) in LIMITS.items():
        limits[name] = given.get(name, default)
        if not low <= limits[name] <= high:
            invalid(name, f"must be from {low} to {high}, not {limits[name]}")
    return limits


cdef enum:
    BY_ARRIVAL = 0
    BY_DEADLINE = 1

FLOW_ORDERS = {"arrival": BY_ARRIVAL, "deadline": BY_DEADLINE}
