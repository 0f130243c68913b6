"""Unary calls of asyncio programs to the scheduler that leads."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio

from schedsvc_client.attempts import Attempts, Method
from schedsvc_client.calls import CallContext
from schedsvc_client.channel import open_aio_channel
from schedsvc_client.errors import CallError, from_rpc_error


class AioCalls:
    """As `Calls`, inside one event loop."""

    def __init__(self, context: CallContext, credentials: grpc.ChannelCredentials | None) -> None:
        self.context = context
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[tuple[str, Any], Any] = {}

    async def close(self) -> None:
        """Hang up."""
        for channel in self._channels.values():
            await channel.close(grace=None)

    def method(self, target: str, method: Method) -> Any:
        """Return gRPC's callable; its channel is made inside the event loop that will use it."""
        stub = self._stubs.get((target, method.stub))
        if stub is None:
            channel = self._channels.get(target) or open_aio_channel(target, self._credentials)
            self._channels[target] = channel
            stub = self._stubs[target, method.stub] = method.stub(channel)
        return getattr(stub, method.name)

    async def call(self, method: Method, request: Any) -> Any:
        """Call a method; with several targets, at one after the other. Raises CallError."""
        context = self.context
        now_s = time.monotonic()
        deadline_s = context.options.call_deadline_s
        attempts = Attempts(context.targets, context.options, now_s, deadline_s)
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
