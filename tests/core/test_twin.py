"""Compares the core with its dumb twin: same events, same decisions, same books."""

import random
from math import prod
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from schedsvc import _core as core

from .differential import Differential
from .pool_limits import change_pool_limits
from .quota_limits import QuotaLimits

SECOND = 10**9
FLOWS = ((b"a", 1000), (b"b", 3000), (b"c", 100), (b"d", 1000))
# Small, so that everything blocks: name, capacity, block size, max_running, max_model_tokens.
POOLS = ((b"big", 128, 8, 0, 0), (b"small", 48, 1, 3, 40), (b"odd", 100, 7, 0, 90))
# Each advances to one of the times that matter, exactly or nearly.
STEPS = (
    0,
    1,
    10**6,
    10**8,
    SECOND,
    SECOND,
    4 * SECOND,
    10 * SECOND - 1,
    10 * SECOND,
    20 * SECOND,
    30 * SECOND,
)
LIMITS = {
    "flow_queue_max": 4,
    "queue_max": 8,
    "answer_ttl_ns": 60 * SECOND,
    "cached_price_ppm": 100_000,
}

flow_of = st.integers(0, len(FLOWS) - 1)
pool_of = st.integers(0, len(POOLS) - 1)
lease_of = st.integers(0, 13)  # see lease()
totals = st.one_of(st.just(-1), st.integers(0, 80))
CLASSES = (
    (b"low", 5, 2 * SECOND, False),
    (b"high", -5, SECOND, False),
    (b"probe", 0, SECOND, True),
    (b"slow", 9, 20 * SECOND, False),
)
NAMES = (b"", b"", b"default", *(name for name, *_ in CLASSES))
class_of = st.sampled_from(NAMES)
# The parts of a request, the simplest first. A draw costs Hypothesis more than both twins need to
# decide, so each half is drawn as one number: below 2**24, where it draws evenly.
ASK: tuple[dict[str, Any], ...] = (
    {
        "flow": range(len(FLOWS)),
        "request_id": range(41),
        "prompt": (1, 3, 8, 20, 45, 200),
        "output": (1, 2, 8, 30),
        "pool": (-1, -1, -1, 0, 1, 2),
        "sequences": (1, 1, 1, 2, 4),
        "n": (1, 1, 2, 4),
        "input_estimated": (True, False),
        "pools": ((), (), (), (0, 1), (1, 2), (2, 1, 0)),
    },
    {
        "queue_ttl_ns": (0, 0, 5 * SECOND),
        "deadline_ns": (0, 0, 2 * SECOND, 10**8),
        "reports_progress": (False, True),
        "principal": (0, 0, 0, 0, 7),
        "tag": range(4),
        "told_output": range(21),
        "adapter": (b"", b"", b"x", b"y", b"z"),
        "request_class": NAMES,
        "prefix_block_hashes": ((), (), (1,), (1, 2, 3), (1, 2, 4, 5), (1, 2, 4, 6), (9, 10)),
        "whole_answer": (False, True),
    },
)


def ask_of(numbers: tuple[int, ...]) -> dict[str, Any]:
    """Read a request off its numbers, digit by digit."""
    ask = {}
    for number, half in zip(numbers, ASK, strict=True):
        for name, values in half.items():
            number, digit = divmod(number, len(values))
            ask[name] = values[digit]
    return ask


def numbers_of(half: dict[str, Any]) -> st.SearchStrategy[int]:
    return st.integers(0, prod(map(len, half.values())) - 1)


asks = st.tuples(*map(numbers_of, ASK)).map(ask_of)


