"""The log never holds up the scheduler, and no peer fills the disk with it."""

import asyncio
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from schedsvc.server.log_limits import PeerLimits, host_of
from schedsvc.server.log_writer import LogWriter

from .conftest import calling
from .test_cli import scheduler
from .test_metrics import of, samples_of

SECOND_NS = 1_000_000_000


class Pipe:
    """Opens a pipe of one page, without a reader at first."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4_096)
        self.stream = os.fdopen(writer, "w")

    def read_all(self) -> list[bytes]:
        """Read until the other end is closed."""
        with os.fdopen(self.reader, "rb") as stream:
            return stream.read().splitlines()


def test_lines_beyond_the_queue_are_dropped_counted_and_said() -> None:
    pipe, said, told = Pipe(), [], threading.Event()

    def say(lines: int) -> None:
        said.append(lines)
        told.set()

    writer = LogWriter(pipe.stream, say, lines_max=50)
    lines = [f"{number:>99}\n" for number in range(1_000)]
    for line in lines:
        writer.put(line)  # a blocking writer would never return
    assert not writer.flush(0.01)
    dropped = writer.dropped
    assert 1_000 - 50 - 256 - 41 <= dropped < 1_000
    found: list[list[bytes]] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_all()))
    reader.start()
    assert writer.flush(30)
    assert told.wait(30)
    pipe.stream.close()
    reader.join()
    assert said == [dropped]
    kept = [line.decode() + "\n" for line in found[0]]
    assert kept == [line for line in lines if line in set(kept)]
    assert len(kept) == 1_000 - dropped


def test_long_lines_are_bounded_by_bytes() -> None:
    pipe = Pipe()
    writer = LogWriter(pipe.stream)
    for _ in range(40):
        writer.put("x" * (1 << 20) + "\n")
    # At most 15 lines wait, and as many are being written.
    assert writer.dropped >= 10
    os.close(pipe.reader)  # the thread gives up


def test_closed_pipe_drops_lines_and_blocks_nothing() -> None:
    pipe = Pipe()
    os.close(pipe.reader)
    writer = LogWriter(pipe.stream)
    writer.put("lost\n")
    assert writer.flush(30)
    assert writer.dropped == 1


def test_stream_without_a_file_is_written() -> None:
    stream = StringIO()
    writer = LogWriter(stream)
    writer.put("a\n")
    assert writer.flush(30)
    assert stream.getvalue() == "a\n"


@pytest.mark.parametrize("style", ["json", "console"])
def test_stamps_are_utc_in_any_time_zone(style: str) -> None:
    code = (
        "import structlog; from schedsvc.server.logs import configure_logs, flush_logs;"
        f"configure_logs({style!r}, 'info'); structlog.get_logger('schedsvc').info('x');"
        "flush_logs()"
    )
    before = datetime.now(UTC) - timedelta(seconds=1)  # a stamp may lack a part of its second
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TZ": "Pacific/Kiritimati"},
        capture_output=True,
        text=True,
        check=True,
    )
    [stamp] = re.findall(r"\d{4}-\d\d-\d\dT[\d:.]+Z", done.stderr)
    after = datetime.now(UTC)
    assert before <= datetime.fromisoformat(stamp) <= after


def test_peer_has_a_burst_and_then_a_line_a_second() -> None:
    limits = PeerLimits()
    peers = [f"ipv4:10.0.0.1:{port}" for port in range(1_000)]  # one host, many connections
    assert [limits.admit(peer, 0) for peer in peers].count(0) == 100
    assert limits.admit("ipv4:10.0.0.2:1", 0) == 0
    assert limits.admit(peers[0], SECOND_NS) == 900
    assert limits.admit(peers[0], SECOND_NS) == -1
    assert limits.admit(peers[0], 2 * SECOND_NS) == 1
    assert limits.suppressed == 901


def test_many_peers_have_an_allowance_together_and_few_bytes() -> None:
    limits, lines = PeerLimits(), 0
    for second in range(100):
        for number in range(100):
            host = second * 100 + number
            lines += limits.admit(f"ipv6:[::{host:x}]:9", second * SECOND_NS) >= 0
    assert 1_000 + 20 * 99 <= lines <= 1_000 + 20 * 100
    assert len(limits._buckets) <= 1_025
    assert len(limits._left_out) <= 1_025


def test_hosts_are_separated_and_ports_are_not() -> None:
    assert host_of("ipv4:10.0.0.1:77") == "ipv4:10.0.0.1"
    assert host_of("ipv6:%5B::1%5D:77") == "ipv6:%5B::1%5D"
    assert host_of("unix:") == "unix:"


LINES_OF_A_LIBRARY = """
import logging, structlog
from schedsvc.server.logs import configure_logs, flush_logs, lines_suppressed
configure_logs("json", "info")
for _ in range(5_000):
    logging.getLogger("aiohttp.server").error("Error handling request", exc_info=ValueError("x"))
    structlog.get_logger("schedsvc.server").error("defect", exc_info=ValueError("y"))
