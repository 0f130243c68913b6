"""Asks running requests for their totals, from time to time, by two timers for all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

# Every report costs the engine's API process a write. The scheduler waits for first tokens: it
# admits the next prompts when they arrive, so a late report here delays the next request. Growth
# can wait: the ledger foresees it, ends carry their totals themselves, and in simulations once a
# second serves as well as five times.
FIRST_TOKEN_PERIOD_S = 0.02
PROGRESS_PERIOD_S = 1.0
# The most sequences a second that the gate checks for a first token: some microseconds each.
_ASKED_PER_S_MAX = 5_000
_log = logging.getLogger("schedsvc_vllm")


class Reporter(Protocol):
    """Declares something that has running totals to report."""

    @property
    def sequences(self) -> int:
        """Return how many sequences the engine makes of it."""

    def begin(self) -> bool:
        """Report the first totals, if there are any; whether that is done."""

    def report(self) -> None:
        """Report the totals so far."""


class Reports:
    """Keeps the requests that run. `reported` is called after each report of all of them."""

    def __init__(self, reported: Callable[[], None]) -> None:
        self._reported = reported
        self.running: set[Reporter] = set()
        #: It is set while any request runs.
        self.busy = asyncio.Event()
        self._beginning: set[Reporter] = set()  # those without a report of totals yet
        self._asking: asyncio.TimerHandle | None = None
        self._reporting: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Cancel the timers."""
        for timer in (self._asking, self._reporting):
            if timer is not None:
                timer.cancel()

    def watch(self, reporter: Reporter) -> None:
        """Ask for running totals from time to time, until `unwatch`."""
        self.running.add(reporter)
        self._beginning.add(reporter)
        self.busy.set()
        if self._asking is None:
            self._ask_soon()
        if self._reporting is None:
            self._report_soon()

    def unwatch(self, reporter: Reporter) -> None:
        """Ask no more. Idempotent."""
        self.running.discard(reporter)
        self._beginning.discard(reporter)
        if not self.running:
            self.busy.clear()

    def _ask_soon(self) -> None:
        delay_s = asking_delay_s(sum(reporter.sequences for reporter in self._beginning))
        self._asking = asyncio.get_running_loop().call_later(delay_s, self._ask)

    def _ask(self) -> None:
        """Have requests with a first token report it. O(sequences without one)."""
        self._asking = None
        for reporter in tuple(self._beginning):
            if self._ask_one(reporter, reporter.begin):
                self._beginning.discard(reporter)
        if self._beginning:
            self._ask_soon()

    def _report_soon(self) -> None:
        loop = asyncio.get_running_loop()
        self._reporting = loop.call_later(PROGRESS_PERIOD_S, self._report_progress)

    def _report_progress(self) -> None:
        """Have running requests report their totals. O(sequences)."""
        self._reporting = None
        for reporter in tuple(self.running):
            self._ask_one(reporter, reporter.report)
        self._reported()
        if self.running:
            self._report_soon()

    def _ask_one(self, reporter: Reporter, question: Callable[[], object]) -> bool:
        """Ask one request; one that cannot answer is asked no more, and the others go on."""
        try:
            return bool(question())
        except Exception:
            _log.exception("a request cannot report its totals before it ends")
            self.unwatch(reporter)
            return False


def asking_delay_s(sequences: int) -> float:
    """Return after how long to ask whether any of these sequences has begun."""
    return min(max(FIRST_TOKEN_PERIOD_S, sequences / _ASKED_PER_S_MAX), PROGRESS_PERIOD_S)
