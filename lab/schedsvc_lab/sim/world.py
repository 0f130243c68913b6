"""Runs in virtual time: arrivals, what decides, engines, reports on their way."""

import gc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from schedsvc._core import GRANTED, REJECTED_TOO_LARGE, InvariantError
from schedsvc_lab.engine.errors import EngineRequestError
from schedsvc_lab.engine.step import EngineGauges
from schedsvc_lab.sim.requests import NEVER, Outcomes, Requests
from schedsvc_lab.sim.runner import EngineRunner, Report
from schedsvc_lab.sim.scheduler_adapter import SchedulerAdapter, Telemetry

# After everything that happens.
_FAR_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Settings:
    """Says how the shims report and how often the world looks. Times in ns.

    Each engine's shim reports all its running requests and the engine's own figures every
    `progress_ns`, and each end at once;
    every report reaches the scheduler `report_delay_ns` later. With `round_steps` > 0 the scheduler
    considers new work only every `round_steps` decode steps, right after a report, or when the
    engine is idle (the server of the VTC paper). The books are verified at every
    `check_samples`-th sample.
    """

    progress_ns: int = 200_000_000
    report_delay_ns: int = 0
    sample_ns: int = 1_000_000_000
    round_steps: int = 0
    check_samples: int = 1_024


class Occupancy:
    """States the KV cache of all engines in tokens; `reserved` is None without a scheduler."""

    __slots__ = ("at_ns", "reserved", "used")

    def __init__(self, at_ns: int, used: int, reserved: int | None) -> None:
        self.at_ns = at_ns
        self.used = used
        self.reserved = reserved


