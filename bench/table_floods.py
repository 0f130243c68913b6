"""Fills one bounded table at full rate as a caller with a token, in a process of its own.

It writes the file `--ready-file` once the scheduler has answered, attacks until SIGTERM, and prints
how many events it sent. `python -m bench.tables` runs it.
"""

import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, cast

import click
import grpc
from schedsvc_client.v1 import explain_pb2, identity_pb2, pool_pb2, tenants_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

__all__ = ["FLOODS", "POOL", "TENANT", "main"]

#: The caller may name every pool and tenant that begins like this.
POOL, TENANT = "hostile-pool", "hostile"

_MESSAGE_BYTES = 60_000
#: Unary calls that are open at once.
_CALLS_AT_ONCE = 32
_ROOM = 1 << 27
_FIRST_LEASE = 1 << 40
_SERVICE = "/schedsvc.v1.SchedulerService/"

_Event = dict[str, Any]


def _pool(name: str = POOL, epoch: int = 1, tokens: int = _ROOM) -> _Event:
    return {
        "pool": pool_pb2.PoolRegistration(
            pool=name, epoch=epoch, capacity_tokens=tokens, block_size_tokens=16
        )
    }


def _admit(number: int, **more: Any) -> pb.AdmitRequest:
    asked: _Event = {
        "request_id": f"h{number}", "tenant": TENANT, "pools": [POOL], "input_tokens": [100],
        "max_output_tokens": 100, "reports_progress": True, **more,
    }  # fmt: skip
    return pb.AdmitRequest(**asked)


def _ask(number: int, **more: Any) -> _Event:
    return {"admit": pb.SessionAdmit(tag=number + 1, request=_admit(number, **more))}


def _replay(number: int) -> _Event:
    lease = pb.LeaseReplay(
        lease_id=number + _FIRST_LEASE, request_id=f"l{number}", tenant=TENANT, pool=POOL,
        pool_epoch=1, reserved_tokens=64, prompt_tokens=10, max_output_tokens=10,
    )  # fmt: skip
    return {"replay": lease}


def _complete(number: int) -> _Event:
    return {"complete": pb.CompleteRequest(lease_id=number + _FIRST_LEASE, pool_epoch=1)}


def _each(*events: Callable[[int], _Event]) -> Callable[[int], list[_Event]]:
    """Return a function that makes one event of each kind for a number."""
    return lambda number: [event(number) for event in events]


_PROVED = tenants_pb2.TENANT_PROOF_TOKEN

#: Session streams without end, by the table that they fill: capacity of the caller's pool, events.
STREAMS: dict[str, tuple[int, Callable[[int], list[_Event]]]] = {
    "places in the queue": (1_600, _each(_ask)),
    "places that are given back": (
        1_600,
        _each(_ask, lambda n: {"cancel": pb.SessionCancel(tag=n + 1)}),
    ),
    "flows of tenants at first sight": (
        _ROOM,
        _each(lambda n: _ask(n, tenant=f"{TENANT}-{n}", tenant_proof=_PROVED)),
    ),
    "leases": (_ROOM, _each(_ask)),
    "restored leases": (_ROOM, _each(_replay)),
    "stored answers": (_ROOM, _each(_replay, _complete)),
    "remembered refusals": (_ROOM, _each(lambda n: _ask(n, pools=[f"{POOL}-none"]))),
    "faults of a stream": (_ROOM, _each(lambda n: _ask(n, request_id=""))),
    "adapters": (_ROOM, _each(lambda n: _ask(n, adapter=f"a{n}"))),
    "hashes of prefixes": (
        _ROOM,
        _each(lambda n: _ask(n, prefix_block_hashes=range(n * 512 + 1, n * 512 + 513))),
    ),
    "pools": (_ROOM, _each(lambda n: _pool(f"{POOL}-{n}"))),
    "epochs of a pool": (_ROOM, _each(lambda n: _pool(epoch=n + 2))),
    "telemetry": (
        _ROOM,
        _each(lambda n: {"telemetry": pool_pb2.EngineTelemetry(pool=POOL, epoch=1, running=n)}),
    ),
    "lookups of leases": (
        _ROOM,
        _each(
            lambda n: {"progress": pb.LeaseProgress(lease_id=n + 1, pool_epoch=1, output_tokens=1)}
        ),
    ),
    "lookups of tags": (_ROOM, _each(lambda n: {"cancel": pb.SessionCancel(tag=n + 1)})),
}

