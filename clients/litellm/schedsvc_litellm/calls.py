"""Follows one HTTP request of the proxy and its attempts: each holds a lease of its own.

LiteLLM retries by itself, so a request may be admitted several times. It says nowhere that all is
over, so the middleware closes the call, and that ends what is still open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import partial

from schedsvc_client import Outcome
from schedsvc_client.aio import Admission

from schedsvc_litellm.refusals import RefusalError
from schedsvc_litellm.sizing import Size
from schedsvc_litellm.usage import Usage


class Attempt:
    """Represents one try of a request at an engine. `admission` None: it runs without a lease.

    `pools` are those in which it may run: that of the grant, or without a lease any that was
    offered. Only the first report of its end counts.
    """

    def __init__(
        self,
        admission: Admission | None,
        pools: frozenset[str],
        size: Size,
        input_tokens: int,
        on_end: Callable[[Attempt, Usage | None], None],
    ) -> None:
        self.admission, self.pools, self.size = admission, pools, size
        self.input_tokens, self.output_tokens = input_tokens, 0
        #: The engine was, or may have been, called.
        self.was_sent = False
        self.has_ended = False
        self._usage: Usage | None = None
        self._on_end = on_end

    def advance(self, usage: Usage | None, *, has_output: bool) -> None:
        """Take note of a chunk, and report progress: never blocks."""
        if usage is not None:
            self._usage = usage
        elif has_output:
            # A chunk has one token at least; the engine's count comes with the last one.
            self.output_tokens += 1
        if self.admission is not None and has_output and not self.has_ended:
            # Totals never fall, so the estimate of the prompt waits for the end.
            self.admission.progress(output_tokens=self.output_tokens)

    def complete(self, usage: Usage | None = None) -> None:
        """End it as done, with the engine's count if one was stated."""
        counted = usage or self._usage
        if not self._ends(counted) or self.admission is None:
            return
        if counted is None:
            self.admission.complete(
                input_tokens=self.input_tokens, output_tokens=self.output_tokens
            )
            return
        self.admission.complete(
            input_tokens=counted.input_tokens,
            cached_input_tokens=counted.cached_input_tokens,
            output_tokens=counted.output_tokens,
        )

    def cancel(self) -> None:
        """End it before it was done: charged for what was reported, else for its time."""
        if self._usage is not None:
            self.complete()
        elif not self.was_sent:
            self.give_back()
        elif self._ends(None) and self.admission is not None:
            cancelled = partial(self.admission.complete, outcome=Outcome.CANCELLED)
            if self.output_tokens:
                cancelled(input_tokens=self.input_tokens, output_tokens=self.output_tokens)
            else:
                cancelled()

    def give_back(self) -> None:
        """End it with nothing used: the engine never had it, refused it, or failed."""
        if self.output_tokens:
            self.cancel()
        elif self._ends(None) and self.admission is not None:
            self.admission.give_back()

    def _ends(self, usage: Usage | None) -> bool:
        if self.has_ended:
            return False
        self.has_ended = True
        self._on_end(self, usage)
        return True


class Call:
    """Represents one HTTP request. A client that left, or an end, withdraws what waits."""

    def __init__(self, path: str = "") -> None:
        self.path, self.tenant = path, ""
        self.has_left = self.is_closed = False
        #: Its client has not asked for the chunk that states the usage.
        self.hides_usage = False
        self.attempts: list[Attempt] = []
        self._waiting: set[asyncio.Future[None]] = set()
        self._refusals: dict[frozenset[str], RefusalError] = {}

    @property
    def running(self) -> Attempt | None:
        """Return the last attempt that has not ended."""
        return next((each for each in reversed(self.attempts) if not each.has_ended), None)

    def check(self, pools: Iterable[str]) -> None:
        """Raise the refusal that these pools have given this request already."""
        refusal = self._refusals.get(frozenset(pools))
        if refusal is not None:
            raise refusal.again()

    def remember(self, pools: Iterable[str], refusal: RefusalError) -> None:
        """Keep a refusal: LiteLLM retries each, and asking again would only lengthen the queue."""
        self._refusals[frozenset(pools)] = refusal

    async def wait(self, future: asyncio.Future[None]) -> None:
        """Wait for a verdict. Raises CancelledError too if the client leaves."""
        if self.has_left or self.is_closed:
            future.cancel()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def leave(self) -> None:
        """Take note that the client left. A running engine keeps its lease until its end."""
        self.has_left = True
        for future in self._waiting:
            future.cancel()

    def close(self) -> None:
        """End all that is open."""
        self.leave()
        self.is_closed = True
        for attempt in self.attempts:
            attempt.cancel()


#: The call in which LiteLLM's hooks run: they get no request, but they run in its context.
CURRENT: ContextVar[Call | None] = ContextVar("schedsvc_call", default=None)
#: The attempt that runs in this task. A stream is read in another task.
ATTEMPT: ContextVar[Attempt | None] = ContextVar("schedsvc_attempt", default=None)
