"""Wraps one request in an async context manager."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from schedsvc_client.leases import Lease, Totals, checked_totals
from schedsvc_client.outcomes import LeaseState, Outcome
from schedsvc_client.requests import Asked, Asker
from schedsvc_client.v1 import scheduler_pb2 as pb

_log = logging.getLogger("schedsvc_client.admission")


class Holder(Protocol):
    """Declares a client that asks for admissions and keeps their leases."""

    def submit(self, admission: Admission) -> asyncio.Future[None]:
        """Ask. Done: granted (`admission.lease` is set) or an exception; cancel to withdraw."""

    def report(self, lease: Lease, totals: Totals) -> None:
        """Report running totals."""

    def end(self, lease: Lease, outcome: Outcome, totals: Totals) -> None:
        """End a lease, and see to it that the scheduler learns of it."""

    async def settled(self, lease: Lease) -> None:
        """Wait until the scheduler knows of the end, where that is worth waiting for."""


class Admission:
    """Holds one request for the time of an `async with` block.

    Entering waits for the grant; it raises Refused, SchedulerUnavailable or another SchedulerError.
    Leaving ends the lease exactly once on every way out: COMPLETED with the last totals, or
    CANCELLED where an exception (also a cancellation) leaves the block.
    """

    __slots__ = (
        "_ended",
        "_holder",
        "_submitted",
        "asked",
        "asked_s",
        "held_us",
        "lease",
        "lost",
        "on_lost",
        "queue_duration_us",
    )

    def __init__(self, holder: Holder, asked: Asked) -> None:
        self.asked = asked
        self.lease: Lease | None = None
        self.queue_duration_us = 0
        # When it was asked for, and how long before the scheduler of the verdict was asked.
        self.asked_s = 0.0
        self.held_us = 0
        # The lease's state, if the scheduler gave it up before its end.
        self.lost: LeaseState | None = None
        self.on_lost: Callable[[LeaseState], None] | None = None
        self._holder = holder
        self._submitted = False
        self._ended = False

    @property
    def request(self) -> pb.AdmitRequest:
        """Return what it asks. It must not be changed. O(bytes) the first time."""
        return self.asked.message

    @property
    def granted(self) -> bool:
        """Return whether it holds a lease that has not been ended."""
        return self.lease is not None and not self._ended

    def submit(self) -> asyncio.Future[None]:
        """Ask without waiting, for callers that wait for other things too.

        The future is done at the verdict; cancelling it withdraws the request. The caller must
        call `complete()` on every way out; `async with` does both.
        """
        if self._submitted:
            raise RuntimeError("an Admission asks only once; make another one")
        self._submitted = True
        self.asked_s = time.monotonic()
        return self._holder.submit(self)

    def progress(
        self,
        *,
        input_tokens: int | None = None,
        cached_input_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Report running totals (never deltas). Cheap and never blocks: reports are batched.

        Raises TypeError for a total that is no integer.
        """
        totals = checked_totals(input_tokens, cached_input_tokens, output_tokens)
        if self.lease is not None and not self._ended:
            self._holder.report(self.lease, totals)

    def complete(
        self,
        *,
        outcome: Outcome = Outcome.COMPLETED,
        input_tokens: int | None = None,
        cached_input_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """End the lease with its final totals; never blocks. The first call counts.

        A total that is not given is the last reported one. Raises TypeError for one that is no
        integer, and ValueError for another outcome than COMPLETED or CANCELLED.
        """
        totals = checked_totals(input_tokens, cached_input_tokens, output_tokens)
        if outcome not in (Outcome.COMPLETED, Outcome.CANCELLED):
            raise ValueError(f"outcome is {outcome!r}; a lease ends as COMPLETED or CANCELLED")
        if self.lease is not None and not self._ended:
            self._ended = True
            self._holder.end(self.lease, outcome, totals)

    def give_back(self) -> None:
        """End the lease as CANCELLED with nothing used."""
        self.complete(
            outcome=Outcome.CANCELLED, input_tokens=0, cached_input_tokens=0, output_tokens=0
        )

    def notify_lost(self, state: LeaseState) -> None:
        """Take note that the scheduler gave the lease up (called by the holder)."""
        self.lost = state
        if self.on_lost is not None:
            try:
                self.on_lost(state)
            except Exception:
                # The caller's function must not end the task that renews all leases.
                _log.exception("on_lost failed")

    async def __aenter__(self) -> Admission:
        future = self.submit()
        try:
            await future
        except BaseException:
            # The grant may have come in the same moment as the cancellation.
            future.cancel()
            self.give_back()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.complete(outcome=Outcome.COMPLETED if kind is None else Outcome.CANCELLED)
        if kind is None and self.lease is not None:
            await self._holder.settled(self.lease)


class HoldingAsker(Asker[Admission], Holder):
    """Holds the common part of the Session and the unary client."""

    def _admission(self, asked: Asked) -> Admission:
        return Admission(self, asked)
