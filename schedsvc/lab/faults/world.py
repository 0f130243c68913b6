"""One run: with faults, while nothing may be wrong, then without, until all has ended."""

from __future__ import annotations

from pathlib import Path
from random import Random
from traceback import extract_tb
from typing import NamedTuple

from schedsvc_client.v1 import quota_pb2

from schedsvc.lab.faults.auditor import Auditor, PoolLimits, Terms, ViolationError
from schedsvc.lab.faults.configured import UNKNOWN_WEIGHT
from schedsvc.lab.faults.event_queue import EventQueue
from schedsvc.lab.faults.fault_injector import FaultInjector
from schedsvc.lab.faults.jobs import JobMaker
from schedsvc.lab.faults.operator import Operator
from schedsvc.lab.faults.options import FAULTS, Options
from schedsvc.lab.faults.server import TICK_NS, Server
from schedsvc.lab.faults.shim import Engine, Shim
from schedsvc.lab.faults.unary_client import UnaryClient

_WALL_START_NS = 1_700_000_000_000_000_000
_CALM_STEPS_MAX = 200_000
_PROBES = 24
"""Requests of one of the two runs that have to be decided alike."""

_KEPT_PPM = 125_000
_GAUGES = ("queued", "live_leases", "promised_tokens")


class Outcome(NamedTuple):
    """What a run came to."""

    events: int
    violation: str  # "": none
    faults: dict[str, int]
    digest: int


