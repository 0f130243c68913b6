"""Runs histories of tenants with sessions beside a plain model of the tree's last level.

The granted request of a tenant is the first of its session with the least counter, ties by arrival;
requests without a session are one session together. With one pool that holds whether or
not requests name it: in any interval in which a session waits all the time, no other of its tenant
is served more than the bound of VTC and the credit more. With a cap each request is granted in the
end, and every invariant holds. A scheduler that is killed goes on with the counters: all is asked
again, and leases are replayed.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from schedsvc import _core as core

INPUT, OUTPUT = 1_000_000, 2_000_000
PROMPT_MAX, OUTPUT_MAX, CAPACITY = 3, 4, 30
EVENTS = 120
SECOND = 10**9
CREDITS = (0, 3 * INPUT, 200 * INPUT)
ANY = -1


class BrokenError(Exception):
    """The grant of a request, or the service of a session, breaks a promise."""


@dataclass(eq=False)
class Session:
    """Models a session of a tenant; the one without a name is the rest."""

    name: bytes
    vtc: int = 0
    queued: dict[int, set[int]] = field(default_factory=dict)  # arrivals by line
    running: int = 0
    had_turn: bool = False

    @property
    def is_open(self) -> bool:
        return self.running > 0 or any(self.queued.values())


@dataclass(eq=False)
class Tenant:
    """Holds sessions of a tenant, and the levels of its lines: a line begins with a session.

    With several pools each target has its line, with one pool all targets share one line.
    """

    flow: int
    weight: int
    sessions: dict[bytes, Session] = field(default_factory=dict)
    levels: dict[int, int] = field(default_factory=dict)
    highest: int = 0
    restored: bool = False  # its sessions had counters before a kill
    saved_level: int = 0  # the level with which each line begins after one

    @property
    def is_at_rest(self) -> bool:
        return not any(session.is_open for session in self.sessions.values())

    def waiting(self, line: int) -> list[tuple[int, int, Session]]:
        """Return (counter, first arrival, session) of all that wait in a line."""
        found = [
            (session.vtc, min(session.queued[line]), session)
            for session in self.sessions.values()
            if session.queued.get(line)
        ]
        return sorted(found, key=lambda entry: entry[:2])

    def level_of(self, line: int) -> int:
        return max([self.levels[line], *(vtc for vtc, _, _ in self.waiting(line)[:1])])

    def raise_level(self, line: int) -> int:
        self.levels[line] = self.level_of(line)
        return self.levels[line]

    def lift(self, session: Session, level: int) -> None:
        session.vtc = max(session.vtc, level)
        self.highest = max(self.highest, session.vtc)

    def restart(self, *, restored: bool) -> None:
        """Nothing waits, and the highest level of a line remains, if any session does."""
        levels = [self.saved_level, *map(self.level_of, self.levels)]
        self.restored, self.saved_level = restored, max(levels) if restored else 0
        self.levels.clear()
        self.highest *= restored
        for session in self.sessions.values():
            session.vtc *= restored
            session.had_turn = False
            session.queued.clear()


class SessionHistory:
    """Runs one scheduler with some tenants and one pool or several, and the model."""

    def __init__(
        self, seed: int, pools: int = 1, *, capped: bool = False, killed: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.credit = self.random.choice(CREDITS)
        self.capped, self.killed = capped, killed
        self.pools, self.kills = range(pools), 0
        self.core = self._process()
        for pool in self.pools:
            self.core.set_pool(0, b"p%d" % pool, 1, CAPACITY, 1)
        if capped:
            self.core.set_pool_limits(0, sessions_max_tokens=self.random.choice((1, 8, 14, 20)))
        self.tenants: list[Tenant] = []
        for n in range(self.random.randint(1, 3)):
            weight = self.random.choice((500, 1_000, 3_000))
            self.tenants.append(Tenant(self.core.set_flow(b"t%d" % n, weight), weight))
        self.names = [b"", *(b"s%d" % k for k in range(self.random.randint(1, 5)))]
        self.now_ns = self.serial = self.granted = 0
        #: Tenant, session, target, prompt, output, arrival, by handle.
        self.asked: dict[int, tuple[Tenant, Session, int, int, int, int]] = {}
        #: Tenant, session, target, prompt, output, produced, charged, and what a replay says (most
        #: output, reservation, pool), by lease.
        self.live: dict[int, list] = {}  # type: ignore[type-arg]
        self.since: dict[tuple[int, int, int], dict[int, int]] = {}
        self.served: Counter[int] = Counter()

    def _process(self) -> core.Scheduler:
        return core.Scheduler(
            ledger="sum", dispatch="strict", headroom_ppm=0, headroom_min_ppm=0,
            headroom_max_ppm=0, credit_max_micro=self.credit,
            flow_order="arrival", queue_ttl_ns=10**6 * SECOND, lease_ttl_ns=10**6 * SECOND,
            lease_id_base=1 + self.kills * 10**6,
        )  # fmt: skip

    def play(self) -> None:
        """Play the history. Raises BrokenError."""
        for _ in range(EVENTS):
            self.now_ns += 1
            dice = self.random.random()
            if dice < 0.55:
                self._ask()
            elif dice < 0.6 and self.asked:
                self._cancel(self.random.choice(list(self.asked)))
            elif self.killed and dice < 0.62:
                self._kill()
            else:
                self._step()
            self._poll()
            self.core.check()
        self._finish()

    def _finish(self) -> None:
        """Let all end: waiting requests must be granted, if need be when their time has come."""
        # Each timer lets a session begin, or ends the activity of one that has paused.
        waits = len(self.asked) + sum(len(each.sessions) for each in self.tenants) + 1
        while self.asked or self.live:
            self._step()
            self._poll()
            if not self.live and self.asked:
                due_ns = self.core.next_deadline()
                if not self.capped or not 0 <= due_ns <= self.now_ns + 60 * SECOND or not waits:
                    raise BrokenError(f"{len(self.asked)} requests wait without end")
                self.now_ns = max(self.now_ns, due_ns)
                waits -= 1
                self._poll()
        self.core.check()
        self.now_ns += 10**7 * SECOND  # also beyond the wait for leases after a kill
        self.core.poll(self.now_ns)
        self.core.check()
        for tenant in self.tenants:
            if self.core.flow_stats(self.now_ns, tenant.flow)["sessions"]:
                raise BrokenError("a session is not forgotten")

    def _kill(self) -> None:
        """End the process; the next one gets its rows, and all running and waiting requests."""
        rows: list[tuple[bytes, bytes, int]] = []
        while some := self.core.save(self.now_ns, 7):
            rows += [(key, value, 0) for key, value in some if value is not None]
        known = [self.core.flow_stats(self.now_ns, each.flow)["sessions"] for each in self.tenants]
        self.kills += 1
        self.core = self._process()
        for n, tenant in enumerate(self.tenants):
            self.core.set_flow(b"t%d" % n, tenant.weight)
            tenant.restart(restored=known[n] > 0)
        self.core.set_saved(self.now_ns, list({row[0]: row for row in rows}.values()))
        for pool in self.pools:
            self.core.set_pool(self.now_ns, b"p%d" % pool, 1, CAPACITY, 1)
        self.since.clear()
        for lease_id, lease in self.live.items():
            tenant, session, _, prompt, _, produced, _, most, reserved, pool = lease
            state = self.core.replay(
                self.now_ns, tenant.flow, b"lease%d" % lease_id, lease_id, pool, 1, reserved,
                prompt, most, prompt, 0, produced, session=session.name,
            )  # fmt: skip
            if state != core.LEASE_LIVE:
                raise BrokenError(f"a lease was not taken over: {state}")
        self.core.check()
        asked, self.asked = self.asked, {}
        for tenant, session, target, prompt, output, _ in asked.values():
            self._admit(tenant, session.name, target, prompt, output)

    def _ask(self) -> None:
        tenant = self.random.choice(self.tenants)
        name = self.random.choice(self.names)
        target = self.random.choice((ANY, *self.pools))
        prompt, output = self.random.randint(1, PROMPT_MAX), self.random.randint(1, OUTPUT_MAX)
        self._admit(tenant, name, target, prompt, output)

    def _admit(self, tenant: Tenant, name: bytes, target: int, prompt: int, output: int) -> None:
        self.serial += 1
        handle = self.core.admit(
            self.now_ns, tenant.flow, b"%d" % self.serial, prompt, output, target,
            reports_progress=True, session=name,
        )  # fmt: skip
        session, line = tenant.sessions.setdefault(name, Session(name)), self._line(target)
        if name and line not in tenant.levels:
            tenant.levels[line] = tenant.saved_level
            for _, _, other in tenant.waiting(line):  # the rest, which has waited without a line
                tenant.lift(other, tenant.saved_level - self.credit)
        if line in tenant.levels and not session.queued.get(line):
            tenant.lift(session, tenant.raise_level(line) - self.credit)
        session.queued.setdefault(line, set()).add(self.serial)
        self.asked[handle] = tenant, session, target, prompt, output, self.serial

    def _line(self, target: int) -> int:
        """Return the line of its tenant in which a request waits."""
        return ANY if len(self.pools) == 1 else target

    def _cancel(self, handle: int) -> None:
        self.core.cancel(self.now_ns, handle)
        tenant, session, target, *_, seq = self.asked.pop(handle)
        session.queued[self._line(target)].remove(seq)
        self._rest(tenant, session)

    def _rest(self, tenant: Tenant, session: Session) -> None:
        """A session that never had a turn is idle at once: in a tenant at rest all are even then.
        Without any that had a turn, the tenant is as if none had come."""
        if not session.name or session.is_open or session.had_turn or not tenant.is_at_rest:
            return
        for line in tenant.levels:
            tenant.levels[line] = max(tenant.levels[line], tenant.highest + self.credit)
        if tenant.saved_level:
            tenant.saved_level = max(tenant.saved_level, tenant.highest + self.credit)
        if not any(other.had_turn for other in tenant.sessions.values() if other.name):
            tenant.levels.clear()
            tenant.sessions.clear()
            tenant.highest = tenant.saved_level = 0
            tenant.restored = False

    def _poll(self) -> None:
        for d in self.core.poll(self.now_ns):
            if d.handle not in self.asked:
                continue
            tenant, session, target, prompt, output, seq = self.asked.pop(d.handle)
            line = self._line(target)
            if not self.capped and line in tenant.levels:
                _, first, picked = tenant.waiting(line)[0]
                if picked is not session or seq != first:
                    raise BrokenError(f"request {seq} of {session.name!r} was granted out of turn")
                tenant.raise_level(line)
            self.granted += 1
            session.queued[line].remove(seq)
            session.running += 1
            lease = [tenant, session, target, prompt, self.random.randint(1, output), 0, 0]
            lease += [output, d.reserved_tokens, d.pool]
            self.live[d.lease_id] = lease
            self._charge(lease)

    def _step(self) -> None:
        """Produce a token of every running request; complete ones end."""
        for lease_id, lease in list(self.live.items()):
            _, session, _, prompt, output, produced, *_ = lease
            lease[5] = produced = produced + 1
            self._charge(lease)
            if produced < output:
                self.core.progress(self.now_ns, lease_id, 1, prompt, 0, produced)
                continue
            del self.live[lease_id]
            session.running -= 1
            session.had_turn = True
            self.core.complete(self.now_ns, lease_id, 1, core.COMPLETED, prompt, 0, produced)

    def _charge(self, lease: list) -> None:  # type: ignore[type-arg]
        tenant, session, target, prompt, _, produced, before, *_ = lease
        lease[6] = after = (prompt * INPUT + produced * OUTPUT) * 1000 // tenant.weight
        if not tenant.levels and not tenant.restored:  # no session has come yet
            return
        session.vtc += after - before
        tenant.highest = max(tenant.highest, session.vtc)
        if not self.capped:
            self._hold(tenant, session, self._line(target), after - before)

    def _hold(self, tenant: Tenant, session: Session, line: int, more: int) -> None:
        """Compare a served session with those that wait in the same line."""
        waits = {id(other) for _, _, other in tenant.waiting(line)}
        bound = 2 * max(PROMPT_MAX * INPUT, CAPACITY * len(self.pools) * OUTPUT) * 1000
        bound = bound // tenant.weight + self.credit
        self.served[id(session)] += more
        for other in tenant.sessions.values():
            place = id(session), id(other), line
            if id(other) not in waits or other is session:
                self.since.pop(place, None)
                continue
            lead = self.served[id(session)] - self.served[id(other)]
            least = self.since.setdefault(place, {0: lead})
            least[0] = min(least[0], lead)
            if len(self.pools) == 1 and lead - least[0] > bound:
                raise BrokenError(
                    f"{session.name!r} got {lead - least[0]} more than one that waits"
                )
