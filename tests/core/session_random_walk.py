"""Runs shims at random: they ask, run, lose their streams, reconnect and replay their leases.

The auditor's rules: every tag gets one verdict or one fault, unless its stream ended or its request
went to another stream; a lease is granted once, and ends once.
"""

import random

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import (
    Stream,
    asking,
    cancelling,
    completing,
    notices,
    offering,
    replaying,
    reporting,
)
from .support import SECOND, make

TENANTS = ("a", "b", "c", "nobody")
LIMITS = {
    "queue_ttl_ns": 2 * SECOND,
    "lease_ttl_ns": SECOND,
    "lease_grace_ns": SECOND // 2,
    "answer_ttl_ns": 5 * SECOND,
    "queue_max": 60,
    "flow_queue_max": 25,
    "session_open_max": 30,
    "answers_max": 200,
    "work_max": 64,
}


class Shim:
    """Holds one shim process: its stream, its tags without verdict, its leases."""

    def __init__(self, walk: "SessionRandomWalk", principal: int) -> None:
        self.walk, self.principal = walk, principal
        self.tags = 0
        self.serial = 0
        self.leases: dict[int, tuple[str, str, int]] = {}  # id -> request, tenant, epoch
        self.connect()

    def connect(self) -> None:
        self.stream = Stream(self.walk.core, self.principal, greets=False)
        self.open: dict[int, tuple[str, str]] = {}  # tag -> request id, tenant
        self.send(pb.SessionEvent(hello=pb.SessionHello(client_id="s", incarnation=1)))

    def send(self, *events: pb.SessionEvent) -> None:
        self.stream.seq += 1
        message = pb.SessionRequest(seq=self.stream.seq, events=events)
        self.stream.session.receive(self.walk.now_ns, message.SerializeToString())

    def reconnect(self) -> None:
        """Lose the stream, with messages under way in either direction; replay running leases."""
        self.stream.session.close(self.walk.now_ns)
        self.connect()
        self.send(
            *(
                replaying(lease_id, request_id, tenant=tenant, pool_epoch=epoch, output_tokens=2)
                for lease_id, (request_id, tenant, epoch) in self.leases.items()
            )
        )

    def ask(self) -> None:
        rnd = self.walk.random
        self.serial += rnd.random() < 0.9
        request_id = f"{self.principal}-{self.serial}"
        made = random.Random(request_id)
        tenant = made.choice(TENANTS)
        prompts = [made.choice((1, 20, 60, 400)) for _ in range(made.choice((1, 1, 3)))]
        self.tags += 1
        tag = self.tags if rnd.random() < 0.97 else 0
        wrong = {"n": 500} if rnd.random() < 0.03 else {}
        if tag:
            self.open[tag] = (request_id, tenant)
        self.send(asking(
            tag, request_id, *prompts, tenant=tenant, max_output_tokens=made.choice((5, 40)),
            pool=made.choice(("", "", "p", "none")), reports_progress=made.random() < 0.5, **wrong,
        ))  # fmt: skip

    def listen(self) -> None:
        answer = self.stream.pull(self.walk.now_ns)
        for verdict in answer.verdicts:
            asked = self.open.pop(verdict.tag)
            if verdict.response.outcome == core.GRANTED:
                grant = verdict.response.grant
                known = self.leases.setdefault(grant.lease_id, (*asked, grant.pool_epoch))
                assert known[0] == asked[0], "a lease belongs to one request"
        for fault in answer.faults:
            if fault.tag and fault.field != "admit.tag":
                self.open.pop(fault.tag)
        for lease_id, state in notices(answer):
            if state in (core.LEASE_ENDED, core.LEASE_UNKNOWN):
                self.leases.pop(lease_id, None)

    def work(self) -> None:
        rnd = self.walk.random
        if not self.leases:
            return
        lease_id = rnd.choice(list(self.leases))
        epoch = self.leases[lease_id][2]
        if rnd.random() < 0.5:
            self.send(reporting(lease_id, epoch, output_tokens=rnd.randint(0, 60)))
        else:
            del self.leases[lease_id]
            outcome = rnd.choice((0, core.COMPLETED, core.CANCELLED))
            self.send(
                completing(lease_id, epoch, outcome=outcome, output_tokens=rnd.randint(0, 60))
            )


class SessionRandomWalk:
    """Runs three shims of two principals before one scheduler."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        flows = (("a", 1000), ("b", 3000), ("c", 500))
        self.core = make(*flows, capacity=600, **LIMITS)  # type: ignore[arg-type]
        self.now_ns = 0
        self.epoch = 1
        self.shims = [Shim(self, principal) for principal in (1, 2, 3)]

    def step(self) -> None:
        rnd = self.random
        shim = rnd.choice(self.shims)
        dice = rnd.random()
        if dice < 0.45:
            shim.ask()
        elif dice < 0.75:
            shim.work()
        elif dice < 0.80 and shim.open:
            shim.send(cancelling(rnd.choice(list(shim.open))))
        elif dice < 0.82:
            if rnd.random() < 0.3:
                shim.leases.clear()  # it was killed
            shim.reconnect()
        elif dice < 0.83:
            self.epoch += rnd.random() < 0.3
            shim.send(offering("p", self.epoch, rnd.choice((300, 600))))
        else:
            self.now_ns += int(rnd.expovariate(1 / 3e7))
        if rnd.random() < 0.8:
            assert self.core.poll(self.now_ns) == []  # there are no unary calls here
        if rnd.random() < 0.8:
            for owner in self.core.ready():
                next(s for s in self.shims if s.stream.session.owner == owner).listen()

    def settle(self) -> None:
        """Let all shims go on until nothing is open; then end the streams."""
        for _ in range(40):
            for shim in self.shims:
                while shim.leases:
                    shim.work()
            self.now_ns += SECOND // 4
            self.core.poll(self.now_ns)
            for shim in self.shims:
                shim.listen()
        for shim in self.shims:
            assert not shim.open, "a tag without verdict"
            shim.stream.session.close(self.now_ns)
        self.now_ns += LIMITS["lease_ttl_ns"] + LIMITS["lease_grace_ns"]
        self.core.poll(self.now_ns)
