"""Compares the transports of one build: the CPU of an Admit and of Session events behind each.

    python -m bench.transport
    python -m bench.transport --instructions

The first measures CPU time, in slices that alternate between the transports, and needs two cores.
The second counts instructions under callgrind, which does not depend on what else runs. T13, T13b
and T6 are targets of issue 61.
"""

import itertools
import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import ngh2
import numpy as np

from bench import machine
from bench.calls import Admits
from bench.harness import verdict
from bench.messages import POOL_EPOCH, admits, tenant
from bench.peers import FLOWS, Peer, serving
from bench.processes import started
from bench.streams import SESSION_METHOD, Pump, Stream
from schedsvc.service import SERVICE_NAME

__all__ = ["Caller"]

TRANSPORTS = ("grpcio", "nghttp2")
#: T13: instructions of a unary Admit.
INSTRUCTIONS_MAX = 60_000
#: T13b: fresh Admits of a second of CPU; T6: CPU of one event of a Session, in ns.
ADMITS_MIN, EVENT_NS_MAX = 50_000, 800
_IN_FLIGHT = 64
_WARM_UP = 200
_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)


def settings(transport: str) -> dict[str, Any]:
    """Return a configuration whose one pool has room for all that is asked."""
    return {
        "transport": transport,
        "scheduler": {"lease_ttl_ms": 600_000, "each_pool": {"max_running": 0}},
        "limits": {"drain_ms": 0},
        "tenants": [{"name": tenant(flow)} for flow in range(FLOWS)],
        "pools": [{"name": "gpu-0", "capacity_tokens": 1 << 27, "epoch": POOL_EPOCH}],
        "log": {"level": "warning"},
    }


