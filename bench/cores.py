"""Makes cores in the states that are measured. Time is made up, so each run decides the same."""

import time
from collections import deque

from bench.messages import (
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    OUTPUT_TOKENS_MAX,
    POOL_EPOCH,
    Traffic,
    admits,
    tenant,
    zipf,
)
from schedsvc._core import COMPLETED, Decision, Scheduler, Session

__all__ = ["Overload", "Picks", "Running", "Wire"]

_LARGE = 1 << 24
_EVENT_NS = 1_000
_HOUR_NS = 3_600_000_000_000
_POOL = {"capacity_tokens": 1 << 27, "block_size_tokens": 16}
Ask = tuple[int, int, bytes]


def _core(flows: int, running_max: int, scheduler: type[Scheduler]) -> Scheduler:
    """Make a core with one pool; whatever limits it has are out of reach but `running_max`."""
    core = scheduler(
        queue_max=_LARGE,
        flow_queue_max=_LARGE,
        leases_max=_LARGE,
        session_open_max=1_000_000,
        queue_ttl_ns=_HOUR_NS,
        lease_ttl_ns=_HOUR_NS,
    )
    for flow in range(flows):
        core.set_flow(tenant(flow).encode(), 1_000)
    core.set_pool(0, b"gpu-0", POOL_EPOCH, max_running=running_max, **_POOL)
    return core


class Overload:
    """Holds a full pool, and `queued` requests behind it, of flows drawn by Zipf's law.

    Every lease that ends makes room for exactly one request.
    """

    RUNNING = 256

    def __init__(
        self,
        flows: int,
        queued: int,
        answers: int = 0,
        scheduler: type[Scheduler] = Scheduler,
    ) -> None:
        """Begin once `answers` answers are stored: then memory no longer grows."""
        self.core = _core(flows, self.RUNNING, scheduler)
        self._draws = zipf(flows)
        self._now_ns = 0
        self._asked = 0
        #: Oldest first.
        self.leases: deque[int] = deque()
        self._granted: list[Decision] = []
        for _ in range(queued + self.RUNNING):
            now_ns, flow, request_id = self.next_ask()
            self.core.admit(now_ns, flow, request_id, INPUT_TOKENS, OUTPUT_TOKENS_MAX)
            self._collect()
        if queued:
            for _ in range(answers):
                self.end_one()
                self.admit(*self.next_ask())

    def tick(self) -> int:
        """Return the next moment."""
        self._now_ns += _EVENT_NS
        return self._now_ns

    def next_ask(self) -> Ask:
        """Return the time, flow and id of the next request."""
        flow = self._draws[self._asked % len(self._draws)]
        self._asked += 1
        return self.tick(), flow, b"r-%010d" % self._asked

    def _collect(self) -> None:
        self.leases.extend(decision.lease_id for decision in self.core.poll(self._now_ns))

    def end_one(self) -> None:
        """End the oldest lease, and let the next request have its place."""
        self.complete(self.tick(), self.leases.popleft())
        self._collect()

    def refill(self) -> None:
        """Take over the last grant, and queue one request more."""
        self.leases.extend(decision.lease_id for decision in self._granted)
        self._granted = []
        self.admit(*self.next_ask())

    def admit(self, now_ns: int, flow: int, request_id: bytes) -> None:
        """Ask for a request, and let the core decide what follows from it."""
        self.core.admit(now_ns, flow, request_id, INPUT_TOKENS, OUTPUT_TOKENS_MAX)
        self.core.poll(now_ns)

    def complete_and_grant(self, now_ns: int, lease_id: int) -> None:
        """End a lease, and let the core grant another."""
        self.complete(now_ns, lease_id)
        self._granted = self.core.poll(now_ns)

    def complete(self, now_ns: int, lease_id: int) -> None:
        """End a lease."""
        self.core.complete(now_ns, lease_id, POOL_EPOCH, COMPLETED, INPUT_TOKENS, 0, OUTPUT_TOKENS)

    def slice_of_admits(self, steps: int) -> list[float]:
        """Return the mean time of an Admit, in ns; as many leases end before, untimed."""
        for _ in range(steps):
            self.end_one()
        asks = [self.next_ask() for _ in range(steps)]
        admit, poll = self.core.admit, self.core.poll
        began_ns = time.perf_counter_ns()
        for now_ns, flow, request_id in asks:
            admit(now_ns, flow, request_id, INPUT_TOKENS, OUTPUT_TOKENS_MAX)
            poll(now_ns)
        return [(time.perf_counter_ns() - began_ns) / steps]


