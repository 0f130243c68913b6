"""Replaces a gRPC channel for a call of FollowService between two processes of a world."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import grpc
from schedsvc_client.v1 import follow_pb2 as pb

from schedsvc_lab.faults.cluster.surroundings import Host, Surroundings

__all__ = ["FollowCall", "ServerContext"]

_EOF = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it


class _Pipe:
    """Carries messages one way, read in the event loop of the process that gets them."""

    def __init__(self, world: Surroundings, sender: Host, reader: Host) -> None:
        self._world, self._sender, self._reader = world, sender, reader
        self._messages: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._free_ns = 0

    def send(self, message: Any) -> None:
        """Send a message; it arrives after those before it."""
        queue = self._world.queue
        due_ns = queue.now_ns + queue.soon(1_000_000)
        self._free_ns = max(self._free_ns + 1, due_ns)
        queue.at(self._free_ns, self._arrive, message)

    def _arrive(self, message: Any) -> None:
        queue = self._world.queue
        until_ns = max(self._sender.peers_cut_until_ns, self._reader.peers_cut_until_ns)
        if until_ns > queue.now_ns:
            queue.at(until_ns + 1, self._arrive, message)
            return
        self._reader.act(lambda: self._take(message))

    def _take(self, message: Any) -> None:
        self._messages.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self) -> Any:
        """Return the next message."""
        while not self._messages:
            self._waiter = self._reader.loop.create_future()
            await self._waiter
        return self._messages.popleft()


class ServerContext:
    """Shows the leader's side of a call, as a handler sees it."""

    def __init__(self, call: FollowCall) -> None:
        self._call = call

    def peer(self) -> str:
        """Return the name of the follower, which stands for its address."""
        return self._call.follower

    async def read(self) -> Any:
        """Return the next message of the follower, as bytes; at the end EOF."""
        return await self._call.to_leader.read()

    async def write(self, data: bytes) -> None:
        """Send a message."""
        if self._call.is_over:
            raise asyncio.CancelledError
        self._call.to_follower.send(data)

    async def abort(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> NoReturn:
        """End the call with an error."""
        self._call.end(details)
        raise grpc.aio.AbortError(details)


class FollowCall:
    """Represents the follower's side, as `Following` reads and writes it."""

    def __init__(
        self,
        world: Surroundings,
        follower: Host,
        leader: Host,
        serve: Callable[[ServerContext], Any],
    ) -> None:
        self.to_leader = _Pipe(world, follower, leader)
        self.to_follower = _Pipe(world, leader, follower)
        self.is_over = False
        self.follower = follower.name
        self._leader = leader
        self._serving: asyncio.Task[Any] | None = None
        queue = world.queue
        queue.after(queue.soon(1_000_000), lambda _: leader.act(lambda: self._begin(serve)))

    def _begin(self, serve: Callable[[ServerContext], Any]) -> None:
        self._serving = self._leader.loop.create_task(self._serve(serve))

    async def _serve(self, serve: Callable[[ServerContext], Any]) -> None:
        with suppress(grpc.aio.AbortError, asyncio.CancelledError):
            await serve(ServerContext(self))
        self.end("the call is over")

    def end(self, details: str) -> None:
        """Report to the follower that the call is over."""
        if not self.is_over:
            self.is_over = True
            self.to_follower.send(ConnectionResetError(details))

    async def write(self, request: pb.FollowRequest) -> None:
        """Send a message to the leader."""
        self.to_leader.send(request.SerializeToString())

    def cancel(self) -> None:
        """Hang up: the leader reads the end."""
        self.to_leader.send(_EOF)

    def __aiter__(self) -> FollowCall:
        return self

    async def __anext__(self) -> pb.FollowResponse:
        found = await self.to_follower.read()
        if isinstance(found, OSError):
            raise found
        return pb.FollowResponse.FromString(found)
