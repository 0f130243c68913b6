"""Random legal exchanges through the proxy, and three books that have to agree.

The upstream's: what it sent. The client's: what it received. The scheduler's: what it charged.

    python -m tests.clients.exchanges --count 100000 --seed 1

It ends with status 1 at the first exchange in which they differ, and prints its seed and number.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import itertools
import json
import logging
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from random import Random
from typing import Any

from openai._streaming import SSEDecoder
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.settings import Settings

from .asgi import Exchange, owner

SAID = [{"role": "user", "content": "x"}]
#: Path, the body that asks, and whether its stream is of the form that usage is taken out of.
ENDPOINTS: list[tuple[str, dict[str, Any], bool]] = [
    ("/v1/completions", {"prompt": "x"}, True),
    ("/v1/chat/completions", {"messages": SAID}, True),
    ("/v1/responses", {"input": "x"}, False),
    ("/v1/messages", {"messages": SAID, "max_tokens": 50}, False),
    ("/cohere/v2/chat", {"messages": SAID}, False),
]
OPTIONS: list[dict[str, bool] | None] = [
    None,
    {"include_usage": True},
    {"include_usage": True, "continuous_usage_stats": True},
]
TEXTS = ("a", "é", "\n\n", "data: {}", '"usage":{"completion_tokens":9}', "\u2028", "😀" * 3, "")
STYLES: list[tuple[int | None, tuple[str, str]]] = [
    (None, (",", ":")), (None, (", ", ": ")), (None, (" , ", " : ")), (1, (",", ": ")),
]  # fmt: skip


@dataclass
class Event:
    """Holds one event of a stream: its bytes, its data as the client may get it, and its usage."""

    raw: bytes
    data: str  # "": a comment
    clean: Any = None  # its JSON without usage, if that is to be removed; DROPPED: all of it
    tells: tuple[int, int, int] | None = None
    counts: bool = False  # as a token while no usage has come


DROPPED = object()


@dataclass
class Script:
    """Plans the upstream's answer to one request."""

    status: int = 200
    headers: list[str] = field(default_factory=list)
    body: bytes = b""
    plain: bytes = b""  # the same before it was compressed
    events: list[Event] | None = None
    usage: tuple[int, int, int] | None = None
    pieces: list[int] = field(default_factory=list)
    framing: str = "length"
    breaks_at: int | None = None
    sent: int = 0  # bytes of the body


def usage_object(path: str, usage: tuple[int, int, int]) -> dict[str, Any]:
    """Write a usage as an endpoint does."""
    prompt, cached, output = usage
    if path == "/v1/responses":
        details = {"cached_tokens": cached}
        return {"input_tokens": prompt, "input_tokens_details": details, "output_tokens": output}
    if path == "/v1/messages":
        read = {"cache_read_input_tokens": cached}
        return {"input_tokens": prompt - cached, "output_tokens": output} | read
    if path == "/cohere/v2/chat":
        tokens = {"input_tokens": prompt, "output_tokens": output}
        return {"tokens": tokens, "cached_tokens": cached}
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}


