"""Tests output lengths: quantiles, decay, fallbacks, growth, coverage (algorithms, 5)."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from schedsvc import _core as core

from .support import grant, make, pool, totals
from .twin_lengths import Lengths

CAPACITY = 1 << 26
Lengths64 = NDArray[np.int64]


def teach(
    s: core.Scheduler,
    lengths: Lengths64,
    flow: int = 0,
    sequences: int = 1,
    adapter: bytes = b"",
) -> None:
    now_ns = totals(s, 0)["granted"]
    for i, length in enumerate(lengths):
        asked: dict[str, Any] = {"sequences": sequences, "adapter": adapter}
        d = grant(s, now_ns + i, f"teach{now_ns + i}", sequences, 1 << 17, flow, **asked)
        s.complete(now_ns + i, d.lease_id, 1, output_tokens=int(length))


def predicted(s: core.Scheduler, flow: int = 0) -> tuple[int, int]:
    stats = s.flow_stats(1 << 40, flow)
    return stats["predicted_p50_tokens"], stats["predicted_quantile_tokens"]


def drawn(name: str, count: int, seed: int = 3) -> Lengths64:
    rnd = np.random.default_rng(seed)
    made: dict[str, NDArray[Any]] = {
        "lognormal": rnd.lognormal(5.5, 1.0, count),
        "uniform": rnd.uniform(1, 4_000, count),
        "geometric": rnd.geometric(0.004, count),
        "two peaks": np.where(rnd.random(count) < 0.7, 40, 30_000),
        "short": rnd.integers(1, 128, count),
        "long": rnd.uniform(60_000, 131_000, count),
    }
    lengths: Lengths64 = np.clip(made[name], 1, 131_000).astype(np.int64)
    return lengths


SHAPES = ("lognormal", "uniform", "geometric", "two peaks", "short", "long")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [20, 101, 511])
@pytest.mark.parametrize("quantile_ppm", [500_000, 900_000, 950_000, 1_000_000])
def test_quantiles_are_within_one_percent(shape: str, count: int, quantile_ppm: int) -> None:
    lengths = drawn(shape, count)
    s = make(capacity=CAPACITY, quantile_ppm=quantile_ppm, answers_max=0)
    teach(s, lengths)
    level_ppm = s.flow_stats(1 << 40, 0)["predictor_level_ppm"]
    if not level_ppm:  # fewer than the quantile needs
        assert predicted(s) == (0, 0)
        assert count * 1_000_000 < quantile_ppm * (count + 1)
        return
    for told, ppm in zip(predicted(s), (500_000, level_ppm), strict=True):
        rank = min(count, -(-ppm * (count + 1) // 1_000_000))
        assert abs(told / np.sort(lengths)[rank - 1] - 1) <= 0.01


@pytest.mark.parametrize("shape", ["lognormal", "two peaks", "short"])
def test_a_steady_stream_keeps_its_quantiles_through_the_decay(shape: str) -> None:
    s = make(capacity=CAPACITY, answers_max=0)
    lengths = drawn(shape, 4_000)
    teach(s, lengths)
    told = predicted(s)
    ranks = [(lengths <= value * 1.01).mean() for value in told]
    if shape != "two peaks":
        assert abs(ranks[0] - 0.5) < 0.1
    assert abs(ranks[1] - 0.9) < 0.1
    twin = Lengths()
    for length in lengths:
        twin.learn(int(length))
    level_ppm = s.flow_stats(1 << 40, 0)["predictor_level_ppm"]
    assert told == (twin.quantile(500_000), twin.quantile(level_ppm))


@pytest.mark.parametrize(("before", "after"), [(100, 1_000), (1_000, 100)])
def test_decay_follows_a_shift(before: int, after: int) -> None:
    s = make(capacity=CAPACITY, answers_max=0)
    teach(s, np.full(5_000, before))
    assert predicted(s)[1] == pytest.approx(before, rel=0.01)
    teach(s, np.full(1_100, after))  # a little more than two windows of it
    assert list(predicted(s)) == pytest.approx([after, after], rel=0.01)


def test_the_promise_grows_at_once_and_the_past_is_half_forgotten_in_a_window() -> None:
    s = make(capacity=CAPACITY, answers_max=0)
    teach(s, np.full(2_000, 100))
    teach(s, np.full(60, 1_000))  # more than a tenth of the kept ones
    assert predicted(s)[1] == pytest.approx(1_000, rel=0.01)


def test_sequences_are_learned_one_by_one_as_their_mean() -> None:
    s = make(capacity=CAPACITY, samples_min=1, quantile_ppm=500_000)
    teach(s, np.array([400]), sequences=4)
    assert predicted(s) == (100, 100)


def test_flow_then_all_flows_then_max_tokens() -> None:
    flows = (("a", 1000), ("b", 1000), ("c", 1000))
    s = make(*flows, capacity=CAPACITY, samples_min=5, quantile_ppm=800_000)
    assert predicted(s, 0) == (0, 0)
    assert grant(s, 0, "max", 10, 500, 2).reserved_tokens == 510  # nothing is known
    s.complete(0, 1, 1, core.CANCELLED)
    teach(s, np.full(4, 50), flow=0)
    assert predicted(s, 0) == predicted(s, 1) == (0, 0)
    teach(s, np.full(1, 50), flow=1)
    assert predicted(s, 0) == predicted(s, 1) == (50, 50)  # over all flows
    teach(s, np.full(10, 90), flow=1)
    assert predicted(s, 1) == (90, 90)  # its own
    assert predicted(s, 0)[1] == 90
    teach(s, np.full(1, 50), flow=0)
    assert predicted(s, 0) == (50, 50)
    now_ns = totals(s, 0)["granted"]
    assert grant(s, now_ns, "own", 10, 500, 0).reserved_tokens == 60
    assert grant(s, now_ns, "capped", 10, 20, 0).reserved_tokens == 30


def test_a_flow_has_lengths_for_each_adapter() -> None:
    s = make(capacity=CAPACITY, samples_min=10)

    def reserved(adapter: bytes) -> int:
        now_ns = totals(s, 0)["granted"]
        d = grant(s, now_ns, f"ask{now_ns}", 1, 5_000, adapter=adapter)
        s.complete(now_ns, d.lease_id, 1, core.CANCELLED)
        return d.reserved_tokens - 1

    teach(s, np.full(12, 1_000), adapter=b"long")
    teach(s, np.full(12, 20), adapter=b"short")
    long = pytest.approx(1_000, rel=0.01)
    assert (reserved(b"long"), reserved(b"short"), reserved(b"other")) == (long, 20, long)
    # It keeps those of 16; the one without a lesson for longest is forgotten.
    for i in range(15):
        teach(s, np.full(12, 50 + i), adapter=b"a%d" % i)
    assert reserved(b"short") == 20
    assert reserved(b"a14") == 64
    teach(s, np.full(900, 300))
    assert reserved(b"long") == pytest.approx(300, rel=0.01)  # the flow's


def test_evidence_counts_once_three_times_as_many_have_ended_as_run() -> None:
    s = make(capacity=CAPACITY, samples_min=10)
    leases = [grant(s, i, f"r{i}", 1, 1_000) for i in range(40)]
    for d in leases[:29]:
        s.complete(100, d.lease_id, 1, output_tokens=7)
    assert grant(s, 200, "cold", 1, 1_000).reserved_tokens == 1_001
    for d in leases[29:32]:
        s.complete(200, d.lease_id, 1, output_tokens=7)  # 32 have ended, 9 run
    assert grant(s, 200, "warm", 1, 1_000).reserved_tokens == 8


def test_a_newcomer_runs_only_a_few_leases_on_the_evidence_of_others() -> None:
    s = make(("known", 1000), ("new", 1000), capacity=CAPACITY, samples_min=10)
    teach(s, np.full(200, 10), flow=0)
    leases = [grant(s, 300, f"n{i}", 1, 100, 1) for i in range(6)]
    assert [d.reserved_tokens for d in leases] == [11] * 4 + [101] * 2
    s.complete(300, leases[0].lease_id, 1, output_tokens=10)  # a few more for each that has ended
    more = [grant(s, 300, f"m{i}", 1, 100, 1).reserved_tokens for i in range(4)]
    assert more == [11] * 3 + [101]


def test_cancelled_and_expired_leases_teach_nothing() -> None:
    s = make(samples_min=1, lease_grace_ns=0)
    d = grant(s, 0, "cancelled")
    s.complete(1, d.lease_id, 1, core.CANCELLED, output_tokens=5)
    grant(s, 1, "expired")
    s.poll(1 << 40)
    assert totals(s, 1 << 40)["predictor_samples"] == 0
    assert predicted(s) == (0, 0)


def test_an_empty_output_is_predicted_as_one_token() -> None:
    s = make(samples_min=1, quantile_ppm=500_000)
    d = grant(s, 0, "empty")
    s.complete(0, d.lease_id, 1, output_tokens=0)
    assert predicted(s) == (1, 1)


def test_longer_output_gets_the_conditional_quantile() -> None:
    s = make(capacity=CAPACITY, samples_min=10)
    teach(s, np.array([10] * 95 + [1_000] * 5))
    assert predicted(s) == (10, 10)
    d = grant(s, 200, "r", 8, 4_000)
    assert d.reserved_tokens == 18
    s.progress(201, d.lease_id, 1, output_tokens=10)
    assert pool(s, 201)["promised_tokens"] == 18
    s.progress(202, d.lease_id, 1, output_tokens=11)
    assert pool(s, 202)["promised_tokens"] == pytest.approx(8 + 1_000, rel=0.01)
    s.progress(203, d.lease_id, 1, output_tokens=1_100)  # longer than all lengths before
    assert pool(s, 203)["promised_tokens"] == 8 + 1_100 + 1_100 // 4
    s.progress(204, d.lease_id, 1, output_tokens=3_900)
    assert pool(s, 204)["promised_tokens"] == 8 + 4_000  # never more than it may produce
    s.check()


def test_growth_without_evidence_stays_below_max_tokens() -> None:
    s = make(capacity=CAPACITY)
    d = grant(s, 0, "r", 8, 100)
    s.progress(1, d.lease_id, 1, output_tokens=90)
    assert pool(s, 1)["promised_tokens"] == 108
    s.progress(2, d.lease_id, 1, output_tokens=130)  # more than it asked for is not believed
    assert pool(s, 2)["promised_tokens"] == 108


@pytest.mark.parametrize("quantile_ppm", [500_000, 900_000, 950_000])
def test_coverage_is_measured(quantile_ppm: int) -> None:
    s = make(capacity=CAPACITY, quantile_ppm=quantile_ppm, answers_max=0)
    teach(s, drawn("lognormal", 6_000))
    sums = totals(s, 0)
    assert abs(sums["predictor_coverage_ppm"] - quantile_ppm) < 30_000
    assert sums["predictor_samples"] == 6_000
    assert sums["reserved_to_used_ppm"] > 0


def test_reset_learned_forgets_lengths() -> None:
    s = make(capacity=CAPACITY, samples_min=1)
    teach(s, np.full(30, 5))
    assert predicted(s) == (5, 5)
    s.reset_learned()
    assert predicted(s) == (0, 0)
    sums = totals(s, 9)
    assert sums["predictor_samples"] == sums["predictor_coverage_ppm"] == 0


def test_a_promise_is_judged_when_it_is_outgrown_or_ends() -> None:
    s = make(capacity=CAPACITY, samples_min=10, quantile_ppm=900_000)
    teach(s, np.full(20, 10))  # the last ten were promised 10, and held

    def judged() -> tuple[int, int]:
        row = s.flow_stats(1 << 40, 0)
        return row["predictor_judged"], row["predictor_level_ppm"]

    before, level_ppm = judged()
    assert before == 10
    d = grant(s, 100, "outgrows", 1, 1_000)
    s.progress(100, d.lease_id, 1, output_tokens=10)
    assert judged() == (10, level_ppm)
    s.progress(100, d.lease_id, 1, output_tokens=11)
    assert judged() == (11, level_ppm + 3_600)
    s.progress(100, d.lease_id, 1, output_tokens=500)
    s.complete(100, d.lease_id, 1, output_tokens=500)
    assert judged() == (11, level_ppm + 3_600)
    for i, (output, step) in enumerate(((9, -400), (2_000, 3_600))):
        level_ppm = judged()[1]
        d = grant(s, 101, f"ends{i}", 1, 4_000)
        s.complete(101, d.lease_id, 1, output_tokens=output)
        assert judged() == (12 + i, level_ppm + step)
    d = grant(s, 102, "cannot fail", 1, 5)
    s.complete(102, d.lease_id, 1, output_tokens=5)
    d = grant(s, 102, "nobody knows", 1, 5_000)
    s.complete(102, d.lease_id, 1, core.CANCELLED)
    assert judged()[0] == 13


def test_the_level_stops_at_a_value_that_can_recover() -> None:
    s = make(capacity=CAPACITY, samples_min=10)
    teach(s, np.full(3_000, 100))  # covered at any level
    assert s.flow_stats(1 << 40, 0)["predictor_level_ppm"] == 700_000
    teach(s, (120 * 1.03 ** np.arange(200)).astype(np.int64))  # never covered
    assert s.flow_stats(1 << 40, 0)["predictor_level_ppm"] == 1_000_000
    s.check()


@pytest.mark.parametrize("ratio", [0.5, 2.0])
@pytest.mark.parametrize("quantile_ppm", [800_000, 900_000, 950_000])
def test_coverage_holds_while_lengths_drift(quantile_ppm: int, ratio: float) -> None:
    """Lengths are halved or doubled each thousand requests: no steady quantile covers them."""
    s = make(capacity=CAPACITY, quantile_ppm=quantile_ppm, answers_max=0)
    count = 4_000
    drift = ratio ** (np.arange(count) / 1_000)
    lengths = np.clip(drawn("lognormal", count) * drift, 1, 131_000).astype(np.int64)
    teach(s, lengths)
    row = s.flow_stats(1 << 40, 0)
    assert abs(row["predictor_coverage_ppm"] - quantile_ppm) <= 10_000
    assert row["predictor_judged"] >= count - 20
    assert (row["predictor_level_ppm"] > quantile_ppm) == (ratio > 1)
