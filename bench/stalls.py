"""Measure the longest turn of the server's event loop under each adversarial message.

The server runs in this process, and its callers in a thread. A turn is one callback of the loop: no
other caller is served during it. CPU time counts, because a turn that the system interrupts would
be longer.
"""

import asyncio
import gc
import tempfile
import time
from asyncio.events import Handle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.request import urlopen

import click
import grpc
from rich.console import Console
from rich.table import Table
from schedsvc_client.v1 import explain_pb2, operator_pb2, pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.explain_pb2_grpc import ExplainServiceStub
from schedsvc_client.v1.operator_pb2_grpc import OperatorServiceStub
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from bench.harness import json_option, verdict
from bench.machine import need_release_core
from schedsvc.config import Config
from schedsvc.server import Server

__all__ = ["BOUNDS_MS", "Stall", "main", "measure"]

#: The longest turn, by what is configured.
BOUNDS_MS = {"plain": 5.0, "all": 20.0}
#: A reload applies a whole configuration at once, so it has a bound of its own.
RELOAD_MS = 2_000.0
_MESSAGE_BYTES = 65_536
_EVENTS_MAX = 4_096
#: Names of tenants in the largest request for Stats.
_NAMES = 4_096
_CALLS_S = 120.0
_ROOM = 1 << 27

_Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stall:
    """Describes the longest turn that one input caused."""

    what: str
    features: str
    longest_ms: float
    bound_ms: float


@dataclass
class Turns:
    """Keeps the CPU time of the longest callback since `begin()`."""

    longest_ns: int = 0

    def begin(self) -> None:
        """Forget earlier measurements."""
        self.longest_ns = 0

    def stall(self, what: str, features: str, bound_ms: float) -> Stall:
        """Name what was measured."""
        return Stall(what, features, round(self.longest_ns / 1e6, 2), bound_ms)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure every callback of the loop that runs in this thread."""
        run, handles = Handle._run, cast(Any, Handle)

        def measured(handle: Handle) -> None:
            began_ns = time.thread_time_ns()
            run(handle)
            self.longest_ns = max(self.longest_ns, time.thread_time_ns() - began_ns)

        handles._run = measured
        try:
            yield
        finally:
            handles._run = run


def _settings(folder: Path, features: str, tenants: int) -> dict[str, Any]:
    listed: list[dict[str, Any]] = [{"name": f"t{number}"} for number in range(tenants)]
    settings: dict[str, Any] = {
        "listeners": [{"unix": str(folder / "stalls.sock"), "auth": "none"}],
        "metrics": {"listen": "127.0.0.1:0", "tenants_max": tenants},
        "limits": {"drain_ms": 0},
        "scheduler": {"lease_ttl_ms": 600_000, "queue_ttl_ms": 600_000, "queue_max": 100_000},
        "tenants": listed,
        "state": {"file": str(folder / "state.db"), "every_ms": 60_000},
        "log": {"level": "warning"},
    }
    if features == "all":
        settings["scheduler"] |= {"flow_order": "deadline", "early_refusal": True}
        settings["classes"] = [{"name": "fast", "rank": -1}, {"name": "slow", "rank": 5}]
        for entry in listed:
            entry["quota"] = {"requests_per_minute": 1_000_000, "tokens_per_minute": _ROOM}
    return settings


class Callers:
    """Sends a hostile caller's traffic from a thread of its own. Every method blocks."""

    def __init__(self, target: str, metrics: str) -> None:
        self.metrics = metrics
        self.console = metrics.removesuffix("metrics") + "console/state.json"
        self._channel = grpc.insecure_channel(
            target, [("grpc.max_receive_message_length", 64 << 20)]
        )
        # As bytes: objects of the callers would be swept by the collector in the loop's turns.
        self._session: Any = cast(Any, self._channel).stream_stream(
            "/schedsvc.v1.SchedulerService/Session"
        )
        self.scheduler: Any = SchedulerServiceStub(self._channel)
        self.operator: Any = OperatorServiceStub(self._channel)
        self.explain: Any = ExplainServiceStub(self._channel)

    def session(self, *messages: bytes) -> int:
        """Send a Hello and a pool, then these messages; return how many answers came."""
        return sum(1 for _ in self._session(iter((_OPENING, *messages)), timeout=_CALLS_S))

    def admit_until_queued(self, tenants: int) -> None:
        """Leave leases of many tenants."""
        for number in range(0, tenants, 500):
            asks = [_ask(f"s{at}", f"t{at}", tag=at + 1) for at in range(number, number + 500)]
            self.session(_message(2, asks))


