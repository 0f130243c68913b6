"""Tests that floods of wrong requests at each port of scheduler and edge write few lines."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from tests import forked

from .certificates import Authority
from .conftest import token_of
from .test_cli import scheduler
from .test_logs import WRONG_HEADS
from .test_principals import bearer

EACH, AT_ONCE = 200, 10
TOKEN = "token-of-the-shim"
#: Bytes that are no request at a port.
GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
    b"\x16\x03\x01\x00\x05hello",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
    b"\0" * 64,
]
PAGES = [
    f"{word} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    for word in (
        "POST /metrics", "GET /none", "GET /console/why.json?tenant=%00&pool=%ff",
        "GET /console/why.json?request=x", "GET /console/state.json?tenant=%ff%00",
        "GET /console/..%2f..%2fetc", "GET http://[::1/metrics", "BREW /metrics",
    )
]  # fmt: skip
NAME = [("grpc.ssl_target_name_override", "scheduler")]
METHODS = ("Admit", "Progress", "Complete", "Stats", "Explain", "None", "../x")


async def send(host: str, port: int, data: bytes) -> None:
    """Send some bytes, and leave once an answer has begun or the server has left."""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(data)
        writer.write_eof()
        await reader.read(1)
        writer.close()


async def flood_bytes(address: str, kinds: list[bytes]) -> None:
    host, _, port = address.rpartition(":")
    for data in kinds:
        for _ in range(EACH // AT_ONCE):
            await asyncio.gather(*(send(host, int(port), data) for _ in range(AT_ONCE)))


async def wrong_call(channel: grpc.aio.Channel, method: str, proof: Any) -> None:
    call = channel.unary_unary(f"/schedsvc.v1.SchedulerService/{method}")
    with suppress(grpc.aio.AioRpcError):
        await call(b"\xff\xff\xff\xff", metadata=proof)


async def wrong_session(channel: grpc.aio.Channel, proof: Any) -> None:
    stub, wrong = stubs.SchedulerServiceStub(channel), iter([pb.SessionRequest(seq=7)])
    call = stub.Session(wrong, metadata=proof)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass


async def flood_calls(channel: grpc.aio.Channel) -> None:
    async with channel:
        for proof in ((), bearer("wrong"), bearer(TOKEN)):
            for _ in range(EACH // AT_ONCE):
                for method in METHODS:
                    calls = (wrong_call(channel, method, proof) for _ in range(AT_ONCE))
                    await asyncio.gather(*calls)
                await asyncio.gather(*(wrong_session(channel, proof) for _ in range(AT_ONCE)))


def certificate(authority: Authority) -> dict[str, str]:
    own = authority.issue("scheduler", NAME[0][1])
    return {"cert": str(own.cert_file), "key": str(own.key_file)}


def bounded(text: str) -> None:
    """Check that this host and each library write 100 lines at once, and then one a second."""
    lines = text.splitlines()
    assert len(lines) < 2 * EACH, Counter(line[:60] for line in lines).most_common(10)
    for line in lines:
        json.loads(line)  # no line was written beside the log


@pytest.mark.slow
async def test_floods_at_each_port_of_a_scheduler(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    file, tls = tmp_path / "c.yaml", certificate(authority)
    file.write_text(
        json.dumps(
            {
                "listeners": [
                    {"tcp": "127.0.0.1:0"},
                    {"tcp": "127.0.0.1:0", "tls": tls, "auth": "token"},
                ],
                "auth": {"principals": [token_of("shim", TOKEN)]},
                "metrics": {"listen": "127.0.0.1:0"},
            }
        )
    )
    with scheduler(file) as (process, ready):
        reading = asyncio.create_task(asyncio.to_thread(process.communicate))
        page = ready["metrics"].partition("//")[2].partition("/")[0]
        plain, secure = ready["targets"]
        proof = grpc.ssl_channel_credentials(authority.cert)
        for target in (plain, secure):
            await flood_bytes(target, GARBAGE)
        await flood_calls(grpc.aio.insecure_channel(plain))
        await flood_calls(grpc.aio.secure_channel(secure, proof, NAME))
        # None of these handshakes succeeds.
        await flood_calls(grpc.aio.insecure_channel(secure))
        await flood_bytes(page, [*GARBAGE, *PAGES, *WRONG_HEADS])
        process.terminate()
        text = (await reading)[1]
        assert process.returncode == 0
    sessions = [line for line in text.splitlines() if "session_opened" in line]
    assert sessions  # the flood is one that the log reports
    bounded(text)


async def test_a_client_that_leaves_is_no_defect(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("listeners: [{unix: s.sock}]\nmetrics: {listen: '127.0.0.1:0'}\n")
    with scheduler(file) as (process, ready):
        page = ready["metrics"].partition("//")[2].partition("/")[0]
        await flood_bytes(page, [b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
        process.terminate()
        text = process.communicate()[1]
    assert "aiohttp" not in text


async def test_floods_at_the_edge(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        json.dumps(
            {
                "listeners": [{"unix": "s.sock", "auth": "token"}],
                "edge": {"tcp": "127.0.0.1:0", "tls": certificate(Authority(tmp_path))},
                "auth": {"principals": [token_of("shim", TOKEN)]},
            }
        )
    )
    ready = tmp_path / "edge.json"
    words = ("-m", "schedsvc", "edge", "--config", "c.yaml", "--ready-file", str(ready))
    piped = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    with forked.started([sys.executable, *words], ready, **piped) as process:
        reading = asyncio.create_task(asyncio.to_thread(process.communicate))
        (target,) = json.loads(ready.read_text())["targets"]
        await flood_bytes(target, GARBAGE)
        await flood_calls(grpc.aio.insecure_channel(target))
        process.terminate()
        bounded((await reading)[1])