#: Unary calls without end: the method, and the message.
CALLS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "calls of Admit": (_SERVICE + "Admit", lambda n: _admit(n, tenant=f"{TENANT}-{n}")),
    "calls of Complete": (
        _SERVICE + "Complete",
        lambda n: pb.CompleteRequest(lease_id=n + 1, pool_epoch=1),
    ),
    "calls of Stats": (_SERVICE + "Stats", lambda _: pb.StatsRequest(flow_limit=10_000)),
    "calls of Stats by name": (
        _SERVICE + "Stats",
        lambda _: pb.StatsRequest(tenants=[f"{TENANT}-x"] * 4_096),
    ),
    "calls of Explain": (
        "/schedsvc.v1.ExplainService/Explain",
        lambda n: explain_pb2.ExplainRequest(request_id=f"h{n}", tenant=TENANT),
    ),
    "calls of WhoIs": (
        "/schedsvc.v1.IdentityService/WhoIs",
        lambda n: identity_pb2.WhoIsRequest(api_key_sha256=n.to_bytes(32, "big")),
    ),
}


def _written(seq: int, events: list[_Event]) -> bytes:
    whole = pb.SessionRequest(seq=seq, events=[pb.SessionEvent(**event) for event in events])
    return whole.SerializeToString()


def _opening(tokens: int, client: str = "hostile") -> bytes:
    hello = pb.SessionHello(client_id=client, incarnation=1)
    return _written(1, [{"hello": hello}, _pool(tokens=tokens)])


def messages(tokens: int, events: Callable[[int], list[_Event]]) -> Iterator[tuple[bytes, int]]:
    """Write a Session's messages, as large as they may be, each with the number of its events."""
    yield _opening(tokens), 2
    numbers = count()
    for seq in count(2):
        body, size = bytearray(), 0
        while len(body) < _MESSAGE_BYTES and size + 2 <= 4_096:
            for event in events(next(numbers)):
                body += pb.SessionRequest(events=[pb.SessionEvent(**event)]).SerializeToString()
                size += 1
        yield pb.SessionRequest(seq=seq).SerializeToString() + bytes(body), size


