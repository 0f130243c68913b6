"""Runs with faults, while nothing may be wrong, then without, until all has ended."""

from pathlib import Path
from traceback import extract_tb
from typing import NamedTuple

from schedsvc_client.v1 import quota_pb2

from schedsvc_lab.faults.auditor import ViolationError
from schedsvc_lab.faults.fault_injector import FaultInjector
from schedsvc_lab.faults.hostile import Hostile
from schedsvc_lab.faults.jobs import JobMaker
from schedsvc_lab.faults.options import Options
from schedsvc_lab.faults.unary_client import UnaryClient
from schedsvc_lab.faults.world import World

_CALM_STEPS_MAX = 200_000
_PROBES = 24
"""Requests of one of the two runs that have to be decided alike."""

_GAUGES = ("queued", "live_leases", "promised_tokens")


class Outcome(NamedTuple):
    """Holds the result of a run."""

    events: int
    violation: str  # "": none
    faults: dict[str, int]
    digest: int


def described(error: Exception) -> str:
    """Say what broke: a promise, or the core or a client, as it would have in production."""
    if isinstance(error, ViolationError):
        return str(error)
    at = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"


class Run:
    """Lives through both phases of a world."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._world = World(options)
        self._events = self._world.event_queue
        hostile = options.hostile
        self._hostile = None if hostile is None else Hostile(self._world, hostile)
        self._injector = FaultInjector(self._world)
        self._is_calm = False

    def play(self) -> Outcome:
        """Run both phases."""
        violation = ""
        try:
            self._suffer()
            self._recover()
        except Exception as error:
            violation = described(error)
        counts = dict(self._injector.counts)
        clients, hostile = list(self._world.callers), self._hostile
        if hostile is not None:
            counts |= hostile.counts
            clients.append(hostile.client)
        for caller in clients:
            for name, count in caller.harm.items():
                counts[name] += count
        return Outcome(self._world.events, violation, counts, self._world.server.core.digest())

    def _arrivals(self, _: object) -> None:
        if not self._is_calm:
            self._world.arrive()
            self._events.after(self._events.soon(self._options.interval_ns), self._arrivals)

    def _strikes(self, _: object) -> None:
        if not self._is_calm:
            self._injector.strike()
            self._events.after(self._events.soon(self._options.fault_ns), self._strikes)

    def _suffer(self) -> None:
        """Run as many events as the run has."""
        self._arrivals(None)
        self._events.after(self._options.fault_ns, self._strikes)
        while self._world.events < self._options.events:
            self._events.steps(16)  # there is always a next arrival

    def _recover(self) -> None:
        """Stop the faults: everything that is open has to end."""
        self._is_calm = True
        server = self._world.server
        server.start()
        server.resume()
        self._world.operator.rest()
        if server.saver:
            server.saver.is_calm = True
        for engine in self._world.engines:
            engine.token_ns = engine.options.token_ns
            engine.sleeps_until_ns = 0
        for shim in self._world.shims:
            shim.is_calm = True
            shim.unreachable_until_ns = 0
            shim.start()
        for caller in self._world.callers:
            caller.lost_permille = 0
        if self._hostile is not None:
            self._hostile.rest()
        self._drain()
        self._check_rest()
        first, second = self._probe("first-"), self._probe("second-")
        if first != second:
            raise ViolationError("a second identical run was decided otherwise")

    def _drain(self) -> None:
        """Let everything happen that is still to happen."""
        if not self._events.drain(_CALM_STEPS_MAX):
            raise ViolationError("without faults and arrivals, the world does not come to rest")

    def _check_rest(self) -> None:
        """Require that all gauges are 0 and that no request or lease is open."""
        server, books = self._world.server, self._world.auditor.books
        server.check()
        stats = server.core.stats(server.core_now())
        rows = [stats["totals"], *stats["flows"], *stats["pools"]]
        gauges = {name: row[name] for row in rows for name in _GAUGES if row.get(name)}
        is_open = bool(books.tags or books.lagging) and not books.is_lost
        if gauges or is_open:
            raise ViolationError(f"at rest something is open: {gauges} {list(books.tags)[:3]}")
        for row in stats["flows"]:
            for quota in row["quotas"]:
                in_use = quota["remaining"] != quota["limit"]
                if in_use and quota["kind"] == quota_pb2.LIMIT_KIND_CONCURRENT_REQUESTS:
                    raise ViolationError(f"at rest a quota is in use: {row['tenant']}: {quota}")
        for shim in self._world.shims:
            p = shim.protocol
            left = {"requests": p.open_requests, "leases": p.open_leases, "ends": p.unacknowledged}
            if any(left.values()) or shim.jobs or shim.running:
                raise ViolationError(f"at rest a shim has something open: {left}")

    def _probe(self, prefix: str) -> tuple[int, int]:
        """Let service go on: the same few requests, from a state that has forgotten all."""
        server = self._world.server
        server.forget()
        self._events.rnd.seed(self._options.seed)
        caller = UnaryClient(self._events, server, self._options, 0)
        caller.lost_permille = 0
        maker = JobMaker(self._events, self._options, prefix)
        for _ in range(_PROBES):
            caller.ask(maker.job())
            self._events.after(self._events.soon(self._options.interval_ns), lambda _: None)
            self._events.step()
        self._drain()
        self._check_rest()
        granted = server.core.stats(server.core_now())["totals"]["granted"]
        return server.core.digest(), granted and len(caller.running)
