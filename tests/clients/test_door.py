"""Tests the proxy's door: requests at every cut, slow clients, idle ones, and the stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from schedsvc_vllm.asgi import Incoming, Mailbox, Message, Receive, Scope, Send
from schedsvc_vllm.bodies import Bodies
from schedsvc_vllm.door.deadlines import Deadlines
from schedsvc_vllm.door.exchange import BODY_BYTES_MAX
from schedsvc_vllm.door.exchange import Exchange as DoorExchange

from tests.waiting import until

from .serving import PROTOCOLS, serving

HEAD = b"POST /a?b=1 HTTP/1.1\r\nHost: x\r\n"
#: Idle connections; those that a server has had before, so that its memory is warm.
IDLE, WARM = 5_000, 200
#: The largest read of asyncio and uvloop.
READ_BYTES_MAX = 256 << 10
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
REQUESTS = {
    "length": HEAD + b"Content-Length: 5\r\n\r\nabcde",
    "chunks": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nx:\r\n\r\n",
    "none": HEAD + b"\r\n",
    "websocket": b"GET /a?b=1 HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\n\r\n",
    "offer": HEAD + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 5\r\n\r\nabcde",
}


class Recorder:
    """Answers each request after reading all of it, and keeps its target and body."""

    def __init__(self) -> None:
        self.read: list[tuple[bytes, bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            body, more = body + message["body"], message["more_body"]
        self.read.append((scope["raw_path"], scope["query_string"], body))
        await answer(send)


async def answer(send: Send, body: bytes = b"ok") -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("kind", REQUESTS)
async def test_a_request_is_read_alike_at_every_cut(kind: str) -> None:
    data = REQUESTS[kind] + LAST
    recorder = Recorder()
    body = b"" if kind in ("none", "websocket") else b"abcde"
    async with serving(recorder) as (port, _):
        for cut in range(len(data)):
            recorder.read = []
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data[:cut])
            await asyncio.sleep(0)
            writer.write(data[cut:])
            assert (await reader.read()).count(b"HTTP/1.1 200 OK\r\n") == 2, cut
            writer.close()
            assert recorder.read == [(b"/a", b"b=1", body), (b"/last", b"", b"")], cut


#: Bytes that two servers could read as other requests, and how they are refused.
SMUGGLED: dict[str, tuple[bytes, bytes]] = {
    "both framings": (
        HEAD + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", b"400",
    ),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"400"),
    "two lengths in one": (HEAD + b"Content-Length: 1, 1\r\n\r\na", b"400"),
    "signed length": (HEAD + b"Content-Length: +1\r\n\r\na", b"400"),
    "huge length": (HEAD + b"Content-Length: 18446744073709551617\r\n\r\na", b"400"),
    "space before a colon": (HEAD + b"Content-Length : 1\r\n\r\na", b"400"),
    "folded coding": (HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", b"400"),
    "other coding": (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", b"501"),
    "chunked twice": (
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"400",
    ),
    "coding of 1.0": (
        HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400",
    ),
    "two hosts": (HEAD + b"Host: y\r\n\r\n", b"400"),
    "no host": (b"GET / HTTP/1.1\r\nx: y\r\n\r\n", b"400"),
    "bare line feeds": (HEAD.replace(b"\r\n", b"\n") + b"\n", b"400"),
    "bare carriage return": (HEAD + b"x: a\rb: c\r\n\r\n", b"400"),
    "zero byte": (HEAD + b"x: a\0b\r\n\r\n", b"400"),
    "fragment": (b"GET /a#b HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
    "tunnel": (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", b"501"),
    "version": (b"GET / HTTP/1.2\r\nhost: x\r\n\r\n", b"400"),
    "no ASCII": (b"GET /\xc3\xa9 HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SMUGGLED)
async def test_smuggled_requests_are_refused_at_every_cut(kind: str) -> None:
    head, status = SMUGGLED[kind]
    data = head + LAST
    recorder = Recorder()
    async with serving(recorder) as (port, _):
        for cut in range(len(head)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data[:cut])
            await asyncio.sleep(0)
            writer.write(data[cut:])
            got = b""
            with contextlib.suppress(ConnectionResetError):  # it may drop the answer
                got = await reader.read()
            assert got.count(b"\nHTTP/1.1 ") == 0, cut
            assert not got or got.split(b" ")[1] == status, (cut, got)
            writer.close()
    # A body may have begun: what is read behind it is another request, and must not be.
    assert b"/last" not in [path for path, _, _ in recorder.read]


async def test_a_body_that_the_app_does_not_take_is_not_read_on() -> None:
    """A client sends without end to an app that waits: the server holds a part of it."""
    held = asyncio.Event()

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await held.wait()
        await answer(send)

    async def send_on(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()

    async with serving(app) as (port, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"content-length: 999999999\r\n\r\n")
        sending = asyncio.ensure_future(send_on(writer))
        await until(lambda: [each for each in server.connections if not each._is_reading])
        [connection] = server.connections
        [exchange] = connection.exchanges
        assert BODY_BYTES_MAX < exchange._size <= BODY_BYTES_MAX + READ_BYTES_MAX
        held.set()
        assert b" 200 OK" in await reader.readuntil(b"ok")
        assert connection._is_reading
        sending.cancel()
        writer.close()


async def test_an_early_answer_to_expect_closes_its_connection() -> None:
    """Whether a body follows is not known: the next request could be read as one."""

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await answer(send)

    async with serving(app) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = HEAD + b"expect: 100-continue\r\ncontent-length: 44\r\n\r\n"
        writer.write(head)
        got = await reader.read()
        assert b"100 Continue" not in got
        assert b"connection: close" in got
        writer.close()


BAD: dict[str, Any] = {
    "longer": (b"1", [b"ab"]),
    "shorter": (b"3", [b"ab"]),
}


@pytest.mark.parametrize("kind", BAD)
async def test_an_answer_of_another_length_breaks_off(kind: str) -> None:
    length, pieces = BAD[kind]

    async def app(_: Scope, __: Receive, send: Send) -> None:
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece})

    async with serving(app) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\n")
        got = await reader.read()
        assert len(got.partition(b"\r\n\r\n")[2]) != int(length)
        writer.close()


@pytest.mark.parametrize("value", [b"a\r\nx-evil: 1", b"a\nb", b"a\rb"])
async def test_a_field_with_the_end_of_a_line_is_not_sent(value: bytes) -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        headers = [(b"x-own", value)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async with serving(app) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\n")
        got = await reader.read()
        assert got.startswith(b"HTTP/1.1 500 ")
        assert b"x-own" not in got
        writer.close()


async def test_a_reader_that_stalls_behind_the_last_answer_is_closed() -> None:
    """The client would decide how long the server keeps its bytes."""

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await answer(send, b"x" * (32 << 20))

    async with serving(app, keep_alive_s=1) as (port, server):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.transport.pause_reading()
        writer.write(HEAD + b"connection: close\r\n\r\n")
        await until(lambda: len(server.closing) == 1)
        await until(lambda: not server.connections)
        writer.close()


async def test_a_slow_reader_of_the_last_answer_gets_all_of_it() -> None:
    size = 16 << 20

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await answer(send, b"x" * size)

    async with serving(app, keep_alive_s=1) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(HEAD + b"connection: close\r\n\r\n")
        got = 0
        while data := await reader.read(size // 8):
            got += len(data)
            await asyncio.sleep(0.001)
        assert got > size
        writer.close()


async def test_a_stop_lets_a_running_request_end_and_closes_idle_connections() -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            began.set()
            await go_on.wait()
        await answer(send)

    async with serving(app) as (port, server):
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", port)
        idle_writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await idle.readuntil(b"ok")
        busy, busy_writer = await asyncio.open_connection("127.0.0.1", port)
        busy_writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        await began.wait()
        server.should_exit = True
        assert await idle.read() == b""
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        go_on.set()
        got = await busy.read()
        assert got.endswith(b"ok")
        assert b"connection: close" in got
        for writer in (idle_writer, busy_writer):
            writer.close()


async def test_a_stop_cancels_what_runs_longer_than_it_may() -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def app(_: Scope, __: Receive, send: Send) -> None:
        headers = [(b"content-length", b"9")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        began.set()
        try:
            await asyncio.sleep(3_600)
        finally:
            cancelled.set()

    async with serving(app, graceful_s=0.05) as (port, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await began.wait()
        server.should_exit = True
        assert (await reader.read()).endswith(b"\r\n\r\n")  # the head alone
        assert cancelled.is_set()
        await until(lambda: not server.connections)
        writer.close()


def memory_of_idle(kind: str, count: int) -> int:
    """Return the bytes by which a server's process grows for connections that have asked once."""
    command = [sys.executable, "-m", "tests.clients.serving", kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        opened = [_asked(port) for _ in range(WARM)]
        before = _resident(process.pid)
        opened += [_asked(port) for _ in range(count)]
        held = _resident(process.pid) - before
        for each in opened:
            each.close()
        process.stdin.close()
        assert process.wait(60) == 0
    return held


def _asked(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), 60)
    made.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    got = b""
    while not got.endswith(b"ok"):
        got += made.recv(4_096)
    return made


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_5000_idle_connections_take_no_more_memory_than_in_uvicorn() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = IDLE + WARM + 500
    assert hard == resource.RLIM_INFINITY or hard >= need
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, need), hard))
    try:
        held = {kind: memory_of_idle(kind, IDLE) for kind in PROTOCOLS}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 0 < held["door"] <= held["uvicorn"], held


