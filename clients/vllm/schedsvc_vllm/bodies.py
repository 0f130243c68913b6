"""Bound the memory and the time that bodies of requests take, over all connections together.

The gate and the proxy read a body through `Bodies`. Without a sum over connections, a few callers
that begin large bodies and never end them fill the memory of the API server. One caller gets half
of the sum, or one body of the largest size, so that it cannot keep the bodies of all others out.
"""

from __future__ import annotations

import asyncio

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import (
    BodyTooLargeError,
    ClientLeftError,
    Incoming,
    Receive,
    Scope,
    going_on,
    header,
)
from schedsvc_vllm.refusals import Reason

#: A body has to be complete by then.
BODY_S_MAX = 60.0
#: Bytes of each body that are not counted, so that large bodies refuse no ordinary request.
UNCOUNTED_BYTES = 64 << 10


class BodiesFullError(BadRequestError):
    """Reports that the bodies of this server leave no room for another large one."""

    def __init__(self, total_max: int) -> None:
        super().__init__(
            f"the bodies of the requests that this server holds have more than {total_max} bytes"
            " together (its operator can raise SCHEDSVC_BODIES_BYTES_MAX)",
            status=503,
            code=Reason.BODIES_FULL,
        )


class CallerFullError(BodiesFullError):
    """Reports that the bodies of this caller leave no room for another large one of it."""

    def __init__(self, caller_max: int) -> None:
        BadRequestError.__init__(
            self,
            f"the bodies of the requests of one caller that this server holds have more than"
            f" {caller_max} bytes together, until one of them has ended",
            status=503,
            code=Reason.BODIES_FULL,
        )


class BodyTooSlowError(BadRequestError):
    """The body did not arrive in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the body was not complete within {seconds:g} s", status=408, code="body_too_slow"
        )


class Bodies:
    """Limits each body that is being read, waits or runs, and their sum."""

    def __init__(self, each_max: int, total_max: int, seconds: float = BODY_S_MAX) -> None:
        self.total = 0
        self.each_max, self.total_max, self.seconds = each_max, total_max, seconds
        #: One body of the largest size always fits.
        self.caller_max = max(total_max // 2, min(each_max, total_max))
        self._of_callers: dict[str | bytes, int] = {}  # only callers that have some

    def open(self, network: str) -> Body:
        """Begin with one of a client network; `release()` it when its request ends.

        It is that network's, unless `caller` is set to another key before it is read.
        """
        return Body(self, network)

    def count(self, caller: str | bytes, more: int) -> None:
        """Count bytes of a caller. Raises BodiesFullError."""
        held = self._of_callers.get(caller, 0) + more
        if self.total + more > self.total_max:
            raise BodiesFullError(self.total_max)
        if held > self.caller_max:
            raise CallerFullError(self.caller_max)
        self.total += more
        self._of_callers[caller] = held

    def discount(self, caller: str | bytes, less: int) -> None:
        """Count bytes of a caller no more."""
        self.total -= less
        left = self._of_callers.pop(caller, 0) - less
        if left:
            self._of_callers[caller] = left


class Body:
    """Holds one request's body, whose bytes count from their arrival until `release()`."""

    def __init__(self, bodies: Bodies, caller: str | bytes) -> None:
        self._bodies = bodies
        #: A key of the caller whose part it takes.
        self.caller = caller
        self._counted = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Read the whole body. O(bytes).

        Raises ClientLeftError, BodyTooLargeError, BodiesFullError or BodyTooSlowError.
        """
        if isinstance(receive, Incoming) and (whole := receive.take_body()) is not None:
            if len(whole) > self._bodies.each_max:
                raise BodyTooLargeError
            if len(whole) > UNCOUNTED_BYTES:
                self._count(len(whole) - UNCOUNTED_BYTES)
            return whole
        told = header(scope, b"content-length")
        if told.isdigit() and int(told) > self._bodies.each_max:
            raise BodyTooLargeError
        steps = self._read(receive).__await__()
        try:
            awaited = next(steps)
        except StopIteration as whole:
            return bytes(whole.value)  # it came with the headers, as most do: no timer
        task, is_late = asyncio.current_task(), False

        def expire() -> None:
            nonlocal is_late
            is_late = True
            if task is not None:
                task.cancel()

        # `asyncio.wait_for()` of Python 3.10 would make a task for each request.
        timer = asyncio.get_running_loop().call_later(self._bodies.seconds, expire)
        try:
            return await going_on(steps, awaited)
        except asyncio.CancelledError:
            if not is_late:
                raise
            getattr(task, "uncancel", int)()
            raise BodyTooSlowError(self._bodies.seconds) from None
        finally:
            timer.cancel()

    async def _read(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._bodies.each_max:
                raise BodyTooLargeError
            self._count(size - UNCOUNTED_BYTES)
            if not message.get("more_body", False):
                return b"".join(parts) if len(parts) > 1 else parts[0]

    def _count(self, size: int) -> None:
        bodies, more = self._bodies, max(0, size) - self._counted
        if more:
            bodies.count(self.caller, more)
            self._counted += more

    def release(self) -> None:
        """Count it no more. Idempotent."""
        if self._counted:
            self._bodies.discount(self.caller, self._counted)
            self._counted = 0
