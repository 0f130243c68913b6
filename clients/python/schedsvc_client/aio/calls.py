"""Unary calls to the scheduler that leads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from schedsvc_client.attempts import Attempts, Method
from schedsvc_client.channel import ClientOptions, Token, bearer_metadata
from schedsvc_client.errors import CallError, SchedulerUnavailable, from_rpc_error
from schedsvc_client.fence import Fence, fence_of, rank_of
from schedsvc_client.targets import Targets
from schedsvc_client.v1 import scheduler_pb2 as pb

#: Answers that have an effect on requests, so only the latest leader may give them.
_FENCED = (pb.AdmitResponse, pb.ProgressResponse, pb.CompleteResponse)


class CallContext:
    """Targets, fence and token of a client's calls."""

    def __init__(
        self, target: str, token: Token | None, options: ClientOptions, fence: Fence | None = None
    ) -> None:
        self.options = options
        self.targets = Targets(target)
        self.fence = fence or fence_of(self.targets.all)
        self._token = token

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call. Raises SchedulerUnavailable without a token."""
        return (*bearer_metadata(self._token), *self.fence.metadata())

    def check(self, target: str, response: Any) -> None:
        """Take note of an answer. Raises SchedulerUnavailable if a later leader is known."""
        wrong = self._wrong(target, response)
        if wrong is not None:
            raise wrong
        self.targets.answered()

    def is_obeyed(self, target: str, response: Any) -> bool:
        """Return whether an answer has an effect, because no later leader is known."""
        return self._wrong(target, response) is None

    def _wrong(self, target: str, response: Any) -> SchedulerUnavailable | None:
        if not isinstance(response, _FENCED):
            return None
        return self.fence.check(rank_of(response.leadership), target)


OpenChannel = Callable[[str, grpc.ChannelCredentials | None], Any]
"""Opens a channel that is called inside an event loop."""


class AioCalls:
    """Opens channels to the targets of a client, each at its first use, inside one event loop."""

    def __init__(
        self,
        context: CallContext,
        credentials: grpc.ChannelCredentials | None,
        opens: OpenChannel,
    ) -> None:
        self.context = context
        self._credentials = credentials
        self._opens = opens
        self._channels: dict[str, Any] = {}
        self._stubs: dict[tuple[str, Any], Any] = {}

    async def close(self) -> None:
        """Hang up."""
        for channel in self._channels.values():
            await channel.close(grace=None)

    def method(self, target: str, method: Method) -> Any:
        """Return gRPC's callable; its channel is made inside the event loop that will use it."""
        stub = self._stubs.get((target, method.stub))
        if stub is None:
            channel = self._channels.get(target) or self._opens(target, self._credentials)
            self._channels[target] = channel
            stub = self._stubs[target, method.stub] = method.stub(channel)
        return getattr(stub, method.name)

    async def call(self, method: Method, request: Any, *, once: bool = False) -> Any:
        """Call a method; with several targets, at one after the other. Raises CallError.

        `once`: it must not be done twice.
        """
        context = self.context
        now_s = time.monotonic()
        deadline_s = context.options.call_deadline_s
        attempts = Attempts(context.targets, context.options, now_s, deadline_s, once=once)
        while True:
            target = context.targets.current
            try:
                return await self._attempt(target, method, request, attempts.timeout_s(now_s))
            except CallError as error:
                pause_s = attempts.failed(target, error, time.monotonic())
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()

    async def _attempt(self, target: str, method: Method, request: Any, timeout_s: float) -> Any:
        metadata = self.context.metadata()
        try:
            call = self.method(target, method)
            response = await call(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target) from None
        self.context.check(target, response)
        return response
