"""Runs a world whose members lead one set of pools in turn, with an engine that fences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.cluster.library import term_keys_of
from schedsvc.cluster.signing import open_row, seal_row
from schedsvc.cluster.terms import TERM_MS
from schedsvc_lab.faults.cluster.led import LedProcess
from schedsvc_lab.faults.cluster.options import ClusterOptions, Tenant
from schedsvc_lab.faults.cluster.process import Process
from schedsvc_lab.faults.cluster.term_books import Fence
from schedsvc_lab.faults.cluster.world import World

__all__ = ["SetWorld"]

_MS = 1_000_000
_SECRET = b"a secret of the set, with 32 bytes"
_OTHER = "other"
#: A client moves on after a silence of this length.
_SILENT_NS = 1_500 * _MS


class _Ask:
    """Represents a request that a client repeats until an engine runs it."""

    __slots__ = ("is_over", "tenant", "tokens", "tries")

    def __init__(self, tenant: Tenant, tokens: tuple[int, int]) -> None:
        self.tenant, self.tokens = tenant, tokens
        self.tries = 0
        self.is_over = False


class SetWorld(World):
    """Holds the members of one set, their clients, and the engine behind them."""

    def __init__(self, options: ClusterOptions, folder: Path) -> None:
        """`folder` holds the files of members: their secret and their highest terms."""
        super().__init__(options)
        (folder / "secret").write_bytes(_SECRET)
        self._folder = folder
        self.fence = Fence()
        self._target = 0
        self._other_term = 0
        self.open: dict[int, _Ask] = {}

    def _process(self, name: str) -> Process:
        self._lives += 1
        config = self._config(self.options.set_config, name, str(self._folder))
        return LedProcess(self, config, self._lives)

    def process_at(self, target: str) -> Process | None:
        """Return the process that listens at a target."""
        place = self.options.members.index(target.partition(".")[0])
        return self.processes[place]

    def begin(self) -> None:
        """Start all members and the clients."""
        self._keep()
        for name in self.options.members:
            self.processes.append(self._process(name))
        for _ in range(2 * self.options.open_each):
            self.queue.after(self.queue.soon(100 * _MS), self._arrive_next)

    def _arrive_next(self, _: object = None) -> None:
        if not self.is_calm:
            self.arrive()

    def arrive(self) -> None:
        """Let a client have a request."""
        rnd, options = self.queue.rnd, self.options
        self._asked += 1
        tokens = 1 + rnd.randrange(options.input_max), 1 + rnd.randrange(options.output_max)
        self.open[self._asked] = _Ask(rnd.choice(options.tenants), tokens)
        self._try(self._asked)

    def ask(self, place: int, tenant: Tenant) -> bool:
        """Send a request of a burst."""
        self._arrive_next()
        return True

    def _try(self, number: int) -> None:
        """Ask the present target, and try the next if it is silent."""
        job = self.open.get(number)
        if job is None:
            return
        job.tries += 1
        tries = job.tries
        process = self.processes[self._target]

        def moves_on(_: object = None) -> None:
            if job.tries == tries and not job.is_over:
                self._target = (self._target + 1) % len(self.processes)
                self.queue.after(self.queue.around(200 * _MS), lambda _: self._try(number))

        def failed(target: str) -> None:
            if job.tries != tries or job.is_over:
                return
            if not target:
                moves_on()
                return
            self._target = self.options.members.index(target.partition(".")[0])
            self.queue.after(self.queue.around(200 * _MS), lambda _: self._try(number))

        def is_silent(_: object) -> None:
            if job.tries != tries or job.is_over:
                return
            if process.is_dead or process.paused_until_ns > self.queue.now_ns:
                moves_on()
            else:
                self.queue.after(_SILENT_NS, is_silent)

        if process.is_dead or not process.is_ready:
            moves_on()
            return
        self.queue.after(_SILENT_NS, is_silent)
        ask = pb.AdmitRequest(
            request_id=f"r{number}",
            tenant=job.tenant.name,
            input_tokens=[job.tokens[0]],
            max_output_tokens=job.tokens[1],
        )
        assert isinstance(process, LedProcess)

        def told(answer: pb.AdmitResponse) -> None:
            self._told_job(number, job, tries, process, answer)

        process.ask_leader(ask, self.fence.highest[0], told, failed)

    def _told_job(
        self, number: int, job: _Ask, tries: int, process: LedProcess, answer: pb.AdmitResponse
    ) -> None:
        self.books.digest = hash((self.books.digest, number, self.queue.now_ns, answer.outcome))
        if job.is_over or job.tries != tries:
            return
        stated = answer.leadership
        if answer.outcome != pb.OUTCOME_GRANTED or not self.fence.obeys(stated.term, stated.leader):
            self.queue.after(self.queue.around(400 * _MS), lambda _: self._try(number))
            return
        self.terms.obeyed(stated.term, stated.leader)
        job.is_over = True
        del self.open[number]
        self.running += 1
        grant, driver = answer.grant, process.led.driver
        lasts_ns = self.queue.around(job.tokens[1] * self.options.token_ns)
        self.queue.after(lasts_ns, lambda _: self._ended(job, process, driver, grant))

    def _ended(self, job: _Ask, process: LedProcess, driver: Any, grant: pb.Grant) -> None:
        self.running -= 1
        tokens = job.tokens[0], 0, job.tokens[1]

        def complete() -> None:
            if driver is process.led.driver and driver.leads:
                driver.complete(grant.lease_id, grant.pool_epoch, pb.OUTCOME_COMPLETED, *tokens, 0)

        process.act(complete)
        self.queue.after(_MS, self._arrive_next)

    def kill(self, place: int) -> None:
        """Kill a member."""
        if not self.processes[place].is_dead:
            self.processes[place].kill()

    def lead_other_set(self) -> None:
        """Let a member of another set take the next term, by the last one that it knows."""
        if not self.store.is_up or self.store.store.refusal is not None:
            return
        keys, call = term_keys_of("sim", _OTHER), self.store.store.command
        held, counter, *_ = call(("FCALL", "schedsvc_term_look", 3, *keys, _OTHER, "", 0))
        call(("FCALL", "schedsvc_term_release", 3, *keys, _OTHER, held))
        known = open_row(_SECRET, b"terms", counter)[0] if counter else 0
        self._other_term = number = max(known, self._other_term) + 1
        mine = (
            seal_row(_SECRET, b"term:" + _OTHER.encode(), number, b"o/1 o.sim:7600"),
            seal_row(_SECRET, b"terms", number, b""),
        )
        call(("FCALL", "schedsvc_term_take", 3, *keys, _OTHER, b"", counter, *mine, TERM_MS, "o"))

    def store_lost(self) -> None:
        """Note that the store lost data."""
        super().store_lost()
        self.terms.lost()

    def store_stepped(self, step_ns: int) -> None:
        """Note that the store's clock was set."""
        super().store_stepped(step_ns)
        if step_ns > 0:
            self.terms.overlap(self.queue.now_ns)
