"""Hears vLLM's reports of its steps (entry point group `vllm.stat_logger_plugins`)."""

from __future__ import annotations

import importlib
from typing import Any

from schedsvc_vllm.telemetry import READINGS

# vLLM is this module's host, not a dependency: only vLLM loads this module.
_host: Any = importlib.import_module("vllm.v1.metrics.loggers")


class StatLogger(_host.StatLoggerBase):  # type: ignore[misc] # known only inside vLLM
    """Notes each step of one engine for the gate of this process."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._cache = vllm_config.cache_config
        self._step = READINGS.attach(engine_index)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Record one step. vLLM runs this while it hands out answers, so nothing is computed."""
        self._step.record(scheduler_stats, iteration_stats)
        if not self._step.capacity_tokens:
            self._step.capacity_tokens = getattr(self._cache, "kv_cache_size_tokens", None) or 0

    def log_engine_initialized(self) -> None:
        """Do nothing: the scheduler shows what would be logged here."""
