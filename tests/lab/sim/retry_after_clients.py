"""Simulates clients that obey Retry-After, and the times that an oracle would name.

A pool has a fixed number of places; every request holds one for a while. Tenants send bursts. A
refused client retries exactly at the time of Retry-After. The oracle knows the future and is as
fair: each place that became free goes to the request that was refused first, and its wait is the
time until then. If a tenant's tokens a minute refuse, they go to the request that asked first. If
requests are evicted after their TTL, places stay free until the retries, so there the oracle is a
world in which no request is ever refused.
"""

import heapq
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from itertools import count

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

MS = 10**6
SECOND = 10**9
PLACES = 8
PATIENT_S = 36_000  # no request is evicted
TOKENS = 100  # input of each request, and its output


@dataclass
class Try:
    """Records one refusal, and what came of the next try."""

    at_ns: int
    told_ns: int
    asked: int  # which request of its tenant's
    admitted: bool = False
    oracle_ns: int = -1


@dataclass(frozen=True)
class Asked:
    """Names a request: its tenant, its number there, and the refusal that it is the retry of."""

    tenant: int
    asked: int
    told: Try | None


@dataclass
class RetryAfterClient:
    """Runs tenants, their clients, and the core between them and the pool."""

    seed: int
    tenants: int = 3
    minutes: int = 20
    quota: dict[str, int] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)
    hold_s: tuple[float, float] = (2.0, 6.0)
    steady_per_s: float = 0.0  # requests of each tenant but the first, which alone has bursts then
    ttl_s: int = PATIENT_S
    obeys: bool = True  # a refused client comes again

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.core = core.Scheduler(
            ledger="sum", headroom_ppm=0, headroom_min_ppm=0, headroom_max_ppm=0,
            queue_ttl_ns=self.ttl_s * SECOND, lease_ttl_ns=3600 * SECOND, **self.options,
        )  # fmt: skip
        self.core.set_pool(0, b"p", 1, PLACES * 2 * TOKENS, 1)
        for tenant in range(self.tenants):
            flow = self.core.set_flow(b"t%d" % tenant, 1000)
            if self.quota:
                self.core.set_flow_quota(0, flow, refuse=True, **self.quota)
        self.events: list[tuple[int, int, str, int, object]] = []
        self.serial = count(1)
        self.tries: list[Try] = []
        self.freed: dict[int, list[int]] = defaultdict(list)  # by tenant: when a place came free
        self.queued: dict[int, Asked] = {}  # by handle
        self.granted_ns: dict[tuple[int, int], int] = {}  # by tenant and its request
        self.wake_ns = -1
        self.refused: dict[int, list[Try]] = defaultdict(list)
        self.asked_ns: dict[int, list[int]] = defaultdict(list)  # the first try of each, by tenant

    def at(self, now_ns: int, kind: str, tenant: int, what: object = None) -> None:
        heapq.heappush(self.events, (now_ns, next(self.serial), kind, tenant, what))

    def run(self, burst: tuple[int, int], every_s: float) -> list[Try]:
        """Play bursts of requests of each tenant, at random times around an interval."""
        for tenant in range(self.tenants):
            now_s = self.random.uniform(0, every_s)
            while now_s < 60 * self.minutes:
                if tenant and self.steady_per_s:
                    self.at(int(now_s * SECOND), "ask", tenant)
                    now_s += self.random.expovariate(self.steady_per_s)
                    continue
                for _ in range(self.random.randint(*burst)):
                    self.at(int(now_s * SECOND), "ask", tenant)
                now_s += self.random.uniform(0.5, 1.5) * every_s
        while self.events:
            now_ns, _, kind, tenant, what = heapq.heappop(self.events)
            if kind == "ask":
                self._ask(now_ns, tenant, what)
            elif kind == "end":
                self.core.complete(now_ns, what, 1, output_tokens=TOKENS)
            self._decided(now_ns, self.core.poll(now_ns))
            due_ns = self.core.next_deadline()
            if due_ns >= 0 and self.wake_ns != due_ns:
                self.wake_ns = due_ns
                self.at(max(now_ns, due_ns), "poll", 0)
        self.core.check()
        if self.quota:
            self._ask_the_oracle_of_quotas()
        elif self.ttl_s < PATIENT_S:
            self._ask_a_patient_world(burst, every_s)
        else:
            self._ask_the_oracle()
        return self.tries

    def _ask(self, now_ns: int, tenant: int, told: object) -> None:
        request = pb.AdmitRequest(
            request_id=f"r{next(self.serial)}", tenant=f"t{tenant}", input_tokens=[TOKENS],
            max_output_tokens=TOKENS, reports_progress=True,
        )  # fmt: skip
        asked = told.asked if isinstance(told, Try) else len(self.asked_ns[tenant])
        if not isinstance(told, Try):
            self.asked_ns[tenant].append(now_ns)
        answer = self.core.admit_wire(now_ns, 0, request.SerializeToString())
        before = told if isinstance(told, Try) else None
        if before:
            before.admitted = True
        if isinstance(answer, int):
            self.queued[answer] = Asked(tenant, asked, before)
            return
        verdict = pb.AdmitResponse.FromString(answer)
        if verdict.outcome == pb.OUTCOME_GRANTED:
            self._hold(now_ns, verdict.grant.lease_id, Asked(tenant, asked, before))
        else:
            told_ns = verdict.refusal.retry_after_ms * MS
            self._refused(now_ns, told_ns, Asked(tenant, asked, before))

    def _refused(self, now_ns: int, told_ns: int, request: Asked) -> None:
        if request.told:
            request.told.admitted = False
        refused = Try(now_ns, told_ns, request.asked)
        self.tries.append(refused)
        self.refused[request.tenant].append(refused)
        if self.obeys:
            self.at(now_ns + told_ns, "ask", request.tenant, refused)

    def _decided(self, now_ns: int, decisions: list[core.Decision]) -> None:
        for decision in decisions:
            request = self.queued.pop(decision.handle)
            if decision.outcome == core.GRANTED:
                self.freed[request.tenant].append(now_ns)
                self._hold(now_ns, decision.lease_id, request)
            else:
                self._refused(now_ns, decision.retry_after_ms * MS, request)

    def _hold(self, now_ns: int, lease_id: int, request: Asked) -> None:
        self.granted_ns[request.tenant, request.asked] = now_ns
        hold_ns = int(self.random.uniform(*self.hold_s) * SECOND)
        self.at(now_ns + hold_ns, "end", 0, lease_id)

    def _ask_the_oracle(self) -> None:
        """Give each free place to the first request that was refused before."""
        for tenant, tries in self.refused.items():
            waiting: deque[Try] = deque()
            rest = deque(tries)
            for freed_ns in self.freed[tenant]:
                while rest and rest[0].at_ns <= freed_ns:
                    waiting.append(rest.popleft())
                if waiting:
                    first = waiting.popleft()
                    first.oracle_ns = freed_ns - first.at_ns

    def _ask_a_patient_world(self, burst: tuple[int, int], every_s: float) -> None:
        """Return the moment at which each is granted if all wait as long as it takes."""
        patient = replace(self, ttl_s=PATIENT_S, options={"flow_queue_max": 1 << 20})
        patient.run(burst, every_s)
        for tenant, tries in self.refused.items():
            for each in tries:
                each.oracle_ns = max(0, patient.granted_ns[tenant, each.asked] - each.at_ns)

    def _ask_the_oracle_of_quotas(self) -> None:
        """Give a tenant's tokens to its requests in the order of their first tries, each as soon as
        there are enough."""
        limit = self.quota["total_tokens"]
        for tenant, asked_ns in self.asked_ns.items():
            level, now_ns, admitted_ns = float(limit), 0, []
            for at_ns in asked_ns:
                from_ns = max(at_ns, now_ns)
                level = min(limit, level + (from_ns - now_ns) * limit / (60 * SECOND))
                wait_ns = max(0, round((2 * TOKENS - level) * 60 * SECOND / limit))
                now_ns = from_ns + wait_ns
                level += wait_ns * limit / (60 * SECOND) - 2 * TOKENS
                admitted_ns.append(now_ns)
            for each in self.refused[tenant]:
                each.oracle_ns = max(0, admitted_ns[each.asked] - each.at_ns)