class Flood:
    """Repeats one call as often as the scheduler allows."""

    def __init__(self, target: str, token: str, ready_file: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._target = target
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._ready = ready_file

    def run(self, table: str) -> NoReturn:
        """Attack without end."""
        if table in STREAMS:
            self._streams(*STREAMS[table])
        elif table in CALLS:
            self._calls(*CALLS[table])
        OTHERS[table](self)
        raise AssertionError

    def channel(self) -> grpc.Channel:
        """Open a separate connection."""
        return grpc.insecure_channel(self._target, [("grpc.use_local_subchannel_pool", 1)])

    def answered(self) -> None:
        """Note that the scheduler has answered."""
        self.counts["answers"] += 1
        if self.counts["answers"] == 1:
            self._ready.write_text("ready")

    def session(self, channel: grpc.Channel, sent: Iterator[bytes]) -> Any:
        """Begin a Session."""
        call = cast(Any, channel).stream_stream(_SERVICE + "Session")
        return call(sent, metadata=self._metadata)

    def unary(self, channel: grpc.Channel, method: str) -> Any:
        """Return a call that takes bytes."""
        call = cast(Any, channel).unary_unary(method)
        return lambda data: call(data, metadata=self._metadata, timeout=30)

    def offer(self) -> None:
        """Offer a separate pool for ever, so that it does not use the others' pools."""

        def opened() -> Iterator[bytes]:
            yield _opening(_ROOM)
            threading.Event().wait()

        self._offering = self.session(self.channel(), opened())
        next(self._offering)

    def _streams(self, tokens: int, events: Callable[[int], list[_Event]]) -> NoReturn:
        def counted() -> Iterator[bytes]:
            for data, size in messages(tokens, events):
                self.counts["sent"] += size
                yield data

        while True:
            try:
                for _ in self.session(self.channel(), counted()):
                    self.answered()
            except grpc.RpcError as error:
                self.counts[f"{cast(Any, error).code()}"] += 1

    def _calls(self, method: str, message: Callable[[int], Any]) -> NoReturn:
        self.offer()
        numbers, channel = count(), self.channel()

        def go_on() -> None:
            call = self.unary(channel, method)
            while True:
                try:
                    self.counts["sent"] += 1
                    call(message(next(numbers)).SerializeToString())
                except grpc.RpcError as error:
                    self.counts[f"{cast(Any, error).code()}"] += 1
                self.answered()

        for _ in range(_CALLS_AT_ONCE):
            threading.Thread(target=go_on, daemon=True).start()
        threading.Event().wait()
        raise AssertionError


def _sessions(flood: Flood) -> None:
    channel = flood.channel()
    for number in count():
        try:
            for _ in flood.session(channel, iter((_opening(_ROOM, f"c{number}"),))):
                flood.answered()
        except grpc.RpcError as error:
            flood.counts[f"{cast(Any, error).code()}"] += 1
        flood.counts["sent"] += 1


def _open_sessions(flood: Flood) -> None:
    """Hold as many Sessions as it gets, and go on asking for more."""
    channel, held = flood.channel(), []
    for number in count():
        over = threading.Event()

        def opened(number: int = number, over: threading.Event = over) -> Iterator[bytes]:
            yield _opening(_ROOM, f"c{number}")
            over.wait()

        stream = flood.session(channel, opened())
        try:
            next(stream)
            held.append((stream, over))
            flood.answered()
        except (grpc.RpcError, StopIteration):
            flood.counts["refused"] += 1
            over.set()
        flood.counts["sent"] += 1


def _connections(flood: Flood) -> None:
    flood.offer()
    for number in count():
        channel = flood.channel()
        try:
            data = _admit(number).SerializeToString()
            flood.unary(channel, _SERVICE + "Admit")(data)
        except grpc.RpcError as error:
            flood.counts[f"{cast(Any, error).code()}"] += 1
        channel.close()
        flood.counts["sent"] += 1
        flood.answered()


def _unread(flood: Flood) -> None:
    """Send messages and read no answer; repeat when the scheduler ends the stream."""
    while True:
        over = threading.Event()

        def unread(over: threading.Event = over) -> Iterator[bytes]:
            for data, size in messages(_ROOM, _each(lambda n: _ask(n, request_id=""))):
                if over.is_set():
                    return
                flood.counts["sent"] += size
                yield data

        stream = flood.session(flood.channel(), unread())
        next(stream)
        flood.answered()
        stream.add_callback(over.set)
        over.wait()
        flood.counts["ended"] += 1


#: Floods of several streams or connections.
OTHERS: dict[str, Callable[[Flood], None]] = {
    "Sessions that come and go": _sessions,
    "open Sessions": _open_sessions,
    "connections": _connections,
    "answers that are not read": _unread,
}

FLOODS = (*STREAMS, *CALLS, *OTHERS)


@click.command()
@click.option("--target", required=True, help="Where the scheduler serves callers with tokens.")
@click.option("--token", required=True, help="The bearer token of the caller.")
@click.option("--table", required=True, type=click.Choice(FLOODS))
@click.option("--ready-file", type=click.Path(path_type=Path), required=True)
def main(target: str, token: str, table: str, ready_file: Path) -> None:
    """Flood one table of a scheduler of your own until SIGTERM; print the counts."""
    flood = Flood(target, token, ready_file)

    def end(*_: object) -> NoReturn:
        click.echo(json.dumps(flood.counts))
        sys.stdout.flush()
        signal.raise_signal(signal.SIGKILL)
        raise AssertionError

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=flood.run, args=(table,), daemon=True).start()
    while True:
        signal.pause()


if __name__ == "__main__":
    main(prog_name="python -m bench.table_floods")
