"""Runs members, their store, their load, and the books of the auditor, in one time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.config import Config
from schedsvc_lab.faults.cluster.lead_books import LeadBooks
from schedsvc_lab.faults.cluster.options import ClusterOptions, Tenant
from schedsvc_lab.faults.cluster.process import Process
from schedsvc_lab.faults.cluster.quota_books import QuotaBooks
from schedsvc_lab.faults.cluster.store_link import StoreHost, VirtualConnection
from schedsvc_lab.faults.cluster.sum_books import SumBooks
from schedsvc_lab.faults.cluster.surroundings import Host, Words, cluster_code
from schedsvc_lab.faults.cluster.term_books import TermBooks
from schedsvc_lab.faults.event_queue import EventQueue

__all__ = ["Job", "World"]

_KEEP_NS = 500_000_000


class Job:
    """Follows a request, from its arrival to the end of its lease."""

    __slots__ = ("asked_ns", "input_tokens", "member", "output_tokens", "process", "tenant")

    def __init__(
        self, member: int, tenant: Tenant, process: Process, tokens: tuple[int, int], now_ns: int
    ) -> None:
        self.member, self.tenant, self.process, self.asked_ns = member, tenant, process, now_ns
        self.input_tokens, self.output_tokens = tokens


class World:
    """Holds everything of a run but its phases."""

    def __init__(self, options: ClusterOptions) -> None:
        self.options = options
        self.queue = EventQueue(Random(options.seed ^ 0xC1))  # noqa: S311 - no secret
        self.queue.now_ns = 1_700_000_000_000_000_000
        self.books = SumBooks()
        keeps = options.faults <= {"store-flushed"}
        self.quotas = QuotaBooks(options.tenants, self.queue.now_ns, keeps=keeps)
        self.leads: dict[int, LeadBooks] = {}
        self.terms = TermBooks()
        #: The rows that the process of each member has saved.
        self.disks: dict[str, dict[bytes, bytes]] = {}
        self.current: Process | None = None
        self.store = StoreHost(self)
        self._lives = 0
        self._configs: dict[str, Config] = {}
        self._asked = 0
        self.is_calm = False
        self.waiting: dict[int, Job] = {}
        self.running = 0
        self.processes: list[Process] = []
        #: Pools have less room than tenants ask for, so tenants wait for each other.
        self._is_full = not options.has_quotas
        self._large: set[Tenant] = set()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the cluster's code read this world's clock and talk to its store."""

        def dial(_: Any) -> Any:
            assert self.current is not None
            return VirtualConnection(self, self.current, self.store)

        def now_ns() -> int:
            assert self.current is not None
            return self.current.now_ns()

        with cluster_code(dial, now_ns):
            yield

    @contextmanager
    def at(self, process: Process) -> Iterator[None]:
        """Run in the context of a process."""
        before, self.current = self.current, process
        try:
            yield
        finally:
            self.current = before

    def begin(self) -> None:
        """Start all members and their load."""
        self._keep()
        for name in self.options.members:
            self.processes.append(self._process(name))
        for place in range(len(self.options.members)):
            for tenant in self.options.tenants:
                self._begin_load(place, tenant)

    def _keep(self, _: object = None) -> None:
        self.store.store.keep()
        self.queue.after(_KEEP_NS, self._keep)

    def _process(self, name: str) -> Process:
        self._lives += 1
        config = self._config(self.options.config, name)
        self.books.began(self._lives)
        self.quotas.began(self._lives)
        self.leads[self._lives] = LeadBooks(self.options)
        return Process(self, config, self._lives)

    def _config(self, make: Callable[..., dict[str, Any]], name: str, *more: str) -> Config:
        """Return a member's configuration, which all of its lives have."""
        if name not in self._configs:
            self._configs[name] = Config.model_validate(make(name, *more))
        return self._configs[name]

    def restart(self, place: int) -> None:
        """Start a member again that was killed."""
        if self.processes[place].is_dead:
            self.processes[place] = self._process(self.options.members[place])

    def kill(self, place: int) -> None:
        """Kill a member; its waiting and running requests are lost."""
        process = self.processes[place]
        if process.is_dead:
            return
        process.kill()
        for number, job in list(self.waiting.items()):
            if job.process is process:
                del self.waiting[number]
                self._again(job)

    def end(self, place: int, pause_ns: int) -> None:
        """Let a member get SIGTERM, and start it again a while after it has ended."""

        def ended() -> None:
            self.kill(place)
            self.queue.after(1 if self.is_calm else pause_ns, lambda _: self.restart(place))

        self.processes[place].end(ended)

    def _begin_load(self, place: int, tenant: Tenant) -> None:
        options, queue = self.options, self.queue
        if queue.rnd.random() < 0.2:
            return  # no client asks for this tenant here
        for _ in range(1 if options.has_quotas else options.open_each):
            queue.after(queue.soon(100_000_000), self._arrive, (place, tenant))

    def _arrive(self, where: tuple[int, Tenant]) -> None:
        if self.is_calm:
            return
        options, tenant = self.options, where[1]
        was_sent = self.ask(*where)
        if options.has_quotas:
            mean_ns = tenant.interval_ns(
                options.interval_ns, options.input_max // 2, len(options.members)
            )
            self.queue.after(self.queue.soon(mean_ns), self._arrive, where)
        elif not was_sent:
            self.queue.after(self.queue.soon(300_000_000), self._arrive, where)

    def ask(self, place: int, tenant: Tenant) -> bool:
        """Send a request to a member; whether it was sent."""
        process, options, rnd = self.processes[place], self.options, self.queue.rnd
        if not process.is_ready:
            return False
        tokens = 1 + rnd.randrange(options.input_max), 1 + rnd.randrange(options.output_max)
        if tenant.input_tokens and tenant not in self._large and rnd.random() < 0.1:
            self._large.add(tenant)  # once, because it waits for most of a minute
            tokens = tenant.input_tokens * 8 // 10, tokens[1]
        self._asked += 1
        number = self._asked
        job = Job(place, tenant, process, tokens, self.queue.now_ns)
        self.waiting[number] = job
        self.leads[process.number].arrived(tenant.name)
        ask = pb.AdmitRequest(
            request_id=f"r{number}",
            tenant=tenant.name,
            input_tokens=[tokens[0]],
            max_output_tokens=tokens[1],
        )
        process.ask(ask, lambda answer: self._told(number, job, answer))
        return True

    def _told(self, number: int, job: Job, answer: pb.AdmitResponse) -> None:
        if self.waiting.pop(number, None) is None:
            return
        self.books.digest = hash((self.books.digest, number, self.queue.now_ns, answer.outcome))
        if answer.outcome != pb.OUTCOME_GRANTED:
            self.leads[job.process.number].left(job.tenant.name)
            self.queue.after(1_000_000, self._again, job)
            return
        self.running += 1
        if self._is_full:
            tokens = job.input_tokens, job.output_tokens
            self.leads[job.process.number].granted(job.tenant.name, *tokens)
        self.quotas.granted(
            job.process.number, job.tenant.name, job.input_tokens, self.queue.now_ns
        )
        lease = answer.grant
        lasts_ns = self.queue.around(job.output_tokens * self.options.token_ns)
        self.queue.after(lasts_ns, lambda _: self._complete(job, lease))

    def _complete(self, job: Job, lease: Any) -> None:
        self.running -= 1
        process = job.process
        if not process.is_dead:
            process.act(lambda: self._completed(job, lease))
        self._again(job)

    def _completed(self, job: Job, lease: Any) -> None:
        tokens = job.input_tokens, 0, job.output_tokens
        job.process.driver.complete(
            lease.lease_id, lease.pool_epoch, pb.OUTCOME_COMPLETED, *tokens, 0
        )
        used = job.input_tokens + 2 * job.output_tokens
        self.books.completed(job.process.number, job.tenant.name, used)

    def _again(self, job: Job) -> None:
        if not self.is_calm and not self.options.has_quotas:
            self.queue.after(1_000_000, self._arrive, (job.member, job.tenant))

    def process_at(self, target: str) -> Process | None:
        """Return the process that listens at a target: members of a set call each other."""
        raise NotImplementedError

    def lead_other_set(self) -> None:
        """Let a member of another set lead; without sets there are no terms."""

    def charged(self, life: int, rows: list[tuple[bytes, bytes, bytes, int, int]]) -> None:
        """Look at what a core is charged for service of others."""
        self.books.charged(life, rows)
        for tenant, _, _, charged, refunded in rows if self._is_full else ():
            self.leads[life].charged(tenant.decode(), charged, refunded)

    def store_took(self, sender: Host, words: Words, found: Any) -> None:
        """Let the books see what the store did."""
        self.books.stored(sender.number, words, found)
        self.terms.stored(words)

    def store_heard(self, sender: Host, words: Words, found: Any) -> None:
        """Let the books see what a process heard."""
        self.books.heard(sender.number, words, found)
        self.terms.heard(sender.name, words, found)

    def store_lost(self) -> None:
        """Note that the store lost data."""
        self.quotas.lost()

    def store_stepped(self, step_ns: int) -> None:
        """Note that the store's clock was set."""
        if step_ns > 0:
            self.quotas.stepped(step_ns)
