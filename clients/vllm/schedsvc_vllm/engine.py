"""Reads the engine as the app around the gate shows it: sizes, telemetry, a tokenizer.

The gate reads them from `scope["app"].state`, under the names that vLLM's server uses:
`vllm_config`, and, if offered, `engine_telemetry()`, `count_prompt_tokens(body)`,
`fetch_metrics()`, `engine_started_ns` and `engine_in_doubt`. The environment overrides them.

vLLM's own telemetry comes through the plugin of stat_logger.py, else from `/metrics`. Each of
several API processes gets only some of an engine's steps. Their common `/metrics` counts all of
them, and the first process reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from schedsvc_vllm.asgi import App, Scope
from schedsvc_vllm.image_sizes import pixel_limits
from schedsvc_vllm.request_sizing import CountTokens, Sizes
from schedsvc_vllm.router import Routes
from schedsvc_vllm.scrape import Fetch, fetch_from_app
from schedsvc_vllm.settings import PoolSettings, SettingsError
from schedsvc_vllm.telemetry import READINGS, Reading
from schedsvc_vllm.token_counter import Counter

_log = logging.getLogger("schedsvc_vllm")


@dataclass(frozen=True)
class Pool:
    """Describes the pool as it is registered."""

    name: str
    epoch: int
    capacity_tokens: int
    block_size_tokens: int
    max_running: int
    max_model_tokens: int

    @cached_property
    def sizes(self) -> Sizes:
        """Return the limits of one request."""
        return Sizes(self.max_model_tokens, self.capacity_tokens, self.max_running)


class EngineView:
    """Shows one engine as the gate sees it."""

    def __init__(self, scope: Scope, app: App) -> None:
        self._app = app
        self._scope = scope
        self._state = getattr(scope.get("app") or app, "state", None)

    @property
    def count_prompt_tokens(self) -> CountTokens | None:
        """Return the server's own count of a body's prompts, if it offers one."""
        count: CountTokens | None = getattr(self._state, "count_prompt_tokens", None)
        return count

    @property
    def api_keys(self) -> list[str]:
        """Return the keys of `vllm serve --api-key`."""
        keys = getattr(getattr(self._state, "args", None), "api_key", None) or []
        return [keys] if isinstance(keys, str) else [key for key in keys if key]

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """Return origins whose pages may read the server's answers (vLLM's --allowed-origins)."""
        origins = getattr(getattr(self._state, "args", None), "allowed_origins", None)
        return tuple(map(str, origins)) if isinstance(origins, list | tuple) else ()

    @property
    def obeys_priority(self) -> bool:
        """Return whether the engine runs requests by their priority; under fcfs it ignores them."""
        return getattr(self._config("scheduler_config"), "policy", "") == "priority"

    def adapter(self, model: object) -> str:
        """Return the LoRA adapter that a model's name stands for; "" for the base model. O(1)."""
        served = getattr(self._state, "openai_serving_models", None)
        adapters = getattr(served, "lora_requests", None)
        known = isinstance(model, str) and isinstance(adapters, dict) and model in adapters
        return str(model) if known else ""

    @property
    def image_patch_pixels(self) -> int:
        """Return the side of the square of pixels that is a token; 0: the model does not state it.

        Only models that keep an image's resolution merge patches like this, as Qwen's do. Others
        scale each image to one size.
        """
        model = self._config("model_config")
        vision = getattr(getattr(model, "hf_config", None), "vision_config", None)
        return _number(vision, "patch_size") * _number(vision, "spatial_merge_size")

    @property
    def image_pixels(self) -> tuple[int, int]:
        """Return the least and the most pixels of a scaled image; 0: not stated."""
        renderer = getattr(getattr(self._state, "engine_client", None), "renderer", None)
        info = getattr(getattr(renderer, "mm_processor", None), "info", None)
        processor = None
        if info is not None:
            try:
                processor = info.get_hf_processor().image_processor
            except Exception:  # a model's own code: it may have none, or raise anything
                _log.debug("the model has no image processor that states its sizes", exc_info=True)
        media = getattr(self._config("model_config"), "multimodal_config", None)
        told = pixel_limits(processor), pixel_limits(getattr(media, "mm_processor_kwargs", None))
        return max(told[0][0], told[1][0]), max(told[0][1], told[1][1])

    @property
    def offers_telemetry(self) -> bool:
        """Return whether `telemetry` has something to give, now or later."""
        if callable(getattr(self._state, "engine_telemetry", None)):
            return True
        alone = _number(self._config("parallel_config"), "_api_process_count") <= 1
        return alone and READINGS.expected

    @property
    def is_vllm(self) -> bool:
        """Return whether vLLM's own engine client is here."""
        return getattr(self._state, "engine_client", None) is not None

    @property
    def is_before_vllm(self) -> bool:
        """Return whether requests are served by vLLM, here or behind the proxy."""
        return self.is_vllm or bool(getattr(self._state, "upstream_is_vllm", False))

    def counter(self) -> Counter | None:
        """Begin to count tokens inside the engine's client; None: that is not possible here."""
        return Counter.attach(self._state)

    @property
    def upstream_up(self) -> Callable[[], bool] | None:
        """Return whether the server behind the proxy answers; None: the gate is in no proxy."""
        is_up: Callable[[], bool] | None = getattr(self._state, "upstream_up", None)
        return is_up

    @property
    def routes(self) -> Routes | None:
        """Return the table of the proxy's upstreams; None: one engine is behind the gate."""
        routes: Routes | None = getattr(self._state, "routes", None)
        return routes

    @property
    def in_doubt(self) -> bool:
        """Return whether another engine may stand here than the one whose sizes are known."""
        return bool(getattr(self._state, "engine_in_doubt", False))

    @property
    def metrics(self) -> Fetch | None:
        """Fetches the engine's `/metrics`.

        None if the app is not vLLM's, or if another process of the same engine reads it.
        """
        own: Fetch | None = getattr(self._state, "fetch_metrics", None)
        if own is not None:
            return own
        is_first = _number(self._config("parallel_config"), "_api_process_rank") == 0
        if getattr(self._state, "vllm_config", None) is None or not is_first:
            return None
        return lambda: fetch_from_app(self._app, self._scope)

    def telemetry(self) -> Reading | None:
        """Return running, waiting, used_tokens and preemptions of this moment; None: not known."""
        ask = getattr(self._state, "engine_telemetry", None) or READINGS.totals
        told: Any = ask()
        if told is None:
            return None
        names = ("running", "waiting", "used_tokens", "preemptions")
        return Reading(**{name: int(getattr(told, name)) for name in names}, known=True)

    def pool(self, settings: PoolSettings, started_ns: int) -> Pool:
        """Work out the pool. Raises SettingsError if its sizes are not known.

        Several data-parallel engines behind one server are one pool: their sum. One request runs
        in one of them, so that none may be longer than an engine's share.
        """
        cache, scheduler = self._config("cache_config"), self._config("scheduler_config")
        engines = self._engines()
        of_one = _number(cache, "kv_cache_size_tokens")
        capacity = settings.capacity_tokens or of_one * engines
        block_size = settings.block_size_tokens or _number(cache, "block_size")
        for size, variable, name in (
            (capacity, "SCHEDSVC_POOL_CAPACITY_TOKENS", "KV cache in tokens"),
            (block_size, "SCHEDSVC_POOL_BLOCK_SIZE_TOKENS", "tokens of a KV block"),
        ):
            if not size:
                raise SettingsError(
                    f"{variable} is not set, and the server does not report it: give the {name}"
                )
        context = _number(self._config("model_config"), "max_model_len")
        if engines > 1 and of_one:
            context = min(context or of_one, of_one)
        return Pool(
            name=settings.name,
            epoch=settings.epoch or _number(self._state, "engine_started_ns") or started_ns,
            capacity_tokens=capacity,
            block_size_tokens=block_size,
            max_running=settings.max_running or _number(scheduler, "max_num_seqs") * engines,
            max_model_tokens=settings.max_model_tokens or context,
        )

    def _engines(self) -> int:
        """Return how many engines this server spreads its requests over."""
        parallel = self._config("parallel_config")
        local = getattr(parallel, "local_engines_only", False) is True
        name = "data_parallel_size_local" if local else "data_parallel_size"
        return max(1, _number(parallel, name))

    def _config(self, part: str) -> object:
        return getattr(getattr(self._state, "vllm_config", None), part, None)


def _number(config: object, name: str) -> int:
    value = getattr(config, name, None)
    return value if type(value) is int and value > 0 else 0
