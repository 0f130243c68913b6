"""Decides who runs, and keeps the books: the scheduling core. Sans-IO.

It reads no clock, no random source, no socket and no log. Every event carries `now_ns` (monotonic
nanoseconds); one that goes back raises CallerError. Events go in, decisions come out of `poll()`
and of sessions, and `next_deadline()` says when to call `poll()` again. Equal inputs give equal
decisions and an equal `digest()`, on every run and machine.

All quantities are integers: tokens, blocks, ns, thousandths of weight, micro-tokens of service.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

from schedsvc._core_cluster import ClusterApi
from schedsvc._core_settings import Settings

# Outcomes (schedsvc.v1.Outcome).
GRANTED: int
REJECTED_FLOW_QUEUE_FULL: int
REJECTED_QUEUE_FULL: int
REJECTED_TOO_LARGE: int
REJECTED_NO_POOL: int
REJECTED_DRAINING: int
REJECTED_UNKNOWN_TENANT: int
REJECTED_QUOTA: int
REJECTED_DEADLINE: int
REJECTED_LIMIT: int
REJECTED_QUOTA_SIZE: int
EVICTED_TTL: int
EVICTED_CANCELLED: int
EVICTED_DRAINING: int
EVICTED_TOO_LARGE: int
EVICTED_DEADLINE: int
COMPLETED: int
CANCELLED: int
EXPIRED: int

# Lease states (schedsvc.v1.LeaseState).
LEASE_UNKNOWN: int
LEASE_LIVE: int
LEASE_VOID: int
LEASE_ENDED: int

QUOTA_LIMIT_MAX: int  # the largest limit of a quota
QUOTA_LEVELS_MAX: int  # a tenant's own limits and the groups above it

BUILD_FLAGS: str  # how the C compiler built it (_core/flags.toml); empty if built otherwise
TOTAL_TOKENS_MAX: int  # the largest total that a report may give
REQUEST_BYTES: int  # of the record that each request has while it is known

OUTCOME_TEXT: dict[int, str]  # one sentence for each outcome
WAITS: list[str]  # what a request may wait for (schedsvc.v1.WaitReason), by number

class CallerError(ValueError):
    """The caller sent something wrong; nothing was changed by it.

    `code` is a google.rpc.Code (3 INVALID_ARGUMENT, 5 NOT_FOUND, 6 ALREADY_EXISTS, 8
    RESOURCE_EXHAUSTED, 14 UNAVAILABLE), `field` the path of the field at fault, `description` one
    sentence.
    """

    code: int
    field: str
    description: str

class InvariantError(RuntimeError):
    """The books do not balance: a defect of ours. The scheduler grants nothing any more."""

class Decision(NamedTuple):
    """States the verdict on one request, or the expiry of one lease."""

    handle: int
    tag: int
    outcome: int  # GRANTED, REJECTED_*, EVICTED_*, EXPIRED
    lease_id: int
    pool: int  # index
    pool_epoch: int
    reserved_tokens: int
    retry_after_ms: int
    position: int
    waited_ns: int
    queue_max: int  # places in the flow's queue, and how many are left
    queue_left: int
    pool_capacity_tokens: int  # of the pool that it waited for, and what is unpromised
    pool_free_tokens: int
    flow: int  # whose quotas `encode()` reports; -1: none
    engine_priority: int  # suggested, lower runs first; the rank of its class

class Ended(NamedTuple):
    """Holds the books of a lease after its end."""

    outcome: int
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    repeated: bool

class Session:
    """Serves one Session stream, bytes in and bytes out: a state machine without a socket.

    `receive()` applies one serialised SessionRequest; `take()` gives the next serialised
    SessionResponse, or None. A wrong event makes a SessionFault in the next response; a stream
    that cannot go on raises CallerError, and has to be closed.
    """

    owner: int
    def receive(self, now_ns: int, data: bytes, events_max: int = 4_096) -> bool:
        """Apply a SessionRequest, or only its first events; return whether some may be left.

        Until it returns False, only `receive_rest()` may follow for this stream, beside `take()`
        and `close()`. Call `Scheduler.poll()` after it. O(events * log n).
        """
    def receive_rest(self, now_ns: int, events_max: int) -> bool:
        """Apply the next events of the message; return whether some may be left.

        The answers acknowledge the message once all of it is applied. O(events * log n).
        """
    def take(self, now_ns: int) -> bytes | None:
        """Take the next SessionResponse (at most 4,096 verdicts), or None."""
    def close(self, now_ns: int) -> None:
        """End the stream: withdraw what is queued on it; leases keep their TTL. Idempotent."""

class Scheduler(ClusterApi):
    """Queues, counters, ledger and leases of one scheduler process."""

    def __init__(
        self,
        *,
        hash_key: bytes = ...,  # 16 bytes; keys every hash of caller-chosen bytes
        lease_seed: str = "",  # 32 hexadecimal digits that lease ids are drawn of; "": they count
        incarnation: int = 1,  # sent to shims, so that they notice a restart
        key: Callable[[int, int, int, int], int] | None = None,  # external_order.pxi has the terms
        place: Callable[[int], int] | None = None,
        **settings: Unpack[Settings],
    ) -> None: ...
    def set_flow(self, name: bytes, weight_milli: int) -> int:
        """Add a tenant, or give a known one another weight.

        Returns the index (from 0) of its flow in the default class; whatever takes a flow takes
        that, and means all of the tenant's. O(classes).
        """
    def set_class(
        self, name: bytes, rank: int, ageing_ns: int = 5_000_000_000, exempt: bool = False
    ) -> int:
        """Add a priority class, or change a known one; "default" is there from the start.

        The least rank (-1,000 to 1,000) goes first. A class that has waited `ageing_ns` for its
        turn overtakes better ones, once. An `exempt` class precedes all others and has no quotas,
        no headroom and no share. It has as many places in queues and leases as all others
        together, and cannot be made an ordinary class. Returns the class's index.
        O(classes + quotas).
        """
    def set_class_gone(self, name: bytes) -> None:
        """Let no request name this class; what it has is served. `set_class()` undoes it."""
    def set_flow_class(
        self, flow: int, default_class: int = 0, named: tuple[int, ...] = ()
    ) -> None:
        """Give a tenant the class of its requests that name none, and others that they may name.

        Both are indices of classes.
        """
    def set_pool_quota(self, now_ns: int, pool: bytes, quota: int) -> None:
        """Let whatever runs in the pool of this name, also a later one, take from a quota too.

        -1: from none. The pool waits while that does not hold enough for its next request.
        """
    def set_pool_limits(self, now_ns: int, pool: bytes = b"", **limits: int) -> None:
        """Limit the pool of this name, also a later one; b"": all without limits of their own.

        0 is no limit. Beside what the engine can: tokens in its cache (wait reason MAX_TOTAL) and
        sequences at once (MAX_RUNNING); input tokens of one request, over all prompts, and with all
        its output (else REJECTED_TOO_LARGE at once). `batch_max_tokens` bounds a round (ROUND): the
        input of requests that were granted at most a second ago and have reported no tokens. With
        -1 it is a sixth of the pool, at least its longest request. A request that is alone
        in its round may be larger; those whose callers report nothing are in none. Requests that
        no pool can hold any more are evicted in their turn; leases stay. At most `max_loras`
        adapters are active (ADAPTERS): those of running leases that hold a reservation. While
        active, each takes `adapter_tokens` of the cache, or the tokens that `set_adapter()` gave
        it. After S-LoRA's queue (arXiv 2311.03285). A session of an agent begins only while the
        last turns of the active ones, with its own, are within `sessions_max_tokens`, or none is
        active (SESSION_CAP). O(pools * adapters).
        """
    def set_no_pool_limits(self, now_ns: int) -> None:
        """Forget all limits of `set_pool_limits()`. O(pools * adapters)."""
    def set_adapter(self, now_ns: int, name: bytes, tokens: int) -> None:
        """Let a LoRA adapter take `tokens` of each pool in which it is active.

        -1: the pool's `adapter_tokens`. An active adapter changes too. O(pools * adapters).
        """
    def set_principal(
        self, now_ns: int, number: int, name: bytes = b"", pools: list[bytes] | None = None,
        tenants: list[bytes] | None = None, classes: list[bytes] | None = None,
        share_ppm: int = 1_000_000, sees_all: bool = False,
    ) -> None:  # fmt: skip
        """Grant a principal (0 to 65,536) names and places, and take back what it had.

        A number without grants may do everything. Lists hold patterns (* is any text); None: all.
        Pools it may register, replay into and report of; tenants it may vouch for; classes its
        requests may name. Else a call raises CallerError with code 7. `share_ppm`: the most of each
        bounded table that it may hold. `sees_all`: its refusals also state the free tokens of pools
        that it may not register. A pool that registered itself takes only requests that name it
        while some principal that may ask (its `tenants` are not []) may not offer it; see
        `set_pools_listed()`. O(1); O(requests) for a number beyond all with grants;
        O(pools * principals) and the queues of pools that this opens or closes for other `pools`.
        """
    def set_pools_listed(self, now_ns: int, names: list[bytes] | tuple[bytes, ...]) -> None:
        """Let these pools, as those of `set_pool()`, take requests that name none. O(pools)."""
    def set_flow_mode(self, now_ns: int, flow: int, dry_run: bool) -> None:
        """Enforce decisions on a flow, or audit it.

        Under audit each request is decided and counted, and granted at the next `poll()`, also if
        that overdraws a pool or a bucket. NO_POOL, DRAINING and LIMIT refuse. Requests that are
        queued when the audit begins are granted too. O(1).
        """
    def set_gone(self, now_ns: int, name: bytes) -> None:
        """Let a tenant's name be unknown; its flow serves what it has. `set_flow()` undoes it."""
    def set_options(self, now_ns: int, **settings: int | str) -> None:
        """Change settings of the constructor while everything runs, all or none.

        Those that a reload changes (docs/reference/settings.md); another one, or a wrong value,
        raises CallerError. Leases and queued requests keep their deadlines. In another
        order queues are sorted by the polls that follow, each for `work_max` requests and then the
        rest of a queue. O(1), O(queues * log n) for a policy.
        """
    def set_no_keys(self) -> None:
        """Forget all key hashes."""
    def set_key(self, api_key_sha256: bytes, flow: int) -> None:
        """Let this key hash (32 bytes) stand for the flow."""
    def flow_index(self, name: bytes) -> int:
        """Return the index of a tenant's flow in the default class, or -1."""
    def flow_indices(self, name: bytes) -> list[int]:
        """Return the indices of a tenant's flows, one for each class it has used. O(classes)."""
    def set_pool(
        self, now_ns: int, name: bytes, epoch: int, capacity_tokens: int, block_size_tokens: int,
        max_running: int = 0, max_model_tokens: int = 0,
    ) -> int:  # fmt: skip
        """Register a pool from the configuration, always attached, or give it new figures.

        A larger epoch voids the leases of the old one; a smaller one raises CallerError.
        Returns the pool's index (from 0). O(leases of the pool) on a new epoch, else O(1).
        """

    # Events.
    def admit(
        self, now_ns: int, flow: int, request_id: bytes, input_tokens: int,
        max_output_tokens: int, pool: int = -1, sequences: int = 1, queue_ttl_ns: int = 0,
        deadline_ns: int = 0, reports_progress: bool = False, principal: int = 0, tag: int = 0,
        n: int = 1, adapter: bytes = b"", told_output: int = 0, request_class: bytes = b"",
        prefix_block_hashes: tuple[int, ...] = (), input_estimated: bool = True,
        whole_answer: bool = False, session: bytes = b"", pools: tuple[int, ...] = (),
    ) -> int:  # fmt: skip
        """Ask for one request. Returns a handle (> 0), or the negated outcome where refused.

        `input_tokens` is the sum over prompts, each of which gets `n` completions, so that there
        are `sequences` = prompts * n; `max_output_tokens` is the most of each sequence. A repeat
        with the same payload returns the same handle; with another payload it raises
        CallerError (6). A refusal is not remembered. The verdict comes from `poll()`. `adapter`
        names a LoRA adapter (UTF-8, at most 256 bytes); more than `adapters_max` of them in use at
        once are refused as REJECTED_LIMIT. `told_output` is what an oracle says of each sequence's
        output, for the policy vtc-oracle (0: nothing). `request_class` names its class (empty: the
        tenant's); an unknown one, or one that the tenant may not name, raises CallerError.
        After `deadline_ns` (0: none) its first token is of no use: with `early_refusal` it can get
        REJECTED_DEADLINE, or EVICTED_DEADLINE in its turn (docs/operate/operations.md).
        `prefix_block_hashes` are chained 64-bit hashes of the prompt's full blocks; of these the
        first 512 count. With `whole_answer` no count is known before the end, so the input is
        posted at the grant. `session` names the conversation of an agent that it is a turn of.
        `pools` takes the place of `pool`: the request may run in any of these, at most 64 of one
        fairness domain. While the queued requests of a flow name 16 such sets, another is refused
        as REJECTED_LIMIT. O(log n + hashes), with several pools O(pools of the set * log n), the
        first with a session in a queue O(queued there * log n) once.
        """
    def admit_wire(
        self, now_ns: int, principal: int, data: bytes, queue_ttl_ns: int = 0
    ) -> int | bytes:
        """Call `admit()` for a serialised AdmitRequest, and dispatch unless something is due.

        After a timer has ended, only `poll()` grants: it does first what that timer asks for.
        Returns the serialised AdmitResponse where the verdict has fallen at once (also a refusal,
        also the stored answer of a repeat), else the handle, whose verdict `poll()` brings.
        `queue_ttl_ns` caps the wait (0: no cap). Raises CallerError with a field.
        """
    def encode(self, decision: Decision) -> bytes:
        """Serialise a decision as an AdmitResponse."""
    def progress(
        self, now_ns: int, lease_id: int, pool_epoch: int, input_tokens: int = -1,
        cached_input_tokens: int = -1, output_tokens: int = -1, principal: int = 0,
    ) -> int:  # fmt: skip
        """Renew a lease and raise its running totals (-1: absent; a smaller total is ignored).

        Returns a LEASE_* state. O(log n).
        """
    def complete(
        self, now_ns: int, lease_id: int, pool_epoch: int, outcome: int = ...,
        input_tokens: int = -1, cached_input_tokens: int = -1, output_tokens: int = -1,
        principal: int = 0,
    ) -> Ended | None:  # fmt: skip
        """End a lease as COMPLETED or CANCELLED. O(log n).

        A repeat gets the stored answer; None where it is unknown.
        """
    def cancel(self, now_ns: int, handle: int) -> bool:
        """Withdraw a request.

        Queued, it leaves the queue (the verdict EVICTED_CANCELLED comes from `poll()`); granted,
        its lease ends as CANCELLED with nothing used. False where it had ended or is unknown.
        O(log n).
        """
    def replay(
        self, now_ns: int, flow: int, request_id: bytes, lease_id: int, pool: int,
        pool_epoch: int, reserved_tokens: int, prompt_tokens: int, max_output_tokens: int,
        input_tokens: int = 0, cached_input_tokens: int = 0, output_tokens: int = 0,
        sequences: int = 1, principal: int = 0, adapter: bytes = b"", request_class: bytes = b"",
        whole_answer: bool = False, session: bytes = b"",
    ) -> int:  # fmt: skip
        """Note that the holder of a lease still runs.

        A known one is renewed; an unknown one, whose epoch is the pool's, is restored as granted,
        also where that overdraws the pool. It is UNKNOWN if all restored leases of the pool would
        reserve more than can have been granted. Returns a LEASE_* state. O(log n).
        """
    def telemetry(
        self, now_ns: int, pool: int, epoch: int, running: int, waiting: int, used_tokens: int,
        preemptions: int,
    ) -> None: ...  # fmt: skip
    def drain(self, now_ns: int) -> None:
        """Refuse new requests from now on. Queued requests are still served."""
    def set_draining(self, now_ns: int, pool: bytes, draining: bool) -> None:
        """Drain a pool, or (b"") all of them and the scheduler with them; or let it serve again.

        New requests that only drained pools can hold are refused; the next `poll()`s evict those
        that are queued. O(1).
        """
    def set_forgiven(self, now_ns: int, tenant: bytes) -> int:
        """Let a tenant's own quota owe nothing; returns how many of its buckets did. O(1)."""
    def set_released(self, now_ns: int, pool: bytes) -> None:
        """Let another caller offer a pool at once; CallerError (9) while one does. O(1)."""
    def revoke(self, now_ns: int, lease_id: int) -> int:
        """Void a lease: its reservation is free; its holder is notified, and ends it. O(1).

        Returns what it was, a LEASE_* state; LIVE, also if it was suspect, is void now.
        """
    def list_leases(
        self, now_ns: int, start: int, scan_max: int, rows_max: int, **meant: bytes | int
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return leases from a place on, and where to go on (0: that was all). O(scan_max).

        A lease that lives all along is found once. `meant`: tenant, pool, client_id, pool_epoch,
        age_min_ns, principal (its number; -1: any). Keys as in schedsvc.v1.Lease. CallerError (5):
        the named one is unknown.
        """
    def evict_queued(self, now_ns: int) -> int:
        """Evict all that is queued (EVICTED_DRAINING). Returns how many. O(queued * log n)."""
    def poll(self, now_ns: int) -> list[Decision]:
        """Handle what is due, and grant what fits.

        Returns the verdicts that belong to no session, and expiries of their leases, in the order
        in which they fell. O(work_max * log n).
        """
    def next_deadline(self) -> int:
        """Return when `poll()` has to be called next (ns), -1: not before the next event. O(1)."""

    # Sessions.
    def open_session(self, principal: int = 0) -> Session:
        """Begin a stream. Raises CallerError (8) at `sessions_max`."""
    def take_notes(self) -> list[tuple[str, bytes, int, str]]:
        """Take what belongs into a log: event, pool, count, reason. At most 64 are kept."""
    def ready(self) -> list[int]:
        """Return owners of sessions that have something to `take()`, and empty the list."""

    def pool_index(self, name: bytes) -> int:
        """Return the index of a pool, or -1."""
    def pool_name(self, pool: int) -> bytes: ...
    def stats(
        self, now_ns: int, flow_limit: int = 1_000, principal: int = -1, pools: bool = True
    ) -> dict[str, Any]:
        """Return a snapshot; a principal with grants sees the pools and tenants that it may name.

        Keys as in schedsvc.v1.StatsResponse. `pools`: whether it has their rows. O(flows + pools).
        """
    def pool_rows(
        self, now_ns: int, first: int, end: int, principal: int = -1
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return the rows of `stats()` of the pools from `first` to before `end`.

        Before them stands `end`, or 0 if there are no more pools. O(end - first).
        """
    def flow_stats(self, now_ns: int, flow: int) -> dict[str, Any]: ...
    def show_histograms(self, flow: int, shown: bool) -> None:
        """Count a tenant's times by itself, or (the default) with all others. O(classes)."""
    def histogram_bounds_ms(self) -> tuple[int, ...]:
        """Return the upper bounds, inclusive, of all buckets but the last.

        They follow from the queue TTL at the start. O(1).
        """
    def histograms(self, flow: int = -1) -> list[dict[str, Any]]:
        """Return a tenant's own histograms (-1: those of all others), a row for each class.

        `queue_wait` (to the grant), `evicted_wait` (to the eviction), `time_to_first_token` (to the
        first report of output before the end), from the admission: counts in the buckets of
        `histogram_bounds_ms()` and beyond, sum in us. They only grow. O(classes).
        """
    def explain(
        self, now_ns: int, request_id: bytes, tenant: bytes = b"", principal: int = -1
    ) -> list[dict[str, Any]]:
        """Return schedsvc.v1.RequestStory of a request of `principal` (-1: any). O(flows)."""
    def recent_request_ids(self, principal: int = -1) -> list[bytes]:
        """Return the ids of the last 256 messages that asked, those of `principal` (-1: all).

        The latest is first, an id that was asked with twice is there twice, and one of more than 64
        bytes is left out. O(256).
        """
    def check(self) -> None:
        """Verify every invariant, also those in O(n); raises InvariantError naming the one."""
    def save(self, now_ns: int, rows_max: int) -> list[tuple[bytes, bytes | None]]:
        """Return counters, quotas and predictions that changed since the last call, as rows.

        At most about `rows_max` rows of a key and a value, at first of everything; an empty list
        says that all is saved. A later row replaces the one of its key; a value of None deletes it.
        Changes nothing that is decided. O(rows).
        """
    def save_all(self) -> None:
        """Let the next calls of `save()` return everything again. O(1), those O(rows)."""
    def set_saved(self, now_ns: int, rows: list[tuple[bytes, bytes, int]]) -> int:
        """Take saved rows over, each with its age in ns: quotas are credited for it.

        Only a scheduler that was configured and saw no request can; CallerError for a row that is
        wrong, and then none counts. Until the lease TTL and grace have passed it reserves the room
        of the leases before the restart, less the leases that `replay()` restores. Flows that were
        active stay so for a lease TTL. Rows of tenants, quotas and pools that are not known are
        left out. Returns how many found their place. O(rows * log n).
        """
    def digest(self) -> int:
        """Return a 64-bit digest of all decisions so far."""
    def describe(self, now_ns: int) -> str:
        """Show the state as text, for a person and for the log when an invariant breaks."""
    def reset_learned(self) -> None:
        """Forget counters, rates and predictions; queues and leases stay.

        After it a drained scheduler decides a run exactly as a fresh one would.
        """

# For simulators.
def progress_all(
    core: Scheduler, now_ns: int, leases: bytes, outputs: bytes, more: int = 0
) -> None:
    """Call `progress()` for leases in turn: int64 of handle, epoch and input, and output, of each.

    The handle is the decision's. Each output is `more` than what is given. Input is reported only
    with output, none of it cached. Raises where the first is refused.
    """

def promised_tokens(core: Scheduler) -> int:
    """Sum what the ledger has promised in all pools, as `stats()` says it. O(pools)."""

def moved_entries(core: Scheduler) -> int:
    """Count what its hash tables have moved since the start, while they grew. O(1)."""

def counted_peaks(core: Scheduler) -> int:
    """Count how often it went through a pool's leases for the load to come. O(pools)."""