class World:
    """`run()` serves every request, and verifies the books on the way and at the end.

    At one moment things happen in this order: steps end, reports arrive, requests arrive, the
    scheduler decides, engines begin their next steps. Raises InvariantError or EngineInvariantError
    if a request is lost or served twice, or books do not balance.
    """

    def __init__(
        self,
        requests: Requests,
        adapter: SchedulerAdapter,
        runners: Sequence[EngineRunner],
        settings: Settings,
    ) -> None:
        if settings.round_steps and len(runners) > 1:
            raise ValueError("round_steps: needs exactly one engine")
        self.requests = requests
        self.outcomes = Outcomes(len(requests))
        self.occupancy: list[Occupancy] = []
        self.now_ns = 0
        self.ended = 0
        self._adapter = adapter
        self._runners = list(runners)
        self._contents = requests.contents
        self._count = len(requests)
        self._arrival_times = requests.arrival_ns
        self._progress_ns = settings.progress_ns
        self._delay_ns = settings.report_delay_ns
        self._sampling_ns = settings.sample_ns
        self._check_samples = settings.check_samples
        self._listens = adapter.listens
        self._rounds = settings.round_steps > 0
        self._arrived = 0
        self._arrival_ns = self._next_arrival_ns()
        self._cached: dict[int, int] = {}  # tokens from the prefix cache, not reported yet
        # Due, and the ended request or a report on running ones.
        self._reports: deque[tuple[int, int | Report]] = deque()
        self._telemetry: deque[tuple[int, int, Telemetry]] = deque()  # due, pool, what
        self._tick_ns = settings.progress_ns
        self._sample_ns = 0

    def run(self, watch: Callable[[int], None] | None = None) -> None:
        """Serve all requests; `watch` hears now and then how many have ended."""
        # Objects that a run makes often have no cycles: the collector would look in vain.
        collects = gc.isenabled()
        gc.disable()
        try:
            self._run(watch)
        finally:
            if collects:
                gc.enable()

    def _run(self, watch: Callable[[int], None] | None) -> None:
        while self.ended < self._count or self._reports:
            sample_ns = self._sample_ns
            self._step(self._next_ns())
            if watch is not None and sample_ns != self._sample_ns:
                watch(self.ended)
        self._check(ended=True)
        if watch is not None:
            watch(self.ended)

    def digest(self) -> str:
        """Digest of all verdicts in their order, of every request's times, and of the core's log.

        16 hexadecimal digits. O(requests).
        """
        outcomes = self.outcomes
        sum_ = blake2b(digest_size=8)
        for column in (
            outcomes.order,
            outcomes.decided_ns,
            outcomes.outcome,
            outcomes.pool,
            outcomes.first_ns,
            outcomes.end_ns,
        ):
            sum_.update(column)
        sum_.update((self._adapter.digest() & (2**64 - 1)).to_bytes(8, "little"))
        return sum_.hexdigest()

    def gauges(self) -> list[EngineGauges]:
        """Take the figures of each engine."""
        return [runner.engine.gauges() for runner in self._runners]

    def _next_ns(self) -> int:
        """Find when something happens next. O(engines)."""
        next_ns, works = self._arrival_ns, False
        for runner in self._runners:
            if NEVER != runner.end_ns < next_ns:
                next_ns = runner.end_ns
            if runner.live:
                works = True
        if self._reports and self._reports[0][0] < next_ns:
            next_ns = self._reports[0][0]
        if self._telemetry and self._telemetry[0][0] < next_ns:
            next_ns = self._telemetry[0][0]
        if not self._rounds:
            if works and self._tick_ns < next_ns and self._listens:
                next_ns = self._tick_ns
            deadline_ns = self._adapter.next_ns()
            if 0 <= deadline_ns < next_ns:
                next_ns = deadline_ns
        if next_ns == _FAR_NS:
            lost = self._count - self.ended
            raise InvariantError(f"{lost} requests wait and nothing will ever happen")
        return max(self.now_ns, next_ns)

    def _next_arrival_ns(self) -> int:
        return self._arrival_times[self._arrived] if self._arrived < self._count else _FAR_NS

    def _step(self, now_ns: int) -> None:
        """Let everything of one moment happen."""
        self.now_ns = now_ns
        for runner in self._runners:
            if runner.end_ns == now_ns:
                self._finish(runner)
        # Without rounds, the scheduler may decide whenever something has happened.
        decides = not self._rounds or self._runners[0].round_is_due()
        if decides and (self._rounds or now_ns >= self._tick_ns) and self._listens:
            self._tick()
        if self._reports or self._telemetry:
            self._hear()
        while self._arrival_ns <= now_ns:
            self._adapter.arrive(now_ns, self._arrived)
            self._arrived += 1
            self._arrival_ns = self._next_arrival_ns()
        if decides:
            self._decide()
        for runner in self._runners:
            if runner.end_ns == NEVER:
                runner.plan(now_ns)
        if now_ns >= self._sample_ns:
            self._sample()

    def _hear(self) -> None:
        """Let the scheduler hear the messages that have arrived by now."""
        now_ns = self.now_ns
        while self._reports and self._reports[0][0] <= now_ns:
            self._report(self._reports.popleft()[1])
        while self._telemetry and self._telemetry[0][0] <= now_ns:
            _, pool, told = self._telemetry.popleft()
            self._adapter.telemetry(now_ns, pool, told)

    def _finish(self, runner: EngineRunner) -> None:
        """Note first tokens and ends of the step that is over, and report the ends."""
        first, finished = runner.finish()
        for index in first:
            self.outcomes.first_ns[index] = self.now_ns
        for index in finished:
            self._end(index)
            if index in runner.cached:
                self._cached[index] = runner.cached[index]
            self._tell(index)

    def _tick(self) -> None:
        """Let every shim report its running requests, and its engine's telemetry."""
        due_ns = self.now_ns + self._delay_ns
        # With several engines, all reports on requests come before those on engines.
        waits = self._delay_ns > 0 or len(self._runners) > 1
        for pool, runner in enumerate(self._runners):
            report = runner.report(self.now_ns)
            if runner.live:
                self._tell(report)
            running, waiting, preemptions = runner.engine.counts()
            told = Telemetry(running, waiting, report.used_tokens, preemptions)
            if waits:
                self._telemetry.append((due_ns, pool, told))
            else:
                self._adapter.telemetry(due_ns, pool, told)
        self._tick_ns = self.now_ns + self._progress_ns

    def _tell(self, report: int | Report) -> None:
        """Send the end of a request, or a report on those that run."""
        if self._delay_ns:
            self._reports.append((self.now_ns + self._delay_ns, report))
        else:
            self._report(report)

    def _report(self, report: int | Report) -> None:
        if isinstance(report, Report):
            self._adapter.progress(self.now_ns, report)
        else:
            self._adapter.complete(self.now_ns, report, True, self._cached.pop(report, 0))

    def _decide(self) -> None:
        """Take the verdicts that have fallen, and pass granted requests to their engine."""
        outcomes, requests = self.outcomes, self.requests
        verdicts = self._adapter.poll(self.now_ns)
        for verdict in verdicts:
            index, outcome, pool = verdict.request, verdict.outcome, verdict.pool
            if outcomes.outcome[index]:
                raise InvariantError(f"request {index} got a second verdict")
            outcomes.decided_ns[index] = self.now_ns
            outcomes.order.append(index)
            if outcome == GRANTED:
                try:
                    self._runners[pool].add(
                        self.now_ns,
                        index,
                        requests.prompt_tokens[index],
                        requests.output_tokens[index],
                        self._keys(index, pool),
                        self._adapter_of(index, pool),
                    )
                except EngineRequestError:
                    self._adapter.complete(self.now_ns, index, False)
                    outcome = REJECTED_TOO_LARGE
                else:
                    outcomes.pool[index] = pool
            outcomes.outcome[index] = outcome
            if outcome != GRANTED:
                self.ended += 1
        if self._rounds:
            self._runners[0].round_done()

    def _keys(self, index: int, pool: int) -> tuple[tuple[int, int], ...]:
        """Name what the blocks of a prompt hold, where the engine keeps them. O(blocks)."""
        config = self._runners[pool].engine.config
        if self._contents is None or config.prefix_cache == "off":
            return ()
        requests = self.requests
        place, prompt_tokens = requests.place[index], requests.prompt_tokens[index]
        return self._contents.keys(place, prompt_tokens, config.block_size_tokens)

    def _adapter_of(self, index: int, pool: int) -> str | None:
        """Name the adapter that a request needs, where the engine has adapters."""
        if self._contents is None or not self._runners[pool].engine.config.adapters_max:
            return None
        return self._contents.adapter(self.requests.place[index])

    def _end(self, index: int) -> None:
        if self.outcomes.end_ns[index] != NEVER:
            raise InvariantError(f"request {index} has ended twice")
        self.outcomes.end_ns[index] = self.now_ns
        self.ended += 1

    def _sample(self) -> None:
        used = 0
        for runner in self._runners:
            used += runner.used_tokens(self.now_ns)
        reserved = self._adapter.reserved_tokens(self.now_ns)
        self.occupancy.append(Occupancy(self.now_ns, used, reserved))
        self._sample_ns = self.now_ns + self._sampling_ns
        if len(self.occupancy) % self._check_samples == 0:
            self._check(ended=False)

    def _check(self, *, ended: bool) -> None:
        self._adapter.check(self.now_ns, ended)
        for runner in self._runners:
            runner.engine.check()
            gauges = runner.engine.gauges()
            held = gauges.used_blocks - gauges.adapters_loaded * runner.engine.config.adapter_blocks
            if ended and (gauges.running or gauges.waiting or gauges.swapped or held):
                raise InvariantError(f"after the run an engine still holds work: {gauges}")
        if ended and len(self.outcomes.order) != self._count:
            raise InvariantError("a request has no verdict")
