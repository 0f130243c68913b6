"""Defines records of the twin: flows, pools and requests."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

QUEUED, LIVE, SUSPECT, ENDED = "queued", "live", "suspect", "ended"
LEASED = LIVE, SUSPECT


class TwinError(Exception):
    """Stands for the core's CallerError."""

    def __init__(self, code: int, field: str) -> None:
        super().__init__(code, field)
        self.code, self.field = code, field


class Verdict(NamedTuple):
    """Mirrors a Decision; `retry_ms` is what the core spreads by up to 10 %."""

    handle: int
    tag: int
    outcome: int
    lease_id: int = 0
    pool: int = 0
    pool_epoch: int = 0
    reserved_tokens: int = 0
    retry_ms: int = 0
    position: int = 0
    waited_ns: int = 0
    queue_max: int = 0
    queue_left: int = 0
    pool_capacity_tokens: int = 0
    pool_free_tokens: int = 0
    flow: int = -1
    engine_priority: int = 0


@dataclass
class Rate:
    """Work over time, in windows of a second and four grants at least, of which each next one
    weighs the older ones by 15/16."""

    work: int = 0
    time_ns: int = 0
    open_work: int = 0
    open_ns: int = 0
    grants: int = 0
    since_ns: int | None = None

    def run(self, now_ns: int, *, runs: bool) -> None:
        if runs and self.since_ns is None:
            self.since_ns = now_ns
        elif not runs and self.since_ns is not None:
            self.open_ns += now_ns - self.since_ns
            self.since_ns = None

    def add(self, now_ns: int, work: int) -> None:
        if self.since_ns is None:
            return
        self.open_work += work
        self.grants += 1
        open_ns = self.open_ns + now_ns - self.since_ns
        if open_ns >= 10**9 and self.grants >= 4:
            self.work += self.open_work - self.work // 16
            self.time_ns += open_ns - self.time_ns // 16
            self.open_work = self.open_ns = self.grants = 0
            self.since_ns = now_ns

    def forget(self, now_ns: int) -> None:
        self.work = self.time_ns = self.open_work = self.open_ns = self.grants = 0
        self.since_ns = None if self.since_ns is None else now_ns

    def pace(self) -> int:
        """Return thousandths of tokens a second; 0: unknown."""
        return self.work * 10**12 // self.time_ns if self.time_ns else 0


@dataclass
class Flow:
    weight_milli: int
    base: int  # the tenant's flow in the default class
    cls: int = 0
    vtc: int = 0
    granted_at_ns: int | None = None
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    kv_token_steps: int = 0
    received: int = 0
    granted: int = 0
    completed: int = 0
    cancelled: int = 0
    expired: int = 0
    refusals: Counter[int] = field(default_factory=Counter)
    average_milli: int = 0
    idle_at_ns: int | None = None  # when it was left last, since anything was learnt
    owed: int = 0  # charged before a restart for leases that are not replayed yet


