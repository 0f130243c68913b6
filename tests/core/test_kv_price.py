"""Tests the price of the KV cache: token-steps, charged as they are reported."""

import random
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .support import SECOND, grant, make, totals, vtc
from .test_fairness import INPUT, OUTPUT, Backlog, few_long_and_many_short, mixed
from .test_restart import reborn

KV = 1_000  # micro-tokens of service a token-step
MILLION = 1_000_000


def steps(prompt: int, output: int) -> int:
    """Add up, step by step, twice what a sequence holds: each step adds one token to it."""
    return sum(2 * (prompt + made) + 1 for made in range(output)) // 2


def priced(*flows: tuple[str, int], **options: Any) -> core.Scheduler:
    return make(*flows, kv_price_micro=KV, **options)


def held(s: core.Scheduler, now_ns: int, flow: int = 0) -> int:
    return int(s.stats(now_ns, 50)["flows"][flow]["kv_token_steps"])


def test_cache_is_charged_with_each_progress_and_is_the_formula_at_the_end() -> None:
    s = priced(("a", 3000))
    lease = grant(s, 0, "r", 10, 50, reports_progress=True).lease_id
    assert vtc(s, 0) == 10 * INPUT * 1000 // 3000
    for output in (1, 2, 7, 30, 41):
        s.progress(output, lease, 1, 10, 4, output)
        micro = 6 * INPUT + 4 * (INPUT // 10) + output * OUTPUT + steps(10, output) * KV
        assert vtc(s, output) == micro * 1000 // 3000  # rounding does not add up
        assert held(s, output) == steps(10, output)
    s.complete(50, lease, 1, core.COMPLETED, 9, 0, 37)  # fewer than were reported
    assert vtc(s, 50) == (9 * INPUT + 37 * OUTPUT + steps(9, 37) * KV) * 1000 // 3000
    assert held(s, 50) == steps(9, 37)
    s.check()


@pytest.mark.parametrize("n", [1, 2, 5])
def test_sequences_share_the_output_and_each_holds_the_prompt(n: int) -> None:
    s = priced(capacity=10_000)
    lease = grant(s, 0, "r", 10, 50, sequences=n, n=n, reports_progress=True).lease_id
    s.progress(1, lease, 1, 10, 0, 30 * n)
    assert held(s, 1) == n * steps(10, 30)
    s.complete(2, lease, 1)
    assert vtc(s, 2) == 10 * INPUT + 30 * n * OUTPUT + n * steps(10, 30) * KV


def test_request_that_ends_without_output_held_nothing() -> None:
    s = priced()
    lease = grant(s, 0, "r", 10, 50, reports_progress=True).lease_id
    s.complete(1, lease, 1, core.COMPLETED, 10, 0, 0)
    assert held(s, 1) == 0
    assert vtc(s, 1) == 10 * INPUT


def test_output_charged_at_the_grant_is_charged_its_cache_too() -> None:
    s = priced(capacity=10_000, samples_min=3, quantile_ppm=700_000)
    for at, length in enumerate((20, 20, 20, 90)):
        lease = grant(s, at, f"learn{at}", 10, 100).lease_id
        s.complete(at, lease, 1, output_tokens=length)
    before = vtc(s, 9)
    lease = grant(s, 9, "quiet", 10, 100).lease_id
    assert vtc(s, 9) - before == 10 * INPUT + 20 * OUTPUT + steps(10, 20) * KV
    s.complete(10, lease, 1, output_tokens=5)
    assert vtc(s, 10) - before == 10 * INPUT + 5 * OUTPUT + steps(10, 5) * KV


def far(weight: int, **options: Any) -> core.Scheduler:
    return make(
        ("dear", weight), ("cheap", 10**9), capacity=1 << 28, block=1 << 16,
        kv_price_micro=10_000, input_price_micro=0, output_price_micro=0, lease_ttl_ns=1 << 50,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(("prompt", "output"), [(1, MILLION - 1), (MILLION // 2, MILLION // 2)])
def test_request_of_a_million_tokens_is_charged_to_the_token_step(prompt: int, output: int) -> None:
    s = far(1000)
    lease = grant(s, 0, "r", prompt, output, reports_progress=True).lease_id
    for made in (output // 3, output - 1, output):
        s.progress(1, lease, 1, prompt, 0, made)
        assert vtc(s, 1) == (made * (2 * prompt + made) // 2) * 10_000
    s.complete(2, lease, 1)
    s.check()


def test_counters_stay_in_order_beyond_what_a_charge_can_be() -> None:
    s = far(1)
    grant(s, 0, "stays", 1, 1, flow=1)
    for at in range(1, 10):
        lease = grant(s, at, f"dear{at}", 1 << 24, 1 << 24, flow=0, reports_progress=True).lease_id
        s.complete(at, lease, 1, output_tokens=1 << 24)
        assert vtc(s, at) >= 3 << 60
        assert vtc(s, at, 1) < vtc(s, at)
        s.check()


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("lengths", [mixed, few_long_and_many_short])
def test_flows_that_wait_are_served_alike_with_their_cache_in_the_sum(
    lengths: Any, reports: bool
) -> None:
    prices = (10_000, 20_000, 10_000)  # most of the charge is that of the cache
    backlog = Backlog([1000, 2000, 500], lengths, capacity=400, reports=reports, prices=prices)
    widest = shown = 0.0
    for _ in backlog.steps(1_500):
        widest = max(widest, max(backlog.weighted()) - min(backlog.weighted()))
        shown = max(shown, totals(backlog.core, backlog.now_ns)["fairness_bound_micro"])
    whole = sum(backlog.service)
    assert 0 < widest <= shown
    for service, weight in zip(backlog.service, (1000, 2000, 500), strict=True):
        assert abs(service / whole / (weight / 3_500) - 1) < 0.1
    backlog.core.check()


def test_bound_grows_by_the_longest_output_times_all_pools() -> None:
    s = priced(capacity=1_000, credit_max_micro=0)
    grant(s, 0, "short", 10, 50)
    grant(s, 0, "long", 10, 300)
    assert totals(s, 0)["fairness_bound_micro"] == 2 * 1_000 * (OUTPUT + 300 * KV)
    s.reset_learned()
    assert totals(s, 0)["fairness_bound_micro"] == 2 * 1_000 * OUTPUT


def test_bound_and_counters_outlive_the_process() -> None:
    flows = (("a", 1000), ("b", 1000), ("c", 1000))
    old = priced(*flows, capacity=1_000, credit_max_micro=0)
    lease = grant(old, 0, "r", 10, 300, reports_progress=True).lease_id
    old.progress(1, lease, 1, 10, 0, 200)
    new = reborn(old, 2, kv_price_micro=KV, credit_max_micro=0, capacity=1_000)
    assert vtc(new, 0) == vtc(old, 2)
    told = [totals(s, 2)["fairness_bound_micro"] for s in (old, new)]
    assert told[0] == told[1] == 2 * 1_000 * (OUTPUT + 300 * KV)


def test_credit_is_the_average_charge_with_the_cache() -> None:
    s = priced(("a", 1000), ("b", 1000))
    for at in range(3):
        lease = grant(s, at, f"r{at}", 10, 50, reports_progress=True).lease_id
        s.complete(at, lease, 1, output_tokens=40)
    bare = 10 * INPUT + 40 * OUTPUT
    bound = totals(s, 9)["fairness_bound_micro"]
    most = 2 * 1_000 * (OUTPUT + 50 * KV)
    assert bound - most == bare + steps(10, 40) * KV


def history(seed: int, **prices: int) -> int:
    """Play a random history of two flows that wait; return its digest."""
    rnd = random.Random(seed)
    s = make(("a", 1000), ("b", 2000), capacity=300, lease_ttl_ns=10**6 * SECOND, **prices)
    live: dict[int, int] = {}
    for at in range(200):
        for flow in (0, 1):
            size = rnd.randint(1, 60), rnd.randint(1, 60)
            s.admit(at, flow, b"%d-%d" % (at, flow), *size, reports_progress=True)
        live |= {d.lease_id: 0 for d in s.poll(at) if d.outcome == core.GRANTED}
        for lease in rnd.sample(sorted(live), len(live) // 2):
            live[lease] += rnd.randint(1, 5)
            s.progress(at, lease, 1, output_tokens=live[lease])
            if rnd.random() < 0.3:
                s.complete(at, lease, 1)
                del live[lease]
    return int(s.stats(200, 0)["digest"])


@pytest.mark.parametrize("seed", fresh(5))
def test_price_of_the_cache_changes_who_goes_first(seed: int) -> None:
    assert history(seed) == history(seed, kv_price_micro=0)
    assert history(seed) != history(seed, kv_price_micro=10_000)
