# Policies and orders, the check of settings, and what a caller asks for.

TOTAL_TOKENS_MAX = TOKENS_MAX

# A request as its caller sent it, checked, with names resolved.
ctypedef struct Ask:
    Hash128 key
    uint64_t payload
    uint64_t tag
    uint64_t pools_hash  # of the names of several pools; 0: it names at most one
    Hash128 adapter_key
    Hash128 place  # keyed hash of principal, tenant and id, if places are kept
    int64_t waited_ns  # at an earlier leader, which confirms it
    Slice adapter  # its name; empty: none
    Slice client_id  # a replay's id at its client; empty: as at the scheduler
    Slice session  # an agent's session; empty: none
    int64_t queue_ttl_ns  # 0: the default
    int64_t deadline_ns  # for the first token; 0: none
    int32_t flow  # in the default class, until `enter_class()`
    int32_t cls
    int32_t target  # pool, or set of pools; -1: any
    int32_t prompt_tokens, prompt_max_tokens, output_max_tokens, sequences, n
    int32_t owner, principal
    int32_t told_output  # output of each sequence, by an oracle
    bint reports_progress
    bint whole_answer  # no count is known before its end
    bint has_exact_input  # the caller counted the prompt's tokens as the engine does
    bint has_own_key  # another principal used this id of the tenant first

cdef enum:  # order of the heads
    ORDER_ARRIVAL = 0
    ORDER_INPUT = 1
    ORDER_COUNTER = 2
    ORDER_EXTERNAL = 3  # by keys that a function returns, in simulations

cdef enum:
    CREDIT_AUTO = -1  # the credit is what one request is charged, on average
    LEAD_AUTO = -1  # the lead is LEAD_CHARGES of the largest, and what the pool serves in a second
    LEAD_CHARGES = 4

cdef int64_t LEAD_MOST = 134_217_728_000_000  # that charges make of it, as of a figure that is set

cdef enum:  # where service counts, by the number of `fairness_domain`
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
# input first; external: a policy of the simulator's user, see external_order.pxi.
POLICIES = {
    "vtc": (ORDER_COUNTER, True, AHEAD_NONE, False),
    "vtc-predict": (ORDER_COUNTER, True, AHEAD_AVERAGE, False),
    "vtc-oracle": (ORDER_COUNTER, True, AHEAD_TOLD, False),
    "dlpm": (ORDER_COUNTER, True, AHEAD_NONE, True),
    "lcf": (ORDER_COUNTER, False, AHEAD_NONE, False),
    "fcfs": (ORDER_ARRIVAL, True, AHEAD_NONE, False),
    "sif": (ORDER_INPUT, True, AHEAD_NONE, False),
    "external": (ORDER_EXTERNAL, False, AHEAD_NONE, False),
}

LEDGER_FORMS = ("sum", "peak")
DISPATCH_ORDERS = ("strict", "backfill")


cdef dict checked(dict table, dict given):
    """Return the settings of a table: those that are given, and the defaults of the others."""
    cdef dict settings = {}
    for name in given:
        if name not in table:
            invalid(name, f"unknown setting; known: {', '.join(table)}")
    for name, (default, low, high) in table.items():
        settings[name] = given.get(name, default)
        if not low <= settings[name] <= high:
            invalid(name, f"must be from {low} to {high}, not {settings[name]}")
    return settings


cdef enum:
    BY_ARRIVAL = 0
    BY_DEADLINE = 1

FLOW_ORDERS = {"arrival": BY_ARRIVAL, "deadline": BY_DEADLINE}
