"""Puts the proxy between a client that sends any bytes and an upstream that keeps its requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm import proxy_cli

from tests.waiting import until

from .reading import BODILESS, Field, Read, Reading, passed_fields, passed_targets, read
from .upstream import NUMBER, Upstream

#: Ends a stream that hangs; a working one takes less time.
_ENDS_S = 60.0
_TENANT = b"x-tenant-id"
# A setting names these: a client's `Connection` cannot drop them.
_KEPT = frozenset(
    {_TENANT, b"x-forwarded-client-cert", b"x-schedsvc-max-queue-ms", b"x-schedsvc-deadline-ms",
     b"x-llm-d-slo-ttft-ms", b"x-session-id"}
)  # fmt: skip

# Header fields that the gate or the HTTP client writes.
_WRITTEN = frozenset({b"host", b"content-length", b"x-request-id"})


class Disagreement(AssertionError):
    """The upstream gets a request that h11 does not read."""


class Hang(Disagreement):
    """The proxy has all bytes of a request and does not act on it."""


def require(holds: object, what: str, *values: object) -> None:
    """Raise Disagreement unless it holds."""
    if not holds:
        raise Disagreement(f"{what}: {values}" if values else what)


class Stream(NamedTuple):
    """Cuts the bytes of a client. If it `is_sound`, the proxy has to serve all of them."""

    data: bytes
    cuts: tuple[int, ...] = ()
    is_sound: bool = False


class Answer(NamedTuple):
    """Holds an answer, and the `number` of the upstream's request; None: the proxy's own."""

    status: int
    number: int | None


class Played(NamedTuple):
    """Holds the outcome of a stream: client's bytes, upstream's requests, tenants admitted.

    `stayed_open`: the proxy waited for more of it.
    """

    got: bytes
    asked: dict[int, Read]
    tenants: list[bytes]
    stayed_open: bool


class _Client(asyncio.Protocol):
    """Sends, and keeps all received bytes."""

    def __init__(self, news: asyncio.Event) -> None:
        self._news = news
        self.got = bytearray()
        self.is_closed = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, _: Exception | None) -> None:
        self.is_closed = True
        self._news.set()


class World:
    """Holds scheduler, proxy and upstream, and plays one stream after the other."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.fake = FakeScheduler(f"unix:{folder}/s")
        self.upstream = Upstream()
        self.kinds: Counter[str] = Counter()
        self._protocol: Any = None
        self._received = 0
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Start all three; the proxy as its command does, but in this process."""
        await self.fake.start()
        url = await self.upstream.start()
        arguments = ["--upstream", url, "--uds", f"{self._folder}/p", "--log-level", "error"]
        environment = {
            "SCHEDSVC_TARGET": self.fake.target,
            "SCHEDSVC_TENANT_HEADERS": _TENANT.decode(),
            "SCHEDSVC_HEADER_SET_BY": "front",
            "SCHEDSVC_UNGATED": "pass",
        }
        options, settings = proxy_cli.prepare(arguments, environment)
        self._gate = proxy_cli.build(options, settings)
        self._server = proxy_cli.server_for(self._gate, options)
        watched = self._watched(self._server.config.http_protocol_class)
        self._server.config = replace(self._server.config, http_protocol_class=watched)
        self._serving = asyncio.create_task(self._server.serve())
        await until(lambda: self._server.started or self._serving.done(), "the proxy's start")
        require(self._server.started, "the proxy did not start")

    async def stop(self) -> None:
        """Stop all three."""
        self._server.should_exit = True
        await self._serving
        await self.upstream.stop()
        await self.fake.stop()

    def _watched(self, base: Any) -> Any:
        """Return a protocol that reports how far the proxy has come."""
        world = self

        class Watched(base):  # type: ignore[misc] # known at run time
            def connection_made(self, transport: Any) -> None:
                world._protocol, world._received = self, 0
                super().connection_made(transport)
                world._news.set()

            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                if world._protocol is self:
                    world._received += len(data)
                    world._news.set()

            def answered(self, exchange: Any) -> None:
                super().answered(exchange)
                world._news.set()

        return Watched

    def _has_read(self, client: _Client, end: int) -> bool:
        return self._received >= end or client.is_closed

    async def _until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    def _is_idle(self) -> bool:
        """Return whether no request is left that has all its bytes."""
        exchanges = self._protocol.exchanges
        if len(exchanges) > 1 or self._protocol.transport.is_closing():
            return False
        return not exchanges or not exchanges[0].has_all

    def _require_limit(self) -> None:
        """A connection that waits for a head has a timer that ends it."""
        kept, server = self._protocol, self._server
        has_limit = kept in server.in_head or kept in server.idle
        require(has_limit or kept.exchanges, "nothing ends a connection that is idle")

    async def play(self, stream: Stream) -> Played:
        """Send a stream, and wait until the proxy has done with it."""
        self.upstream.forget()
        self.fake.admits.clear()
        self._protocol, self._received = None, 0
        loop = asyncio.get_running_loop()
        _, client = await loop.create_unix_connection(
            lambda: _Client(self._news), f"{self._folder}/p"
        )
        await self._until(lambda: self._protocol is not None)
        for begin, end in pairwise((0, *stream.cuts, len(stream.data))):
            if end > begin and not client.is_closed:
                client.transport.write(stream.data[begin:end])
                await self._until(partial(self._has_read, client, end))
        await self._until(lambda: client.is_closed or self._is_idle())
        stayed_open = not client.is_closed
        if stayed_open:
            self._require_limit()
            client.transport.write_eof()
            await self._until(lambda: client.is_closed)
        while tasks := list(self._server.running.values()):
            await asyncio.wait(tasks)
        await self.upstream.settle()
        tenants = [admit.tenant.encode() for admit in self.fake.admits]
        return Played(bytes(client.got), dict(self.upstream.asked), tenants, stayed_open)

    async def check(self, stream: Stream) -> None:
        """Play a stream, and compare. Raises Disagreement."""
        reading = read(stream.data)
        try:
            played = await asyncio.wait_for(self.play(stream), _ENDS_S)
        except asyncio.TimeoutError:
            raise Hang("the proxy neither answers nor closes") from None
        require(not self.upstream.faults, "the upstream was asked otherwise", self.upstream.faults)
        answers = answers_in(played.got, reading)
        self._compare(reading, answers, played)
        self._compare_tenants(reading, played.tenants)
        served = sum(answer.number is not None for answer in answers)
        whole = sum(request.is_whole for request in reading.requests)
        if stream.is_sound:
            require(served == whole and not reading.error, "a sound stream is refused", answers)
        elif played.stayed_open:
            require(len(answers) >= whole, "a request has no answer", answers, whole)
        self.kinds["streams"] += 1
        self.kinds["refused by h11"] += bool(reading.error)
        if len(answers) > served:
            self.kinds["refused"] += 1
        elif played.stayed_open:
            self.kinds["served to an open end"] += 1
        else:
            self.kinds["served whole" if served >= whole else "broken off"] += 1

    def _compare(self, reading: Reading, answers: Sequence[Answer], played: Played) -> None:
        """Compare the upstream's requests with those that h11 read, one after the other."""
        asked = list(played.asked.items())
        for place, answer in enumerate(answers):
            if answer.number is None:
                require(answer.status >= 400, "the proxy answers by itself", answer)
                continue
            require(asked and asked[0][0] == answer.number, "answers in another order", answers)
            self._same(reading, place, asked.pop(0)[1])
        # A connection that ends loses the answer of the running request. A request runs without its
        # whole body if the proxy drops that.
        is_cut = not played.stayed_open or any(not each.is_whole for each in reading.requests)
        require(len(asked) <= is_cut, "an answer is missing", asked)
        if asked:
            self._same(reading, len(answers), asked[0][1])

    def _compare_tenants(self, reading: Reading, tenants: Sequence[bytes]) -> None:
        """Compare: each admitted request names the tenant of a head, in the order of the heads."""
        heads = iter([tenant_of(request.fields) for request in reading.requests])
        for tenant in tenants:
            require(tenant in heads, "another tenant", tenant, reading.requests)
            self.kinds["requests admitted"] += 1

    def _same(self, reading: Reading, place: int, asked: Read) -> None:
        if place >= len(reading.requests):
            raise Disagreement(f"h11 does not read it ({reading.error or 'no more'}): {asked}")
        found = reading.requests[place]
        is_bodiless = found.method in BODILESS
        require(is_bodiless or found.is_whole, "its body has no end", reading.error, asked)
        require(asked.method == found.method, "another method", asked, found)
        targets = passed_targets(found)
        require(asked.target in targets, "another target", asked.target, targets)
        fields = [pair for pair in asked.fields if pair[0] not in _WRITTEN]
        require(fields == passed_fields(found, _KEPT), "other headers", fields, found.fields)
        body = b"" if is_bodiless else found.body
        require(asked.body == body, "another body", asked.body, body)
        self.kinds["requests read alike"] += 1
        for name in found.deviations:
            self.kinds[f"requests with {name}"] += 1


def tenant_of(fields: Sequence[Field]) -> bytes | None:
    """Return the tenant that a head names; None: it names two, so that it has to be refused."""
    names = [value for name, value in fields if name == _TENANT]
    return b"".join(names) if len(names) < 2 else None


def answers_in(got: bytes, reading: Reading) -> list[Answer]:
    """Return the answers on a connection, of which the last may be cut. Raises Disagreement."""
    answers: list[Answer] = []
    while got:
        head, end, got = got.partition(b"\r\n\r\n")
        if not end:
            break
        status, *lines = head.split(b"\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in lines)
        code = int(status.split(b" ")[1])
        if code < 200:
            continue
        number = int(fields[NUMBER]) if NUMBER in fields else None
        place = len(answers)
        answers.append(Answer(code, number))
        if place < len(reading.requests) and reading.requests[place].method == b"HEAD":
            continue
        require(b"content-length" in fields, "an answer without a length", head)
        got = got[int(fields[b"content-length"]) :]
    return answers
