"""Logs one JSON line for each step: vLLM loads it if this folder is on its path.

A step lasts from the record before it to its own, which counts only where the engine had work all
the time. `prompt_tokens` were computed in it, `running` sequences decoded, over `kv_tokens` of
cache. Needs `--enable-logging-iteration-details`; the file is named by STEPS_FILE. REQUESTS_FILE
gets a line for each request that has ended: its size, and its time in the engine up to its first
token.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
from typing import Any

_host: Any = importlib.import_module("vllm.v1.metrics.loggers")
# vLLM would write a line for each step, too, which takes a good part of a short one.
_host.logger.setLevel(logging.WARNING)


class StepLogger(_host.StatLoggerBase):  # type: ignore[misc] # known only inside vLLM
    """Notes each step of one engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._capacity = vllm_config.cache_config.num_gpu_blocks_override
        self._capacity *= vllm_config.cache_config.block_size
        self._file = open(os.environ["STEPS_FILE"], "a", buffering=1 << 16)  # noqa: SIM115
        self._requests = open(os.environ["REQUESTS_FILE"], "a", buffering=1 << 16)  # noqa: SIM115
        self._last_s = 0.0
        self._busy = False

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Write one step."""
        self._note_requests(iteration_stats)
        details = getattr(scheduler_stats, "iteration_details", None)
        if details is None or details.is_dummy:
            return
        now_s = time.monotonic()
        if self._busy:
            line = {
                "duration_s": round(now_s - self._last_s, 7),
                "prompt_tokens": details.num_ctx_tokens,
                "running": details.num_generation_requests,
                "kv_tokens": round(scheduler_stats.kv_cache_usage * self._capacity),
                "preemptions": iteration_stats.num_preempted_reqs if iteration_stats else 0,
            }
            self._file.write(json.dumps(line) + "\n")
        self._last_s = now_s
        self._busy = scheduler_stats.num_running_reqs > 0
        if not self._busy:
            self._file.flush()
            self._requests.flush()

    def _note_requests(self, iteration_stats: Any) -> None:
        for request in iteration_stats.finished_requests if iteration_stats else ():
            line = {
                "prompt_tokens": request.num_prompt_tokens,
                "output_tokens": request.num_generation_tokens,
                "first_token_s": round(request.queued_time + request.prefill_time, 7),
            }
            self._requests.write(json.dumps(line) + "\n")

    def log_engine_initialized(self) -> None:
        """Log nothing."""
