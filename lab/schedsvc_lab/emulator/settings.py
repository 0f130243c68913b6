"""Holds the settings of one emulator, and the views of it that a middleware can read.

The views carry vLLM's names, so that a middleware reads the same attributes of
`scope["app"].state.vllm_config` here and inside `vllm serve`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from schedsvc_lab.emulator.tokenizer import TextTokenizer, Tokenizer
from schedsvc_lab.engine import Engine, EngineConfig, Profile


@dataclass(frozen=True, slots=True)
class EmulatorSettings:
    """Configures an emulated engine: costs, sizes, name, speed of time, how it counts tokens."""

    profile: Profile
    config: EngineConfig
    model: str
    speed: float = 1.0
    tokenizer: TextTokenizer = field(default_factory=Tokenizer)


@dataclass(frozen=True, slots=True)
class CacheView:
    """Stands for `vllm_config.cache_config`."""

    block_size: int
    num_gpu_blocks: int
    kv_cache_size_tokens: int
    enable_prefix_caching: bool


@dataclass(frozen=True, slots=True)
class ModelView:
    """Stands for `vllm_config.model_config`."""

    model: str
    served_model_name: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """Stands for `vllm_config.scheduler_config`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    enable_chunked_prefill: bool


@dataclass(frozen=True, slots=True)
class ConfigView:
    """Stands for `vllm_config`: what a middleware needs to know to register the pool."""

    cache_config: CacheView
    model_config: ModelView
    scheduler_config: SchedulerView

    @classmethod
    def of(cls, settings: EmulatorSettings) -> "ConfigView":
        """Show an emulator's settings."""
        config = settings.config
        return cls(
            CacheView(
                config.block_size_tokens,
                config.blocks,
                config.capacity_tokens,
                config.prefix_cache != "off",
            ),
            ModelView(settings.model, settings.model, config.context_tokens_max),
            SchedulerView(
                config.sequences_max,
                config.step_tokens_max,
                config.policy,
                config.prefill == "chunked",
            ),
        )


class EngineTelemetry(NamedTuple):
    """Holds the engine's state now, as `scope["app"].state.engine_telemetry()` returns it.

    `preemptions` counts from the engine's start; `used_tokens` counts the blocks in use.
    """

    running: int
    waiting: int
    used_tokens: int
    preemptions: int

    @classmethod
    def of(cls, engine: Engine) -> "EngineTelemetry":
        """Read an engine. O(1)."""
        gauges = engine.gauges()
        return cls(gauges.running, gauges.waiting, gauges.used_tokens, gauges.preemptions)
