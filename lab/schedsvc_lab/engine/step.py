"""Defines the values that the engine returns: steps, runs of steps, their results, and gauges."""

from typing import NamedTuple

from schedsvc_lab.engine.sequence import Sequence


class EngineGauges(NamedTuple):
    """Shows the engine at one moment, and totals since its start.

    `prompt_tokens` counts a request's prompt once, when the first of its sequences has computed it;
    what is recomputed after a preemption is not counted again. Sequences and loaded adapters hold
    `used_blocks`. `cached_blocks` have no holder, but a prompt can still find their contents.
    Admitted prompts asked for `cache_query_tokens` and found `cache_hit_tokens` of them.
    """

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    used_tokens: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    swapped: int
    cached_blocks: int
    cache_query_tokens: int
    cache_hit_tokens: int
    cache_evictions: int
    swapped_blocks: int
    copied_blocks: int
    adapters_loaded: int
    adapter_loads: int


class Step:
    """Describes a step under way: what it computes and how long it takes.

    `transfer_ns` of its duration go to blocks that are swapped or copied, and to adapters. The
    first `together` of its sequences decode in lockstep.
    """

    __slots__ = (
        "decodes",
        "duration_ns",
        "kv_tokens",
        "preempted",
        "prompt_tokens",
        "sequences",
        "together",
        "transfer_ns",
    )

    def __init__(
        self,
        duration_ns: int,
        sequences: list[Sequence],
        preempted: list[Sequence],
        prompt_tokens: int,
        decodes: int,
        kv_tokens: int,
        transfer_ns: int,
        together: int,
    ) -> None:
        self.duration_ns = duration_ns
        self.sequences = sequences
        self.preempted = preempted
        self.prompt_tokens = prompt_tokens
        self.decodes = decodes
        self.kv_tokens = kv_tokens
        self.transfer_ns = transfer_ns
        self.together = together


class DecodeRun:
    """Decode steps that could be done at once; the first of them reads `kv_tokens`."""

    __slots__ = ("decodes", "duration_ns", "kv_tokens", "steps")

    def __init__(self, steps: int, duration_ns: int, decodes: int, kv_tokens: int) -> None:
        self.steps = steps
        self.duration_ns = duration_ns
        self.decodes = decodes
        self.kv_tokens = kv_tokens


class StepResult:
    """The result of a step or of a run of decode steps.

    Each of `produced` has `tokens` more tokens of output; `started` are the ones that got their
    first token, `finished` the complete ones. `preempted` lost their blocks when the step was
    planned, and wait again.
    """

    __slots__ = ("duration_ns", "finished", "preempted", "produced", "started", "tokens")

    def __init__(
        self,
        duration_ns: int,
        tokens: int,
        produced: list[Sequence],
        finished: list[Sequence],
        preempted: list[Sequence],
        started: list[Sequence],
    ) -> None:
        self.duration_ns = duration_ns
        self.tokens = tokens
        self.produced = produced
        self.finished = finished
        self.preempted = preempted
        self.started = started
