"""What the engines behind this process do at the moment, as vLLM tells its stat loggers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger("schedsvc_vllm")


@dataclass(slots=True)
class Reading:
    """One engine; `preemptions` since its start."""

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    preemptions: int = 0
    known: bool = False


class Readings:
    """The last reading of each engine. Written in each engine step, read once a second."""

    def __init__(self) -> None:
        self._engines: dict[int, Reading] = {}
        self._broken = False

    def attach(self, engine: int) -> None:
        """Take note of an engine that will be heard of; a new one in the place of an old."""
        self._engines[engine] = Reading()

    @property
    def expected(self) -> bool:
        """Whether any engine will be heard of."""
        return bool(self._engines)

    def record(self, engine: int, capacity_tokens: int, scheduler: Any, iteration: Any) -> None:
        """Take in one step's SchedulerStats and IterationStats; either may be None. O(1).

        vLLM does not promise these types. It runs this where it hands out answers, so nothing is
        raised: what cannot be read is said once, and nothing is reported any more.
        """
        if self._broken:
            return
        try:
            reading = self._engines[engine]
            if iteration is not None:
                reading.preemptions += iteration.num_preempted_reqs
            if scheduler is not None:
                reading.running = scheduler.num_running_reqs
                reading.waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
                reading.used_tokens = round(scheduler.kv_cache_usage * capacity_tokens)
                reading.known = True
        except Exception:
            _log.exception("vLLM's statistics cannot be read; they are not reported")
            self._broken = True

    def totals(self) -> Reading | None:
        """Sum all engines up; None: none of them has been heard of, or not to be understood.

        Where several API processes share an engine, vLLM tells each step to one of them.
        """
        known = [reading for reading in self._engines.values() if reading.known]
        if not known or self._broken:
            return None
        return Reading(
            sum(reading.running for reading in known),
            sum(reading.waiting for reading in known),
            sum(reading.used_tokens for reading in known),
            sum(reading.preemptions for reading in known),
            known=True,
        )


READINGS = Readings()
"""Of this process: vLLM makes the stat loggers, and the gate is made apart from them."""
