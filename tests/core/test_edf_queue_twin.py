"""Tests deadlines in a flow under quotas and shares: the core beside its twin."""

import random
from collections import Counter

from schedsvc import _core as core

from .differential import Differential

SECOND = 10**9
CLASSES = ((b"low", 5, 2 * SECOND, False),)


class Crowd:
    """Runs few flows that ask for much, in two classes, with limits that are hardly ever enough."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        policy = self.random.choice(("vtc", "vtc", "fcfs", "sif"))
        self.pair = Differential(
            policy, {"flow_order": "deadline"}, saturation_ppm=1, queue_ttl_ns=20 * SECOND
        )
        for name in (b"a", b"b", b"c"):
            self.pair.flow(name, self.random.choice((500, 1000)))
        self.pair.both("set_pool", b"p", 1, 90, 1)
        self.pair.both("set_pool", b"q", 1, 60, 1)
        self.pair.classes(*CLASSES)
        self.pair.class_of(2, 0, (0, 1))
        self.met: Counter[str] = Counter()
        self.handles: list[int] = []
        self.serial = 0

    def limit(self) -> None:
        rnd = self.random
        group = self.pair.both("set_quota", b"group", -1, concurrency=rnd.choice((0, 2, 4)))
        for flow in range(3):
            limits = {
                "requests": rnd.choice((0, 0, 20, 200)),
                "total_tokens": rnd.choice((0, 0, 500)),
                "concurrency": rnd.choice((0, 0, 1, 2)),
                "share": rnd.choice((0, 60, 100, 1_000)),
                "borrows": rnd.choice((-1, 0, 0, 50)),
            }
            refuse = rnd.random() < 0.2
            self.pair.both("set_flow_quota", flow, rnd.choice((-1, group)), refuse, **limits)
            self.pair.both("set_flow_mode", flow, rnd.random() < 0.05)

    def ask(self) -> None:
        rnd = self.random
        before = {(r.flow, r.target): r for r in self.pair.twin.order.heads()}
        waits = dict(self.pair.twin.quotas.waits)
        billed = set(self.pair.twin.quotas.bills)
        holds = set(self.pair.twin.quotas.shares.holds)
        self.serial += 1
        handle = self.pair.both(
            "admit", rnd.randrange(3), b"r%d" % self.serial, rnd.randrange(5, 40), 10,
            pool=rnd.choice((-1, -1, 0, 1)),
            deadline_ns=rnd.choice((0, rnd.randrange(1, 15) * SECOND)),
            request_class=rnd.choice((b"", b"low")),
        )  # fmt: skip
        if handle is None or handle < 0:
            return
        self.handles.append(handle)
        for new in self.pair.twin.order.heads():
            old = before.get((new.flow, new.target), new)
            if old is not new:
                wait = waits.get(old.flow)
                self.met["displaced"] += 1
                self.met["with its quota"] += old.seq in billed
                self.met["held"] += old.seq in holds
                self.met["waiting"] += bool(wait and wait.request is old)

    def step(self) -> None:
        rnd, pair = self.random, self.pair
        event = rnd.random()
        if event < 0.02:
            self.limit()
        elif event < 0.03:
            pair.both("set_options", flow_order=rnd.choice(("arrival", "deadline", "deadline")))
            self.met["reordered"] += 1
        elif event < 0.1 and self.handles:
            pair.cancel(self.handles.pop(rnd.randrange(len(self.handles))))
        elif event < 0.3 and (live := pair.twin.leases()):
            r = rnd.choice(live)
            pair.both("complete", r.lease_id, r.epoch, output_tokens=rnd.randrange(12))
        else:
            self.ask()
        if event > 0.4:
            pair.now_ns += rnd.choice((0, SECOND // 10, SECOND // 2, SECOND))
        if event > 0.35 or event < 0.03:
            for d in pair.poll():
                self.met["granted"] += d.outcome == core.GRANTED
                self.met["expired"] += d.outcome == core.EVICTED_DEADLINE
        if self.serial % 2:
            pair.compare()


def test_core_and_twin_agree_about_heads_that_are_displaced() -> None:
    met: Counter[str] = Counter()
    for seed in range(5):
        crowd = Crowd(seed)
        crowd.limit()
        for _ in range(150):
            crowd.step()
        crowd.pair.drain()
        met += crowd.met
    rare = ("displaced", "with its quota", "held", "waiting", "reordered", "granted", "expired")
    assert {name: met[name] for name in rare if not met[name]} == {}
