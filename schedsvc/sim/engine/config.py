"""What an engine holds and how it schedules."""

from dataclasses import dataclass
from typing import Literal

Policy = Literal["fcfs", "priority"]
Prefill = Literal["chunked", "whole", "separate"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and policies of one engine. Raises ValueError naming the field that is wrong.

    `policy`: "fcfs" serves by arrival; "priority" by lower priority value, then by arrival.
    `prefill`: "chunked" cuts prompts to the step's token budget and mixes them with decodes
    (vLLM V1's default); "whole" mixes them uncut; "separate" computes whole prompts in steps of
    their own, before any decode (vLLM V0, S-LoRA).
    """

    blocks: int
    block_size_tokens: int
    sequences_max: int
    step_tokens_max: int
    context_tokens_max: int
    policy: Policy = "fcfs"
    prefill: Prefill = "chunked"

    def __post_init__(self) -> None:
        """Refuse sizes under which some request could never end."""
        _positive("blocks", self.blocks)
        _positive("block_size_tokens", self.block_size_tokens)
        _positive("sequences_max", self.sequences_max)
        _positive("step_tokens_max", self.step_tokens_max)
        _positive("context_tokens_max", self.context_tokens_max)
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy: must be fcfs or priority, not {self.policy!r}")
        if self.prefill not in ("chunked", "whole", "separate"):
            raise ValueError(f"prefill: must be chunked, whole or separate, not {self.prefill!r}")
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

    @property
    def capacity_tokens(self) -> int:
        """KV cache in tokens."""
        return self.blocks * self.block_size_tokens


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: must be an integer of at least 1, not {value!r}")
