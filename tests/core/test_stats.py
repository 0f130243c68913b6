"""Tests Stats of the core: the names of the contract, and figures that add up."""

import pytest
from schedsvc_client.v1 import pool_pb2, quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import Stream, offering
from .support import SECOND, admit, gauges, grant, is_drained, make, outcomes, pool


def names(message: type) -> set[str]:
    return set(message.DESCRIPTOR.fields_by_name)  # type: ignore[attr-defined]


OF_THE_SERVER = {"judgement", "incarnation", "state", "mode", "config", "usage", "cluster"}


def test_keys_are_the_fields_of_the_contract() -> None:
    s = make()
    grant(s, 0, "r")
    stats = s.stats(0)
    assert set(stats) == names(pb.StatsResponse) - OF_THE_SERVER
    assert set(stats["totals"]) == names(pb.Totals)
    assert set(stats["pools"][0]) == names(pool_pb2.PoolStats)
    assert set(stats["flows"][0]) == names(pb.FlowStats)
    assert set(s.flow_stats(0, 0)) == names(pb.FlowStats)
    assert stats["quotas"] == []
    assert stats["groups"] == []
    s.set_quota(0, b"group:g", concurrency=1, weight_milli=1_000)
    [row] = s.stats(0)["quotas"]
    assert set(row) == names(quota_pb2.QuotaStats)
    [row] = s.stats(0)["groups"]  # no tenant is below it
    assert set(row) == names(quota_pb2.GroupStats)
    s.set_flow_quota(0, 0, s.quota_index(b"group:g"))
    s.poll(0)
    [row] = s.stats(0)["groups"]
    assert set(row) == names(quota_pb2.GroupStats)


def test_limited_snapshot_keeps_flows_that_wait() -> None:
    s = make(("a", 1000), ("b", 1000), ("c", 1000), capacity=20)
    for flow, tokens in ((0, 9), (1, 5)):
        decision = grant(s, 0, f"done{flow}", flow=flow)
        s.complete(0, decision.lease_id, 1, output_tokens=tokens)
    grant(s, 0, "runs", 4, flow=0)
    assert [row["tenant"] for row in s.stats(0, 2)["flows"]] == ["a", "b"]
    admit(s, 0, "waits", 10, flow=2)
    stats = s.stats(0, 2)
    assert [row["tenant"] for row in stats["flows"]] == ["a", "c"]
    assert stats["totals"]["flows"] == len(s.stats(0)["flows"])


def test_snapshot_says_how_long_a_pool_is_detached_and_owned() -> None:
    s = core.Scheduler(lease_ttl_ns=2 * SECOND, lease_grace_ns=SECOND)
    stream = Stream(s)
    stream.send(0, offering("q"))
    [row] = s.stats(9 * SECOND)["pools"]
    assert (row["detached_ms"], row["owned_ms"]) == (0, 0)
    stream.session.close(10 * SECOND)
    [row] = s.stats(11 * SECOND)["pools"]
    assert (row["detached_ms"], row["owned_ms"]) == (1_000, 2_000)
    [row] = s.stats(20 * SECOND)["pools"]
    assert (row["detached_ms"], row["owned_ms"]) == (10_000, 0)


@pytest.mark.parametrize("goodbye", [False, True])
def test_snapshot_says_whether_the_last_stream_of_a_pool_said_goodbye(goodbye: bool) -> None:
    s = core.Scheduler()
    first, last = Stream(s), Stream(s)
    for number, stream in enumerate((first, last)):
        stream.send(0, offering("q"))
        if goodbye or number == 0:
            stream.send(0, pb.SessionEvent(goodbye=pb.SessionGoodbye()))
    first.session.close(0)
    assert not pool(s, 0)["said_goodbye"], "the other stream offers it"
    last.session.close(0)
    assert pool(s, 0)["said_goodbye"] is goodbye
    back = Stream(s)
    back.send(0, offering("q"))
    assert not pool(s, 0)["said_goodbye"]
    back.session.close(0)
    assert not pool(s, 0)["said_goodbye"]


def test_a_snapshot_fits_the_messages() -> None:
    s = make(("a", 1000), ("b", 500), capacity=20)
    grant(s, 0, "runs")
    admit(s, 0, "waits", flow=1)
    admit(s, 0, "big", 100)
    stats = s.stats(SECOND)
    for row in (*stats["flows"], stats["totals"]):
        row["refusals"] = [
            pb.OutcomeCount(outcome=outcome, count=count)
            for outcome, count in row["refusals"].items()
        ]
    flows = [pb.FlowStats(**row) for row in stats["flows"]]
    pb.StatsResponse(
        pools=[pool_pb2.PoolStats(**row) for row in stats["pools"]],
        flows=flows,
        totals=pb.Totals(**stats["totals"]),
        policy=stats["policy"],
        flow_order=stats["flow_order"],
        digest=stats["digest"],
        draining=stats["draining"],
    ).SerializeToString()
    assert flows[0].tenant == "a"
    assert flows[0].refusals[0].outcome == core.REJECTED_TOO_LARGE


