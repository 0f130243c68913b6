"""Walks over all events by a seed, with an auditor who believes nothing of the core's books.

The auditor's rules: a request gets one verdict; a lease that was granted ends once.
"""

import random
from collections.abc import Callable

from schedsvc import _core as core

from .support import SECOND

FLOWS = 40
LIMITS = {
    "queue_ttl_ns": 3 * SECOND,
    "lease_ttl_ns": SECOND,
    "lease_grace_ns": SECOND // 2,
    "flow_queue_max": 12,
    "queue_max": 200,
    "leases_max": 150,
    "adapters_max": 8,
    "answers_max": 500,
    "answer_ttl_ns": 5 * SECOND,
    "work_max": 16,
    "lease_id_base": 10**9,  # those below are of an earlier process
    "samples_min": 5,
}
POOLS = ((b"p0", 4096, 16, 0, 0), (b"p1", 2000, 1, 24, 900), (b"p2", 3000, 7, 0, 0))


def context_of(capacity: int, block: int, _running: int, model: int) -> int:
    """Return the longest length that a sequence can have in a pool."""
    return model or capacity // block * block


class RandomWalk:
    """Holds one scheduler, one source of randomness, and what the auditor knows."""

    def __init__(
        self, seed: int, policy: str = "vtc", small_pools: int = 0, pools: int = len(POOLS)
    ) -> None:
        self.random = random.Random(seed)
        limits = LIMITS | {"pools_max": 64 + small_pools}
        self.core = core.Scheduler(policy=policy, **limits)  # type: ignore[arg-type]
        for i in range(FLOWS):
            self.core.set_flow(b"flow%d" % i, self.random.choice((100, 1000, 1000, 2500)))
        for name, *figures in POOLS[:pools]:
            self.core.set_pool(0, name, 1, *figures)
        for k in range(small_pools):
            self.core.set_pool(0, b"small%d" % k, 1, 60, 1)
        self.now_ns = 0
        self.pools = pools
        self.epochs = [1] * (pools + small_pools)
        contexts = [context_of(*figures) for _, *figures in POOLS[:pools]]
        self.contexts = contexts + [60] * small_pools
        self.waiting: dict[int, int] = {}  # handle -> when it was asked
        self.leases: dict[int, core.Decision] = {}  # live as far as the auditor knows
        self.withdrawn: set[int] = set()
        self.named: dict[int, tuple[int, ...]] = {}  # the pools of a set, by handle
        self.handles: set[int] = set()  # ever given out
        # The tokens of prompts and of outputs, and the number of sequences, by handle.
        self.asked: dict[int, tuple[int, int]] = {}
        self.ids = self.restored = 0
        choices: list[tuple[Callable[[], None], int]] = [
            (self.admit, 38),
            (self.poll, 30),
            (self.progress, 16),
            (self.complete, 12),
            (self.cancel, 3),
            (self.restart, 1),
            (self.replay, 1),
        ]
        self.events = [event for event, _ in choices]
        self.weights = [weight for _, weight in choices]

    def run(self, events: int, check_every: int) -> None:
        for n in range(events):
            self.random.choices(self.events, self.weights)[0]()
            if n % check_every == 0:
                self.core.check()
        self.core.check()

    def admit(self) -> None:
        rnd = self.random
        repeated = self.ids and rnd.random() < 0.05
        serial = rnd.randrange(max(0, self.ids - 400), self.ids) if repeated else self.ids
        self.ids += not repeated
        ask = random.Random(serial)  # the same id asks for the same
        sequences = ask.choice((1, 1, 1, 2, 4))
        inputs, output = sequences * ask.choice((1, 30, 200, 500)), ask.choice((1, 20, 200, 400))
        handle = self.core.admit(
            self.now_ns,
            ask.randrange(FLOWS),
            b"r%d" % serial,
            inputs,
            output,
            pool=min(ask.choice((-1, -1, -1, 0, 1, 2)), self.pools - 1),
            pools=(named := self.pools_of(serial)),
            sequences=sequences,
            queue_ttl_ns=ask.choice((0, 0, SECOND)),
            reports_progress=ask.random() < 0.5,
            tag=serial % 5,
            adapter=ask.choice((b"", b"", b"x", b"y", b"adapter%d" % (serial % 30))),
            session=self.session_of(ask),
        )
        # A repeat of a refused or evicted request is a new request.
        if handle > 0 and handle not in self.handles:
            self.handles.add(handle)
            self.asked[handle] = output * sequences, sequences
            self.waiting[handle] = self.now_ns
            self.named[handle] = named
        elif handle > 0:
            assert repeated, "a handle names one request"

    def pools_of(self, _serial: int) -> tuple[int, ...]:
        return ()

    def session_of(self, _ask: random.Random) -> bytes:
        return b""

    def poll(self) -> None:
        self.now_ns += int(self.random.expovariate(1 / 20_000_000))
        for d in self.core.poll(self.now_ns):
            if d.outcome == core.EXPIRED:
                del self.leases[d.lease_id]
            elif d.outcome == core.GRANTED:
                assert self.waiting.pop(d.handle) == self.now_ns - d.waited_ns
                assert d.lease_id not in self.leases
                assert d.waited_ns < LIMITS["queue_ttl_ns"]
                assert not self.named[d.handle] or d.pool in self.named[d.handle]
                self.leases[d.lease_id] = d
            else:
                asked_ns = self.waiting.pop(d.handle)
                assert asked_ns == self.now_ns - d.waited_ns or d.outcome != core.EVICTED_TTL
                assert core.EVICTED_TTL <= d.outcome <= core.EVICTED_DEADLINE

    def lease(self) -> core.Decision | None:
        return self.random.choice(list(self.leases.values())[-60:]) if self.leases else None

    def progress(self) -> None:
        d = self.lease()
        if d:
            state = self.core.progress(
                self.now_ns,
                d.lease_id,
                d.pool_epoch,
                self.random.choice((-1, 10, 300)),
                self.random.choice((-1, 10)),
                self.random.choice((-1, 5, 100, 600)),
            )
            is_void = d.pool_epoch < self.epochs[d.pool]
            assert state == (core.LEASE_VOID if is_void else core.LEASE_LIVE)

    def most_output(self, d: core.Decision) -> int:
        """The context ends the output, whatever was asked for."""
        outputs, sequences = self.asked[d.handle]
        return max(outputs, self.contexts[d.pool] * sequences)

    def complete(self) -> None:
        d = self.lease()
        if d:
            outcome = self.random.choice((core.COMPLETED, core.COMPLETED, core.CANCELLED))
            output = int(self.random.expovariate(1 / 60))
            for repeated in (False, True):
                ended = self.core.complete(
                    self.now_ns, d.lease_id, d.pool_epoch, outcome, output_tokens=output
                )
                assert ended
                used = min(output, self.most_output(d))
                assert (ended.outcome, ended.output_tokens) == (outcome, used)
                assert ended.repeated == repeated
            del self.leases[d.lease_id]

    def cancel(self) -> None:
        handles = list(self.waiting)[-40:] + [d.handle for d in list(self.leases.values())[-5:]]
        if handles:
            handle = self.random.choice(handles)
            granted = [d.lease_id for d in self.leases.values() if d.handle == handle]
            assert self.core.cancel(self.now_ns, handle) == (handle not in self.withdrawn)
            self.withdrawn.add(handle)
            for lease_id in granted:
                del self.leases[lease_id]

    def restart(self) -> None:
        pool = self.random.randrange(self.pools)
        name, capacity, *figures = POOLS[pool]
        self.epochs[pool] += self.random.random() < 0.3
        capacity = int(capacity * self.random.choice((0.3, 0.7, 1, 1, 1)))
        self.core.set_pool(self.now_ns, name, self.epochs[pool], capacity, *figures)
        self.contexts[pool] = context_of(capacity, *figures)

    def replay(self) -> None:
        d = self.lease()
        if d and self.random.random() < 0.5:  # known to the core: renewed
            lease_id, pool, epoch = d.lease_id, d.pool, d.pool_epoch
        else:
            pool = self.random.randrange(self.pools)
            self.restored += 1
            lease_id, epoch = self.restored, self.epochs[pool]
        before = lease_id in self.leases
        state = self.core.replay(
            self.now_ns, self.random.randrange(FLOWS), b"restored%d" % lease_id, lease_id, pool,
            epoch, 100, 50, 50, output_tokens=10,
        )  # fmt: skip
        assert before or state in (core.LEASE_LIVE, core.LEASE_UNKNOWN)

    def drain(self) -> None:
        """Let time pass without other events."""
        self.core.drain(self.now_ns)
        for wait in ("queue_ttl_ns", "lease_ttl_ns", "lease_grace_ns", "answer_ttl_ns"):
            self.now_ns += LIMITS[wait]
            while True:
                self.poll()
                deadline_ns = self.core.next_deadline()
                if not 0 <= deadline_ns <= self.now_ns:
                    break
        assert not self.waiting
        assert not self.leases