class Caller:
    """Calls Admit on a Unix socket, many calls in flight, for a small part of grpcio's CPU."""

    def __init__(self, target: str, requests: Iterator[bytes]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(target.removeprefix("unix:"))
        self._h2 = ngh2.Connection(ngh2.Role.CLIENT)
        self._h2.initiate_connection({ngh2.Setting.INITIAL_WINDOW_SIZE: 1 << 20})
        self._requests = requests
        self._headers = (
            (b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"localhost"),
            (b":path", f"/{SERVICE_NAME}/Admit".encode()), (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )  # fmt: skip

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    def call(self, count: int) -> None:
        """Make calls that were not made before. Raises RuntimeError if one is not granted."""
        sent = min(count, _IN_FLIGHT)
        self._send(sent)
        answered = 0
        while answered < count:
            data = self._socket.recv(1 << 18)
            if not data:
                raise RuntimeError("the server closed the connection")
            self._h2.receive_data(data)
            closed = 0
            for event in self._h2.events():
                if isinstance(event, ngh2.DataReceived) and event.data[5:7] != b"\x08\x01":
                    raise RuntimeError("a call was not granted")
                if isinstance(event, ngh2.StreamReset):
                    raise RuntimeError(f"a call was reset with code {event.error_code}")
                closed += isinstance(event, ngh2.StreamClosed)
            answered += closed
            more = min(closed, count - sent)
            self._send(more)
            sent += more

    def _send(self, count: int) -> None:
        h2 = self._h2
        for request in itertools.islice(self._requests, count):
            stream = h2.send_request(self._headers)
            h2.send_data(stream, b"\0" + len(request).to_bytes(4, "big") + request, end_stream=True)
        self._socket.sendall(h2.data_to_send())


def admit_ns(peers: dict[str, Peer], rounds: int, calls: int) -> dict[str, float]:
    """Return the server's CPU time of a fresh Admit with 64 in flight, in ns: the median slice."""
    found: dict[str, list[float]] = {name: [] for name in peers}
    callers = {name: Caller(peer.unix, admits(FLOWS)) for name, peer in peers.items()}
    for number in range(rounds + 1):
        for name, caller in callers.items():
            began_ns = peers[name].cpu_ns()
            caller.call(calls)
            if number:  # the first warms up
                found[name].append((peers[name].cpu_ns() - began_ns) / calls)
    for caller in callers.values():
        caller.close()
    return {name: float(np.median(values)) for name, values in found.items()}


def event_ns(peers: dict[str, Peer], events: int, rounds: int, messages: int) -> dict[str, float]:
    """Return the server's CPU time of an event of a Session, in ns: the median slice."""
    found: dict[str, list[float]] = {name: [] for name in peers}
    pump = Pump()
    with ExitStack() as stack:
        streams = {
            name: stack.enter_context(
                Stream(pump, peer, SESSION_METHOD, events, counts_acks=True, series=events % 90)
            )
            for name, peer in peers.items()
        }
        for stream in streams.values():
            stream.greet()
        for number in range(rounds + 1):
            for name, stream in streams.items():
                cpu_ns, _ = stream.slice(messages)
                if number:
                    found[name].append(cpu_ns)
    pump.close()
    return {name: float(np.median(values)) for name, values in found.items()}


@contextmanager
def counted(transport: str, folder: Path) -> Iterator[tuple[Peer, Path]]:
    """Run a scheduler under callgrind, which counts nothing yet; give it and its output's name."""
    config, ready, out = folder / "s.yaml", folder / "s.ready", folder / "callgrind.out"
    listeners = [{"unix": str(folder / "s.sock")}]
    config.write_text(json.dumps({"listeners": listeners, **settings(transport)}))
    before = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no"]
    before.append(f"--callgrind-out-file={out}")
    command = ["-m", "schedsvc", "serve", "--config", str(config), "--ready-file", str(ready)]
    with started(command, ready, before=before, log=folder / "s.log", start_s_max=300) as process:
        target = json.loads(ready.read_text())["targets"][0]
        yield Peer(process, target, target), out


def instructions(transport: str, calls: int) -> int:
    """Return the instructions of a unary Admit, one call after the other.

    The server's own work, such as its beat, goes on meanwhile. So what it does in the same time
    without calls is subtracted.
    """
    with (
        tempfile.TemporaryDirectory(prefix="transport-") as name,
        counted(transport, Path(name)) as (peer, out),
        Admits(peer, peer.unix, is_scheduler=True) as admit,
    ):
        for _ in range(_WARM_UP):
            admit.admit(admit.next_request())
        requests = [admit.next_request() for _ in range(calls)]
        _control(peer, "-i", "on")
        began_s = time.monotonic()
        for request in requests:
            admit.admit(request)
        spent_s = time.monotonic() - began_s
        with_calls = _dumped(peer, out)
        time.sleep(spent_s)
        return (with_calls - _dumped(peer, out)) // calls


def _control(peer: Peer, *words: str) -> None:
    command = ["callgrind_control", *words, str(peer.process.pid)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _dumped(peer: Peer, out: Path) -> int:
    """Return the instructions since the last dump. Raises click.ClickException."""
    _control(peer, "-d")
    for _ in range(100):
        for file in sorted(out.parent.glob(f"{out.name}*")):
            found = _TOTAL.search(file.read_text())
            if found is not None and int(found[1]):
                file.unlink()
                return int(found[1])
        time.sleep(0.1)
    raise click.ClickException("callgrind wrote no counts")


def timed(rounds: int) -> dict[str, Any]:
    """Measure CPU time of both transports, in alternating slices."""
    with tempfile.TemporaryDirectory(prefix="transport-") as name, ExitStack() as stack:
        peers = {}
        for transport in TRANSPORTS:
            folder = Path(name) / transport
            folder.mkdir()
            peers[transport] = stack.enter_context(serving(folder, settings(transport)))
        stack.enter_context(machine.pinned(machine.generator_cores()))
        admit = admit_ns(peers, rounds, 2_000)
        one = event_ns(peers, 1, rounds, 500)
        many = event_ns(peers, 128, rounds, 60)
    rows = {
        "CPU of an Admit, 64 in flight, in ns": admit,
        "fresh Admits of a second of CPU": {n: 1e9 / ns for n, ns in admit.items()},
        "CPU of an event, one a message, in ns": one,
        "CPU of an event, 128 a message, in ns": many,
    }
    holds = 1e9 / admit["nghttp2"] >= ADMITS_MIN and many["nghttp2"] <= EVENT_NS_MAX
    return {"rows": rows, "holds": holds}


def _show(found: dict[str, Any]) -> None:
    click.echo(f"{'':40}" + "".join(f"{name:>12}" for name in TRANSPORTS) + f"{'ratio':>8}")
    for what, row in found["rows"].items():
        ours, theirs = row["nghttp2"], row["grpcio"]
        figures = "".join(f"{row[name]:12,.0f}" for name in TRANSPORTS)
        click.echo(f"{what:40}{figures}{ours / theirs:8.3f}")


@click.command(epilog="Example: python -m bench.transport --instructions")
@click.option("--instructions", "counts", is_flag=True, help="Count under callgrind.")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(min=1))
@click.option("--calls", default=400, show_default=True, help="Calls that are counted.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def main(counts: bool, rounds: int, calls: int, as_json: bool) -> None:
    """Compare grpcio and nghttp2 as the transport of the scheduler."""
    if counts:
        row = {transport: instructions(transport, calls) for transport in TRANSPORTS}
        rows = {"instructions of a unary Admit": row}
        verdict({"rows": rows, "holds": row["nghttp2"] <= INSTRUCTIONS_MAX}, as_json, _show)
    else:
        verdict(timed(rounds), as_json, _show)


if __name__ == "__main__":
    main()
