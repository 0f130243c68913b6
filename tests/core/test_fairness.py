"""Tests virtual token counters: shares, bound, lift, charge, refund (arXiv 2401.00588, 4)."""

import random
from collections.abc import Callable, Iterator

import pytest

from schedsvc import _core as core

from .support import SECOND, admit, grant, make, outcomes, totals, vtc

INPUT, OUTPUT = 1_000_000, 2_000_000  # micro-tokens of service, the default prices


class Backlog:
    """Runs flows whose queues never run dry, in front of an engine that ends a random lease."""

    def __init__(
        self,
        weights: list[int],
        lengths: Callable[[random.Random, int], tuple[int, int]],
        *,
        capacity: int,
        reports: bool = True,
        policy: str = "vtc",
        predicts: bool = False,  # else max_tokens is reserved, and running requests fit the pool
        prices: tuple[int, int, int] = (INPUT, OUTPUT, 0),  # the last of a token-step of cache
    ) -> None:
        self.random = random.Random(7)
        flows = [(f"f{i}", w) for i, w in enumerate(weights)]
        self.core = make(
            *flows,
            capacity=capacity,
            policy=policy,
            lease_ttl_ns=10**6 * SECOND,
            input_price_micro=prices[0],
            output_price_micro=prices[1],
            kv_price_micro=prices[2],
        )
        self.prices = prices
        self.lengths, self.weights = lengths, weights
        self.reports, self.predicts = reports, predicts
        self.service = [0] * len(weights)  # micro-tokens as the engine served them
        self.output: dict[int, int] = {}  # handle -> true length
        self.running: list[tuple[core.Decision, int, int]] = []  # lease, flow, produced
        self.flow_of: dict[int, int] = {}
        self.prompt_of: dict[int, int] = {}
        self.serial = self.now_ns = 0
        for flow in range(len(weights)):
            for _ in range(capacity // 2 + 1):  # more than one poll can grant
                self.ask(flow)

    def ask(self, flow: int) -> None:
        prompt, output = self.lengths(self.random, flow)
        self.serial += 1
        handle = admit(
            self.core, self.now_ns, f"r{self.serial}", prompt, output, flow,
            reports_progress=self.reports, queue_ttl_ns=0,
        )  # fmt: skip
        self.flow_of[handle], self.prompt_of[handle] = flow, prompt
        self.output[handle] = self.random.randint(max(1, output // 4), output)

    def steps(self, count: int) -> Iterator[None]:
        """Add one token to every lease; end those that are done; fill up the queues."""
        for _ in range(count):
            self.now_ns += 1_000
            if not self.predicts:
                self.core.reset_learned()  # counters of active flows stay
            for d in self.core.poll(self.now_ns):
                assert d.outcome == core.GRANTED
                flow = self.flow_of[d.handle]
                self.running.append((d, flow, 0))
                self.service[flow] += self.prices[0] * self.prompt_of[d.handle]
                self.ask(flow)
            still = []
            for d, flow, produced in self.running:
                twice_held = 2 * (self.prompt_of[d.handle] + produced) + 1
                self.service[flow] += self.prices[1] + twice_held * self.prices[2] // 2
                if produced + 1 == self.output[d.handle]:
                    self.core.complete(self.now_ns, d.lease_id, 1, output_tokens=produced + 1)
                else:
                    still.append((d, flow, produced + 1))
                    if self.reports:
                        self.core.progress(self.now_ns, d.lease_id, 1, output_tokens=produced + 1)
            self.running = still
            yield

    def weighted(self) -> list[float]:
        return [s * 1000 / w for s, w in zip(self.service, self.weights, strict=True)]


def mixed(rnd: random.Random, flow: int) -> tuple[int, int]:
    return (rnd.randint(1, 60), rnd.randint(1, 20)) if flow % 2 else (rnd.randint(1, 8), 40)


def few_long_and_many_short(rnd: random.Random, flow: int) -> tuple[int, int]:
    return (1, 60) if flow == 0 else (1, 1)


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("lengths", [mixed, few_long_and_many_short])
def test_service_of_backlogged_flows_stays_within_the_bound(
    lengths: Callable[[random.Random, int], tuple[int, int]], reports: bool
) -> None:
    capacity = 400
    backlog = Backlog([1000] * 3, lengths, capacity=capacity, reports=reports)
    bound = 2 * max(INPUT * 60, OUTPUT * capacity)  # theorem 4.4: M fills a running batch
    widest = 0.0
    for _ in backlog.steps(1_500):
        widest = max(widest, max(backlog.weighted()) - min(backlog.weighted()))
    assert 0 < widest <= bound
    backlog.core.check()


@pytest.mark.parametrize("lengths", [mixed, few_long_and_many_short])
def test_the_bound_that_stats_shows_holds(
    lengths: Callable[[random.Random, int], tuple[int, int]],
) -> None:
    backlog = Backlog([1000] * 3, lengths, capacity=400, reports=False)
    widest = shown = 0.0
    for _ in backlog.steps(1_500):
        widest = max(widest, max(backlog.weighted()) - min(backlog.weighted()))
        shown = max(shown, totals(backlog.core, backlog.now_ns)["fairness_bound_micro"])
    assert widest <= shown


def test_the_gap_that_stats_shows_is_the_spread_of_counters() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=20)
    for flow, prompt in ((0, 10), (1, 4)):
        grant(s, 0, f"run{flow}", prompt, 1, flow)
    assert totals(s, 0)["fairness_gap_micro"] == 0  # no flow waits
    admit(s, 0, "w1", 15, 1, 1)
    admit(s, 0, "w0", 15, 1, 0)
    s.poll(0)
    assert totals(s, 0)["fairness_gap_micro"] == vtc(s, 0, 0) - vtc(s, 0, 1) == 6 * INPUT


@pytest.mark.parametrize("reports", [True, False])
def test_shares_follow_the_weights(reports: bool) -> None:
    weights = [1000, 2000, 3000, 4000]
    backlog = Backlog(
        weights,
        lambda rnd, _: (rnd.randint(1, 20), 8),
        capacity=300,
        reports=reports,
        predicts=True,
    )
    for _ in backlog.steps(6_000):
        pass
    whole = sum(backlog.service)
    for service, weight in zip(backlog.service, weights, strict=True):
        assert abs(service / whole / (weight / 10_000) - 1) < 0.01


def test_a_tie_goes_to_the_first_arrival() -> None:
    for first, second in ((0, 1), (1, 0)):
        s = make(("a", 1000), ("b", 1000), capacity=10)
        grant(s, 0, "runs", 5, 5, flow=first)
        s.complete(0, 1, 1, core.CANCELLED, 0, 0, 0)  # both counters are 0 again
        handles = [admit(s, 1, "x", 5, 5, second), admit(s, 1, "y", 5, 5, first)]
        assert [d.handle for d in s.poll(1)] == handles[:1]


def test_order_inside_a_flow_is_arrival_also_past_a_cancellation() -> None:
    s = make(capacity=10)
    handles = [admit(s, 0, f"r{i}", 5, 5) for i in range(6)]
    s.cancel(0, handles[0])
    s.cancel(0, handles[3])
    served = []
    for now_ns in range(1, 6):
        for d in s.poll(now_ns):
            if d.outcome == core.GRANTED:
                served.append(d.handle)
                s.complete(now_ns, d.lease_id, 1, output_tokens=1)
    assert served == [handles[i] for i in (1, 2, 4, 5)]


def test_a_lift_never_lowers() -> None:
    s = make(("a", 1000), ("b", 1000))
    for i in range(3):
        d = grant(s, 0, f"a{i}", 100, 10, 0)
        s.complete(0, d.lease_id, 1, output_tokens=10)
    high = vtc(s, 0, 0)
    grant(s, 1, "b", 10, 10, 1)
    grant(s, 2, "a", 1, 1, 0)
    assert vtc(s, 2, 0) == high + INPUT


def test_many_newcomers_do_not_push_the_busy_flow_back_by_more_than_one_round() -> None:
    names = [(f"n{i}", 1000) for i in range(500)]
    s = make(("busy", 1000), *names, capacity=20, credit_max_micro=0)
    for i in range(20):
        d = grant(s, i, f"b{i}", 10, 10, 0)
        s.complete(i, d.lease_id, 1, output_tokens=10)
    busy = admit(s, 30, "busy", 10, 10, 0)
    for i in range(500):
        admit(s, 30, "x", 10, 10, i + 1)
    assert [d.handle for d in s.poll(30)] == [busy]  # same counter, and it came first


def test_charges_come_with_progress_and_are_exact_at_the_end() -> None:
    s = make(("a", 3000))
    d = grant(s, 0, "r", 10, 50, reports_progress=True)
    assert vtc(s, 0) == 10 * INPUT * 1000 // 3000
    for output in range(1, 41):
        s.progress(output, d.lease_id, 1, 10, 4, output)
        micro = 6 * INPUT + 4 * (INPUT // 10) + output * OUTPUT
        assert vtc(s, output) == micro * 1000 // 3000  # rounding does not add up
    s.complete(50, d.lease_id, 1, core.COMPLETED, 12, 4, 37)
    assert vtc(s, 50) == (8 * INPUT + 4 * (INPUT // 10) + 37 * OUTPUT) * 1000 // 3000


def test_a_smaller_or_repeated_total_charges_nothing() -> None:
    s = make()
    d = grant(s, 0, "r", 10, 50, reports_progress=True)
    s.progress(1, d.lease_id, 1, 10, 5, 30)
    before = vtc(s, 1)
    for totals_told in ((10, 5, 30), (3, 1, 7), (-1, -1, -1), (0, 0, 0)):
        s.progress(2, d.lease_id, 1, *totals_told)
        assert vtc(s, 2) == before


def test_without_progress_the_median_is_charged_and_settled() -> None:
    s = make(capacity=10_000, samples_min=3, quantile_ppm=700_000)
    for i, length in enumerate((20, 20, 20, 90)):
        d = grant(s, i, f"learn{i}", 10, 100)
        s.complete(i, d.lease_id, 1, output_tokens=length)
    before = vtc(s, 9)
    quiet = grant(s, 9, "quiet", 10, 100)
    assert vtc(s, 9) - before == 10 * INPUT + 20 * OUTPUT
    s.complete(9, quiet.lease_id, 1, output_tokens=5)
    assert vtc(s, 9) - before == 10 * INPUT + 5 * OUTPUT  # the rest is refunded
    before = vtc(s, 9)
    grant(s, 9, "telling", 10, 100, reports_progress=True)
    assert vtc(s, 9) - before == 10 * INPUT


def test_the_median_is_charged_at_most_up_to_max_tokens() -> None:
    s = make(capacity=10_000, samples_min=1, quantile_ppm=500_000)
    d = grant(s, 0, "learn", 10, 100)
    s.complete(0, d.lease_id, 1, output_tokens=100)
    before = vtc(s, 0)
    grant(s, 0, "short", 1, 3, sequences=1)
    assert vtc(s, 0) - before == INPUT + 3 * OUTPUT


def test_a_cancelled_grant_costs_nothing() -> None:
    s = make()
    handle = admit(s, 0, "r", 10, 10)
    assert outcomes(s.poll(0)) == [core.GRANTED]
    assert vtc(s, 0) == 10 * INPUT
    assert s.cancel(1, handle)
    assert vtc(s, 1) == 0
    s.check()


def test_a_lease_keeps_the_weight_it_was_granted_at() -> None:
    s = make(("a", 1000))
    d = grant(s, 0, "r", 10, 10, reports_progress=True)
    s.set_flow(b"a", 2000)
    s.complete(1, d.lease_id, 1, output_tokens=10)
    assert vtc(s, 1) == 10 * INPUT + 10 * OUTPUT
    before = vtc(s, 1)
    grant(s, 2, "r2", 10, 10, reports_progress=True)
    assert vtc(s, 2) - before == 10 * INPUT // 2


def test_counters_survive_enormous_charges_in_order() -> None:
    # The highest price at the least weight, beside a flow that always stays near 0.
    s = make(
        ("dear", 1), ("cheap", 1_000_000_000), capacity=1 << 28, block=1 << 16,
        input_price_micro=10_000_000, lease_ttl_ns=1 << 50,
    )  # fmt: skip
    grant(s, 0, "stays", 1, 1, flow=1)
    last = 0
    for i in range(20):
        d = grant(s, i, f"dear{i}", (1 << 27) - 1, 1, flow=0)
        s.complete(i, d.lease_id, 1, output_tokens=1)
        now = vtc(s, i, 0)
        assert now >= last > -1 or now > vtc(s, i, 1)
        assert now > 10**18
        last = now
    admit(s, 30, "later", 100, 1, flow=1)
    s.check()


def test_rebase_keeps_the_order_of_active_flows() -> None:
    names = [("a", 1), ("b", 1), ("c", 1)]
    s = make(
        *names, capacity=1 << 28, block=1 << 16, input_price_micro=10_000_000,
        lease_ttl_ns=1 << 50, lease_grace_ns=0,
    )  # fmt: skip
    served = [0, 0, 0]
    flow_of = {}
    for i in range(60):
        for flow in range(3):
            handle = admit(s, i, f"{flow}-{i}", (1 << 27) - 1, 1, flow, queue_ttl_ns=1 << 50)
            if handle > 0:
                flow_of[handle] = flow
        for d in s.poll(i):
            served[flow_of[d.handle]] += 1
            s.complete(i, d.lease_id, 1, output_tokens=1)
        s.check()
    assert sum(served) >= 60
    assert max(served) - min(served) <= 2