def test_outcomes_and_lease_states_are_numbered_as_in_the_contract() -> None:
    for name, number in pb.Outcome.items():
        ours = getattr(core, name.removeprefix("OUTCOME_"), None)
        assert ours in (number, None)
        if ours:
            assert core.OUTCOME_TEXT[ours]
    for name, state in pb.LeaseState.items():
        if state:
            assert getattr(core, "LEASE_" + name.removeprefix("LEASE_STATE_")) == state


def test_flows_come_by_service_and_up_to_the_limit() -> None:
    s = make(("a", 1000), ("b", 1000), ("c", 1000))
    for flow, output in ((0, 5), (1, 50), (2, 20)):
        d = grant(s, 0, f"r{flow}", 10, 50, flow)
        s.complete(0, d.lease_id, 1, output_tokens=output)
    assert [f["tenant"] for f in s.stats(0)["flows"]] == ["b", "c", "a"]
    assert [f["tenant"] for f in s.stats(0, 1)["flows"]] == ["b"]
    assert s.stats(0, 0)["flows"] == []


def test_ages_are_in_milliseconds() -> None:
    s = make(capacity=20)
    grant(s, 0, "runs")
    admit(s, SECOND, "waits")
    admit(s, 2 * SECOND, "waits2")
    assert s.flow_stats(3 * SECOND, 0)["oldest_queued_ms"] == 2_000
    assert pool(s, 3 * SECOND)["telemetry_age_ms"] == -1
    s.telemetry(3 * SECOND, 0, 1, 4, 3, 2, 1)
    row = pool(s, 5 * SECOND)
    assert row["telemetry_age_ms"] == 2_000
    keys = ("running", "waiting", "used_tokens", "preemptions")
    assert [row[f"engine_{k}"] for k in keys] == [4, 3, 2, 1]
    s.telemetry(6 * SECOND, 0, 2, 9, 9, 9, 9)  # of another engine
    assert pool(s, 6 * SECOND)["engine_running"] == 4


@pytest.mark.parametrize("queued", [0, 1, 7])
def test_a_verdict_states_place_and_limits(queued: int) -> None:
    s = make(capacity=100, flow_queue_max=10, headroom_ppm=100_000)
    grant(s, 0, "runs", 50, 10)
    for i in range(queued):
        admit(s, 0, f"q{i}", 50, 10)
    last = admit(s, 0, "last", 50, 10)
    s.cancel(SECOND, last)
    (d,) = s.poll(SECOND)
    assert d.position == queued
    assert (d.queue_max, d.queue_left) == (10, 8 - queued)  # a fifth is not for all
    assert (d.pool_capacity_tokens, d.pool_free_tokens) == (100, 30)
    assert d.waited_ns == SECOND


def test_retry_after_is_spread_and_bounded() -> None:
    s = make(capacity=20, queue_max=10_000, flow_queue_max=10_000)
    grant(s, 0, "runs")
    for i in range(2_000):
        admit(s, 0, f"q{i}")
    told = {d.retry_after_ms for d in s.poll(30 * SECOND) if d.outcome == core.EVICTED_TTL}
    assert len(told) > 50  # requests refused together do not retry together
    assert all(900 <= ms <= 120_000 for ms in told)


def test_retry_after_follows_the_rate_of_grants() -> None:
    def told_after(interval_ns: int) -> int:
        s = make(capacity=20, queue_ttl_ns=1 << 55, lease_ttl_ns=1 << 55)
        now_ns = 0
        for i in range(20):
            d = grant(s, now_ns, f"r{i}")
            s.complete(now_ns, d.lease_id, 1)
            now_ns += interval_ns
        grant(s, now_ns, "runs")
        admit(s, now_ns, "waits", queue_ttl_ns=1)
        (d,) = s.poll(now_ns + 1)
        return d.retry_after_ms

    assert 900 <= told_after(SECOND // 10) <= 1_100
    # 3/8 and half an interval more than the expected one, and up to 10 %.
    assert 9_375 <= told_after(5 * SECOND) <= 10_313
    assert 90_000 <= told_after(1 << 49) <= 120_000  # 6.5 days between grants


def test_describe_says_what_matters() -> None:
    s = make(("alpha", 2000), capacity=20)
    grant(s, 0, "runs")
    admit(s, 0, "waits")
    s.poll(0)
    text = s.describe(0)
    for part in ("vtc", "alpha", "2000", "20 promised", "1 queued", "KV", f"{s.digest():016x}"):
        assert part in text


def test_a_drained_scheduler_shows_zero() -> None:
    s = make(lease_grace_ns=0)
    grant(s, 0, "r")
    admit(s, 0, "big", 990, 10)
    assert gauges(s, 0)["promised_tokens"] == 20
    assert outcomes(s.poll(10 * SECOND)) == [core.EXPIRED, core.GRANTED]
    assert outcomes(s.poll(20 * SECOND)) == [core.EXPIRED]
    assert is_drained(s, 20 * SECOND)