def _message(seq: int, events: list[_Event]) -> bytes:
    whole = pb.SessionRequest(seq=seq, events=[pb.SessionEvent(**event) for event in events])
    return whole.SerializeToString()


_OPENING = _message(
    1,
    [
        {"hello": pb.SessionHello(client_id="stalls", incarnation=1)},
        {
            "pool": pool_pb2.PoolRegistration(
                pool="p", epoch=1, capacity_tokens=_ROOM, block_size_tokens=16
            )
        },
    ],
)


def _ask(request_id: str, tenant: str = "t1", *, tag: int, **more: Any) -> _Event:
    request = pb.AdmitRequest(
        request_id=request_id, tenant=tenant, input_tokens=[100], max_output_tokens=100, **more
    )
    return {"admit": pb.SessionAdmit(tag=tag, request=request)}


def _replay(number: int, epoch: int = 1) -> _Event:
    lease = pb.LeaseReplay(
        lease_id=number + (1 << 40), request_id=f"l{number}", tenant="t1", pool="p",
        pool_epoch=epoch, reserved_tokens=64, prompt_tokens=10, max_output_tokens=10,
    )  # fmt: skip
    return {"replay": lease}


def filled(event: Callable[[int], _Event]) -> list[_Event]:
    """Return as many events as one message may hold."""
    events: list[_Event] = []
    size = pb.SessionRequest(seq=2).ByteSize()
    for number in range(_EVENTS_MAX):
        events.append(event(number))
        size += pb.SessionRequest(events=[pb.SessionEvent(**events[-1])]).ByteSize()
        if size > _MESSAGE_BYTES:
            return events[:-1]
    return events


#: One message of each kind of event, as large as it may be.
MESSAGES: Mapping[str, Callable[[int], _Event]] = {
    "Progress of unknown leases": lambda n: {
        "progress": pb.LeaseProgress(lease_id=n + 1, pool_epoch=1, output_tokens=1)
    },
    "Progress of ids 2^32 apart": lambda n: {
        "progress": pb.LeaseProgress(lease_id=(n + 1) << 32, pool_epoch=1)
    },
    "Complete of unknown leases": lambda n: {
        "complete": pb.CompleteRequest(lease_id=n + 1, pool_epoch=1)
    },
    "Cancel of unknown tags": lambda n: {"cancel": pb.SessionCancel(tag=n + 1)},
    "Cancel without a tag": lambda _: {"cancel": pb.SessionCancel()},
    "Admit": lambda n: _ask(f"m{n}", tag=n + 1),
    "Admit, refused as unknown pool": lambda n: _ask(f"u{n}", tag=n + 1, pools=["q"]),
    "Admit without an id": lambda n: _ask("", tag=n + 1),
    "Admit with 4,096 hashes of prefixes": lambda n: _ask(
        f"h{n}", tag=n + 1, prefix_block_hashes=range(1, 4_097)
    ),
    "Admit with 512 hashes of their own": lambda n: _ask(
        f"o{n}", tag=n + 1, prefix_block_hashes=range(n * 512 + 1, n * 512 + 513)
    ),
    "replay of new leases": _replay,
    "replay of another epoch": lambda n: _replay(n, epoch=2),
    "telemetry": lambda n: {"telemetry": pool_pb2.EngineTelemetry(pool="p", epoch=1, running=n)},
    "telemetry of an unknown pool": lambda _: {"telemetry": pool_pb2.EngineTelemetry(pool="q")},
    "pools": lambda n: {
        "pool": pool_pb2.PoolRegistration(
            pool=f"n{n}", epoch=1, capacity_tokens=1_000, block_size_tokens=16
        )
    },
    "events without content": lambda _: {},
}


