"""Injects the faults: each method does harm once, and reports whether it found a target."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.cluster_options import CLUSTER_FAULTS
from schedsvc_lab.faults.hostile_options import HOSTILE_FAULTS
from schedsvc_lab.faults.leavers import Leavers
from schedsvc_lab.faults.options import FAULTS

if TYPE_CHECKING:
    from schedsvc_lab.faults.shim import Shim
    from schedsvc_lab.faults.unary_client import UnaryClient
    from schedsvc_lab.faults.world import World

_S, _MS = 1_000_000_000, 1_000_000
_HOUR_NS = 3_600 * _S
_TOKENS_MAX = 1 << 27


_OTHERS = HOSTILE_FAULTS.keys() | CLUSTER_FAULTS.keys()
"""Done by a hostile principal, or in runs of a cluster."""


class FaultInjector:
    """Draws faults and lets them happen. `counts` says how often each did."""

    def __init__(self, world: World) -> None:
        self.counts = dict.fromkeys(FAULTS, 0)
        self._world = world
        self._events = world.event_queue
        self._random = world.event_queue.rnd.random
        self._leavers = Leavers(world.event_queue, world.maker)
        self._faults: list[tuple[str, Callable[[], bool]]] = []
        weights: list[int] = []
        for name, (weight, _) in FAULTS.items():
            if weight and name in world.options.faults and name not in _OTHERS:
                self._faults.append((name, getattr(self, name.replace("-", "_"))))
                weights.append(weight)
        self._cumulated = list(accumulate(weights))

    def strike(self) -> None:
        """Let one fault happen."""
        if self._faults:
            choices = self._events.rnd.choices
            ((name, act),) = choices(self._faults, cum_weights=self._cumulated)
            if act():
                self.counts[name] += 1

    # Choice of a target.

    def _one(self, of: list[Any]) -> Any:
        return of[int(self._random() * len(of))] if of else None

    def _shim(self) -> Shim | None:
        shim: Shim | None = self._one([shim for shim in self._world.shims if shim.is_alive])
        return shim

    def _connected(self) -> Shim | None:
        shim = self._shim()
        return shim if shim and shim.conn and not shim.conn.is_broken else None

    def _caller(self) -> UnaryClient | None:
        caller: UnaryClient | None = self._one(self._world.callers)
        return caller

    # Clients.

    def client_leaves_queue(self) -> bool:
        """Cancel what waits."""
        shim, caller = self._shim(), self._caller()
        if shim is not None and shim.jobs:
            shim.leave(self._one(list(shim.jobs.values())))
            return True
        if caller is not None and caller.waiting:
            caller.leave(self._one(list(caller.waiting.values()))[0])
            return True
        return False

    def client_leaves_run(self) -> bool:
        """Cancel what runs."""
        whose: Any = self._one([c for c in (self._shim(), self._caller()) if c and c.running])
        if whose is None:
            return False
        whose.leave(self._one(list(whose.running.values())))
        return True

    def client_leaves_prefill(self) -> bool:
        """Leave shortly before the first token."""
        return self._leavers.leave_prefill(self._shim())

    def client_asks_again(self) -> bool:
        """Leave before the first token, and ask for the same at once."""
        return self._leavers.leave_and_ask(self._shim())

    def output_above_limit(self) -> bool:
        """Let an engine generate more than it may."""
        return self._leavers.run_on(self._shim())

    def client_vanishes(self) -> bool:
        """Let a unary client die."""
        caller = self._caller()
        if caller is None or not (caller.running or caller.waiting):
            return False
        caller.vanish()
        return True

    def complete_twice(self) -> bool:
        """End an ended lease again, with other totals."""
        return self._end_or_report(ends=True)

    def progress_after_complete(self) -> bool:
        """Report on an ended lease."""
        return self._end_or_report(ends=False)

    def _end_or_report(self, *, ends: bool) -> bool:
        whose: Any = self._one([c for c in (self._shim(), self._caller()) if c and c.last_ended[0]])
        if whose is None:
            return False
        lease_id, epoch = whose.last_ended
        used = (5, 0, int(self._random() * 50))
        if whose in self._world.callers:
            if ends:
                whose.end(lease_id, epoch, 48, used, lambda call, answer: None)
            else:
                whose.report(lease_id, epoch, used)
            return True
        if ends:
            said = pb.SessionEvent(complete=_complete(lease_id, epoch, used))
        else:
            said = pb.SessionEvent(progress=_progress(lease_id, epoch, used))
        return bool(whose.inject(said))

    def complete_early(self) -> bool:
        """End a lease while its grant is on its way to the client."""
        shim = self._connected()
        if shim is None or shim.conn is None:
            return False
        for lease in self._world.auditor.books.live.values():
            if lease.request.conn == shim.conn.number and lease.lease_id not in shim.running:
                done = _complete(lease.lease_id, lease.epoch, (1, 0, 1))
                return shim.inject(pb.SessionEvent(complete=done))
        return False

    def complete_after_expiry(self) -> bool:
        """End a lease that has expired because its holder did not renew it."""
        caller, core = self._caller(), self._world.options.core
        if caller is None or not caller.running:
            return False
        job = self._one(list(caller.running.values()))
        del caller.running[job.lease_id]
        silence_ns = core["lease_ttl_ns"] + core["lease_grace_ns"] + 10 * _MS
        self._events.after(silence_ns, lambda job: caller.complete(job, 48), job)
        return True

    def admit_twice(self) -> bool:
        """Hedge: ask for the same again."""
        caller, shim = self._caller(), self._shim()
        if caller is not None and (caller.waiting or caller.running):
            jobs = [job for job, _ in caller.waiting.values()] + list(caller.running.values())
            caller.hedge(self._one(jobs))
            return True
        if shim is None or not (shim.running or shim.jobs):
            return False
        jobs = list(shim.running.values()) + list(shim.jobs.values())
        return self._inject_admit(shim, self._one(jobs).request)

    def admit_conflict(self) -> bool:
        """Use an id again for another request."""
        caller, shim = self._caller(), self._shim()
        if caller is not None and caller.running:
            caller.conflict(self._world.maker.conflict(self._one(list(caller.running.values()))))
            return True
        if shim is None or not shim.running:
            return False
        job = self._one(list(shim.running.values()))
        return self._inject_admit(shim, self._world.maker.conflict(job))

    def _inject_admit(self, shim: Shim, request: pb.AdmitRequest) -> bool:
        self._world.tags += 1
        admit = pb.SessionAdmit(tag=(1 << 40) + self._world.tags, request=request)
        return shim.inject(pb.SessionEvent(admit=admit))

    def mass_cancellation(self) -> bool:
        """Cancel all requests of a shim."""
        shim = self._shim()
        if shim is None or not (shim.jobs or shim.running):
            return False
        for job in [*shim.jobs.values(), *shim.running.values()]:
            shim.leave(job)
        return True

    def burst(self) -> bool:
        """Let a hundred requests arrive in one moment."""
        for _ in range(100):
            self._world.arrive()
        return True

    def tenant_flood(self) -> bool:
        """Send requests of tenants that the configuration does not name."""
        for _ in range(20):
            self._world.arrive(tenant=f"nobody-{int(self._random() * 1e9)}")
        return True

    def too_large(self) -> bool:
        """Ask for more than any pool can hold."""
        job = self._world.maker.job()
        job.request.input_tokens[0] = int(10 ** (4 + 3 * self._random()))
        shim, caller = self._shim(), self._caller()
        if shim is not None:
            shim.ask(job)
        elif caller is not None:
            caller.ask(job)
        return shim is not None or caller is not None

    # Shims and their streams.

    def shim_killed(self) -> bool:
        """Kill a process: with its engine, unless other shims share that."""
        shim = self._shim()
        if shim is None:
            return False
        shim.kill(server_ns=self._events.soon(_S) if self._random() < 0.5 else 0)
        if len(shim.engine.shims) == 1:
            shim.engine.epoch = self._world.wall_ns()
        self._events.after(self._events.soon(2 * _S), shim.start)
        return True

    def stream_cut(self) -> bool:
        """Cut a stream; both sides notice soon."""
        shim = self._connected()
        if shim is None or shim.conn is None:
            return False
        soon = self._events.soon
        shim.conn.cut(client_ns=soon(10 * _MS), server_ns=soon(10 * _MS))
        return True

    def half_open(self) -> bool:
        """Break a stream: the scheduler notices late, and the shim is back before that."""
        shim = self._connected()
        if shim is None or shim.conn is None:
            return False
        shim.conn.cut(client_ns=0, server_ns=self._events.soon(10 * _S))
        return True

    def partition(self) -> bool:
        """Nothing passes: a short outage delays, a long one breaks the stream."""
        shim = self._connected()
        if shim is None or shim.conn is None:
            return False
        duration_ns = self._events.soon(4 * _S)
        shim.unreachable_until_ns = self._events.now_ns + duration_ns
        if duration_ns < 3 * _S:
            shim.conn.delay(duration_ns)
        else:
            shim.conn.cut(client_ns=3 * _S, server_ns=self._events.soon(10 * _S))
        return True

    def message_delayed(self) -> bool:
        """Pause a stream for a moment."""
        shim = self._connected()
        if shim is None or shim.conn is None:
            return False
        shim.conn.delay(self._events.soon(_S))
        return True

    def slow_reader(self) -> bool:
        """Block the scheduler's writer, at most until it ends the stream."""
        shim = self._connected()
        if shim is None or shim.conn is None or shim.conn.is_stalled:
            return False
        conn, server = shim.conn, self._world.server
        conn.is_stalled = True
        if self._random() < 0.8:
            self._events.after(self._events.soon(300 * _MS), server.enter, (server.unstall, conn))
        else:
            self._events.after(10 * _S, server.enter, (server.end_stream, conn))
        return True

    def malformed(self) -> bool:
        """Send an event that breaks a limit, between right ones."""
        shim = self._connected()
        return shim is not None and shim.inject(self._wrong_event())

    def _wrong_event(self) -> pb.SessionEvent:
        draw, request = int(self._random() * 10), self._world.maker.job().request
        if draw == 0:
            del request.input_tokens[:]
        elif draw == 1:
            request.input_tokens[0] = self._one([0, -1, 1 << 31, (1 << 63) - 1])
        elif draw == 2:
            request.max_output_tokens = self._one([0, -5, 1 << 62])
        elif draw == 3:
            request.n = self._one([-1, 129, (1 << 31) - 1])
        elif draw == 4:
            request.request_id = "x" * self._one([129, 4_000])
        elif draw == 5:
            request.tenant = "t" * 257
        if draw < 6:
            self._world.tags += 1
            tag = (1 << 40) + self._world.tags
            return pb.SessionEvent(admit=pb.SessionAdmit(tag=tag, request=request))
        if draw == 6:
            return pb.SessionEvent(admit=pb.SessionAdmit(tag=0, request=request))
        if draw == 7:
            return pb.SessionEvent(progress=_progress(1, 1, (-7, 0, 0)))
        if draw == 8:
            return pb.SessionEvent(complete=_complete(1, 1, (0, 0, 1 << 40)))
        return pb.SessionEvent(telemetry=pool_pb2.EngineTelemetry(pool="nobody", running=1))

    def garbage(self) -> bool:
        """Send bytes that are no message, or a number that is not the next: the stream ends."""
        shim = self._connected()
        if shim is None or shim.conn is None:
            return False
        wrong = pb.SessionRequest(seq=1 << 50).SerializeToString()
        data: bytes = self._one([b"\xff" * 9, b"\x0a\x7f" + bytes(3), wrong])
        shim.conn.garbage.add(data)
        shim.conn.send_up(data)
        return True

    # The scheduler.

    def scheduler_restarted(self) -> bool:
        """Kill the scheduler; it restarts after a while."""
        server = self._world.server
        if not server.is_up:
            return False
        server.kill()
        self._events.after(self._events.soon(_S), server.start)
        return True

    def power_lost(self) -> bool:
        """Kill its machine: a few writes of the state file are lost, too."""
        saver = self._world.server.saver
        if saver is None or not self.scheduler_restarted():
            return False
        saver.disk.lose(1 + int(self._random() * 4))
        return True

    def state_damaged(self) -> bool:
        """Kill the scheduler, and damage its saved state."""
        saver = self._world.server.saver
        if saver is None or not saver.disk.rows or not self.scheduler_restarted():
            return False
        saver.disk.is_damaged = True
        return True

    def disk_full(self) -> bool:
        """Let writes of the state file fail for a while."""
        saver = self._world.server.saver
        if saver is None or saver.disk.is_full:
            return False
        saver.disk.is_full = True
        self._events.after(self._events.soon(3 * _S), self._free, saver.disk)
        return True

    def _free(self, disk: Any) -> None:
        disk.is_full = False

    def scheduler_paused(self) -> bool:
        """Its process is paused."""
        if not self._world.server.is_up:
            return False
        self._world.server.pause(int(self._random() * 30 * _S))
        return True

    def weights_reloaded(self) -> bool:
        """Set other weights, at once."""
        if not self._world.server.is_up:
            return False
        weights = {name: 100 + int(self._random() * 5_000) for name in self._world.options.tenants}
        self._world.server.enter((self._world.server.reload, weights))
        return True

    def wall_clock_step(self) -> bool:
        """Let the clock jump from which epochs are made."""
        self._world.wall_skew_ns += int((2 * self._random() - 1) * _HOUR_NS)
        return True

    # An operator.

    def pool_drained(self) -> bool:
        """Let a pool grant nothing, for a while."""
        return self._world.operator.drain(self._one(self._world.engines).options.name)

    def all_drained(self) -> bool:
        """Let nothing be granted, for a while."""
        return self._world.operator.drain("")

    def lease_revoked(self) -> bool:
        """Void a lease."""
        return self._world.operator.revoke()

    def mode_dry_run(self) -> bool:
        """Let a tenant or all in, for a while."""
        return self._world.operator.dry_run()

    def pools_relisted(self) -> bool:
        """Let other pools take requests that name none."""
        return self._world.operator.relist()

    # Engines.

    def engine_restarted(self) -> bool:
        """Begin a new epoch."""
        engine = self._one(self._world.engines)
        engine.restart(self._world.wall_ns())
        return True

    def engine_slow(self) -> bool:
        """Make an engine ten times slower, for a while."""
        engine = self._one(self._world.engines)
        engine.token_ns = engine.options.token_ns * 10
        self._events.after(self._events.soon(2 * _S), self._quick, engine)
        return True

    def _quick(self, engine: Any) -> None:
        engine.token_ns = engine.options.token_ns

    def engine_sleeps(self) -> bool:
        """Let nothing come out of an engine for a while."""
        engine = self._one(self._world.engines)
        engine.sleeps_until_ns = self._events.now_ns + self._events.soon(3 * _S)
        return True

    def telemetry_false(self) -> bool:
        """Send numbers out of thin air."""
        shim = self._connected()
        if shim is not None:
            shim.tell(used_tokens=int(10 ** (15 * self._random())))
        return shim is not None

    def telemetry_stale(self) -> bool:
        """Send numbers of an earlier engine."""
        shim = self._connected()
        if shim is not None:
            shim.tell(used_tokens=0, epoch=shim.engine.epoch - 1)
        return shim is not None

    def report_false(self) -> bool:
        """Report totals beyond all requests, or less than before."""
        shim = self._shim()
        if shim is None or not shim.running:
            return False
        job = self._one(list(shim.running.values()))
        tokens = int(self._random() * self._one([3, 1_000, _TOKENS_MAX]))
        report = _progress(job.lease_id, job.epoch, (tokens, tokens // 2, tokens))
        return shim.inject(pb.SessionEvent(progress=report))

    def capacity_changed(self) -> bool:
        """Register a pool again, as its engine would after a change of its settings."""
        shim = self._connected()
        if shim is None:
            return False
        engine, size = shim.engine, shim.engine.options.capacity_tokens
        engine.capacity_tokens = max(64, int(size * self._one([0.3, 0.7, 1.0, 1.5])))
        for other in engine.shims:
            if other.is_alive:
                other.protocol.register_pool(engine.registration())
                other.pump()
        return True


def _complete(lease_id: int, epoch: int, used: tuple[int, int, int]) -> pb.CompleteRequest:
    return pb.CompleteRequest(
        lease_id=lease_id,
        pool_epoch=epoch,
        input_tokens=used[0],
        cached_input_tokens=used[1],
        output_tokens=used[2],
    )


def _progress(lease_id: int, epoch: int, used: tuple[int, int, int]) -> pb.LeaseProgress:
    return pb.LeaseProgress(
        lease_id=lease_id,
        pool_epoch=epoch,
        input_tokens=used[0],
        cached_input_tokens=used[1],
        output_tokens=used[2],
    )