class Maker:
    """Draws one exchange after the other."""

    def __init__(self, rnd: Random) -> None:
        self.rnd = rnd

    def usage(self) -> tuple[int, int, int]:
        prompt = self.rnd.randrange(1, 900)
        return prompt, self.rnd.randrange(prompt + 1), self.rnd.randrange(1, 60)

    def written(self, data: dict[str, Any], name: str = "") -> tuple[bytes, str]:
        """Write an event in one of the ways that the standard allows; return its data, too."""
        rnd = self.rnd
        indent, style = rnd.choice(STYLES)
        text = json.dumps(data, indent=indent, separators=style, ensure_ascii=rnd.random() < 0.5)
        # These end a line for some parsers of the data.
        text = text.replace("\u2028", "\\u2028")
        # A space behind the colon is not part of the data, so a line that begins with one needs it.
        space = " " if indent else rnd.choice(("", " "))
        lines = [f"data:{space}{line}" for line in text.split("\n")]
        if name or rnd.random() < 0.1:
            lines.insert(0, f"event:{space}{name or 'x'}")
        if rnd.random() < 0.1:
            lines.insert(rnd.randrange(len(lines) + 1), rnd.choice((": ping", "id: 7", "retry: 9")))
        return "".join(line + "\n" for line in (*lines, "")).encode(), text

    def stream(self, path: str, cuts: bool, keep_last: bool, keep_all: bool) -> Script:
        made = Script()
        made.events = events = []
        usage, telling = self.usage(), self.rnd.choice(("every", "end", "none"))
        count = self.rnd.randrange(1, 30)
        for number in range(count):
            output = max(1, usage[2] * (number + 1) // count)
            so_far = (usage[0], usage[1], output)
            text = self.rnd.choice(TEXTS)
            events.append(self.piece(path, text, so_far if telling == "every" else None, cuts))
            if self.rnd.random() < 0.05:
                events.append(Event(b": a comment\n\n", ""))
        if telling != "none":
            events.append(self.end(path, usage, cuts))
            made.usage = usage
        if cuts:
            events.append(Event(b"data: [DONE]\n\n", "[DONE]"))
        for event in events:
            self.as_the_client_gets_it(event, keep_last, keep_all)
        end = self.rnd.choice((b"\n", b"\n", b"\r\n", b"\r"))
        for event in events:
            event.raw = event.raw.replace(b"\n", end)
        made.plain = b"".join(event.raw for event in events)
        made.headers = ["content-type: text/event-stream"]
        return made

    def piece(self, path: str, text: str, usage: Any, cuts: bool) -> Event:
        if cuts:
            data: dict[str, Any] = {"id": "x", "choices": [{"text": text}]}
            if usage is not None:
                data["usage"] = usage_object(path, usage)
            elif self.rnd.random() < 0.2:
                data["usage"] = None
            if self.rnd.random() < 0.2:
                data["after"] = {"usage": {"completion_tokens": 999}}
            raw, written = self.written(data)
            return Event(raw, written, data, usage, counts=True)
        name = {
            "/v1/responses": "response.output_text.delta",
            "/v1/messages": "content_block_delta",
            "/cohere/v2/chat": "content-delta",
        }[path]
        data = {"delta": {"text": text}, "metadata": {"usage": {"output_tokens": 10**9}}}
        raw, written = self.written(data, name)
        return Event(raw, written, counts=True)

    def end(self, path: str, usage: tuple[int, int, int], cuts: bool) -> Event:
        told = usage_object(path, usage)
        data, name = {
            "/v1/responses": ({"response": {"usage": told}}, "response.completed"),
            "/v1/messages": ({"delta": {}, "usage": told}, "message_delta"),
            "/cohere/v2/chat": ({"delta": {"usage": told}}, "message-end"),
        }.get(path, ({"id": "x", "choices": [], "usage": told}, ""))
        raw, written = self.written(data, name)
        return Event(raw, written, data if cuts else None, usage, counts=not cuts)

    def as_the_client_gets_it(self, event: Event, keep_last: bool, keep_all: bool) -> None:
        """Compute the documented answer: usage that was not asked for is removed."""
        data, event.clean = event.clean, None
        if not isinstance(data, dict) or keep_all or "usage" not in data:
            return
        if data["usage"] is not None and not data["choices"]:
            event.clean = None if keep_last else DROPPED
            return
        rest = {name: value for name, value in data.items() if name != "usage"}
        event.clean = rest | ({"usage": None} if keep_last else {})

    def whole(self, path: str) -> Script:
        made = Script(headers=["content-type: application/json"])
        if self.rnd.random() < 0.1:
            made.status = self.rnd.choice((400, 404, 422, 500, 503))
            made.plain = json.dumps({"error": {"message": "no", "usage": {"x": 1}}}).encode()
            return made
        made.usage = self.usage() if self.rnd.random() < 0.9 else None
        text = self.rnd.choice(TEXTS) * self.rnd.randrange(1, 4_000)
        answer: dict[str, Any] = {"text": text, "metadata": {"usage": {"output_tokens": 10**9}}}
        if made.usage is not None:
            answer["usage"] = usage_object(path, made.usage)
        indent, style = self.rnd.choice(STYLES)
        made.plain = json.dumps(answer, indent=indent, separators=style).encode()
        return made

    def frame(self, made: Script) -> Script:
        """Compress it, cut it into pieces, choose how its length is stated, and break it off."""
        rnd = self.rnd
        made.body = made.plain
        encoding = rnd.choice(("", "", "", "", "gzip", "deflate"))
        if encoding:
            made.body = (gzip if encoding == "gzip" else zlib).compress(made.plain)
            made.headers.append(f"content-encoding: {encoding}")
        cuts = rnd.randrange(12)
        made.pieces = sorted(rnd.randrange(len(made.body) + 1) for _ in range(cuts))
        made.framing = rnd.choice(("length", "chunked", "chunked", "close"))
        # A body that ends with its connection has no other end: it cannot be seen to break off.
        if made.status == 200 and made.framing != "close" and rnd.random() < 0.15:
            made.breaks_at = rnd.randrange(len(made.body) + 1)
        return made


class Server:
    """Answers each request with the script that is set."""

    def __init__(self) -> None:
        self.script = Script()
        self.asked: dict[str, Any] = {}

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self.one(reader, writer):
                pass
        with contextlib.suppress(ConnectionError):
            writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 404 x\r\ncontent-length: 0\r\n\r\n")
            return True
        lines = head.lower().split(b"\r\n")
        [length] = [line for line in lines if line.startswith(b"content-length:")]
        self.asked = json.loads(await reader.readexactly(int(length.partition(b":")[2])))
        script = self.script
        framing = {
            "length": [f"content-length: {len(script.body)}"],
            "chunked": ["transfer-encoding: chunked"],
            "close": ["connection: close"],
        }[script.framing]
        start = [f"HTTP/1.1 {script.status} x", *script.headers, *framing, "", ""]
        writer.write("\r\n".join(start).encode())
        whole = len(script.body) if script.breaks_at is None else script.breaks_at
        cuts = [0, *(cut for cut in script.pieces if cut < whole), whole]
        for begin, end in itertools.pairwise(cuts):
            piece = script.body[begin:end]
            if piece and script.framing == "chunked":
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            elif piece:
                writer.write(piece)
            script.sent = end
            await writer.drain()
            if end % 3 == 0:
                await asyncio.sleep(0)
        if script.breaks_at is not None:
            writer.transport.abort()
            return False
        if script.framing == "chunked":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return script.framing != "close"


class Client(Exchange):
    """Represents a client that leaves after some messages, if it leaves."""

    leaves_after: int | None = None

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.leaves_after is not None and len(self.sent) > self.leaves_after:
            self.left.set()
            await asyncio.sleep(0)


class Disagreement(AssertionError):
    """Reports that the books of one exchange differ."""


def require(holds: object, what: str, *values: object) -> None:
    """Raise Disagreement unless it holds."""
    if not holds:
        raise Disagreement(f"{what}: {values}")


class World:
    """Holds scheduler, gate, proxy and upstream, and runs one exchange after the other."""

    def __init__(self, seed: int, folder: str) -> None:
        self.maker = Maker(Random(seed))
        self.server = Server()
        self.fake = FakeScheduler(f"unix:{folder}/s")
        self.kinds: dict[str, int] = {}

    async def start(self) -> None:
        await self.fake.start()
        self._listener = await asyncio.start_server(self.server.handle, "127.0.0.1", 0)
        port = self._listener.sockets[0].getsockname()[1]
        self.upstream = Upstream(f"http://127.0.0.1:{port}")
        self.gate = Gate(self.upstream, Settings(target=self.fake.target))
        self.owner = owner()

    async def stop(self) -> None:
        await self.gate._close()
        self.upstream.close()
        self._listener.close()
        await self.fake.stop()

    async def exchange(self) -> None:
        """Play one exchange, and compare. Raises Disagreement."""
        rnd, maker = self.maker.rnd, self.maker
        path, body, cuts = rnd.choice(ENDPOINTS)
        stream = rnd.random() < 0.7
        options = rnd.choice(OPTIONS) if cuts and stream else None
        keep_last = options is not None
        keep_all = keep_last and "continuous_usage_stats" in (options or {})
        made = maker.stream(path, cuts, keep_last, keep_all) if stream else maker.whole(path)
        self.server.script = script = maker.frame(made)
        asked = body | ({"stream": True} if stream else {})
        asked |= {"stream_options": options} if options else {}
        client = Client(self.gate, json.dumps(asked).encode(), path, owner=self.owner)
        if rnd.random() < 0.15:
            client.leaves_after = rnd.randrange(1, 8)
        raised = False
        try:
            await asyncio.wait_for(client.run(), 60)
        except Exception as error:
            raised = True
            require(script.breaks_at is not None, "the gate raised", repr(error))
        assert self.gate._runtime is not None
        await self.gate._runtime.session.flush(20)
        self.compare(script, client, stream, raised)

    def compare(self, script: Script, client: Client, stream: bool, raised: bool) -> None:
        require(not self.fake.live, "a lease is left", self.fake.live)
        [book] = self.fake.books.values()
        self.fake.books.clear()
        end = book.end
        whole = client.sent and client.sent[-1].get("more_body") is False
        kind = "error" if script.status >= 400 else "whole" if whole else "cut"
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        require(client.status == script.status, "another status", client.status, script.status)
        told = client.answer_headers.get("content-length")
        if whole and told is not None:
            require(int(told) == len(client.answer), "another length", told, len(client.answer))
        if script.events is not None:
            self.compare_stream(script, client.answer, bool(whole) and not raised)
        elif whole:
            require(client.answer == script.plain, "another answer", client.answer[:200])
        charged = (end.input_tokens, end.cached_input_tokens, end.output_tokens)
        if script.status >= 400:
            require(end.outcome == pb.OUTCOME_CANCELLED, "an error was charged", charged)
            require(charged == (0, 0, 0), "an error was charged", charged)
        elif whole and script.breaks_at is None and client.leaves_after is None:
            require(end.outcome == pb.OUTCOME_COMPLETED, "not completed", charged)
            self.compare_whole(script, charged, stream)
        elif script.events is not None:
            self.compare_cut(script, client.answer, end.output_tokens)

    def compare_whole(self, script: Script, charged: tuple[int, int, int], stream: bool) -> None:
        if script.usage is not None:
            require(charged == script.usage, "charged otherwise", charged, script.usage)
        elif script.events is not None:
            events = sum(event.counts for event in script.events)
            require(charged[2] == events, "not charged by its events", charged, events)
        else:
            require(charged[2] >= len(script.plain) // 4, "not charged by its bytes", charged)

    def compare_stream(self, script: Script, answer: bytes, whole: bool) -> None:
        """Compare: the client got the upstream's bytes, less the usage that it did not ask for."""
        assert script.events is not None
        if not any(event.clean is not None for event in script.events):
            got = answer if whole else answer[: len(script.plain)]
            tail = answer[len(got) :]
            is_same = got == script.plain[: len(got)] and (not tail or b"broke off" in tail)
            if not whole and b"broke off" in answer:
                return
            require(is_same and (not whole or len(got) == len(script.plain)), "other bytes", got)
            return
        expected = [event for event in script.events if event.data and event.clean is not DROPPED]
        data = [told.data for told in SSEDecoder().iter_bytes(iter([answer])) if told.data]
        if not whole:
            data = [text for text in data if "broke off" not in text]
        require(len(data) == len(expected) if whole else len(data) <= len(expected) + 1,
                "another number of events", len(data), len(expected))  # fmt: skip
        for text, event in zip(data, expected, strict=False):
            if event.clean is None:
                require(whole is False or text == event.data, "another event", text, event.data)
            elif whole:
                require(json.loads(text) == event.clean, "another event", text, event.clean)

    def compare_cut(self, script: Script, answer: bytes, output_tokens: int) -> None:
        """The charge is between the client's and the upstream's tokens: by usage, or events."""
        assert script.events is not None
        got, at_most = 0, 0
        told: list[int] = [0]
        for event in script.events:
            at_most += event.counts
            if event.tells is not None:
                told.append(event.tells[2])
            if event.counts and event.clean is None and event.raw in answer:
                got += 1
        most = max(at_most, max(told))
        require(output_tokens <= most, "charged more than was sent", output_tokens, most)
        if got and max(told) == 0:
            require(output_tokens >= min(got, 1), "nothing charged after an event", got)
        elif got:
            require(output_tokens >= 1, "nothing charged after an event", got)


async def play(count: int, seed: int, *, tell: bool = False) -> dict[str, int]:
    """Play exchanges; return the number of each kind. Raises Disagreement."""
    with tempfile.TemporaryDirectory(prefix="exchanges-") as folder:
        world = World(seed, folder)
        await world.start()
        started_s = time.monotonic()
        try:
            for number in range(count):
                try:
                    await world.exchange()
                except Disagreement as error:
                    raise Disagreement(f"seed {seed}, exchange {number}: {error}") from error
                if tell and number % 5_000 == 4_999:
                    spent_s = time.monotonic() - started_s
                    print(f"{number + 1:,} exchanges in {spent_s:.0f} s: {world.kinds}", flush=True)
        finally:
            await world.stop()
        return world.kinds


def main() -> int:
    """Read the command line, and play."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients.exchanges", description="Play random exchanges.",
        epilog="example: python -m tests.clients.exchanges --count 100000 --seed 1",
    )  # fmt: skip
    parser.add_argument("--count", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--seed", type=int, default=1, help="of all of them (1)")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    try:
        kinds = asyncio.run(play(given.count, given.seed, tell=True))
    except Disagreement as error:
        print(f"the books differ: {error}", file=sys.stderr)
        return 1
    print(f"{given.count:,} exchanges, the three books agree: {kinds}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
