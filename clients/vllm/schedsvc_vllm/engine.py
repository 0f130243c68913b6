"""What the app around the gate shows of its engine: sizes, telemetry, a tokenizer.

Read from `scope["app"].state`, under the names that vLLM's server uses: `vllm_config`, and, where
offered, `engine_telemetry()` and `count_prompt_tokens(body)`. The environment goes before it.
vLLM's own telemetry comes through the plugin of stat_logger.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schedsvc_vllm.asgi import Scope
from schedsvc_vllm.intake import CountTokens, Sizes
from schedsvc_vllm.settings import PoolSettings, SettingsError
from schedsvc_vllm.telemetry import READINGS


@dataclass(frozen=True)
class Pool:
    """The pool as it is registered."""

    name: str
    epoch: int
    capacity_tokens: int
    block_size_tokens: int
    max_running: int
    max_model_tokens: int

    @property
    def sizes(self) -> Sizes:
        """What bounds one request."""
        return Sizes(self.max_model_tokens, self.capacity_tokens)


class EngineView:
    """One engine as the gate sees it."""

    def __init__(self, scope: Scope, app: object) -> None:
        self._state = getattr(scope.get("app") or app, "state", None)

    @property
    def count_prompt_tokens(self) -> CountTokens | None:
        """The server's own count of a body's prompts, where it offers one."""
        count: CountTokens | None = getattr(self._state, "count_prompt_tokens", None)
        return count

    @property
    def api_keys(self) -> list[str]:
        """The keys of `vllm serve --api-key`."""
        keys = getattr(getattr(self._state, "args", None), "api_key", None) or []
        return [keys] if isinstance(keys, str) else [key for key in keys if key]

    @property
    def offers_telemetry(self) -> bool:
        """Whether `telemetry` has something to give, now or later."""
        return callable(getattr(self._state, "engine_telemetry", None)) or READINGS.expected

    def telemetry(self) -> dict[str, int] | None:
        """Return running, waiting, used_tokens and preemptions of this moment; None: not known."""
        ask = getattr(self._state, "engine_telemetry", None) or READINGS.totals
        told: Any = ask()
        if told is None:
            return None
        names = ("running", "waiting", "used_tokens", "preemptions")
        return {name: int(getattr(told, name)) for name in names}

    def pool(self, settings: PoolSettings, started_ns: int) -> Pool:
        """Work out the pool. Raises SettingsError where its sizes are not known."""
        config = getattr(self._state, "vllm_config", None)
        cache = getattr(config, "cache_config", None)
        capacity = settings.capacity_tokens or _number(cache, "kv_cache_size_tokens")
        block_size = settings.block_size_tokens or _number(cache, "block_size")
        for size, variable, name in (
            (capacity, "SCHEDSVC_POOL_CAPACITY_TOKENS", "KV cache in tokens"),
            (block_size, "SCHEDSVC_POOL_BLOCK_SIZE_TOKENS", "tokens of a KV block"),
        ):
            if not size:
                raise SettingsError(
                    f"{variable} is not set, and the server does not tell it: give the {name}"
                )
        model = getattr(config, "model_config", None)
        scheduler = getattr(config, "scheduler_config", None)
        return Pool(
            name=settings.name,
            epoch=settings.epoch or started_ns,
            capacity_tokens=capacity,
            block_size_tokens=block_size,
            max_running=settings.max_running or _number(scheduler, "max_num_seqs"),
            max_model_tokens=settings.max_model_tokens or _number(model, "max_model_len"),
        )


def _number(config: object, name: str) -> int:
    value = getattr(config, name, None)
    return value if type(value) is int and value > 0 else 0