def _calls(callers: Callers, tenants: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every call whose cost grows with what the scheduler holds, dearest state first."""
    stats = callers.scheduler.Stats
    yield "Stats of 1,000 flows", lambda: stats(pb.StatsRequest(), timeout=_CALLS_S)
    yield (
        f"Stats of {tenants:,} flows",
        lambda: stats(pb.StatsRequest(flow_limit=10_000), timeout=_CALLS_S),
    )
    yield (
        "Stats of 1,000 named tenants",
        lambda: stats(pb.StatsRequest(tenants=[f"t{n}" for n in range(1_000)]), timeout=_CALLS_S),
    )
    names = pb.StatsRequest(tenants=[""] * _NAMES)
    yield f"Stats of {_NAMES:,} unknown tenants", lambda: stats(names, timeout=_CALLS_S)
    yield "metrics page", lambda: urlopen(callers.metrics).read()
    yield "console's state", lambda: urlopen(callers.console).read()
    yield (
        "Explain",
        lambda: callers.explain.Explain(
            explain_pb2.ExplainRequest(request_id="s7", tenant="t7"), timeout=_CALLS_S
        ),
    )
    leases = callers.operator.ListLeases
    yield "ListLeases", lambda: leases(operator_pb2.ListLeasesRequest(), timeout=_CALLS_S)
    yield (
        "RevokeLeases of a tenant",
        lambda: callers.operator.RevokeLeases(
            operator_pb2.RevokeLeasesRequest(filter=operator_pb2.LeaseFilter(tenant="t1")),
            timeout=_CALLS_S,
        ),
    )
    yield (
        "Drain of a pool and back",
        lambda: [
            callers.operator.Drain(operator_pb2.DrainRequest(pool="p", undo=undo), timeout=_CALLS_S)
            for undo in (False, True)
        ],
    )


async def measure(features: str, tenants: int, rounds: int) -> list[Stall]:
    """Measure each input on a server of its own kind; the worst of some rounds counts."""
    turns, found = Turns(), []
    with tempfile.TemporaryDirectory(prefix="stalls-") as name, turns.watching():
        settings = _settings(Path(name), features, tenants)
        server = Server(Config.model_validate(settings))
        await server.start()
        gc.freeze()  # as `schedsvc serve` does
        bound_ms = BOUNDS_MS[features]

        async def worst(what: str, act: Callable[[], object], times: int = rounds) -> None:
            gc.collect()
            await asyncio.sleep(0)  # this turn is not the server's
            turns.begin()
            for _ in range(times):
                await asyncio.to_thread(act)
            found.append(turns.stall(what, features, bound_ms))

        try:
            callers = Callers(server.targets[0], str(server.metrics_url))
            for what, event in MESSAGES.items():
                events = filled(event)
                await worst(
                    f"{len(events):,} of {what}", partial(callers.session, _message(2, events))
                )
            await asyncio.to_thread(callers.admit_until_queued, tenants)
            for what, act in _calls(callers, tenants):
                await worst(what, act)
            turns.begin()
            if server._keeper is not None:
                await server._keeper.save()
            found.append(turns.stall("state save", features, bound_ms))
            turns.begin()
            settings["tenants"][0]["weight"] = 2
            asyncio.get_running_loop().call_soon(
                server.reconfigure, Config.model_validate(settings)
            )
            await asyncio.sleep(0.1)
            found.append(turns.stall("reload", features, RELOAD_MS))
        finally:
            await server.stop(None)
    return found


@click.command(epilog="Example: python -m bench.stalls --tenants 10000")
@click.option("--tenants", default=10_000, show_default=True, type=click.IntRange(1_000, 100_000))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--features", type=click.Choice(list(BOUNDS_MS)), help="Default: one, then the other."
)
@json_option
def main(tenants: int, rounds: int, features: str | None, as_json: bool) -> None:
    """Show the longest turn of each input; exit with status 1 if one exceeds its bound."""
    need_release_core()
    stalls = [
        stall
        for each in ([features] if features else BOUNDS_MS)
        for stall in asyncio.run(measure(each, tenants, rounds))
    ]
    rows = [asdict(stall) for stall in stalls]
    holds = all(stall.longest_ms <= stall.bound_ms for stall in stalls)
    verdict({"stalls": rows, "holds": holds}, as_json, _show)


def _show(report: dict[str, Any]) -> None:
    table = Table("input", "features", "longest turn", "bound")
    for row in report["stalls"]:
        missed = "" if row["longest_ms"] <= row["bound_ms"] else " missed"
        longest = f"{row['longest_ms']:.1f} ms{missed}"
        table.add_row(row["what"], row["features"], longest, f"{row['bound_ms']:g} ms")
    Console().print(table)


if __name__ == "__main__":
    main(prog_name="python -m bench.stalls")