structlog.get_logger("schedsvc.server").info("a line of our own")
flush_logs()
print(lines_suppressed())
"""


def test_lines_of_libraries_and_tracebacks_have_a_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LINES_OF_A_LIBRARY], capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert 201 <= len(lines) <= 241
    assert lines[-1]["event"] == "a line of our own"
    assert int(done.stdout) == 10_001 - len(lines)
    later = sum(line.get("suppressed", 0) for line in lines)
    assert later == 0 if len(lines) == 201 else later > 0


#: Heads of requests that are wrong: in what they accept, in their Host, and in their form.
WRONG_HEADS = [
    *(
        f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: {accept}\r\n\r\n".encode("latin1")
        for accept in (
            "application/openmetrics-text; version=x",
            "application/openmetrics-text; version=1.0.x",
            "text/plain; version=\xb2",
            "text/plain; version=1.0.0; escaping=x; q=x",
            "application/openmetrics-text; version=" + "9" * 5_000,
            ";=,;version",
        )
    ),
    *(
        f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin1")
        for host in ("a:b:c", "127.0.0.1:99999999", "\xff\xfe", "[::1", "127.0.0.1:x")
    ),
    b"GET /metrics HTTP/9.9\r\n\r\n",
]


def test_wrong_requests_are_no_defects_and_cause_few_lines(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("listeners: [{unix: s.sock}]\nmetrics: {listen: '127.0.0.1:0'}\n")
    with scheduler(file) as (process, ready):
        address = urlsplit(ready["metrics"])
        answers = [status_of(address, head) for head in WRONG_HEADS]
        assert answers[:6] == [200] * 6
        assert set(answers[6:]) <= {200, 400, 403}
        for _ in range(40):
            answers += [status_of(address, head) for head in WRONG_HEADS]
        assert not [status for status in answers if status >= 500]
        process.terminate()
        lines = process.communicate(timeout=60)[1].splitlines()
    # It allows 100 at once, and then one a second.
    assert len([line for line in lines if "aiohttp" in line]) < 150


def status_of(address: SplitResult, head: bytes) -> int:
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 0), 30) as connection:
        connection.sendall(head)
        with connection.makefile("rb") as stream:
            return int(stream.readline().split()[1])


async def wrong_stream(stub: stubs.SchedulerServiceStub) -> None:
    call = stub.Session(iter([pb.SessionRequest(seq=7)]))
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in call:
            pass


async def test_unread_stderr_does_not_stop_the_scheduler(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("listeners: [{tcp: '127.0.0.1:0'}]\nmetrics: {listen: '127.0.0.1:0'}\n")
    with scheduler(file) as (process, ready):
        assert process.stderr is not None
        fcntl.fcntl(process.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4_096)
        async with calling(ready["targets"][0]) as stub:
            for _ in range(20):
                await asyncio.gather(*(wrong_stream(stub) for _ in range(10)))
            await stub.Stats(pb.StatsRequest(), timeout=10)
        page = await asyncio.to_thread(fetch, ready["metrics"])
        samples = samples_of(page)
        assert of(samples, "log_lines_suppressed_total") >= 2 * 200 - 100 - 30
        assert of(samples, "log_lines_dropped_total") == 0
        process.terminate()
        said = [json.loads(line) for line in process.communicate(timeout=30)[1].splitlines()]
        assert process.returncode == 0
    sessions = [entry for entry in said if entry["event"].startswith("session_")]
    assert 100 <= len(sessions) <= 130


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def test_process_ends_though_stderr_is_unread(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("listeners: [{unix: s.sock}]\ntenants: [{name: a}]\n")
    with scheduler(file) as (process, _):
        assert process.stderr is not None
        # Full: no further line fits.
        fcntl.fcntl(process.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4_096)
        fill(process.pid)
        process.terminate()
        assert process.wait(timeout=30) == 0


def fill(pid: int) -> None:
    """Fill the pipe that is a process's stderr."""
    file = os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(file, b"x" * 64)
    except BlockingIOError:
        os.close(file)
