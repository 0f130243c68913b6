"""Collects the present load of the engines behind this process, by vLLM's stat loggers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger("schedsvc_vllm")


@dataclass(slots=True)
class Reading:
    """Holds the load of the engines at one moment; `preemptions` since their start."""

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    preemptions: int = 0
    known: bool = False


class Step:
    """Holds the last report of one engine.

    The engine writes it in each step, so this only keeps it.
    """

    __slots__ = ("capacity_tokens", "preemptions", "scheduler")

    def __init__(self) -> None:
        self.capacity_tokens = 0
        self.preemptions = 0
        self.scheduler: Any = None

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Keep one step's SchedulerStats and IterationStats; either may be None."""
        if iteration is not None:
            self.preemptions += getattr(iteration, "num_preempted_reqs", 0)
        if scheduler is not None:
            self.scheduler = scheduler


class Readings:
    """Keeps the last step of each engine. Written in each engine step, read once a second."""

    def __init__(self) -> None:
        self._engines: dict[int, Step] = {}
        self._broken = False

    def attach(self, engine: int) -> Step:
        """Take note of an engine that will be heard of; a new one in the place of an old."""
        self._engines[engine] = step = Step()
        return step

    @property
    def expected(self) -> bool:
        """Return whether any engine will be heard of."""
        return bool(self._engines)

    def totals(self) -> Reading | None:
        """Sum all engines up; None: no engine has reported, or a report cannot be read.

        vLLM does not promise these types: an unreadable report is logged once, and no later one is
        sent.
        """
        if self._broken:
            return None
        total = Reading()
        try:
            for step in self._engines.values():
                told = step.scheduler
                if told is not None:
                    total.running += told.num_running_reqs
                    total.waiting += told.num_waiting_reqs + told.num_skipped_waiting_reqs
                    total.used_tokens += round(told.kv_cache_usage * step.capacity_tokens)
                    total.preemptions += step.preemptions
                    total.known = True
        except Exception:
            _log.exception("vLLM's statistics cannot be read; they are not reported")
            self._broken = True
            return None
        return total if total.known else None


READINGS = Readings()
"""Of this process: vLLM makes the stat loggers, and the gate is made apart from them."""