# The parts.


async def test_deadlines_expire_in_order_and_one_timer_serves_all() -> None:
    ended: list[str] = []
    deadlines: Deadlines[str] = Deadlines(0.05, ended.append)
    for name in ("a", "b", "c"):
        deadlines.add(name)
    deadlines.remove("b")
    deadlines.add("a")  # it goes on waiting as it did
    await until(lambda: ended == ["a", "c"])
    assert len(deadlines) == 0
    deadlines.add("d")
    await until(lambda: ended == ["a", "c", "d"])
    deadlines.add("e")
    assert (deadlines.oldest(), deadlines.newest()) == ("e", None)


async def test_a_departure_is_reported_without_a_message_whenever_it_came() -> None:
    told: list[str] = []
    entered = asyncio.Event()

    async def app(_: Scope, receive: Receive, __: Send) -> None:
        assert isinstance(receive, Incoming)
        assert receive.take_body(4) is None  # it has more
        assert receive.take_body(5) == b"abcde"
        assert receive.take_body() is None  # it has been given
        receive.watch(lambda: told.append("first"))
        receive.watch(lambda: told.append("second"))
        entered.set()
        await until(lambda: bool(told))
        receive.watch(lambda: told.append("late"))

    async with serving(app) as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUESTS["length"])
        await entered.wait()
        writer.close()
        await until(lambda: told == ["second", "late"])