class Running(Overload):
    """Keeps the queue empty: each request is granted at once. Some leases run all along."""

    def __init__(self, flows: int, answers: int, scheduler: type[Scheduler] = Scheduler) -> None:
        """Begin once `answers` answers are stored."""
        super().__init__(flows, queued=0, scheduler=scheduler)
        self.core.set_pool(self.tick(), b"gpu-0", POOL_EPOCH, max_running=0, **_POOL)
        self._reports = 0
        for _ in range(answers):
            self.pair(*self.next_ask())

    def pair(self, now_ns: int, flow: int, request_id: bytes) -> None:
        """Ask for a request, have it granted, and end it."""
        core = self.core
        core.admit(now_ns, flow, request_id, INPUT_TOKENS, OUTPUT_TOKENS_MAX)
        lease_id = core.poll(now_ns)[0].lease_id
        core.complete(now_ns, lease_id, POOL_EPOCH, COMPLETED, INPUT_TOKENS, 0, OUTPUT_TOKENS)

    def next_report(self) -> tuple[int, int, int]:
        """Return the time, lease and output tokens of the next Progress: one token more."""
        rounds, at = divmod(self._reports, len(self.leases))
        self._reports += 1
        return self.tick(), self.leases[at], rounds + 1

    def progress(self, now_ns: int, lease_id: int, output_tokens: int) -> None:
        """Report on a lease."""
        self.core.progress(now_ns, lease_id, POOL_EPOCH, INPUT_TOKENS, 0, output_tokens)


class Picks:
    """Every flow has requests queued, and `AT_ONCE` leases end together: `AT_ONCE` picks in a row.

    The requests belong to a Session, as a shim's do, so that a pick is what the core does and not
    what Python makes of it: choose the flow, charge it, open the lease, take the next deadline.
    """

    AT_ONCE = 64
    _DEPTH = 2

    def __init__(self, flows: int, scheduler: type[Scheduler] = Scheduler) -> None:
        self.core = _core(flows, self.AT_ONCE, scheduler)
        self.stream = self.core.open_session()
        self._now_ns = 1
        self._lease_id = 1
        self._traffic = Traffic(2 * self.AT_ONCE, range(flows))
        self.stream.receive(self._now_ns, self._traffic.hello())
        for _ in range(1 + self._DEPTH * flows // self.AT_ONCE):
            self._ask()
        self.core.poll(self._now_ns)
        #: The messages that the core sent to the shim, serialised.
        self.answers: list[bytes] = []
        self._take()

    def _ask(self) -> None:
        self.stream.receive(self._now_ns, self._traffic.asks())

    def _take(self) -> None:
        while (answer := self.stream.take(self._now_ns)) is not None:
            self.answers.append(answer)

    def slice(self, times: int = 1) -> list[float]:
        """Return the mean time of a pick in ns, over `times` polls."""
        spent_ns = 0
        for _ in range(times):
            self._now_ns += _EVENT_NS
            for _ in range(self.AT_ONCE):
                usage = (INPUT_TOKENS, 0, 0)
                self.core.complete(self._now_ns, self._lease_id, POOL_EPOCH, COMPLETED, *usage)
                self._lease_id += 1
            began_ns = time.perf_counter_ns()
            self.core.poll(self._now_ns)
            spent_ns += time.perf_counter_ns() - began_ns
            self._take()
            # Equal requests are picked in the order of the flows, so each stays as backlogged.
            self._ask()
        return [spent_ns / times / self.AT_ONCE]


class Wire:
    """Passes serialised messages into a core and out of it, as the service does."""

    FLOWS = 1_000

    def __init__(self) -> None:
        self.core = _core(self.FLOWS, 0, Scheduler)
        self.now_ns = 1
        self.stream: Session = self.core.open_session()
        self._lease_id = 1
        self._admits = admits(self.FLOWS)

    def store_answers(self, answers: int) -> None:
        """Begin and end `answers` requests, so that the core stores their answers."""
        traffic = Traffic(128, zipf(self.FLOWS), series=1)
        self.open(traffic)
        for message in traffic.take(answers // 64):
            self.exchange(message)
        self.stream.close(self.now_ns)
        self.stream = self.core.open_session()
        self._lease_id = self.core.stats(self.now_ns, 0)["totals"]["granted"] + 1

    def next_admit(self) -> tuple[int, bytes]:
        """End the lease before, and return the time and the next AdmitRequest."""
        self.now_ns += _EVENT_NS
        last = self._lease_id - 1
        self.core.complete(self.now_ns, last, POOL_EPOCH, COMPLETED, INPUT_TOKENS, 0, OUTPUT_TOKENS)
        self._lease_id += 1
        return self.now_ns, next(self._admits)

    def admit(self, now_ns: int, data: bytes) -> int | bytes:
        """Decide on an AdmitRequest."""
        return self.core.admit_wire(now_ns, 0, data)

    def open(self, traffic: Traffic) -> None:
        """Greet, and begin the first leases."""
        self.exchange(traffic.hello())
        traffic.learn(self.exchange(traffic.asks()))

    def exchange(self, message: bytes) -> bytes:
        """Pass on one SessionRequest, and return the SessionResponses to it."""
        self.now_ns += _EVENT_NS
        now_ns = self.now_ns
        stream = self.stream
        stream.receive(now_ns, message)
        self.core.poll(now_ns)
        answers = []
        while (answer := stream.take(now_ns)) is not None:
            answers.append(answer)
        return answers[0] if len(answers) == 1 else b"".join(answers)
