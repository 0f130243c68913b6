"""Serves plain threads by the asyncio client, in a thread that also renews leases."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

import grpc

from schedsvc_client import aio
from schedsvc_client.channel import ClientOptions, Token, options_of
from schedsvc_client.leases import Lease, checked_totals
from schedsvc_client.loop_thread import LoopThread
from schedsvc_client.outcomes import LeaseState, Outcome
from schedsvc_client.requests import Asked, Asker
from schedsvc_client.thread_channel import open_thread_channel
from schedsvc_client.v1 import explain_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

_log = logging.getLogger("schedsvc_client.sync")


class _Inner(aio.AsyncScheduler):
    _open = staticmethod(open_thread_channel)


class Admission:
    """Holds one request for the time of a `with` block.

    Entering blocks until the grant; it raises Refused, SchedulerUnavailable or another
    SchedulerError. Leaving ends the lease exactly once on every way out: COMPLETED with the last
    totals, or CANCELLED where an exception leaves the block. A process that is forked inside the
    block has no part in the lease.
    """

    __slots__ = (
        "_asked",
        "_holder",
        "_inner",
        "_thread",
        "lease",
        "lost",
        "on_lost",
        "queue_duration_us",
    )

    def __init__(self, thread: LoopThread[_Inner], asked: Asked) -> None:
        self._asked = asked
        self.lease: Lease | None = None
        self.queue_duration_us = 0
        # The lease's state, if the scheduler gave it up before its end.
        self.lost: LeaseState | None = None
        self.on_lost: Callable[[LeaseState], None] | None = None
        self._thread = thread
        self._inner: aio.Admission | None = None
        self._holder: _Inner | None = None

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
        checked_totals(input_tokens, cached_input_tokens, output_tokens)
        if self._is_held and self._inner is not None:
            self._thread.soon(
                partial(
                    self._inner.progress,
                    input_tokens=input_tokens,
                    cached_input_tokens=cached_input_tokens,
                    output_tokens=output_tokens,
                )
            )

    def complete(
        self,
        *,
        outcome: Outcome = Outcome.COMPLETED,
        input_tokens: int | None = None,
        cached_input_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """End the lease with its final totals. The first call counts.

        Tries once here; if that fails, the client's thread repeats it. A total that is not given
        is the last one that was reported. Raises TypeError for one that is no integer, and
        ValueError for another outcome than COMPLETED or CANCELLED.
        """
        inner, lease = self._inner, self.lease
        if inner is None or lease is None or not self._is_held:
            return

        async def end(scheduler: _Inner) -> None:
            inner.complete(
                outcome=outcome,
                input_tokens=input_tokens,
                cached_input_tokens=cached_input_tokens,
                output_tokens=output_tokens,
            )
            await scheduler.tried(lease)

        self._thread.run(end)

    @property
    def _is_held(self) -> bool:
        """Return whether it holds a lease of this process."""
        held = self._inner is not None and self._inner.granted
        return held and self._holder is self._thread.here()

    def _notify_lost(self, state: LeaseState) -> None:
        self.lost = state
        if self.on_lost is not None:
            # It may ask the scheduler, and the loop's thread must not wait for that.
            name = "schedsvc-lease-lost"
            threading.Thread(
                target=_call, args=(self.on_lost, state), name=name, daemon=True
            ).start()

    @property
    def request(self) -> pb.AdmitRequest:
        """Return what it asks. It must not be changed. O(bytes) the first time."""
        return self._asked.message

    def __enter__(self) -> Admission:
        if self._inner is not None:
            raise RuntimeError("an Admission asks only once; make another one")
        self._holder = self._thread.here()
        inner = self._inner = aio.Admission(self._holder, self._asked)
        inner.on_lost = self._notify_lost
        try:
            self._thread.run(lambda _: inner.__aenter__())
        except BaseException:
            # The grant may have come in the same moment as an interrupt.
            self._thread.soon(inner.give_back)
            raise
        finally:
            self.lease, self.queue_duration_us = inner.lease, inner.queue_duration_us
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.complete(outcome=Outcome.COMPLETED if kind is None else Outcome.CANCELLED)


def _call(on_lost: Callable[[LeaseState], None], state: LeaseState) -> None:
    try:
        on_lost(state)
    except Exception:
        _log.exception("on_lost failed")


class Scheduler(Asker[Admission]):
    """Asks for threads; share one between all of them. Use it as `with`, or `close()` it."""

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: Token | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        super().__init__()
        self.target = target
        self._options = options_of(options)
        self._thread = LoopThread(
            lambda: _Inner(target, credentials=credentials, token=token, options=options)
        )

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is open, try once more what was not delivered, and hang up."""
        most_s = self._options.backoff_max_s
        self._thread.close(lambda inner: inner.close(flush_deadline_s=most_s))

    def _admission(self, asked: Asked) -> Admission:
        return Admission(self._thread, asked)

    def stats(
        self, tenants: Sequence[str] = (), flow_limit: int = 0, max_age_ms: int = 0
    ) -> pb.StatsResponse:
        """Get pools, flows and counters, as of at most `max_age_ms` ago. Raises CallError."""
        return self._thread.run(lambda inner: inner.stats(tenants, flow_limit, max_age_ms))

    def explain(self, request_id: str, tenant: str = "") -> explain_pb2.ExplainResponse:
        """Ask where a request stands, why it waits, or why it was refused. Raises CallError."""
        return self._thread.run(lambda inner: inner.explain(request_id, tenant))

    def request_ids(self) -> list[str]:
        """Ask for the ids of the last requests, the latest first. Raises CallError."""
        return self._thread.run(lambda inner: inner.request_ids())
