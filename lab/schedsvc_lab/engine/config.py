"""The capacity and the scheduling rules of an engine."""

from dataclasses import dataclass
from typing import Literal

Policy = Literal["fcfs", "priority"]
Prefill = Literal["chunked", "whole", "separate"]
Groups = Literal["fan-out", "fork"]
Preemption = Literal["recompute", "swap"]
Resume = Literal["arrival", "front"]
Eviction = Literal["off", "lru", "fifo", "lfu", "belady"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "policy": ("fcfs", "priority"),
    "prefill": ("chunked", "whole", "separate"),
    "groups": ("fan-out", "fork"),
    "preemption": ("recompute", "swap"),
    "resume": ("arrival", "front"),
    "prefix_cache": ("off", "lru", "fifo", "lfu", "belady"),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and policies of one engine. Raises ValueError naming the field that is wrong.

    `policy`: "fcfs" serves by arrival; "priority" by lower priority value, then by arrival.
    `prefill`: "chunked" cuts prompts to the step's token budget and mixes them with decodes
    (vLLM V1's default); "whole" mixes them uncut; "separate" computes whole prompts in steps of
    their own, before any decode (vLLM V0, S-LoRA).
    `groups`: with "fan-out" each answer to a prompt is a sequence of its own (vLLM V1); with
    "fork" the answers run as a group that computes the prompt once and shares its blocks (V0).
    `preemption`: "recompute" throws away what was computed; "swap" moves it to `swap_blocks` of
    host memory and back, and recomputes only where these are full.
    `resume`: preempted work goes on in the order of its arrival, or, with "front", each step's
    victims are put in front of the queue as they were thrown out, the youngest first.
    `delay_factor_ppm`: while sequences run, a new one is admitted only after the first in the queue
    has waited for this many millionths of the last prompt step's duration (vLLM V0's delay factor).
    `prefix_cache`: which block of the prefix cache is given up first, or "off". At most
    `cache_blocks_max` blocks that no sequence holds stay cached; None: only the memory limits them.
    `reserve_prompt`: a prompt that is computed in pieces is admitted only where all of it fits
    (vLLM 0.32), not just its first piece.
    `adapters_max` LoRA adapters may be loaded at a time, each as large as `adapter_tokens` tokens
    of KV cache (0: their memory is set aside beforehand).
    """

    blocks: int
    block_size_tokens: int
    sequences_max: int
    step_tokens_max: int
    context_tokens_max: int
    policy: Policy = "fcfs"
    prefill: Prefill = "chunked"
    groups: Groups = "fan-out"
    preemption: Preemption = "recompute"
    resume: Resume = "arrival"
    swap_blocks: int = 0
    delay_factor_ppm: int = 0
    prefix_cache: Eviction = "off"
    cache_blocks_max: int | None = None
    adapters_max: int = 0
    adapter_tokens: int = 0
    reserve_prompt: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes under which some request could never end."""
        for name in (
            "blocks",
            "block_size_tokens",
            "sequences_max",
            "step_tokens_max",
            "context_tokens_max",
        ):
            _at_least(1, name, getattr(self, name))
        for name in ("swap_blocks", "delay_factor_ppm", "adapters_max", "adapter_tokens"):
            _at_least(0, name, getattr(self, name))
        if self.cache_blocks_max is not None:
            _at_least(0, "cache_blocks_max", self.cache_blocks_max)
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                listed = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
                raise ValueError(f"{name}: must be {listed}, not {value!r}")
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.context_tokens_max > self.capacity_tokens:
            raise ValueError(
                f"context_tokens_max: {self.context_tokens_max} does not fit into the KV cache "
                f"of {self.capacity_tokens} tokens ({self.blocks} blocks of "
                f"{self.block_size_tokens})"
            )
        if self.prefill != "chunked" and self.step_tokens_max < self.context_tokens_max:
            raise ValueError(
                f"step_tokens_max: must be at least context_tokens_max "
                f"({self.context_tokens_max}) unless prefill is chunked, "
                f"not {self.step_tokens_max}"
            )
        if self.preemption == "swap" and not self.swap_blocks:
            raise ValueError("swap_blocks: must be at least 1 where preemption is swap")
        if self.adapter_tokens and not self.adapters_max:
            raise ValueError("adapters_max: must be at least 1 where adapter_tokens is given")
        room = self.blocks - self.adapter_blocks
        if self.context_tokens_max > room * self.block_size_tokens:
            raise ValueError(
                f"adapter_tokens: beside an adapter of {self.adapter_tokens} tokens there is no "
                f"room for context_tokens_max ({self.context_tokens_max})"
            )

    @property
    def capacity_tokens(self) -> int:
        """Return the KV cache in tokens."""
        return self.blocks * self.block_size_tokens

    @property
    def adapter_blocks(self) -> int:
        """Blocks that one loaded adapter takes."""
        return -(-self.adapter_tokens // self.block_size_tokens)


def _at_least(least: int, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: must be an integer of at least {least}, not {value!r}")
