"""Bounds the lines that clients and an upstream can cause in the log of proxy and gate."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from schedsvc_vllm.log_limit import LINES_AT_ONCE, LineLimit

from tests import forked
from tests.waiting import until

from .upstreams import POOL

PROXY = "from schedsvc_vllm.proxy_cli import main; main()"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
ANSWERS = {
    "/health": HEAD + b"Content-Length: 0\r\n\r\n",
    "/broken": HEAD + b"Content-Length: 9\r\n\r\nabc",
    "/other": b"SSH-2.0-other\r\n",
    "/away": b"",
}
END = b" HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
#: The bytes of a client, and the text that the log then has.
FLOODS = {
    b"\x16\x03\x01\x02\x00\x01\r\n\r\n": "no valid HTTP",
    b"GET /broken" + END: "broke off an answer",
    b"GET /other" + END: "not valid HTTP",
    b"GET /away" + END: "cannot be reached",
}
EACH = 400


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(ANSWERS.get(head.split()[1].decode(), HEAD + b"Content-Length: 0\r\n\r\n"))
    writer.close()


async def takes_connections(path: str) -> bool:
    with suppress(OSError):
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
        return True
    return False


@asynccontextmanager
async def proxied(folder: Path) -> AsyncIterator[str]:
    """Run the proxy as a process before an upstream of many faults; give its socket."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    url = "http://{}:{}".format(*server.sockets[0].getsockname())
    path, target = str(folder / "p.sock"), f"unix:{folder}/none.sock"
    words = ("--upstream", url, "--uds", path, "--schedsvc-target", target)
    command = [sys.executable, "-c", PROXY, *words]
    environment = os.environ | POOL | {"SCHEDSVC_POOL": "p"}
    with forked.started(command, lambda: True, log=folder / "log", env=environment) as process:
        await until(lambda: takes_connections(path))
        yield path
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) == 0
    server.close()


async def send(path: str, data: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    await reader.read()
    writer.close()


async def test_floods_write_few_lines_and_none_hides_another(tmp_path: Path) -> None:
    async with proxied(tmp_path) as path:
        for data in FLOODS:
            for _ in range(EACH // 10):
                await asyncio.gather(*(send(path, data) for _ in range(10)))
    lines = (tmp_path / "log").read_text().splitlines()
    for expected in FLOODS.values():
        found = sum(expected in line for line in lines)
        assert LINES_AT_ONCE <= found < EACH, (expected, found)


def test_each_place_has_a_burst_and_the_next_line_says_how_many_were_left_out() -> None:
    limit, now_s = LineLimit(), 7.0
    limit.clock = lambda: now_s

    def written(line: int, text: str = "x %d") -> str | None:
        made = logging.LogRecord("a", logging.INFO, "a.py", line, text, (1,), None)
        return made.getMessage() if limit.filter(made) else None

    assert [written(1) for _ in range(150)] == ["x 1"] * 100 + [None] * 50
    assert written(2) == "x 1"
    now_s += 1
    assert written(1) == "x 1 (50 such lines before it were left out)"
    assert written(1) is None
    now_s += 200
    assert [written(1) for _ in range(101)].count(None) == 1
