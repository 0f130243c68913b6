"""Simulates a hostile principal: what one caller can try against all engines and tenants.

It knows what the others know: their lease ids, tags, request ids and epochs, as if it had read
their messages. Each act is a method that says whether it found something to act on.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.event_queue import EventQueue
from schedsvc_lab.faults.hostile_options import HOSTILE_FAULTS, POOLS, TENANT, HostileOptions
from schedsvc_lab.faults.jobs import Job, JobMaker
from schedsvc_lab.faults.link import Connection
from schedsvc_lab.faults.unary_client import UnaryClient

if TYPE_CHECKING:
    from schedsvc_lab.faults.auditor.records import Lease
    from schedsvc_lab.faults.shim import Engine
    from schedsvc_lab.faults.world import World

_S, _MS = 1_000_000_000, 1_000_000
TOKEN_NS = 2 * _MS
"""Of output, in a duel."""
_IDS_MAX = 1 << 62
_COUNTED_MAX = 1 << 40  # no counter of the simulated processes gets so far
_TOKENS_MAX = 1 << 27
_STREAMS_KEPT = 3
_TAGS = 1 << 41
"""Its own tags are above, those of others below."""

_GRANTED, _COMPLETED, _CANCELLED = 1, 48, 49


class HostileStream:
    """Simulates a Session that sends what no client would send, and hears of grants alone."""

    def __init__(self, hostile: Hostile, world: World) -> None:
        self._hostile = hostile
        self._seq = 0
        self.offered: dict[str, int] = {}  # pools, and their epochs
        world.server.streams_made += 1
        self.conn = Connection(
            world.event_queue,
            world.server,
            world.server.streams_made,
            hostile.principal,
            world.options.delay_ns,
            self._received,
            self._lost,
        )
        hello = pb.SessionHello(client_id=f"mal-{self.conn.number}", incarnation=1)
        self.send(pb.SessionEvent(hello=hello))

    def send(self, *events: pb.SessionEvent) -> None:
        """Send one message."""
        self._seq += 1
        message = pb.SessionRequest(seq=self._seq, events=events)
        self.conn.send_up(message.SerializeToString())

    def _received(self, what: tuple[Connection, Any]) -> None:
        for verdict in what[1].verdicts:
            if verdict.response.outcome == _GRANTED:
                self._hostile.granted(self, verdict.tag, verdict.response.grant)

    def _lost(self, _: Connection) -> None:
        self._hostile.lost(self)


class Hostile:
    """Simulates the principal: an honest client with a backlog, and its attacks beside that."""

    def __init__(self, world: World, options: HostileOptions) -> None:
        self.principal = options.grants.principal
        self.counts = dict.fromkeys(HOSTILE_FAULTS, 0)
        self.client = UnaryClient(
            world.event_queue, world.server, world.options, options.grants.principal
        )
        self._world = world
        self._options = options
        self._events: EventQueue = world.event_queue
        self._random = world.event_queue.rnd.random
        self._maker = JobMaker(world.event_queue, world.options, "m")
        self._streams: list[HostileStream] = []
        self._kept: HostileStream | None = None
        self._quick: set[int] = set()  # tags of requests that end as soon as they are granted
        self._running: dict[int, int] = {}  # epoch of each lease
        self._is_calm = False
        self._tags = _TAGS
        acts = [name for name in HOSTILE_FAULTS if name in world.options.faults]
        self._acts: list[tuple[str, Callable[[], bool]]] = [
            (name, getattr(self, name.replace("-", "_"))) for name in acts
        ]
        self._cumulated = list(accumulate(HOSTILE_FAULTS[name][0] for name in acts))
        self._tick(None)

    # Its life.

    def _tick(self, _: object) -> None:
        if self._is_calm:
            return
        for _ in range(self._options.waiting_max - len(self.client.waiting)):
            pool = self._engine().options.name if self._random() < 0.7 else ""
            self.client.ask(self._job(pool, TENANT))
        if self._acts:
            ((name, act),) = self._events.rnd.choices(self._acts, cum_weights=self._cumulated)
            if act():
                self.counts[name] += 1
        self._events.after(self._events.soon(self._options.strikes_ns), self._tick)

    def rest(self) -> None:
        """Stop all attacks: the others have to recover from them."""
        self._is_calm = True
        self.client.lost_permille = 0
        for stream in list(self._streams):
            stream.conn.cut()

    def lost(self, stream: HostileStream) -> None:
        """Forget a stream that has ended."""
        if stream in self._streams:
            self._streams.remove(stream)

    def granted(self, stream: HostileStream, tag: int, grant: Any) -> None:
        """Run what was granted on a stream: for a while, for no time, or without an end."""
        lease = (stream, grant.lease_id, grant.pool_epoch)
        size = self._options.size
        if size is not None:
            self._running[grant.lease_id] = grant.pool_epoch
            self._events.after(size[1] * TOKEN_NS, self._end_whole, lease)
        elif tag in self._quick:
            self._quick.discard(tag)
            self._end(lease)
        else:
            self._running[grant.lease_id] = grant.pool_epoch
            if self._random() < 0.7:
                self._events.after(self._events.soon(100 * _MS), self._end, lease)

    def _end(self, lease: tuple[HostileStream, int, int]) -> None:
        stream, lease_id, epoch = lease
        self._running.pop(lease_id, None)
        stream.send(_complete(lease_id, epoch, (1, 0, 1)))

    def _end_whole(self, lease: tuple[HostileStream, int, int]) -> None:
        _, lease_id, epoch = lease
        prompt, output = self._options.size or (1, 1)
        self._running.pop(lease_id, None)
        used = (prompt, 0, output)
        self.client.end(lease_id, epoch, _COMPLETED, used, lambda call, answer: None)

    # Choice of a target.

    def _one(self, of: Any) -> Any:
        return of[int(self._random() * len(of))] if of else None

    def _engine(self) -> Engine:
        engine: Engine = self._one(self._world.engines)
        return engine

    def _stream(self, *, fresh: bool = False) -> HostileStream:
        """Return one of its streams, which it ends after seconds."""
        if fresh or len(self._streams) < _STREAMS_KEPT:
            stream = HostileStream(self, self._world)
            self._streams.append(stream)
            self._events.after(self._events.soon(2 * _S), self._leave, stream)
            return stream
        found: HostileStream = self._one(self._streams)
        return found

    def _ask(self, *admits: pb.SessionEvent) -> None:
        """Ask on a stream; in a duel on one that stays, so no grant is lost with it."""
        if self._options.size is None:
            self._stream().send(*admits)
            return
        if self._kept is None:
            self._kept = HostileStream(self, self._world)
        self._kept.send(*admits)

    def _leave(self, stream: HostileStream) -> None:
        if self._random() < 0.3:
            stream.send(pb.SessionEvent(goodbye=pb.SessionGoodbye()))
            self._events.after(20 * _MS, lambda _: stream.conn.cut())
        else:
            stream.conn.cut(server_ns=self._events.soon(_S))

    def _victim(self) -> Lease | None:
        books = self._world.auditor.books
        leases = [x for x in books.live.values() if x.request.principal != self.principal]
        lease: Lease | None = self._one(leases)
        return lease

    def _foreign_id(self) -> tuple[int, int]:
        """Return a lease id of another caller, or near one, and an epoch."""
        lease, draw = self._victim(), self._random()
        if lease is None or draw < 0.2:
            return 1 + int(self._random() * (_IDS_MAX - 1)), self._engine().epoch
        if draw < 0.7:
            return lease.lease_id, lease.epoch
        near = lease.lease_id + int(self._random() * 9) - 4
        return max(1, near), lease.epoch - (draw < 0.8)

    @property
    def _draws_ids(self) -> bool:
        return "lease_seed" in self._world.options.core

    def _totals(self) -> tuple[int, int, int]:
        tokens = int(self._random() * self._one([3, 1_000, _TOKENS_MAX]))
        return tokens, tokens // 2, tokens

    def _tag(self) -> int:
        self._tags += 1
        return self._tags

    # Leases of others.

    def foreign_replay(self) -> bool:
        """Replay leases of others, and invented ones, into their pools."""
        lease, engine = self._victim(), self._engine()
        replays = []
        for _ in range(1 + int(self._random() * 6)):
            lease_id, _epoch = self._foreign_id()
            if lease_id > _COUNTED_MAX and not self._draws_ids:
                lease_id %= 1_000_000_000  # a replay moves a counter, which is why servers draw ids
            epoch = engine.epoch + self._one([0, 0, 0, 1, -1])
            ids = [self._maker.next_id(), lease.request.key[2] if lease else "r1"]
            name = self._one([TENANT, *self._world.options.tenants])
            pool = engine.options.name
            replays.append(self._replay(lease_id, self._one(ids), name, pool, epoch))
        self._stream().send(*replays)
        return True

    def _replay(
        self, lease_id: int, request_id: str, tenant: str, pool: str, epoch: int
    ) -> pb.SessionEvent:
        prompt, output = 1 + int(self._random() * 200), 1 + int(self._random() * 200)
        return pb.SessionEvent(
            replay=pb.LeaseReplay(
                lease_id=lease_id,
                request_id=request_id,
                tenant=tenant,
                pool=pool,
                pool_epoch=epoch,
                reserved_tokens=prompt + output,
                prompt_tokens=prompt,
                max_output_tokens=output,
                sequences=1,
            )
        )

    def foreign_report(self) -> bool:
        """Report on a lease of another caller."""
        lease_id, epoch = self._foreign_id()
        if self._random() < 0.3:
            self.client.report(lease_id, epoch, self._totals())
        else:
            self._stream().send(_progress(lease_id, epoch, self._totals()))
        return True

    def foreign_complete(self) -> bool:
        """Complete a lease of another caller."""
        lease_id, epoch = self._foreign_id()
        if self._random() < 0.3:
            self.client.end(lease_id, epoch, _CANCELLED, (0, 0, 0), lambda call, answer: None)
        else:
            self._stream().send(_complete(lease_id, epoch, self._totals()))
        return True

    def foreign_cancel(self) -> bool:
        """Cancel and ask under the tags of another caller's stream."""
        tags = list(self._world.auditor.books.tags)
        if not tags:
            return False
        tag = self._one(tags)[1]
        cancel = pb.SessionEvent(cancel=pb.SessionCancel(tag=tag))
        self._ask(cancel)
        if tag < _TAGS:
            self._ask(self._admit(self._job("", TENANT).request, tag))
            self._ask(cancel)
        return True

    def foreign_telemetry(self) -> bool:
        """Report that an engine of another caller is full, or empty."""
        engine = self._engine()
        telemetry = pool_pb2.EngineTelemetry(
            pool=engine.options.name,
            epoch=engine.epoch,
            used_tokens=int(10 ** (9 * self._random())),
        )
        self._stream().send(pb.SessionEvent(telemetry=telemetry))
        return True

    def foreign_goodbye(self) -> bool:
        """Say goodbye, and offer a pool of others on the next stream."""
        stream = self._stream(fresh=True)
        stream.send(self._registration(), pb.SessionEvent(goodbye=pb.SessionGoodbye()))
        self._events.after(20 * _MS, lambda _: stream.conn.cut())
        self._stream(fresh=True).send(self._registration())
        return True

    # Names and ids of others.

    def _job(self, pool: str, tenant: str) -> Job:
        """Draw a request for no adapter of others: who was first keeps its place with them."""
        job = self._maker.job(pool, tenant)
        job.request.adapter = ""
        if self._options.size is not None:
            alike(job, self._options.size)
        return job

    def _admit(self, request: pb.AdmitRequest, tag: int = 0) -> pb.SessionEvent:
        return pb.SessionEvent(admit=pb.SessionAdmit(tag=tag or self._tag(), request=request))

    def foreign_name(self) -> bool:
        """Ask for a tenant of others, on a stream and by a call."""
        name = self._one(list(self._world.options.tenants))
        self._ask(self._admit(self._job("", name).request))
        self.client.conflict(self._job("", name).request)
        return True

    def ids_reserved(self) -> bool:
        """Use the request ids that others use, and those that they will use next."""
        made = self._world.maker.made
        tenants = [TENANT, *self._world.options.tenants]
        admits = []
        for number in range(max(1, made - 8), made + 9):
            request = self._job("", self._one(tenants)).request
            request.request_id = f"r{number}"
            admits.append(self._admit(request))
        self._ask(*admits)
        return True

    # Its own leases.

    def usage_false(self) -> bool:
        """Report totals that none of its requests can use."""
        stream = self._stream()
        if self._running and self._random() < 0.5:
            lease_id = self._one(list(self._running))
            epoch = self._running[lease_id]
        elif self.client.running:
            job = self._one(list(self.client.running.values()))
            lease_id, epoch = job.lease_id, job.epoch
        else:
            return False
        if self._random() < 0.7 or self._options.size is not None:
            stream.send(_progress(lease_id, epoch, self._totals()))
        else:
            self._running.pop(lease_id, None)
            stream.send(_complete(lease_id, epoch, self._totals()))
        return True

    # Tables.

    def _registration(self) -> pb.SessionEvent:
        """Offer a pool of others, best one whose owner has no stream at this time."""
        pools = self._world.auditor.books.pools
        free = [
            e for e in self._world.engines if not (p := pools.get(e.options.name)) or not p.offers
        ]
        engine: Engine = self._one(free) or self._engine()
        return _offer(
            engine.options.name, engine.epoch + self._one([0, 0, 1, -1]), engine.options.block,
            64 + int(self._random() * 4_000),
        )  # fmt: skip

    def pool_squatted(self) -> bool:
        """Offer a pool of others."""
        self._stream().send(self._registration())
        return True

    def pools_taken(self) -> bool:
        """Offer eight pools."""
        stream = self._stream(fresh=True)
        epoch = 1 + self._events.now_ns
        for number in {int(self._random() * POOLS) for _ in range(8)}:
            name = f"mal-{number}"
            stream.offered[name] = epoch
            stream.send(_offer(name, epoch, 16, 16 * (4 + int(self._random() * 100))))
        return True

    def sessions_taken(self) -> bool:
        """Open two dozen streams."""
        for _ in range(24):
            self._stream(fresh=True)
        return True

    def adapters_taken(self) -> bool:
        """Ask for adapters that no other request uses."""
        admits = []
        for _ in range(12):
            request = self._job(self._engine().options.name, TENANT).request
            request.adapter = f"mal-lora-{int(self._random() * 40)}"
            admits.append(self._admit(request))
        self._ask(*admits)
        return True

    def queue_flooded(self) -> bool:
        """Ask for sixty requests at once."""
        return self._flood(TENANT)

    def queue_of_another_filled(self) -> bool:
        """Ask for sixty requests of one tenant of others at once."""
        return self._flood(self._one(list(self._world.options.tenants)))

    def _flood(self, tenant: str) -> bool:
        pools = ["", self._engine().options.name]
        admits = [self._admit(self._job(self._one(pools), tenant).request) for _ in range(60)]
        self._ask(*admits)
        return True

    def answers_flooded(self) -> bool:
        """Ask for the smallest requests, which end as soon as they are granted."""
        admits = []
        for _ in range(20):
            request = self._job(self._engine().options.name, TENANT).request
            if self._options.size is None:
                del request.input_tokens[:]
                request.input_tokens.append(1)
                request.n = request.max_output_tokens = 1
            tag = self._tag()
            self._quick.add(tag)
            admits.append(self._admit(request, tag))
        self._ask(*admits)
        return True

    def leases_flooded(self) -> bool:
        """Replay forty invented leases into a pool of its own."""
        own = [(s, name) for s in self._streams for name in s.offered]
        if not own:
            return False
        stream, pool = self._one(own)
        live, replays = self._world.auditor.books.live, []
        # Others may have been granted the next ids, on streams that are not read.
        lease_id = max(live, default=1) + 1_000
        for _ in range(40):
            # The core counts ids, so one far ahead would be the last.
            lease_id += 1 + int(self._random() * 5)
            if self._draws_ids:
                lease_id = 1 + int(self._random() * (_IDS_MAX - 1))
            request_id, epoch = self._maker.next_id(), stream.offered[pool]
            replays.append(self._replay(lease_id, request_id, TENANT, pool, epoch))
        stream.send(*replays)
        return True