class Twins(RuleBasedStateMachine):
    """Compares what both answer in every rule; after it, all that they show."""

    @initialize(
        policy=st.sampled_from(
            ("vtc", "vtc", "vtc", "fcfs", "vtc-predict", "vtc-oracle", "lcf", "sif", "dlpm", "dlpm")
        ),
        modes=st.fixed_dictionaries(
            {
                "credit_max_micro": st.sampled_from((-1, 0)),
                "ledger": st.sampled_from(("peak", "peak", "sum")),
                "dispatch": st.sampled_from(("backfill", "backfill", "strict")),
                "flow_order": st.sampled_from(("arrival", "deadline")),
            }
        ),
        bypass_max=st.sampled_from((0, 1, 3, 32)),
        kv_price_micro=st.sampled_from((0, 0, 1_000, 10_000)),
        backfill_surplus_ppm=st.sampled_from((0, 0, 250_000)),
        pools=st.integers(1, len(POOLS)),
        classes=st.sampled_from((0, 0, 1, 2, 3, 4)),
        headroom_ppm=st.sampled_from((0, 20_000, 300_000)),
        grace=st.sampled_from((0, 20 * SECOND)),
        leases_max=st.sampled_from((2, 5, 50)),
        answers_max=st.sampled_from((0, 3, 50)),
        adapters_max=st.sampled_from((1, 2, 50)),
        samples_min=st.sampled_from((1, 3)),
        prefix_affinity_ppm=st.sampled_from((0, 100_000, 1_000_000)),
        prefix_blocks_max=st.sampled_from((0, 3, 65_536, 65_536)),
        quantum_tokens=st.sampled_from((1, 20, 100)),
        adapter_affinity_ppm=st.sampled_from((0, 100_000, 1_000_000)),
        quantile_ppm=st.sampled_from((500_000, 500_000, 700_000, 900_000)),
        flow_queue_tokens_max=st.sampled_from((0, 0, 40, 100)),
        queue_tokens_max=st.sampled_from((0, 0, 100)),
        saturation_ppm=st.sampled_from((1, 300_000, 800_000)),
        lead_max_micro=st.sampled_from((-1, 0, 10**7, 10**9)),
        fairness_domain=st.sampled_from((0, 1, 2)),
        saturation_band_ppm=st.sampled_from((0, 0, 200_000)),
        early_refusal=st.sampled_from((0, 1, 1)),
        refusal_samples_min=st.sampled_from((0, 0, 1)),
        shared=st.booleans(),
    )
    def begin(
        self,
        policy: str,
        modes: dict[str, str],
        pools: int,
        classes: int,
        grace: int,
        shared: bool,
        **limits: int,
    ) -> None:
        # Which of several pools gives a deadline up, its eviction does not say.
        limits["early_refusal"] &= pools == 1
        self.pair = Differential(policy, modes, lease_grace_ns=grace, **LIMITS, **limits)
        if shared:
            self.pair.both("set_shared")
        for name, weight in FLOWS:
            self.pair.flow(name, weight)
        for name, *figures in POOLS[:pools]:
            self.pair.both("set_pool", name, 1, *figures)
        self.pair.classes(*CLASSES[:classes])
        self.pair.class_of(0, 0, tuple(range(classes + 1)))  # it may name the exempt one, too
        self.pair.class_of(1, min(classes, 2), ())
        self.handles: list[int] = []

    def lease(self, index: int) -> tuple[int, int]:
        """Draw mostly a lease that runs; else one that ended; else one that never was."""
        live = [(r.lease_id, r.epoch) for r in self.pair.twin.leases()]
        if live and index < 8:
            return live[index % len(live)]
        if self.pair.leases and index < 11:
            return self.pair.leases[-index % len(self.pair.leases)]
        return 10**6 + index, 1

    @rule(asks=st.lists(asks, min_size=1, max_size=6), polls=st.booleans())
    def admit(self, asks: list[dict[str, Any]], polls: bool) -> None:
        for ask in asks:
            self.ask(**ask)
        self.then(polls)

    @rule(asks=st.lists(asks, min_size=3, max_size=9))
    def admit_many(self, asks: list[dict[str, Any]]) -> None:
        self.admit(asks=asks, polls=True)

    def ask(self, flow: int, request_id: int, prompt: int, output: int, **more: Any) -> None:
        more["sequences"] *= more["n"]
        if more["pool"] >= len(self.pair.twin.pools):
            more["pool"] = -1
        more["pools"] = tuple(p for p in more["pools"] if p < len(self.pair.twin.pools))
        if self.pair.twin.classes.find(more["request_class"]) < 0:
            more["request_class"] = b""
        handle = self.pair.both(
            "admit", flow, b"id%d" % request_id, max(prompt, more["sequences"]), output, **more
        )
        if handle is not None and handle > 0:
            self.handles.append(handle)

    @precondition(lambda self: self.pair.leases)
    @rule(
        index=lease_of,
        stale=st.sampled_from((0, 0, 0, 1, -1)),
        input_tokens=totals,
        cached=totals,
        output=totals,
        principal=st.sampled_from((0, 0, 0, 7)),
        polls=st.booleans(),
    )
    def progress(
        self,
        index: int,
        stale: int,
        input_tokens: int,
        cached: int,
        output: int,
        principal: int,
        polls: bool,
    ) -> None:
        lease_id, epoch = self.lease(index)
        self.pair.both("progress", lease_id, epoch + stale, input_tokens, cached, output, principal)
        self.then(polls)

    @precondition(lambda self: self.pair.leases)
    @rule(
        index=lease_of,
        outcome=st.sampled_from((core.COMPLETED, core.COMPLETED, 0, core.CANCELLED, 1)),
        input_tokens=totals,
        cached=totals,
        output=totals,
        principal=st.sampled_from((0, 0, 0, 7)),
        polls=st.booleans(),
    )
    def complete(
        self,
        index: int,
        outcome: int,
        input_tokens: int,
        cached: int,
        output: int,
        principal: int,
        polls: bool,
    ) -> None:
        lease_id, epoch = self.lease(index)
        self.pair.both(
            "complete", lease_id, epoch, outcome, input_tokens, cached, output, principal
        )
        self.then(polls)

    @precondition(lambda self: self.pair.leases)
    @rule(outputs=st.lists(st.integers(0, 40), min_size=1, max_size=5))
    def serve(self, outputs: list[int]) -> None:
        for output in outputs:
            lease_id, epoch = self.lease(0)
            self.pair.both("progress", lease_id, epoch, output_tokens=output // 2)
            self.pair.both("complete", lease_id, epoch, output_tokens=output)
        self.then(polls=True)

    @precondition(lambda self: self.handles)
    @rule(index=st.integers(0, 20), polls=st.booleans())
    def cancel(self, index: int, polls: bool) -> None:
        self.pair.cancel(self.handles[-1 - index % len(self.handles)])
        self.then(polls)

    @rule(
        flow=flow_of,
        request_id=st.integers(0, 14),
        index=lease_of,
        pool=pool_of,
        stale=st.sampled_from((0, 0, 0, 1, -1)),
        reserved=st.integers(0, 60),
        prompt=st.integers(1, 30),
        output=st.integers(1, 30),
        produced=st.integers(0, 40),
        sequences=st.sampled_from((1, 1, 3)),
        adapter=st.sampled_from((b"", b"", b"x", b"y")),
        request_class=class_of,
        whole_answer=st.booleans(),
    )
    def replay(self, flow: int, request_id: int, index: int, pool: int, **lease: Any) -> None:
        lease_id, epoch = self.lease(index)
        pool %= len(self.pair.twin.pools)
        if lease_id >= 10**6:
            epoch = self.pair.twin.pools[pool].epoch
        state = self.pair.both(
            "replay",
            flow,
            b"id%d" % request_id,
            lease_id,
            pool,
            epoch + lease["stale"],
            lease["reserved"],
            max(lease["prompt"], lease["sequences"]),
            lease["output"],
            output_tokens=lease["produced"],
            sequences=lease["sequences"],
            adapter=lease["adapter"],
            request_class=lease["request_class"],
            whole_answer=lease["whole_answer"],
        )
        if state == core.LEASE_LIVE and (lease_id, epoch) not in self.pair.leases:
            self.pair.leases.append((lease_id, epoch))
        self.then(polls=True)

    @rule(
        pool=pool_of,
        restart=st.sampled_from((0, 0, 1, 1, -1)),
        percent=st.sampled_from((40, 60, 100, 150)),
        block=st.sampled_from((0, 0, 0, 1)),
    )
    def resize(self, pool: int, restart: int, percent: int, block: int) -> None:
        pool %= len(self.pair.twin.pools)
        name, capacity, size, running, context = POOLS[pool]
        epoch = max(0, self.pair.twin.pools[pool].epoch + restart)
        self.pair.both(
            "set_pool", name, epoch, capacity * percent // 100, size + block, running, context
        )
        self.then(polls=True)

    @rule(
        pool=pool_of,
        stale=st.sampled_from((0, 0, 0, 0, 1)),
        used=st.sampled_from((0, 20, 60, 110, 125, 200)),
        preempted=st.sampled_from((0, 0, 0, 0, 1, 3, 30)),
    )
    def telemetry(self, pool: int, stale: int, used: int, preempted: int) -> None:
        pool %= len(self.pair.twin.pools)
        p = self.pair.twin.pools[pool]
        figures = (1, 0, used, p.preemptions + preempted)
        self.pair.both("telemetry", pool, p.epoch + stale, *figures)
        self.then(polls=True)

    @rule(
        flow=flow_of,
        name=class_of,
        domain=st.sampled_from((b"", b"", b"model", b"team", b"none")),
        charged=st.sampled_from((0, 10**6, 10**8, 10**10)),
        refunded=st.sampled_from((0, 10**6)),
    )
    def remote_service(
        self, flow: int, name: bytes, domain: bytes, charged: int, refunded: int
    ) -> None:
        # A refund elsewhere follows its charge.
        row = (FLOWS[flow][0], name or b"default", domain, charged + refunded, refunded)
        self.pair.both("set_remote_service", [row])
        self.then(polls=True)

    @rule(step=st.sampled_from(STEPS))
    def wait(self, step: int) -> None:
        self.pair.now_ns += step
        self.then(polls=True)

    @rule()
    def wait_until_due(self) -> None:
        self.pair.now_ns = max(self.pair.now_ns, self.pair.twin.next_due())
        self.then(polls=True)

    @rule(flow=flow_of, weight=st.sampled_from((1, 500, 1000, 2000)))
    def reweight(self, flow: int, weight: int) -> None:
        self.pair.flow(FLOWS[flow][0], weight)
        self.then(polls=False)

    @rule(name=class_of, rank=st.sampled_from((-9, 0, 3, 7)), default=st.integers(0, 4))
    def reclass(self, name: bytes, rank: int, default: int) -> None:
        known = self.pair.twin.classes.items
        found = next((c for c in known if c.name == name), None)
        if found is not None:
            self.pair.classes((name, rank, found.ageing_ns, found.exempt))
            self.pair.class_of(2, default % len(known), ())
        self.then(polls=True)

    @rule(order=st.sampled_from(("arrival", "deadline")))
    def reorder(self, order: str) -> None:
        self.pair.both("set_options", flow_order=order)
        self.then(polls=True)

    @rule(seed=st.integers(0, 10**6))
    def limit(self, seed: int) -> None:
        QuotaLimits(random.Random(seed), self.pair)
        self.then(polls=True)

    @rule(seed=st.integers(0, 10**6))
    def limit_pools(self, seed: int) -> None:
        change_pool_limits(random.Random(seed), self.pair)
        self.then(polls=True)

    @rule(pool=pool_of, draining=st.sampled_from((False, False, True)))
    def drain_pool(self, pool: int, draining: bool) -> None:
        pool %= len(self.pair.twin.pools)
        self.pair.both("set_draining", POOLS[pool][0], draining)
        self.then(polls=True)

    @precondition(lambda self: self.pair.now_ns > 10 * SECOND)
    @rule(asks=st.lists(asks, max_size=2))
    def drain_all_for_a_while(self, asks: list[dict[str, Any]]) -> None:
        self.pair.both("set_draining", b"", True)
        self.admit(asks=asks, polls=True)
        self.pair.both("set_draining", b"", False)
        self.then(polls=True)

    @precondition(lambda self: self.pair.leases)
    @rule(index=lease_of, polls=st.booleans())
    def revoke(self, index: int, polls: bool) -> None:
        self.pair.both("revoke", self.lease(index)[0])
        self.then(polls)

    @rule()
    def save(self) -> None:
        self.pair.save()

    @precondition(lambda self: self.pair.now_ns > 10 * SECOND)
    @rule(told=st.lists(st.integers(0, 20), max_size=6), wait=st.sampled_from((0, 0, SECOND)))
    def restart(self, told: list[int], wait: int) -> None:
        """The scheduler is killed; some of its leases are replayed to the next one."""
        live = self.pair.twin.leases(lambda r: r.principal == 0)
        self.pair.restart()
        self.handles.clear()
        self.then(polls=False)
        self.pair.now_ns += wait
        for r in [live.pop(index % len(live)) for index in told if live]:
            self.pair.told_again(r)
        self.then(polls=True)

    @precondition(lambda self: self.pair.now_ns > 40 * SECOND)
    @rule()
    def evict_queued(self) -> None:
        self.pair.both("evict_queued")
        self.then(polls=True)

    @precondition(lambda self: self.pair.twin.predictor.overall.samples > 3)
    @rule()
    def reset_learned(self) -> None:
        self.pair.core.reset_learned()
        self.pair.twin.reset_learned()
        self.then(polls=False)

    def then(self, polls: bool) -> None:
        if polls:
            self.pair.poll()
        self.pair.compare()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.drain()


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


class TestTwins(Twins.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(
        max_examples=40,
        stateful_step_count=60,
        deadline=None,
        database=None,
        suppress_health_check=QUIET,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
