"""The auditor's records: requests, leases, pools, and the terms it holds the core to."""

from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from schedsvc_lab.faults.auditor.tree import NO_TREE, Tree

# Outcomes and lease states, as the contract numbers them.
GRANTED = 1
REJECTED_FLOW_QUEUE_FULL, REJECTED_TOO_LARGE, REJECTED_NO_POOL = 16, 18, 19
REJECTED_FIRST, REJECTED_LAST = 16, 31
REJECTED_DEADLINE, EVICTED_DEADLINE = 23, 36
REJECTED_DRAINING, REJECTED_LIMIT = 20, 24
EVICTED_TTL, EVICTED_CANCELLED, EVICTED_DRAINING, EVICTED_TOO_LARGE = 32, 33, 34, 35
COMPLETED, CANCELLED, EXPIRED = 48, 49, 50
UNKNOWN, LIVE, VOID, ENDED = 1, 2, 3, 4

CREDIT_AUTO = -1
LEAD_AUTO = -1
NO_PRINCIPAL = -1  # the owner of a pool that was drained before a stream offered it

#: A prefill at this part of another one's pace is about as fast; the scheduler, which rounds, has
#: 7/8.
_AS_FAST = Fraction(874, 1_000)

# Limits of the contract (proto/README.md).
PROMPT_TOKENS_MAX = 1 << 24
SEQUENCES_MAX, COMPLETIONS_MAX = 1_024, 128
TOTAL_TOKENS_MAX = 1 << 27
TELEMETRY_MAX = 1 << 50
ID_BYTES_MAX, NAME_BYTES_MAX = 128, 256


class ViolationError(Exception):
    """The scheduler breaks a promise."""


def require(holds: bool, what: str, *figures: object) -> None:
    """Raise ViolationError unless it holds."""
    if not holds:
        raise ViolationError(": ".join([what, ", ".join(map(str, figures))]) if figures else what)


def is_telemetry(t: Any) -> bool:
    """Return whether figures of an engine are within the contract."""
    figures: tuple[int, ...] = (t.running, t.waiting, t.used_tokens, t.preemptions)
    return min(figures) >= 0 and max(figures) <= TELEMETRY_MAX


@dataclass(frozen=True)
class Limits:
    """Limits one node of quotas: units a minute, and requests at once; 0: no limit."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    concurrency: int = 0
    share: int = 0  # what it can count on, tokens a minute; not audited, like the next two
    lends: int = -1
    borrows: int = -1


@dataclass(frozen=True)
class Quotas:
    """Limits tenants, one group, and the model on one pool."""

    tenants: dict[str, Limits]
    refusing: frozenset[str]  # tenants that are refused at once instead of waiting
    members: frozenset[str]  # of the group
    group: Limits | None
    model: Limits | None
    model_pool: str


@dataclass(frozen=True)
class PriorityClass:
    """Describes a priority class: the least rank goes first, an exempt one before all."""

    name: str
    rank: int
    ageing_ns: int
    exempt: bool = False


DEFAULT_CLASS = PriorityClass("default", 0, 5_000_000_000)


@dataclass(frozen=True)
class Classes:
    """Holds all classes by name, and those of tenants whose requests name none."""

    known: dict[str, PriorityClass]
    of_tenants: dict[str, str]

    def find(self, tenant: str, named: str) -> PriorityClass:
        """Return the class of a tenant's request."""
        return self.known.get(named) or self.known[self.of_tenants.get(tenant, "default")]


@dataclass(frozen=True)
class PoolLimits:
    """Limits each pool besides the limits of its engine; 0: no limit."""

    batch_max_tokens: int = 0
    max_total_tokens: int = 0
    max_running: int = 0
    max_request_total_tokens: int = 0
    max_request_input_tokens: int = 0
    max_loras: int = 0
    adapter_tokens: int = 0
    sessions_max_tokens: int = 0


@dataclass(frozen=True)
class Grants:
    """Lists a principal's names, and its share of each table; others have no limits."""

    principal: int
    pools: tuple[str, ...]  # patterns
    tenants: tuple[str, ...]
    share_ppm: int


