"""What the twin keeps of flows, pools and requests."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

QUEUED, LIVE, SUSPECT, ENDED = "queued", "live", "suspect", "ended"


class TwinError(Exception):
    """What CallerError is to the core."""

    def __init__(self, code: int, field: str) -> None:
        super().__init__(code, field)
        self.code, self.field = code, field


class Verdict(NamedTuple):
    """A Decision; `retry_ms` is what the core spreads by up to 10 %."""

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
class Flow:
    weight_milli: int
    base: int  # the tenant's flow in the default class
    cls: int = 0
    vtc: int = 0
    interval_ns: int = 0
    granted_at_ns: int | None = None
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    received: int = 0
    granted: int = 0
    completed: int = 0
    cancelled: int = 0
    expired: int = 0
    refusals: Counter[int] = field(default_factory=Counter)
    average_milli: int = 0
    idle_at_ns: int | None = None  # when it was left last, since anything was learnt
    owed: int = 0  # charged before a restart for leases that nobody has told of yet


@dataclass
class Pool:
    epoch: int
    engine_tokens: int
    headroom_ppm: int
    block_size: int
    engine_max_running: int
    max_model_tokens: int
    limits: dict[str, int]
    reason: str = "NONE"
    probes: bool = True
    pressed: bool = False
    told_at_ns: int | None = None
    preemptions: int = 0
    foreign_tokens: int = 0
    owed_tokens: int = 0  # to leases of before a restart
    light: list[tuple[int, int]] = field(default_factory=list)  # when, tokens
    brought: bool = False  # whom it served last, came before better classes

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


@dataclass
class Request:
    seq: int
    flow: int
    request_id: bytes
    payload: tuple[Any, ...] | None  # None: of a restored lease, nobody told it
    target: int
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
    told: bool = True  # whoever polls hears of it
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
    promised_output: int = 0
    predicted_output: int = 0
    evidence: int = 0  # what its promise was made from; 0: nothing, or judged
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

    @property
    def lives(self) -> bool:
        return self.state in (LIVE, SUSPECT)