class World:
    """Everything there is in one run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        rnd = Random(options.seed ^ 0x5EED)  # noqa: S311 - no secret: one seed is one run
        self.event_queue = EventQueue(rnd)
        self.auditor = Auditor(terms_of(options))
        self.wall_skew_ns = 0
        self.server = Server(self.event_queue, options, self.auditor, self.wall_ns)
        self.maker = JobMaker(self.event_queue, options)
        self.tags = 0  # of injected requests
        self.engines = [Engine(pool, self.wall_ns()) for pool in options.pools]
        self.shims = [
            Shim(self.event_queue, self.server, options, engine, 10 * at + number, at + 1)
            for at, engine in enumerate(self.engines)
            for number in range(engine.options.shims)
        ]
        self.callers = [
            UnaryClient(self.event_queue, self.server, options, 0) for _ in range(options.callers)
        ]
        self.operator = Operator(self.event_queue, self.server, options)
        self.injector = FaultInjector(self)
        self._is_calm = False

    @property
    def events(self) -> int:
        """What has happened so far: on the agenda, and inside of messages."""
        return self.event_queue.events + self.auditor.events

    def wall_ns(self) -> int:
        """Read the wall clock, which may have been set back."""
        return _WALL_START_NS + self.event_queue.now_ns + self.wall_skew_ns

    def run(self) -> Outcome:
        """Run both phases."""
        violation = ""
        try:
            self._suffer()
            self._recover()
        except ViolationError as broken:
            violation = str(broken)
        except Exception as error:
            # Whatever the core or a client raises here, it would have raised in production.
            at = extract_tb(error.__traceback__)[-1]
            violation = f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
        counts = dict(self.injector.counts)
        for caller in self.callers:
            for name, count in caller.harm.items():
                counts[name] += count
        return Outcome(self.events, violation, counts, self.server.core.digest())

    def arrive(self, tenant: str | None = None) -> None:
        """Let one request arrive somewhere."""
        whom = int(self.event_queue.rnd.random() * (len(self.shims) + len(self.callers)))
        if whom < len(self.shims):
            shim = self.shims[whom]
            shim.ask(self.maker.job(shim.engine.options.name, tenant))
        else:
            caller = self.callers[whom - len(self.shims)]
            caller.ask(self.maker.job(tenant=tenant))

    def _arrivals(self, _: object) -> None:
        if not self._is_calm:
            self.arrive()
            self.event_queue.after(self.event_queue.soon(self.options.interval_ns), self._arrivals)

    def _strikes(self, _: object) -> None:
        if not self._is_calm:
            self.injector.strike()
            self.event_queue.after(self.event_queue.soon(self.options.fault_ns), self._strikes)

    def _suffer(self) -> None:
        """Live through as many events as the run has."""
        self._arrivals(None)
        self.event_queue.after(self.options.fault_ns, self._strikes)
        while self.events < self.options.events:
            self.event_queue.steps(16)  # there is always a next arrival

    def _recover(self) -> None:
        """No more faults: everything that is open has to end."""
        self._is_calm = True
        server = self.server
        server.start()
        server.resume()
        self.operator.rest()
        if server.saver:
            server.saver.is_calm = True
        for engine in self.engines:
            engine.token_ns = engine.options.token_ns
            engine.sleeps_until_ns = 0
        for shim in self.shims:
            shim.is_calm = True
            shim.unreachable_until_ns = 0
            shim.start()
        for caller in self.callers:
            caller.lost_permille = 0
        self._drain()
        self._check_rest()
        first, second = self._probe("first-"), self._probe("second-")
        if first != second:
            raise ViolationError("a second identical run was decided otherwise")

    def _drain(self) -> None:
        """Let everything happen that is still to happen."""
        if not self.event_queue.drain(_CALM_STEPS_MAX):
            raise ViolationError("without faults and arrivals, the world does not come to rest")

    def _check_rest(self) -> None:
        """All gauges are 0, and nobody waits for anything."""
        server, books = self.server, self.auditor.books
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
        for shim in self.shims:
            p = shim.protocol
            left = {"requests": p.open_requests, "leases": p.open_leases, "ends": p.unacknowledged}
            if any(left.values()) or shim.jobs or shim.running:
                raise ViolationError(f"at rest a shim has something open: {left}")

    def _probe(self, prefix: str) -> tuple[int, int]:
        """Let service go on: the same few requests, from a state that has forgotten all."""
        server = self.server
        server.forget()
        self.event_queue.rnd.seed(self.options.seed)
        caller = UnaryClient(self.event_queue, server, self.options, 0)
        caller.lost_permille = 0
        maker = JobMaker(self.event_queue, self.options, prefix)
        for _ in range(_PROBES):
            caller.ask(maker.job())
            self.event_queue.after(self.event_queue.soon(self.options.interval_ns), lambda _: None)
            self.event_queue.step()
        self._drain()
        self._check_rest()
        granted = server.core.stats(server.core_now())["totals"]["granted"]
        return server.core.digest(), granted and len(caller.running)


def _bypass_max(options: Options) -> int | None:
    """Say how often a head may be bypassed, where arrivals alone tell who is the head.

    What a pool has outgrown, because it became smaller, waits for its eviction, not for its turn.
    """
    core = options.core
    if core["policy"] != "fcfs" or len(options.pools) > 1 or "capacity-changed" in options.faults:
        return None
    if options.quotas is not None or options.classes is not None or _reorders(options):
        return None
    backfills = core.get("dispatch", "strict") == "backfill"
    return int(core["bypass_max"]) if backfills else 0


def _reorders(options: Options) -> bool:
    """Whether arrivals, counters and classes alone do not tell who is next."""
    by_deadline = options.core.get("flow_order") == "deadline"
    return by_deadline or "mode-dry-run" in options.faults


def terms_of(options: Options) -> Terms:
    """Say what the scheduler promises under these options."""
    core = options.core
    headroom = core["headroom_ppm"]
    # A core whose headroom adapts keeps more, and some for those below their share.
    adapts = "headroom_max_ppm" in core
    limited = options.quotas is not None
    all_report = options.reports_permille == 1_000
    counts = core["policy"] in ("vtc", "lcf") and all_report and not limited
    counts = counts and options.classes is None  # counters are compared inside of a class
    delays = "delay_factor_milli" in core or options.limits is not None
    may_pass = core.get("dispatch", "strict") == "backfill"
    most = max(headroom, core["headroom_max_ppm"]) + _KEPT_PPM if adapts else headroom
    return Terms(
        tenants=options.tenants,
        shares_unknown=options.shares_unknown,
        queue_ttl_ns=core["queue_ttl_ns"],
        lease_ttl_ns=core["lease_ttl_ns"],
        lease_grace_ns=core["lease_grace_ns"],
        answer_ttl_ns=core["answer_ttl_ns"],
        answers_max=core["answers_max"],
        flow_queue_max=core["flow_queue_max"],
        queue_max=core["queue_max"],
        headroom_ppm=min(headroom, core.get("headroom_min_ppm", headroom)),
        headroom_most_ppm=most,
        tick_ns=TICK_NS,
        input_price=1_000_000,
        output_price=2_000_000,
        cached_price=core["cached_price_ppm"],
        sum_form=core.get("ledger", "sum") == "sum",
        # What an engine holds beyond all promises is believed for a while, also where it is false.
        work_conserving=not ((adapts and "telemetry-false" in options.faults) or limited or delays),
        paces_grants=bool(core.get("grant_pacing")),
        bypass_max=_bypass_max(options),
        fair=options.fair and core["policy"] == "vtc",
        lifts=core["policy"] == "vtc",
        lift_queued=core.get("lift", "active") == "queued",
        counts_exactly=counts,
        serves_in_order=counts and not (may_pass or len(options.pools) > 1 or _reorders(options)),
        unknown_weight=UNKNOWN_WEIGHT,
        pools=len(options.pools),
        quotas=options.quotas,
        classes=options.classes,
        strict_classes=options.classes is not None
        and not (
            limited
            or may_pass
            or len(options.pools) > 1
            or not {"capacity-changed", "mode-dry-run"}.isdisjoint(options.faults)
        ),
        limits=options.limits or PoolLimits(),
        by_deadline=core.get("flow_order") == "deadline",
        early_refusal=bool(core.get("early_refusal")),
        adapters={n: tokens for n, tokens in (options.adapters or {}).items() if tokens >= 0},
    )


__all__ = ["FAULTS", "Outcome", "World", "terms_of"]