@pytest.mark.parametrize("expects", [b"", b"Expect: 100-continue\r\n"])
async def test_an_unread_body_does_not_hold_its_client_back(expects: bytes) -> None:
    size = 1 << 20

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(receive, Incoming)
        assert receive.take_body() is None  # it has not arrived
        receive.watch(lambda: None)
        await all_sent.wait()
        await answer(send)

    all_sent = asyncio.Event()
    async with serving(app) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n" + expects)
        writer.write(b"content-length: %d\r\n\r\n" % size)
        if expects:
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(bytes(size))
        await writer.drain()
        all_sent.set()
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


@pytest.mark.parametrize("is_incoming", [False, True])
@pytest.mark.parametrize("waits_first", [False, True])
async def test_a_mailbox_reports_a_departure(is_incoming: bool, waits_first: bool) -> None:
    gone, told = asyncio.Event(), list[str]()

    class Server(Incoming):
        async def __call__(self) -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        def take_body(self, most: int | None = None) -> bytes | None:
            return None

        def watch(self, left: Callable[[], object]) -> None:
            leaving.append(left)

    server, leaving = Server(), list[Callable[[], object]]()
    mailbox = Mailbox(server if is_incoming else server.__call__, b"x")
    mailbox.on_left = lambda: told.append("on_left")
    if waits_first:
        assert not mailbox.departure().done()
    mailbox.watch(lambda: told.append("watched"))
    gone.set()
    for left in leaving:
        left()
    await until(lambda: told == ["on_left", "watched"])
    assert mailbox.left
    mailbox.close()


async def test_a_closed_mailbox_reports_no_departure() -> None:
    async def never() -> Message:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    told: list[bool] = []
    mailbox = Mailbox(never, None)
    mailbox.watch(lambda: told.append(True))
    leaving = mailbox.departure()
    mailbox.close()
    await until(leaving.cancelled)
    await asyncio.sleep(0)
    assert not told
    assert not mailbox.left


async def test_a_request_that_has_ended_is_freed_without_the_collector() -> None:
    """Else its body, which may be large, would stay until the collector next runs."""

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        mailbox = Mailbox(receive, await Bodies(100, 100).open("x").read({"headers": []}, receive))
        # As of a gated request: who watches knows the mailbox.
        mailbox.watch(partial(served, mailbox))
        await answer(send)
        mailbox.close()

    def served(mailbox: Mailbox) -> None:
        raise AssertionError(mailbox)

    def alive() -> list[object]:
        return [each for each in gc.get_objects() if isinstance(each, Mailbox | DoorExchange)]

    gc.collect()
    gc.disable()
    try:
        async with serving(app) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUESTS["length"])
            await reader.readuntil(b"ok")
            await until(lambda: not alive())
            writer.close()
    finally:
        gc.enable()