@dataclass
class Pool:
    epoch: int
    engine_tokens: int
    headroom_ppm: int
    block_size: int
    engine_max_running: int
    max_model_tokens: int
    limits: dict[str, int]
    replays_until_ns: int = 0  # replays of unknown leases are accepted until then
    replayed: tuple[int, int] = (0, 0)  # tokens and sequences of restored leases
    reason: str = "NONE"
    draining: bool = False  # an operator lets no request in any more
    probes: bool = True
    pressed: bool = False
    served: int = 0  # since the last telemetry of the engine
    told_at_ns: int | None = None
    preemptions: int = 0
    foreign_tokens: int = 0
    owed_tokens: int = 0  # to leases of before a restart
    replay_debt: int = 0  # that, as the restart found it
    saturated: bool = False
    light: list[tuple[int, int]] = field(default_factory=list)  # when, tokens
    brought: bool = False  # whom it served last, came before better classes
    drain: Rate = field(default_factory=Rate)  # while requests wait
    # Tokens of the blocks that it was given, by adapter and hash, the oldest first.
    blocks: dict[tuple[bytes, int], int] = field(default_factory=dict)
    asked_tokens: int = 0
    matched_tokens: int = 0
    output_above_limit: int = 0  # that final counts state above what requests can use
    surplus_micro: int = 0  # of work that worse classes may pass with

    def holds_replay(self, tokens: int, sequences: int, headroom_min_ppm: int) -> bool:
        """Return whether leases of the replays' sum and number, with this one, can be granted."""
        tokens += self.replayed[0] - self.replay_debt
        sequences += self.replayed[1]
        most = self.engine_tokens + self.engine_tokens * max(0, -headroom_min_ppm) // 1_000_000
        most *= 1 + (sequences - 1).bit_length()
        return tokens <= most + (sequences + 1) * (self.block_size + 1)

    def forget_pace(self, now_ns: int) -> None:
        self.drain.forget(now_ns)
        self.surplus_micro = 0

    @property
    def capacity_blocks(self) -> int:
        tokens = [t for t in (self.engine_tokens, self.limits.get("max_total_tokens")) if t]
        return max(1, min(tokens) // self.block_size)

    @property
    def beyond_tokens(self) -> int:
        return max(self.foreign_tokens, self.owed_tokens)

    @property
    def max_running(self) -> int:
        counts = [c for c in (self.engine_max_running, self.limits.get("max_running")) if c]
        return min(counts, default=0)

    @property
    def round_max_tokens(self) -> int:
        given = self.limits.get("batch_max_tokens", 0)
        if given >= 0:
            return given
        keys = ("max_request_input_tokens", "max_request_total_tokens")
        longest = [self.limits.get(key) for key in keys]
        longest += [self.max_model_tokens, self.engine_tokens]
        return max(self.capacity_blocks * self.block_size // 6, min(t for t in longest if t))

    @property
    def headroom_blocks(self) -> int:
        blocks = self.capacity_blocks * abs(self.headroom_ppm) // 1_000_000
        return blocks if self.headroom_ppm > 0 else -blocks


Target = int | tuple[int, ...]  # a pool, -1: any, or the pools of a set


def names(target: Target, pool: int) -> bool:
    """Return whether a request for a target names a pool, alone or beside others."""
    return pool in target if isinstance(target, tuple) else target == pool


def may_run(target: Target, pool: int) -> bool:
    """Return whether a request for a target may run in a pool."""
    return target == -1 or names(target, pool)


def target_of(pool: int, pools: tuple[int, ...]) -> Target:
    """Return the target of a request that names one pool, or several in its place."""
    named = tuple(sorted(set(pools)))
    return named if len(named) > 1 else (*named, pool)[0]


@dataclass(eq=False)
class Request:
    seq: int
    flow: int
    request_id: bytes
    payload: tuple[Any, ...] | None  # None: of a restored lease, which has none
    target: Target
    prompt_tokens: int
    prompt_max_tokens: int
    output_max_tokens: int
    sequences: int  # prompts times n
    n: int
    principal: int
    tag: int
    reports_progress: bool
    arrival_ns: int
    due_ns: int
    adapter: bytes = b""
    stated_ns: int | None = None  # until which it says that it waits in the queue
    told: bool = True  # a poll returns its verdict
    has_exact_input: bool = False
    whole_answer: bool = False
    was_limited: bool = False
    state: str = QUEUED
    outcome: int = 0
    ordinal: int = 0  # arrivals in its queue before it, ever
    lease_id: int = 0
    granted_tokens: int = 0
    pool: int = -1
    epoch: int = 0
    weight_milli: int = 1
    waited_ns: int = 0
    charged: int = 0
    kv_steps: int = 0  # token-steps of the KV cache in that
    discount_ppm: int = 0  # part of its work that is not charged: it passed a head
    promised_output: int = 0
    predicted_output: int = 0
    evidence: int = 0  # the base of its promise; 0: nothing, or judged
    ahead_output: int = 0
    told_output: int = 0
    input_tokens: int | None = None
    cached_tokens: int = 0
    output_tokens: int = 0
    reserved_blocks: int = 0
    posted_blocks: int = 0
    is_void: bool = False
    bypassed: int = 0
    bypassed_ns: int = 0
    engine_priority: int = 0
    work: int = 0
    deadline_ns: int | None = None  # for its first token
    head_ns: int | None = None  # first in its queue
    hashes: tuple[int, ...] = ()  # while it is queued
    hash_tokens: int = 0  # tokens of the prompt for each
    matched_tokens: int = 0  # charged as cached until its end
    lined_ns: int | None = None  # in the line, its quotas given
    ended_ns: int = 0

    @property
    def lives(self) -> bool:
        return self.state in LEASED

    @property
    def names_one(self) -> bool:
        """Return whether it has to run in a certain pool."""
        return isinstance(self.target, int) and self.target != -1

    @property
    def lines(self) -> tuple[int, ...]:
        """Return the pools in whose lines it waits; -1: in that for any pool."""
        return self.target if isinstance(self.target, tuple) else (self.target,)


TICK_NS = 60_000
TICKS_MAX = 10**12


@dataclass
class Bucket:
    """Holds millionths of a unit: `rate` a tick, up to a minute's worth."""

    rate: int
    level: int
    at_ns: int

    @property
    def size(self) -> int:
        return self.rate * 10**6

    def level_at(self, now_ns: int) -> int:
        return min(self.size, self.level + (now_ns - self.at_ns) // TICK_NS * self.rate)

    def draw(self, now_ns: int, micro: int) -> None:
        level = self.level_at(now_ns)
        whole = (now_ns - self.at_ns) // TICK_NS * TICK_NS
        self.at_ns = now_ns if level == self.size else self.at_ns + whole
        self.level = min(self.size, level - micro)

    def due_ns(self, micro: int) -> int:
        """Return when it holds so much, or is full."""
        wanted = min(micro, self.size)
        after = range(TICKS_MAX)
        ticks = bisect_left(after, wanted, key=lambda k: self.level_at(self.at_ns + k * TICK_NS))
        return self.at_ns + ticks * TICK_NS


@dataclass
class Bill:
    """Holds the amounts that a request has taken from its quotas."""

    nodes: list[int]
    inputs: int
    outputs: int


@dataclass
class Node:
    parent: int = -1
    buckets: dict[int, Bucket] = field(default_factory=dict)
    concurrency: int = 0
    lift: Counter[int] = field(default_factory=Counter)  # by class
    owed: tuple[int, int, int] = (0, 0, 0)  # requests, input, output: of before a restart


@dataclass
class Wait:
    node: int
    request: Request
    lift: int


@dataclass
class Hold:
    """Describes a head that is held to the share of its flow."""

    request: Request
    limited: bool = False  # it may not borrow
    due_ns: int | None = None  # the time of its own event
