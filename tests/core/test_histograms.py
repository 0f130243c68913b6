"""Tests histograms of times: what is counted, for which tenant and class, how exactly."""

import random
from bisect import bisect_left
from itertools import pairwise
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .stream import Stream, completing, reporting
from .support import admit, grant, make

MS = 10**6
NEVER_NS = 1 << 62
#: Bounds that follow from the default queue TTL.
BOUNDS_NS = [bound * MS for bound in core.Scheduler().histogram_bounds_ms()]


def row(s: core.Scheduler, flow: int = -1, name: str = "default") -> dict[str, Any]:
    """Return histograms of a tenant, or (-1) of all that are not shown, in one class."""
    [found] = [row for row in s.histograms(flow) if row["request_class"] == name]
    return found


def count(s: core.Scheduler, kind: str, flow: int = -1, name: str = "default") -> int:
    return sum(row(s, flow, name)[kind][0])


def bounds_ns_of(s: core.Scheduler) -> list[int]:
    return [bound * MS for bound in s.histogram_bounds_ms()]


def histogram_of(times_ns: list[int], bounds_ns: list[int] = BOUNDS_NS) -> tuple[list[int], int]:
    """Return the histogram of these times, worked out independently."""
    counts = [0] * (len(bounds_ns) + 1)
    for ns in times_ns:
        counts[bisect_left(bounds_ns, ns)] += 1
    return counts, sum(ns // 1_000 for ns in times_ns)


def quantile_ns(counts: list[int], q: float, bounds_ns: list[int]) -> float:
    """Compute what Prometheus's `histogram_quantile()` does."""
    rank, seen = q * sum(counts), 0
    for k, here in enumerate(counts[:-1]):
        if seen + here >= rank:
            low = bounds_ns[k - 1] if k else 0
            return low + (bounds_ns[k] - low) * (rank - seen) / here
        seen += here
    return bounds_ns[-1]


@pytest.mark.parametrize("ttl_ms", [1, 7, 100, 5_000, 30_000, 600_000, 3_600_000, 1 << 40])
def test_bounds_rise_and_are_fine_around_the_queue_ttl(ttl_ms: int) -> None:
    bounds = make(queue_ttl_ns=ttl_ms * MS).histogram_bounds_ms()
    assert len(bounds) == 31
    assert list(bounds) == sorted(set(bounds))
    assert ttl_ms in bounds
    near = [bound for bound in bounds if ttl_ms / 2 <= bound <= 2 * ttl_ms]
    if ttl_ms >= 100:
        assert all(high <= 1.11 * low for low, high in pairwise(near))


@pytest.mark.parametrize("bucket", range(32))
def test_histogram_bounds_belong_to_the_lower_bucket(bucket: int) -> None:
    low = BOUNDS_NS[bucket - 1] + 1 if bucket else 0
    high = BOUNDS_NS[bucket] if bucket < 31 else 10**15
    for ns in (low, high):
        s = make()
        s.set_options(0, queue_ttl_ns=1 << 58)
        first = grant(s, 0, "first", 500, 500)
        admit(s, 0, "second", 500, 500)
        s.complete(ns, first.lease_id, 1)
        [decision] = s.poll(ns)
        assert decision.waited_ns == ns
        counts, sum_us = row(s)["queue_wait"]
        assert counts[0] == (2 if bucket == 0 else 1)
        assert counts[bucket] == (2 if bucket == 0 else 1)
        assert sum_us == ns // 1_000


def test_eviction_counts_no_queue_wait() -> None:
    s = make(queue_ttl_ns=300 * MS)
    grant(s, 0, "runs", 500, 500)
    admit(s, 100 * MS, "waits", 500, 500)
    withdrawn = admit(s, 200 * MS, "leaves", 500, 500)
    s.cancel(220 * MS, withdrawn)
    s.poll(400 * MS)
    bounds_ns = bounds_ns_of(s)
    assert row(s)["queue_wait"] == histogram_of([0], bounds_ns)
    assert row(s)["evicted_wait"] == histogram_of([20 * MS, 300 * MS], bounds_ns)
    assert row(s)["time_to_first_token"] == histogram_of([], bounds_ns)


def test_rejection_counts_in_no_histogram() -> None:
    s = make()
    assert admit(s, 0, "large", 10_000, 10) < 0
    assert [sum(row(s)[kind][0]) for kind in ("queue_wait", "evicted_wait")] == [0, 0]


def test_first_output_counts_once_and_only_before_the_end() -> None:
    s = make()
    stream = Stream(s)
    reported = stream.grant(0, 1, "reports")
    stream.send(30 * MS, reporting(reported, input_tokens=10))
    stream.send(70 * MS, reporting(reported, output_tokens=1))
    stream.send(900 * MS, reporting(reported, output_tokens=5))
    stream.send(950 * MS, completing(reported, output_tokens=9))
    silent = grant(s, 950 * MS, "silent")
    s.complete(2_000 * MS, silent.lease_id, 1, output_tokens=3)
    assert row(s)["time_to_first_token"] == histogram_of([70 * MS])
    assert row(s)["queue_wait"] == histogram_of([0, 0])


def test_a_completed_request_counts_its_time_and_that_of_each_further_token() -> None:
    s = make()
    pair = grant(s, 0, "pair", sequences=2, n=2, reports_progress=True)
    s.progress(100 * MS, pair.lease_id, 1, output_tokens=2)
    s.complete(500 * MS, pair.lease_id, 1, output_tokens=10)
    silent = grant(s, 500 * MS, "silent")
    s.complete(900 * MS, silent.lease_id, 1, output_tokens=7)
    left = grant(s, 900 * MS, "left", reports_progress=True)
    s.progress(950 * MS, left.lease_id, 1, output_tokens=2)
    s.complete(960 * MS, left.lease_id, 1, core.CANCELLED, output_tokens=3)
    assert row(s)["completed"] == histogram_of([500 * MS, 400 * MS])
    counts, sum_us = row(s)["output_token"]
    assert sum(counts) == 1
    assert sum_us == pytest.approx(100_000, abs=1)


def test_first_output_includes_the_wait_in_the_queue() -> None:
    s = make()
    first = grant(s, 0, "first", 500, 500)
    admit(s, 0, "second", 500, 500)
    s.complete(40 * MS, first.lease_id, 1)
    [second] = s.poll(40 * MS)
    s.progress(70 * MS, second.lease_id, 1, output_tokens=1)
    assert row(s)["time_to_first_token"] == histogram_of([70 * MS])


def test_restored_lease_counts_in_no_histogram() -> None:
    s = make()
    state = s.replay(5 * MS, 0, b"old", 77, 0, 1, 20, 10, 10, output_tokens=4)
    assert state == core.LEASE_LIVE
    assert s.progress(9 * MS, 77, 1, output_tokens=5) == core.LEASE_LIVE
    assert row(s)["queue_wait"] == row(s)["time_to_first_token"] == histogram_of([])
    assert s.flow_stats(9 * MS, 0)["granted"] == 1


def test_shown_tenants_count_by_themselves() -> None:
    s = make(("a", 1000), ("b", 1000), ("c", 1000))
    for flow in range(3):
        grant(s, 0, f"before-{flow}", flow=flow)
    s.show_histograms(1, True)
    assert count(s, "queue_wait", 1) == 0
    for flow in range(3):
        grant(s, 0, f"shown-{flow}", flow=flow)
    s.show_histograms(1, False)
    grant(s, 0, "hidden", flow=1)
    assert (count(s, "queue_wait", 1), count(s, "queue_wait")) == (1, 6)
    s.show_histograms(1, True)
    grant(s, 0, "again", flow=1)
    assert (count(s, "queue_wait", 1), count(s, "queue_wait")) == (2, 6)
    assert count(s, "queue_wait", 0) == 0


def test_classes_of_a_shown_tenant_count_by_themselves() -> None:
    s = make(("a", 1000), ("b", 1000))
    batch = s.set_class(b"batch", 5)
    for flow in (0, 1):
        s.set_flow_class(flow, 0, (batch,))
    s.show_histograms(0, True)
    assert [r["request_class"] for r in s.histograms(0)] == ["default", "batch"]
    for flow in (0, 1):
        grant(s, 0, f"r{flow}", flow=flow, request_class=b"batch")
    for flow in (0, -1):
        assert count(s, "queue_wait", flow, "batch") == 1
        assert count(s, "queue_wait", flow) == 0


def test_histograms_of_classes_that_a_tenant_may_not_name_are_left_out() -> None:
    s = make(("a", 1000))
    batch = s.set_class(b"batch", 5)
    s.set_class(b"ops", 1, exempt=True)
    s.set_flow_class(0, batch, (batch,))
    assert [r["request_class"] for r in s.histograms(0)] == ["batch"]
    assert [r["request_class"] for r in s.histograms()] == ["ops", "default", "batch"]


def test_class_that_takes_a_place_begins_at_0() -> None:
    s = make(("a", 1000), ("b", 1000))
    old = s.set_class(b"old", 5)
    for flow in (0, 1):
        s.set_flow_class(flow, 0, (old,))
    s.show_histograms(0, True)
    for flow in (0, 1):
        grant(s, 0, f"r{flow}", flow=flow, request_class=b"old")
    s.set_class_gone(b"old")
    assert count(s, "queue_wait", 0, "old") == count(s, "queue_wait", -1, "old") == 1
    s.set_class(b"new", 6)
    for flow in (0, -1):
        assert count(s, "queue_wait", flow, "new") == 0
        assert "old" not in [r["request_class"] for r in s.histograms(flow)]
    assert {row["name"]: row["granted"] for row in s.stats(0)["classes"]} == {
        "default": 0, "new": 0,
    }  # fmt: skip
    grant(s, 0, "r2", flow=0, request_class=b"new")
    assert s.stats(0)["classes"][1]["granted"] == 1


def test_unknown_flow_has_no_histograms() -> None:
    s = make()
    for call in (lambda: s.histograms(7), lambda: s.show_histograms(7, True)):
        with pytest.raises(core.CallerError, match="flow"):
            call()


def play(seed: int, shown: bool) -> tuple[core.Scheduler, dict[str, list[int]]]:
    """Random load with waits over many orders of magnitude, and the exact times of everything."""
    rng = random.Random(seed)
    s = make(("a", 1000), ("b", 3000), capacity=4_000, queue_ttl_ns=20_000 * MS, early_refusal=0)
    if shown:
        s.show_histograms(0, True)
    times: dict[str, list[int]] = {"queue_wait": [], "evicted_wait": [], "time_to_first_token": []}
    running: list[tuple[int, int, bool]] = []
    arrived: dict[int, int] = {}
    now_ns = 0
    for serial in range(4_000):
        now_ns += int(rng.expovariate(1 / (50 * MS)))
        if rng.random() < 0.5:
            handle = admit(s, now_ns, f"r{serial}", rng.randint(1, 900), 20, rng.randint(0, 1))
            if handle > 0:
                arrived[handle] = now_ns
        elif running:
            lease_id, at_ns, has_begun = running.pop(rng.randrange(len(running)))
            if not has_begun and rng.random() < 0.7:
                s.progress(now_ns, lease_id, 1, output_tokens=1)
                times["time_to_first_token"].append(now_ns - at_ns)
                running.append((lease_id, at_ns, True))
            else:
                s.complete(now_ns, lease_id, 1, output_tokens=2)
        for decision in s.poll(now_ns):
            if decision.outcome == core.GRANTED:
                at_ns = arrived.pop(decision.handle)
                times["queue_wait"].append(now_ns - at_ns)
                running.append((decision.lease_id, at_ns, False))
            elif decision.outcome == core.EVICTED_TTL:
                times["evicted_wait"].append(now_ns - arrived.pop(decision.handle))
            else:
                running = [one for one in running if one[0] != decision.lease_id]
    s.check()
    return s, times


@pytest.mark.parametrize("seed", fresh(5))
def test_quantiles_are_within_one_bucket_of_the_exact_value(seed: int) -> None:
    s, times = play(seed, shown=False)
    for kind, exact in times.items():
        assert len(exact) > 100, kind
        bounds_ns = bounds_ns_of(s)
        assert row(s)[kind] == histogram_of(exact, bounds_ns), kind
        exact.sort()
        for q in (0.5, 0.9, 0.99):
            value_ns = exact[min(len(exact) - 1, int(q * len(exact)))]
            estimate_ns = quantile_ns(row(s)[kind][0], q, bounds_ns)
            places = [bisect_left(bounds_ns, ns) for ns in (value_ns, estimate_ns)]
            assert abs(places[0] - places[1]) <= 1, (kind, q, value_ns, estimate_ns)


def first_tokens(ttl_ms: int, load: float, seed: int) -> tuple[core.Scheduler, list[int]]:
    """Serve one request at a time under an open load, and return the time to each first token."""
    rng = random.Random(seed)
    ttl_ns = ttl_ms * MS
    s = make(capacity=100, queue_ttl_ns=ttl_ns, early_refusal=0)
    service_ns = ttl_ns // 40
    arrived: dict[int, int] = {}
    first: list[int] = []
    arrival_ns, end_ns, lease_id, serial = 0, NEVER_NS, 0, 0
    while len(first) < 1_500:
        now_ns = min(arrival_ns, end_ns)
        if arrival_ns <= end_ns:
            arrived[admit(s, now_ns, f"r{serial}", 50, 10)] = now_ns
            serial += 1
            arrival_ns += int(rng.expovariate(load / service_ns))
        else:
            s.complete(now_ns, lease_id, 1, output_tokens=10)
            end_ns = NEVER_NS
        for decision in s.poll(now_ns):
            at_ns = arrived.pop(decision.handle)
            if decision.outcome != core.GRANTED:
                continue
            prefill_ns = int(service_ns * rng.uniform(0.2, 0.5))
            s.progress(now_ns + prefill_ns, decision.lease_id, 1, output_tokens=1)
            first.append(now_ns + prefill_ns - at_ns)
            lease_id, end_ns = decision.lease_id, now_ns + service_ns
            arrival_ns = max(arrival_ns, now_ns + prefill_ns)
    return s, first


@pytest.mark.parametrize("ttl_ms", [2_000, 5_000, 30_000, 120_000])
@pytest.mark.parametrize("load", [0.95, 1.0, 1.2, 4.0])
def test_p99_near_the_queue_ttl_is_within_a_tenth_of_the_clients(ttl_ms: int, load: float) -> None:
    for seed in fresh(3):
        s, exact = first_tokens(ttl_ms, load, seed)
        exact.sort()
        p99_ns = exact[int(0.99 * len(exact))]
        shown_ns = quantile_ns(row(s)["time_to_first_token"][0], 0.99, bounds_ns_of(s))
        if p99_ns >= ttl_ms * MS / 2:
            assert abs(shown_ns - p99_ns) <= p99_ns / 10, (seed, p99_ns, shown_ns)
        else:
            assert load < 1.2


def test_shown_histograms_change_no_decision() -> None:
    plain, _ = play(1, shown=False)
    shown, _ = play(1, shown=True)
    assert plain.digest() == shown.digest()
    for kind in ("queue_wait", "evicted_wait", "time_to_first_token"):
        parts = [row(shown, 0)[kind], row(shown)[kind]]
        together = [sum(pair) for pair in zip(parts[0][0], parts[1][0], strict=True)]
        assert (together, parts[0][1] + parts[1][1]) == row(plain)[kind]
        assert sum(parts[0][0]) > 50
