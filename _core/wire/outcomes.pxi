# The outcomes of requests and the states of leases, declared once.

cdef enum Outcome:
    OUT_GRANTED = 1
    OUT_REJECTED_FLOW_QUEUE_FULL = 16
    OUT_REJECTED_QUEUE_FULL = 17
    OUT_REJECTED_TOO_LARGE = 18
    OUT_REJECTED_NO_POOL = 19
    OUT_REJECTED_DRAINING = 20
    OUT_REJECTED_UNKNOWN_TENANT = 21
    OUT_REJECTED_QUOTA = 22
    OUT_REJECTED_DEADLINE = 23
    OUT_REJECTED_LIMIT = 24
    OUT_REJECTED_QUOTA_SIZE = 25
    OUT_EVICTED_TTL = 32
    OUT_EVICTED_CANCELLED = 33
    OUT_EVICTED_DRAINING = 34
    OUT_EVICTED_TOO_LARGE = 35
    OUT_EVICTED_DEADLINE = 36
    OUT_COMPLETED = 48
    OUT_CANCELLED = 49
    OUT_EXPIRED = 50

GRANTED = OUT_GRANTED
REJECTED_FLOW_QUEUE_FULL = OUT_REJECTED_FLOW_QUEUE_FULL
REJECTED_QUEUE_FULL = OUT_REJECTED_QUEUE_FULL
REJECTED_TOO_LARGE = OUT_REJECTED_TOO_LARGE
REJECTED_NO_POOL = OUT_REJECTED_NO_POOL
REJECTED_DRAINING = OUT_REJECTED_DRAINING
REJECTED_UNKNOWN_TENANT = OUT_REJECTED_UNKNOWN_TENANT
REJECTED_QUOTA = OUT_REJECTED_QUOTA
REJECTED_DEADLINE = OUT_REJECTED_DEADLINE
REJECTED_LIMIT = OUT_REJECTED_LIMIT
REJECTED_QUOTA_SIZE = OUT_REJECTED_QUOTA_SIZE
EVICTED_TTL = OUT_EVICTED_TTL
EVICTED_CANCELLED = OUT_EVICTED_CANCELLED
EVICTED_DRAINING = OUT_EVICTED_DRAINING
EVICTED_TOO_LARGE = OUT_EVICTED_TOO_LARGE
EVICTED_DEADLINE = OUT_EVICTED_DEADLINE
COMPLETED = OUT_COMPLETED
CANCELLED = OUT_CANCELLED
EXPIRED = OUT_EXPIRED

cdef enum:
    REFUSAL_KINDS = 15


cdef inline int refusal_place(int outcome) noexcept nogil:
    return outcome - 16 if outcome < 32 else outcome - 32 + 10


REFUSALS = (
    list(range(OUT_REJECTED_FLOW_QUEUE_FULL, OUT_REJECTED_QUOTA_SIZE + 1))
    + list(range(OUT_EVICTED_TTL, OUT_EVICTED_DEADLINE + 1))
)

# Retries that a full queue still expects; see retry_slots.pxi.
ctypedef struct RetrySlots:
    int64_t count
    int64_t first_ns, last_ns  # when the first and the last of them are due

ctypedef struct Refusals:
    int64_t counts[REFUSAL_KINDS]
    RetrySlots retry_slots

# Stands for the record of a flow without refusals. It is only read.
cdef Refusals NO_REFUSALS
memset(&NO_REFUSALS, 0, sizeof(NO_REFUSALS))

OUTCOME_TEXT = {
    OUT_GRANTED: "granted",
    OUT_REJECTED_FLOW_QUEUE_FULL: "the tenant's queue is full",
    OUT_REJECTED_QUEUE_FULL: "all queues together are full",
    OUT_REJECTED_TOO_LARGE: "larger than the model's context or the engine's KV cache",
    OUT_REJECTED_NO_POOL: "no engine is registered, or none of the name asked for",
    OUT_REJECTED_DRAINING: "the scheduler, or the engine asked for, is draining",
    OUT_REJECTED_UNKNOWN_TENANT: "the tenant is unknown and unknown tenants are refused",
    OUT_REJECTED_QUOTA: "a quota of the tenant is spent",
    OUT_REJECTED_DEADLINE: "its expected wait is longer than it may wait",
    OUT_REJECTED_LIMIT: "a limit of the scheduler itself is reached",
    OUT_REJECTED_QUOTA_SIZE: "larger than a quota of the tenant can ever hold",
    OUT_EVICTED_TTL: "its turn did not come while it could wait",
    OUT_EVICTED_CANCELLED: "withdrawn by its caller",
    OUT_EVICTED_DRAINING: "the scheduler or its engine was drained before its turn came",
    OUT_EVICTED_TOO_LARGE: "no registered engine can hold it any more",
    OUT_EVICTED_DEADLINE: "its turn came too late for its deadline",
    OUT_COMPLETED: "completed",
    OUT_CANCELLED: "cancelled",
    OUT_EXPIRED: "nobody renewed its lease",
}

cdef bytes ONLY_NAMED = (
    b"each connected engine takes only requests that name its pool; name one, or list it in `pools`"
    b" of the configuration"
)
cdef dict OUTCOME_BYTES = {k: v.encode() for k, v in OUTCOME_TEXT.items()}

cdef enum LeaseState:
    LS_UNKNOWN = 1
    LS_LIVE = 2
    LS_VOID = 3
    LS_ENDED = 4

LEASE_UNKNOWN = LS_UNKNOWN
LEASE_LIVE = LS_LIVE
LEASE_VOID = LS_VOID
LEASE_ENDED = LS_ENDED


Decision = namedtuple(
    "Decision",
    "handle tag outcome lease_id pool pool_epoch reserved_tokens retry_after_ms position"
    " waited_ns queue_max queue_left pool_capacity_tokens pool_free_tokens"
    " flow engine_priority",
)


Ended = namedtuple(
    "Ended", "outcome input_tokens cached_input_tokens output_tokens repeated"
)

cdef type DECISION_TYPE = Decision
cdef type ENDED_TYPE = Ended
cdef Py_ssize_t DECISION_FIELDS = len(Decision._fields)
cdef Py_ssize_t ENDED_FIELDS = len(Ended._fields)

# A request's verdict on its way to the caller.
ctypedef struct Verdict:
    int64_t handle
    uint64_t tag
    int64_t lease_id
    int64_t epoch
    int64_t reserved_tokens
    int64_t retry_after_ms
    int64_t waited_ns
    int64_t pool_capacity_tokens
    int64_t pool_free_tokens
    bint only_named  # each connected pool takes only requests that name it
    int32_t pool
    int32_t outcome
    int32_t position
    int32_t queue_max
    int32_t queue_left
    int32_t flow  # its quotas are reported; -1: none
    int32_t engine_priority
    int32_t spent_budget  # refused because of it: 1 the day's, 2 the month's; 0: none
