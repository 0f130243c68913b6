# Words of the contract as C types: outcomes, states, the two families of errors.

from collections import namedtuple
from heapq import nlargest

from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_SET_ITEM
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

cdef extern from *:
    """
    #if defined(__GNUC__)
    /* Without the empty asm GCC takes a function that only prefetches for one that does
       nothing, and leaves its calls out. */
    #define prefetch_line(p) do { __builtin_prefetch(p); __asm__ volatile (""); } while (0)
    #else
    #define prefetch_line(p) ((void)(p))
    #endif
    typedef __int128 wide;
    """
    ctypedef long long wide  # 128 bits
    void prefetch_line(const void* p) noexcept nogil
    # As C has it: Cython's own declaration takes any object, of which compilers complain.
    object PyType_GenericAlloc(type cls, Py_ssize_t count)


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

# Who was told to come back to a full queue, and has not yet; see retry_slots.pxi.
ctypedef struct RetrySlots:
    int64_t count
    int64_t first_ns, last_ns  # when the first and the last of them are due


ctypedef struct Refusals:
    int64_t counts[REFUSAL_KINDS]
    RetrySlots retry_slots


# What those have that were refused nothing. Nobody writes to it.
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
    OUT_REJECTED_DEADLINE: "its first token is expected after its deadline",
    OUT_REJECTED_LIMIT: "a limit of the scheduler itself is reached",
    OUT_REJECTED_QUOTA_SIZE: "larger than a quota of the tenant can ever hold",
    OUT_EVICTED_TTL: "it waited for the whole queue TTL",
    OUT_EVICTED_CANCELLED: "withdrawn by its caller",
    OUT_EVICTED_DRAINING: "the scheduler or its engine was drained before its turn came",
    OUT_EVICTED_TOO_LARGE: "no registered engine can hold it any more",
    OUT_EVICTED_DEADLINE: "its turn came too late for its deadline",
    OUT_COMPLETED: "completed",
    OUT_CANCELLED: "cancelled",
    OUT_EXPIRED: "nobody renewed its lease",
}
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

# google.rpc.Code
cdef enum Code:
    CODE_INVALID_ARGUMENT = 3
    CODE_NOT_FOUND = 5
    CODE_ALREADY_EXISTS = 6
    CODE_RESOURCE_EXHAUSTED = 8
    CODE_FAILED_PRECONDITION = 9

cdef enum:
    NONE = -1
    # Keeps every product of tokens, price and weight below 2^63: 2^28 * 10^7 * 10^3 < 2.7 * 10^18.
    TOKENS_MAX = 1 << 27
    PROMPT_TOKENS_MAX = 1 << 24
    SEQUENCES_MAX = 1024
    PRICE_MICRO_MAX = 10_000_000
    WEIGHT_MILLI_MAX = 1_000_000_000
    POOLS_MAX = 64
    ADAPTERS_MAX = 65_536
    NAME_BYTES_MAX = 256
    ID_BYTES_MAX = 128

TOTAL_TOKENS_MAX = TOKENS_MAX

cdef int64_t LEASE_ID_MAX = <int64_t>1 << 62
# Names of flows and adapters, and ids of requests, have the same key, as different kinds.
cdef uint64_t NAME_SALT = <uint64_t>0xA5A5A5A5A5A5A5A5
cdef uint64_t ADAPTER_SALT = <uint64_t>0x5A5A5A5A5A5A5A5A
cdef int64_t NS_PER_MS = 1_000_000
cdef int64_t NS_PER_S = 1_000_000_000

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


cdef inline object new_row(type cls, Py_ssize_t fields):
    """A named tuple, every field of which `put_item()` has to fill: without its own Python frame,
    and without another tuple before it."""
    return PyType_GenericAlloc(cls, fields)


cdef inline void put_item(object row, Py_ssize_t place, object value) noexcept:
    Py_INCREF(value)  # which the row keeps
    PyTuple_SET_ITEM(row, place, value)


class CallerError(ValueError):
    """The caller sent something wrong; nothing was changed by it."""

    def __init__(self, int code, str field, str description):
        super().__init__(f"{field}: {description}" if field else description)
        self.code = code
        self.field = field
        self.description = description


class InvariantError(RuntimeError):
    """The books do not balance: a defect of ours."""


@cython.final
cdef class Fuse:
    """Blows at the first broken invariant and stays blown: nothing is granted after it."""

    cdef str what

    cdef object blow(self, str what):
        if self.what is None:
            self.what = what
        return InvariantError(what)


# A request's verdict on its way to whoever asked.
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
    int32_t pool
    int32_t outcome
    int32_t position
    int32_t queue_max
    int32_t queue_left
    int32_t flow  # whose quotas are told; -1: nobody's
    int32_t engine_priority


cdef int invalid(str field, str description) except -1:
    raise CallerError(CODE_INVALID_ARGUMENT, field, description)


cdef void* grow(void* old, size_t old_count, size_t new_count, size_t size) except NULL:
    # Zeroes what is new.
    cdef void* new = realloc(old, new_count * size)
    if new == NULL:
        raise MemoryError()
    memset(<uint8_t*>new + old_count * size, 0, (new_count - old_count) * size)
    return new


cdef enum:
    SIZE_FIRST = 64
    SIZE_COPIED = 4096  # an array beyond it has room for so many times as much at once
    SIZE_AT_ONCE = 1 << 20


cdef inline int32_t larger(int32_t size, int32_t number) noexcept nogil:
    """How large an array becomes that has no place for a number. Only small ones are ever copied:
    what an array does not use yet is memory that was never touched, and costs nothing. Beyond
    SIZE_AT_ONCE the C library maps the pages elsewhere."""
    cdef int64_t wanted = max(<int64_t>SIZE_FIRST, max(2 * <int64_t>size, <int64_t>number + 1))
    if SIZE_COPIED < wanted < SIZE_AT_ONCE:
        wanted = SIZE_AT_ONCE
    return <int32_t>min(wanted, <int64_t>0x7FFFFFFF)


cdef void* extend(void* old, size_t count, size_t size) except NULL:
    """Like `grow()`, but what is new holds anything, and is not touched."""
    cdef void* new = realloc(old, count * size)
    if new == NULL:
        raise MemoryError()
    return new