def alike(job: Job, size: tuple[int, int]) -> None:
    """Let a request have the common size, and its prompt be counted."""
    request, (prompt, output) = job.request, size
    del request.input_tokens[:]
    request.input_tokens.append(prompt)
    request.n, request.max_output_tokens = 1, output
    request.pools[:] = ["gpu-0"]
    request.reports_progress, request.input_estimated = True, False
    request.queue_ttl_ms = 0
    job.input_tokens, job.output_tokens, job.steps_left = prompt, output, 1


def _offer(pool: str, epoch: int, block: int, capacity_tokens: int) -> pb.SessionEvent:
    return pb.SessionEvent(
        pool=pool_pb2.PoolRegistration(
            pool=pool,
            epoch=max(0, epoch),
            capacity_tokens=max(block, capacity_tokens),
            block_size_tokens=block,
        )
    )


def _complete(lease_id: int, epoch: int, used: tuple[int, int, int]) -> pb.SessionEvent:
    return pb.SessionEvent(
        complete=pb.CompleteRequest(
            lease_id=lease_id,
            pool_epoch=epoch,
            input_tokens=used[0],
            cached_input_tokens=used[1],
            output_tokens=used[2],
        )
    )


def _progress(lease_id: int, epoch: int, used: tuple[int, int, int]) -> pb.SessionEvent:
    return pb.SessionEvent(
        progress=pb.LeaseProgress(
            lease_id=lease_id,
            pool_epoch=epoch,
            input_tokens=used[0],
            cached_input_tokens=used[1],
            output_tokens=used[2],
        )
    )
