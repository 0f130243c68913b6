"""Handles schedsvc.v1.FollowService: gives the state of a leader to members that follow it.

Each follower reads the rows of the state file at its own pace. One that does not take a message
within the write stall is cut off, and starts again; it holds up neither the leader nor others.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

import grpc
import structlog
from schedsvc_client.v1 import follow_pb2 as pb
from schedsvc_client.v1.leader_pb2 import Leadership

from schedsvc._core import CallerError
from schedsvc.driver import Broken, Driver
from schedsvc.driver.clock import boot_ns
from schedsvc.service.auth import Authenticator, Forbidden, Unauthenticated
from schedsvc.service.servicer_base import ServicerBase, parse, untimely
from schedsvc.service.status import Failure

__all__ = ["FOLLOW_SERVICE_NAME", "FollowService", "Rows"]

FOLLOW_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["FollowService"].full_name

_log = structlog.get_logger("schedsvc.cluster")
_EOF = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it
_EVERY_S = 0.1
#: Rows in one message, each below 64 KiB in any case and mostly of 100 bytes.
_ROWS_MAX = 500


class Rows(Protocol):
    """Feeds rows to followers."""

    async def collect(self) -> None:
        """Take over what changed. Raises Broken."""

    def begin(self) -> None:
        """Keep rows from now on; all come with the next `collect()`. Idempotent."""

    def since(self, number: int) -> tuple[int, list[pb.StateRow]]:
        """Return the number of the last change, and the rows after another one."""

    def places(self, number: int) -> tuple[int, list[pb.QueuedPlace]]:
        """Return the number of the last change of a place in the queue, and places after another.

        A place without a key is free again.
        """

    def operators(self) -> pb.OperatorState:
        """Return what operators have set."""


class FollowService(ServicerBase):
    """Serves FollowService on one listener of a leader."""

    def __init__(
        self,
        driver: Driver,
        rows: Rows,
        fingerprint: str,
        on_promise: Callable[[str, int], None],
        *,
        authenticator: Authenticator,
        write_stall_s: float,
        on_failure: Callable[[str, grpc.StatusCode], None] | None = None,
    ) -> None:
        """Serve rows to followers with the same fingerprint.

        `on_promise` gets the name of a follower that starts no term for now, and when it was asked.
        """
        super().__init__(authenticator, on_failure)
        self._driver, self._rows, self._fingerprint = driver, rows, fingerprint
        self._on_promise, self._write_stall_s = on_promise, write_stall_s
        leading = driver.leading
        # `leading` knows a later leader's term before this one's streams end.
        self._leadership = (
            Leadership() if leading is None else Leadership(term=leading.term, leader=leading.me)
        )
        self._followers: dict[str, int] = {}
        #: How often a proof of a principal was withdrawn.
        self._withdrawn: Counter[int] = Counter()
        if leading is not None:
            leading.followers = ()
        #: Set when the leader ends its term, and (the second) once the store knows it.
        self.ending, self.ended = asyncio.Event(), asyncio.Event()
        self._flushed, self._all_flushed = 0, asyncio.Event()

    async def flush(self) -> None:
        """Wait until all followers have the last rows."""
        if any(self._followers.values()):
            await self._all_flushed.wait()

    def withdraw(self, principals: Iterable[int]) -> None:
        """End the streams of principals of which a proof is not valid any more. O(principals)."""
        self._withdrawn.update(principals)

    def handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Return the handler to add to a grpc.aio server; its method takes and gives bytes."""
        methods = {"Follow": grpc.stream_stream_rpc_method_handler(self.follow)}
        return self._guarded(FOLLOW_SERVICE_NAME, methods, self._driver)

    async def follow(self, _: Any, context: Any) -> None:
        """Serve one follower until it leaves, or is cut off."""
        try:
            principal = self._principal(context)
            began = self._withdrawn[principal]
            if not self._authenticator.credentials.is_member(principal):
                raise Forbidden("following needs a principal with `member: true`")
            if not self._driver.is_under_term:
                raise self._driver.not_leading()
            data = await context.read()
            hello = parse(pb.FollowRequest, data if isinstance(data, bytes) else b"")
            if hello.fingerprint != self._fingerprint:
                raise untimely(
                    "fingerprint",
                    f"member {hello.member} has other tenants, classes, groups, prices or"
                    " principals than the leader; give all members the same",
                )
            is_member = self._authenticator.credentials.is_member
            await self._serve(
                hello, context, lambda: is_member(principal) and self._withdrawn[principal] == began
            )
        except (CallerError, Broken, Unauthenticated, Forbidden) as error:
            await self._fail(context, "Follow", error)
        except TimeoutError:
            what = f"the follower did not read for {self._write_stall_s:g} s"
            failure = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
            await self._abort(context, "Follow", failure)

    async def _serve(
        self, hello: pb.FollowRequest, context: Any, may_follow: Callable[[], bool]
    ) -> None:
        name = hello.member if hello.may_lead else ""
        self._count(name, 1)
        _log.info("follower", peer=context.peer(), member=hello.member)
        reading = asyncio.get_running_loop().create_task(self._read(hello.member, context))
        try:
            async for response in self._responses():
                if reading.done():
                    return
                if not may_follow():
                    raise Unauthenticated("this caller's token or certificate was withdrawn")
                async with asyncio.timeout(self._write_stall_s):
                    await context.write(response.SerializeToString())
        finally:
            reading.cancel()
            self._count(name, -1)

    async def _responses(self) -> AsyncIterator[pb.FollowResponse]:
        self._rows.begin()
        number, last_place, told, is_last = 0, 0, pb.OperatorState(), False
        while True:
            is_last = self.ending.is_set()
            await self._rows.collect()
            upto, rows = self._rows.since(number)
            operators = self._rows.operators()
            for at in range(0, len(rows), _ROWS_MAX):
                yield pb.FollowResponse(rows=rows[at : at + _ROWS_MAX])
            last_place, places = self._rows.places(last_place)
            for at in range(0, len(places), _ROWS_MAX):
                yield pb.FollowResponse(places=places[at : at + _ROWS_MAX])
            response = pb.FollowResponse(
                leadership=self._leadership, is_whole=True, asked_ns=boot_ns()
            )
            if operators != told or not number:
                response.operators.CopyFrom(operators)
            number, told = upto, operators
            yield response
            if is_last:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self.ending.wait()
        self._flushed += 1
        if self._flushed >= sum(self._followers.values()):
            self._all_flushed.set()
        await self.ended.wait()
        yield pb.FollowResponse(leadership=self._leadership, hands_over=True)

    async def _read(self, member: str, context: Any) -> None:
        while (data := await context.read()) is not _EOF:
            answer = parse(pb.FollowRequest, data)
            if answer.promises:
                self._on_promise(member, answer.asked_ns)

    def _count(self, name: str, step: int) -> None:
        self._followers[name] = self._followers.get(name, 0) + step
        leading = self._driver.leading
        # A stream of an earlier term may end late, in the next one.
        if leading is not None and not self._driver.broken:
            leading.followers = tuple(sorted(n for n, k in self._followers.items() if n and k))