@dataclass(frozen=True)
class Terms:
    """Holds the promises of the configuration. Times in ns, prices in micro-tokens."""

    tenants: dict[str, int]  # weight in thousandths
    shares_unknown: bool
    queue_ttl_ns: int
    lease_ttl_ns: int
    lease_grace_ns: int
    answer_ttl_ns: int
    answers_max: int
    flow_queue_max: int
    queue_max: int
    headroom_ppm: int  # at least; less than 0: promises may exceed the capacity by this part
    headroom_most_ppm: int
    tick_ns: int
    input_price: int
    output_price: int
    cached_price: int
    kv_price: int  # of a token that is held in the KV cache for one step of output
    sum_form: bool  # the ledger's test adds reservations up; else it is the peak form
    # Nothing holds a request back but the ledger: no quota, delay or deadline.
    work_conserving: bool
    # In one pool, first come, first served: the most bypasses of a head; None: no rule.
    bypass_max: int | None
    # Every report is true: the bound of VTC applies, with several pools in each of them.
    fair: bool
    # A request may pass one that does not fit, if its flow is ahead by no more than that one's
    # charge: the bound is larger by the charge of one request.
    passes: bool
    unknown_weight: int  # of all unknown tenants together
    pools: int
    quotas: Quotas | None
    pool_sets: int = 0  # that requests may name
    classes: Classes | None = None
    # In one pool, where nothing but the ledger holds requests back, better classes go first.
    strict_classes: bool = False
    limits: PoolLimits = PoolLimits()
    adapters: dict[str, int] = field(default_factory=dict)  # tokens of each, where not the usual
    early_refusal: bool = False  # a request that cannot meet its deadline is refused
    credit_max: int = 0  # micro-tokens; CREDIT_AUTO: the average charge of a request
    lead_max: int = 0  # micro-tokens, how far ahead service elsewhere keeps a flow in a pool
    by_deadline: bool = False  # inside a flow, the request whose wait ends first is next
    closed: frozenset[str] = frozenset()  # pools that only take requests naming them, at the start
    grants: Grants | None = None
    sessions_max: int = 4_096
    leases_max: int = 65_536
    adapters_max: int = 1_024
    ids_tell_order: bool = True  # grants are in the order of lease ids: these are consecutive
    tree: Tree = NO_TREE  # groups with a weight
    has_sessions: bool = False  # requests may name sessions of agents
    sign_of_life_ns: int = 0  # for streams of a claimed pool; 0: the newcomer gets it at once


class Ask(NamedTuple):
    """Holds the fields of a request that the auditor checks."""

    tenant: str
    request_id: str
    pools: tuple[str, ...]  # by name; (): any
    prompts: tuple[int, ...]
    n: int
    max_output_tokens: int
    adapter: str
    request_class: PriorityClass
    session: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """Holds a request that the scheduler has taken in."""

    ask: Ask | None  # None: of a restored lease, whose payload is unknown
    key: tuple[str, str, str, int]  # flow, tenant if it is unknown, request id, principal
    flow: str
    principal: int
    seq: int
    asked_ns: int
    due_ns: int
    conn: int  # stream on which it was last asked for; 0: a unary call, -1: no stream
    tag: int
    reports_progress: bool
    prompt_tokens: int
    sequences: int
    n: int
    max_output_tokens: int
    adapter: str = ""
    cls: PriorityClass = DEFAULT_CLASS
    queued: bool = True
    withdrawn: bool = False
    has_deadline: bool = False  # for its first token
    is_due_by_deadline: bool = False  # no other limit of its wait is shorter
    has_exact_input: bool = False  # its prompt was counted, not estimated
    audited: bool = False  # granted while its tenant was in audit
    place: tuple[int, int] = (0, 0)  # in its queue, the least first
    bypassed: int = 0  # later requests that passed while it was the next
    lease: "Lease | None" = None
    session: str = ""  # session of an agent; empty: none
    target: tuple[str, ...] = ()  # the pools that it names and that were known; (): any


