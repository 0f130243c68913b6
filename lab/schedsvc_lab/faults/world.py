"""Holds everything of one run: the scheduler, its callers, their engines, an operator."""

from random import Random

from schedsvc_lab.faults.auditor import Auditor
from schedsvc_lab.faults.event_queue import EventQueue
from schedsvc_lab.faults.jobs import JobMaker
from schedsvc_lab.faults.operator import Operator
from schedsvc_lab.faults.options import Options
from schedsvc_lab.faults.server import Server
from schedsvc_lab.faults.shim import Engine, Shim
from schedsvc_lab.faults.terms import terms_of
from schedsvc_lab.faults.unary_client import UnaryClient

_WALL_START_NS = 1_700_000_000_000_000_000


class World:
    """Holds everything of one run."""

    def __init__(self, options: Options, event_queue: EventQueue | None = None) -> None:
        self.options = options
        rnd = Random(options.seed ^ 0x5EED)  # noqa: S311 - no secret: one seed is one run
        self.event_queue = event_queue or EventQueue(rnd)
        self.auditor = Auditor(terms_of(options))
        self.wall_skew_ns = 0
        self.server = Server(self.event_queue, options, self.auditor, self.wall_ns)
        self.maker = JobMaker(self.event_queue, options)
        self.tags = 0  # tags given to injected requests
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

    @property
    def events(self) -> int:
        """Return the number of events so far: on the agenda, and inside of messages."""
        return self.event_queue.events + self.auditor.events

    def wall_ns(self) -> int:
        """Read the wall clock, which may have been set back."""
        return _WALL_START_NS + self.event_queue.now_ns + self.wall_skew_ns

    def arrive(self, tenant: str | None = None) -> None:
        """Let one request arrive somewhere."""
        whom = int(self.event_queue.rnd.random() * (len(self.shims) + len(self.callers)))
        if whom < len(self.shims):
            shim = self.shims[whom]
            shim.ask(self.maker.job(shim.engine.options.name, tenant))
        else:
            caller = self.callers[whom - len(self.shims)]
            caller.ask(self.maker.job(tenant=tenant))
