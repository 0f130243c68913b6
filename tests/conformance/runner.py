"""Runs one conformance script. The Python client makes the unary calls that it offers.

Streams go over a connection of gRPC, and so do calls that no client should make: raw bytes, another
scheme of authorization, leases of others, and leases that are abandoned.
"""

import asyncio
from typing import Any

import grpc
from google.protobuf.message import Message

from tests.waiting import until

from .callers import DEADLINE_MS, Callers
from .matching import Json, fill, look_up, mismatches
from .wire import (
    POLL_S,
    Stream,
    error_as_json,
    message_class,
    path_of,
    to_json,
    to_message,
)

VERBS = frozenset(
    {
        "call",
        "start",
        "waits",
        "finish",
        "cancel",
        "open",
        "send",
        "receive",
        "quiet",
        "close",
        "drop",
        "ended",
        "sleep_ms",
    }
)


async def run(steps: list[dict[str, Any]], target: str) -> None:
    """Run every step of a script; raises AssertionError at the first that does not hold."""
    async with grpc.aio.insecure_channel(target) as channel, Callers(target) as callers:
        runner = Runner(channel, callers)
        for number, step in enumerate(steps, 1):
            (verb,) = VERBS & step.keys()
            try:
                await getattr(runner, verb)(step)
            except (AssertionError, LookupError, ValueError) as error:
                note = step.get("note", "")
                raise AssertionError(
                    f"step {number} ({verb} {step[verb]}) {note}: {error}"
                ) from error
        runner.check_nothing_left()


class Runner:
    """Holds a script's state: saved values, calls under way, streams. Each verb has a method."""

    def __init__(self, channel: grpc.aio.Channel, callers: Callers) -> None:
        self._channel, self._callers = channel, callers
        self._saved: dict[str, Json] = {}
        self._calls: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._streams: dict[str, Stream] = {}

    async def call(self, step: dict[str, Any]) -> None:
        """Make a unary call, once or until its answer matches."""
        expected = fill(step.get("until"), self._saved)
        outcome = await self._unary(step)

        def found() -> list[str]:
            return list(mismatches(expected, outcome.get("answer")))

        async def matches() -> bool:
            nonlocal outcome
            if found():
                outcome = await self._unary(step)
            return not found()

        if expected is not None:
            await until(matches, lambda: "; ".join(found()))
        self._judge(step, outcome)

    async def start(self, step: dict[str, Any]) -> None:
        """Make a unary call without waiting for it."""
        self._calls[step["as"]] = asyncio.create_task(self._unary(step))
        # The call has to be under way before the next step.
        await asyncio.sleep(POLL_S)

    async def waits(self, step: dict[str, Any]) -> None:
        """Hold that a started call has no answer yet."""
        await asyncio.sleep(step["for_ms"] / 1_000)
        task = self._calls[step["waits"]]
        assert not task.done(), f"it was answered: {task.result()}"

    async def finish(self, step: dict[str, Any]) -> None:
        """Wait for a started call."""
        self._judge(step, await self._calls.pop(step["finish"]))

    async def cancel(self, step: dict[str, Any]) -> None:
        """Cancel a started call."""
        self._calls[step["cancel"]].cancel()

    async def open(self, step: dict[str, Any]) -> None:
        """Open a Session."""
        self._streams[step["open"]] = Stream(self._channel, list(step.get("metadata", {}).items()))

    async def send(self, step: dict[str, Any]) -> None:
        """Send one message on a stream."""
        events = fill(step["events"], self._saved)
        await self._streams[step["send"]].send(events, step.get("seq"))

    async def receive(self, step: dict[str, Any]) -> None:
        """Take a message of a stream, and judge it."""
        stream = self._streams[step["receive"]]
        answer: dict[str, Json] = {}
        for kind in Stream.kinds:
            answer[kind] = [await stream.take(kind) for _ in step.get(kind, [])]
        if "welcome" in step:
            answer["welcome"] = await stream.take("welcome")
        if step.get("acked"):
            await stream.acked()
        expected = {kind: step[kind] for kind in answer if kind in step}
        self._judge({**step, "expect": expected}, {"answer": answer})

    async def quiet(self, step: dict[str, Any]) -> None:
        """Hold that a stream brings nothing."""
        await asyncio.sleep(step["for_ms"] / 1_000)
        left = self._streams[step["quiet"]].left()
        assert not left, f"it brought {left}"

    async def close(self, step: dict[str, Any]) -> None:
        """End the sending side of a stream."""
        await self._streams[step["close"]].close()

    async def drop(self, step: dict[str, Any]) -> None:
        """Cancel a stream."""
        self._streams[step["drop"]].drop()

    async def ended(self, step: dict[str, Any]) -> None:
        """Wait for the end of a stream."""
        error = await self._streams[step["ended"]].ended()
        self._judge(step, {"error": error} if error else {"answer": {}})

    async def sleep_ms(self, step: dict[str, Any]) -> None:
        """Wait."""
        await asyncio.sleep(step["sleep_ms"] / 1_000)

    def check_nothing_left(self) -> None:
        """Hold that the script took all that came."""
        assert not self._calls, f"calls that were not finished: {sorted(self._calls)}"
        left = {name: stream.left() for name, stream in self._streams.items() if stream.left()}
        assert not left, f"not received: {left}"

    async def _unary(self, step: dict[str, Any]) -> dict[str, Any]:
        name = step.get("call") or step["start"]
        request = to_message(f"{name}Request", fill(step.get("request", {}), self._saved))
        caller = self._callers.of(step)
        try:
            if caller is not None and caller.offers(request):
                return await caller.call(request)
            return await self._direct(name, request, step)
        except asyncio.CancelledError:
            return {"error": {"code": "CANCELLED", "message": "", "field": [], "retry": False}}

    async def _direct(self, name: str, request: Message, step: dict[str, Any]) -> dict[str, Any]:
        raw = bytes.fromhex(fill(step["raw"], self._saved)) if "raw" in step else None
        method = self._channel.unary_unary(
            path_of(name),
            request_serializer=lambda message: message,
            response_deserializer=message_class(name + "Response").FromString,
        )
        try:
            answer = await method(
                request.SerializeToString() if raw is None else raw,
                timeout=step.get("deadline_ms", DEADLINE_MS) / 1_000,
                metadata=list(step.get("metadata", {}).items()),
            )
        except grpc.aio.AioRpcError as error:
            return {"error": error_as_json(error)}
        return {"answer": to_json(answer)}

    def _judge(self, step: dict[str, Any], outcome: dict[str, Any]) -> None:
        if "error" in step:
            expected = dict(step["error"])
            assert "error" in outcome, f"it did not fail: {outcome['answer']}"
            assert len(outcome["error"]["message"]) < 300, "an error repeats no long value"
            if "field" in expected:
                expected["field"] = {"$has": expected["field"]}
            found = list(mismatches(expected, outcome["error"]))
        else:
            assert "answer" in outcome, f"it failed: {outcome['error']}"
            expected = fill(step.get("expect", {}), self._saved)
            found = list(mismatches(expected, outcome["answer"]))
        assert not found, "; ".join(found)
        for name, path in step.get("save", {}).items():
            self._saved[name] = look_up(outcome["answer"], path)
