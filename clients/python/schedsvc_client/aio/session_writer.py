"""Writes the messages of a Session to its stream."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from schedsvc_client.session_protocol import SessionProtocol


async def send_all(call: Any, protocol: SessionProtocol, wake: asyncio.Event) -> None:
    """Send what the protocol has, whenever something is new or due.

    Waking takes one round of the event loop, in which everything that happened in the last one
    gathers into one message; more gathers while a message is being written.
    """
    loop = asyncio.get_running_loop()
    while True:
        wake.clear()
        data = protocol.data_to_send(time.monotonic_ns())
        if data is not None:
            try:
                await call.write(data)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # the reader learns why
            continue
        timer = None
        due_ns = protocol.next_deadline_ns()
        if due_ns is not None:
            timer = loop.call_later((due_ns - time.monotonic_ns()) / 1e9, wake.set)
        try:
            await wake.wait()
        finally:
            if timer is not None:
                timer.cancel()