@dataclass(slots=True, eq=False)
class Lease:
    """Holds a lease from its grant until its answer is forgotten."""

    lease_id: int
    request: Request
    pool: "Pool"
    epoch: int
    renewed_ns: int
    weight_milli: int
    reserved_tokens: int  # as granted
    granted_ns: int
    low: int = 0  # blocks that it holds at least, and at most
    high: int = 0
    input_tokens: int = -1  # as reported; -1: never
    cached_tokens: int = 0
    output_tokens: int = 0
    served: int = 0  # weighted micro-tokens that its flow was charged
    input_billed: int = 0  # the most input that its quotas were asked for
    told: tuple[int, int] | None = None  # the part of its reservation for its output, see peak.py
    is_void: bool = False
    computed: tuple[int, int] = (0, 0)  # computed of its prompt by the engine: tokens, and the time
    was_limited: bool = False  # a report of it stated more than was charged
    outcome: int = 0  # once it has ended
    forgotten_ns: int = 0

    def usage(self) -> tuple[int, int, int]:
        """Return the totals as an answer reports them."""
        return max(0, self.input_tokens), self.cached_tokens, self.output_tokens

    def limited(
        self, totals: tuple[int, int, int], *, is_final: bool
    ) -> tuple[tuple[int, int, int], int]:
        """Return what a report may charge, and the part of it above what its request can use.

        Running totals are charged as far as the request can use them. The output of a final one
        counts as far as the context has room for it beside the input.
        """
        r, pool = self.request, self.pool
        input_tokens, cached, output_tokens = totals
        whole = (pool.max_model_tokens or pool.capacity_blocks * pool.block) * r.sequences
        input_max = -(-r.prompt_tokens * 21 // 20)
        if not r.has_exact_input:
            input_max = max(input_max, whole)
        input_tokens = min(input_tokens, input_max)
        left = whole - max(0, input_tokens) * r.n
        output_max = r.max_output_tokens * r.sequences
        if not r.has_exact_input and r.prompt_tokens * r.n + output_max >= whole:
            output_max = max(output_max, left)
        output_tokens = min(output_tokens, max(output_max, left) if is_final else output_max)
        return (input_tokens, cached, output_tokens), max(0, output_tokens - output_max)


@dataclass(slots=True, eq=False)
class Pool:
    """Holds one engine's KV cache, as it was registered."""

    name: str
    epoch: int
    capacity_blocks: int
    block: int
    max_running: int
    max_model_tokens: int
    principal: int
    offers: dict[int, int]  # streams that offer it, and at which epoch
    leases: dict[int, Lease]  # live, not void
    terms: Terms
    low: int = 0  # sums over them
    high: int = 0
    granted: bool = False  # in this round
    owned_until_ns: int = 0  # end of its principal's ownership, after its last stream has ended
    replays_until_ns: int = 0  # replays of unknown leases are accepted until then
    owed_low: int = 0  # tokens of leases of an earlier process, not replayed yet
    owed_high: int = 0
    debt: tuple[int, int] = (0, 0)  # at least and at most what these were at the start
    replayed: tuple[int, int] = (0, 0)  # tokens and sequences of the leases restored at its epoch
    engine_tokens: int = 0
    prefills: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=64))
    """Of the last prompts whose first token was reported: tokens, and in which time."""

    def computed_in(self, time_ns: int, prompt_tokens: int) -> int:
        """Return the tokens of a prompt that the last prefills let one expect after a time.

        That is the pace of the fastest, as far as a prompt reached that was about as fast.
        """
        paces = [(Fraction(tokens, max(1, took_ns)), tokens) for tokens, took_ns in self.prefills]
        fastest = max(pace for pace, _ in paces)
        reached = max(tokens for pace, tokens in paces if pace >= _AS_FAST * fastest)
        tokens = int(time_ns * fastest)
        return prompt_tokens if tokens > reached else min(tokens, prompt_tokens)

    def replays_beyond(self, tokens: int, sequences: int) -> int:
        """Return by how much its replays and one more exceed what can have been granted.

        With n sequences that is the promised capacity times 1 and the harmonic number of n - 1, of
        which the scheduler takes the binary digits; and a block and a token for each.
        """
        tokens, sequences = tokens + self.replayed[0], sequences + self.replayed[1]
        most = self.engine_tokens * max(0, -self.terms.headroom_ppm) // 1_000_000
        most = (most + self.engine_tokens) * (1 + (sequences - 1).bit_length())
        return tokens - most - (sequences + 1) * (self.block + 1)

    def blocks(self, tokens: int, sequences: int) -> int:
        """Return the blocks for `tokens` tokens; each sequence may have a partly filled one."""
        return -(-tokens // self.block) + sequences - 1

    def need(self, r: Request, output_tokens: int) -> int:
        """Return the blocks of a request that produces so much in each sequence."""
        tokens = r.prompt_tokens * r.n + output_tokens * r.sequences
        return self.blocks(tokens, r.sequences)

    def can_hold(self, r: Request) -> bool:
        """Return whether it could ever run here, all its output counted."""
        limits = self.terms.limits
        total = r.prompt_tokens + r.max_output_tokens * r.sequences
        if 0 < limits.max_request_input_tokens < r.prompt_tokens:
            return False
        if 0 < limits.max_request_total_tokens < total:
            return False
        longest = max(r.ask.prompts) if r.ask else r.prompt_tokens
        if self.max_model_tokens and longest + r.max_output_tokens > self.max_model_tokens:
            return False
        if self.max_running and r.sequences > self.max_running:
            return False
        need = self.need(r, r.max_output_tokens) * self.block
        if r.adapter:
            need += self.terms.adapters.get(r.adapter, limits.adapter_tokens)
        return need <= self.capacity_blocks * self.block

    def size(self, capacity_tokens: int, block: int, max_running: int) -> None:
        """Hold and run the less of what the engine can and what is allowed."""
        limits = self.terms.limits
        self.block, self.engine_tokens = block, capacity_tokens
        self.capacity_blocks = max(1, least(capacity_tokens, limits.max_total_tokens) // block)
        self.max_running = least(max_running, limits.max_running)

    def adapters(self) -> set[str]:
        """Return the adapters that are active. O(leases)."""
        return {lease.request.adapter for lease in self.leases.values()} - {""}

    def adapter_tokens(self) -> int:
        """Return what the active adapters take of the cache. O(leases)."""
        usual, own = self.terms.limits.adapter_tokens, self.terms.adapters
        if not (usual or own):
            return 0
        return sum(own.get(name, usual) for name in self.adapters())


def least(*limits: int) -> int:
    """Return the least limit, 0 where there is none."""
    return min((limit for limit in limits if limit), default=0)


Stats = dict[str, Any]
