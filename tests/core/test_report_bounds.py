"""Tests the bounded effect of a report: on the charge, on others' counters, on a quota's debt."""

from typing import Any

import pytest

from schedsvc import _core as core

from .stream import Stream, asking, completing, fates, reporting
from .support import admit, grant, make, pool, totals

HUGE = core.TOTAL_TOKENS_MAX
SECOND = 10**9


LIMITED_400 = {"max_model_tokens": 400, "output": 10}


def used(s: core.Scheduler, flow: int = 0) -> tuple[int, int, int]:
    row = s.flow_stats(0, flow)
    return row["input_tokens"], row["cached_input_tokens"], row["output_tokens"]


@pytest.mark.parametrize(
    ("asked", "limits", "reported", "charged", "final_output"),
    [
        # Exact: the prompt and 5 %, rounded up.
        ({"input_estimated": False}, {}, (HUGE, 0, HUGE), (105, 0, 50), 895),
        ({"input_estimated": False}, {}, (105, 0, 50), (105, 0, 50), 50),
        ({"input_estimated": False}, {}, (105, 0, 700), (105, 0, 50), 700),
        ({"input_estimated": False, "prompt": 1}, {}, (HUGE, 0, 1), (2, 0, 1), 1),
        ({"input_estimated": False}, {}, (HUGE, HUGE, 1), (105, 105, 1), 1),
        # Estimated, or of a gate that does not say: the context, else the cache, for each sequence.
        ({}, {"max_model_tokens": 400}, (HUGE, 0, HUGE), (400, 0, 50), 50),
        ({}, {"max_model_tokens": 400}, (100, 0, HUGE), (100, 0, 50), 300),
        ({}, {"max_model_tokens": 400}, (-1, -1, HUGE), (0, 0, 50), 400),
        ({"sequences": 3}, {"max_model_tokens": 400}, (HUGE, 0, HUGE), (1_200, 0, 150), 150),
        ({"sequences": 3}, {"max_model_tokens": 400}, (100, 0, HUGE), (100, 0, 150), 1_100),
        ({}, {}, (HUGE, 0, HUGE), (1_000, 0, 50), 50),
        ({"prompt": 390}, LIMITED_400, (HUGE, 0, 1), (410, 0, 1), 1),
        # The context ends the output: a prompt that was shorter leaves it more.
        ({"prompt": 390}, LIMITED_400, (20, 0, 380), (20, 0, 380), 380),
        ({"prompt": 390}, LIMITED_400, (20, 0, HUGE), (20, 0, 380), 380),
        ({"prompt": 389}, LIMITED_400, (20, 0, 380), (20, 0, 10), 380),
        (
            {"prompt": 390, "sequences": 2, "n": 2},
            LIMITED_400,
            (20, 0, HUGE),
            (20, 0, 760),
            760,
        ),
        ({"prompt": 990, "output": 10}, {}, (20, 0, HUGE), (20, 0, 980), 980),
        ({"prompt": 390, "input_estimated": False}, LIMITED_400, (20, 0, 380), (20, 0, 10), 380),
    ],
)
@pytest.mark.parametrize("is_final", [True, False])
def test_report_charges_no_more_than_its_request_can_use(
    asked: dict[str, Any],
    limits: dict[str, Any],
    reported: tuple[int, int, int],
    charged: tuple[int, int, int],
    final_output: int,
    is_final: bool,
) -> None:
    """The charge is the stated final output, if the context has room for it."""
    usable = charged[2]
    s = core.Scheduler(headroom_ppm=0)
    s.set_flow(b"f", 1_000)
    s.set_pool(0, b"p", 1, 1_000, 1, max_model_tokens=limits.get("max_model_tokens", 0))
    asked = {"prompt": 100, "output": limits.get("output", 50)} | asked
    lease_id = grant(s, 0, "r", **asked).lease_id
    if is_final:
        s.complete(0, lease_id, 1, core.COMPLETED, *reported)
        assert pool(s, 0)["output_above_limit_tokens"] == final_output - usable
        charged = (charged[0] if reported[0] >= 0 else asked["prompt"], charged[1], final_output)
    else:
        s.progress(0, lease_id, 1, *reported)
        assert pool(s, 0)["output_above_limit_tokens"] == 0
    assert used(s) == charged
    exceeds = reported[0] > charged[0] or reported[2] > charged[2]
    assert totals(s, 0)["reports_limited"] == exceeds
    s.progress(0, lease_id, 1, *reported)
    assert totals(s, 0)["reports_limited"] == exceeds  # counted once for a lease
    s.check()


def test_output_above_the_limit_is_paid_by_counters_and_quotas() -> None:
    s = core.Scheduler(headroom_ppm=0)
    s.set_flow(b"f", 1_000)
    s.set_pool(0, b"p", 1, 1_000, 1)
    s.set_flow_quota(0, 0, output_tokens=600)
    lease_id = grant(s, 0, "r", 100, 50, reports_progress=True).lease_id
    s.progress(0, lease_id, 1, 100, 0, 500)
    before = s.flow_stats(0, 0)["vtc_micro"]
    assert used(s)[2] == 50
    ended = s.complete(0, lease_id, 1, core.COMPLETED, 100, 0, 500)
    assert ended is not None
    assert ended.output_tokens == used(s)[2] == 500
    assert s.flow_stats(0, 0)["vtc_micro"] - before == 2 * 450 * 10**6
    assert s.flow_stats(0, 0)["quotas"][0]["remaining"] == 100
    assert pool(s, 0)["output_above_limit_tokens"] == 450
    s.check()


def test_output_above_the_limit_is_counted_over_a_restart_of_the_engine() -> None:
    s = make(capacity=1_000)
    for epoch in (1, 2):
        lease_id = grant(s, 0, f"r{epoch}", 100, 50).lease_id
        s.set_pool(0, b"p", epoch + 1, 1_000, 1)
        s.complete(0, lease_id, epoch, core.COMPLETED, 100, 0, 80)
        assert pool(s, 0)["output_above_limit_tokens"] == epoch * 30
    s.check()


def test_gate_says_on_the_wire_whether_its_prompt_is_counted() -> None:
    s = make(capacity=10_000)
    stream = Stream(s)
    for tag, (said, charged) in enumerate(
        [({}, 10_000), ({"input_estimated": True}, 10_000), ({"input_estimated": False}, 105)], 1
    ):
        lease_id = stream.grant(0, tag, f"r{tag}", 100, **said)
        stream.send(0, completing(lease_id, input_tokens=HUGE, output_tokens=0))
        ended = s.complete(0, lease_id, 1)
        assert ended is not None
        assert ended.input_tokens == charged


def test_false_report_of_one_caller_leaves_others_their_share() -> None:
    """A single report of 2^27 tokens could set two equal tenants of another shim at 1 to 1,999."""
    s = core.Scheduler(headroom_ppm=0)
    for name in (b"victim", b"other"):
        s.set_flow(name, 1_000)
    s.set_pool(0, b"p", 1, 16, 1)  # one request at a time
    liar = grant(s, 0, "lie", 8, 8, principal=2, input_estimated=False)
    for number in range(3):  # both always have waiting requests
        for flow in (0, 1):
            admit(s, 0, f"{flow}-{number}", 8, 8, flow)
    s.complete(0, liar.lease_id, 1, core.COMPLETED, HUGE, 0, HUGE, principal=2)
    granted = [0, 0]
    for number in range(2_000):
        [d] = s.poll(0)
        granted[d.flow] += 1
        s.complete(0, d.lease_id, 1, core.COMPLETED, 8, 0, 8)
        admit(s, 0, f"next-{number}", 8, 8, d.flow)
    assert abs(granted[0] - granted[1]) <= 2
    s.check()


def test_reports_of_running_leases_hold_no_more_of_the_pool() -> None:
    s = make(capacity=1_000)
    stream = Stream(s)
    lease_id = stream.grant(0, 1, "r", 100)
    stream.send(0, reporting(lease_id, output_tokens=HUGE))
    assert pool(s, 0)["promised_tokens"] == 110
    assert fates(stream.send(0, asking(2, "q", 800))) == [(2, core.GRANTED)]


# The debt of a quota.


def owed_ns(s: core.Scheduler, now_ns: int, kind: int) -> int:
    """Return how long a bucket takes until it holds something again."""
    [row] = [row for row in s.flow_stats(now_ns, 0)["quotas"] if row["kind"] == kind]
    return row["reset_ms"] * 10**6 - 60 * SECOND


def short_by_prediction(count: int) -> tuple[core.Scheduler, list[int]]:
    """Make leases of 900 output tokens each, predicted to be short, under a quota of 1,000."""
    s = make(capacity=100_000, samples_min=1)
    for i in range(30):
        s.complete(0, grant(s, 0, f"teach{i}", 1, 900).lease_id, 1, output_tokens=1)
    s.set_flow_quota(0, 0, output_tokens=1_000)
    return s, [grant(s, 0, f"r{i}", 1, 900).lease_id for i in range(count)]


def test_bucket_owes_at_most_a_minute_and_a_request() -> None:
    s, leases = short_by_prediction(10)
    for lease_id in leases:
        s.progress(0, lease_id, 1, output_tokens=900)
    for lease_id in leases:  # 9,000 tokens: nine minutes of the limit
        s.complete(0, lease_id, 1, output_tokens=900)
    assert 0 < owed_ns(s, 0, 5) <= 60 * SECOND * 1_900 // 1_000
    s.check()


def test_open_requests_are_given_back_in_full() -> None:
    """The scheduler forgives no tokens that an open request may still give back."""
    s, leases = short_by_prediction(10)
    before = s.flow_stats(0, 0)["quotas"][0]["remaining"]
    for lease_id in leases:
        s.progress(0, lease_id, 1, output_tokens=900)
    for lease_id in leases:  # the final report counts: they used the prediction
        s.complete(0, lease_id, 1, output_tokens=1)
    assert s.flow_stats(0, 0)["quotas"][0]["remaining"] == before
    s.check()


@pytest.mark.parametrize("restarts", [False, True])
def test_lowered_limit_is_owed_a_minute_of_the_new_one(restarts: bool) -> None:
    """If it were not, 900,000 of 1,000,000 used, then 10,000, would mean 90 minutes of refusals."""
    s = make(capacity=2_000_000)
    s.set_flow_quota(0, 0, refuse=True, total_tokens=1_000_000)
    s.complete(0, grant(s, 0, "r", 899_900, 100).lease_id, 1, output_tokens=100)
    if restarts:
        rows = [(key, value, 0) for key, value in s.save(0, 1_000)]
        s = make(capacity=2_000_000)
        s.set_flow_quota(0, 0, refuse=True, total_tokens=10_000)
        s.set_saved(0, rows)
    else:
        s.set_flow_quota(0, 0, refuse=True, total_tokens=10_000)
    assert admit(s, 0, "early", 50, 50) == -core.REJECTED_QUOTA
    assert 0 < owed_ns(s, 0, 6) <= 60 * SECOND
    assert admit(s, 61 * SECOND, "late", 50, 50) > 0
    s.check()


def test_lowered_share_gives_its_guarantee_within_a_minute() -> None:
    s = make(capacity=1_000)
    group = s.set_quota(0, b"g", share=1_000_000)
    s.set_flow_quota(0, 0, parent=group)
    for i in range(90):
        s.complete(0, grant(s, 0, f"r{i}", 900, 50).lease_id, 1, output_tokens=50)
    s.set_quota(0, b"g", share=10_000)
    left = []
    for at_s in (0, 59, 61, 121):
        [row] = [row for row in s.stats(at_s * SECOND)["quotas"] if row["name"] == "g"]
        left.append(row["share_left_tokens"])
    assert left == [0, 0, 166, 10_000]


def test_forgiven_tenant_owes_nothing() -> None:
    s, leases = short_by_prediction(10)
    for lease_id in leases:
        s.complete(0, lease_id, 1, output_tokens=900)
    assert owed_ns(s, 0, 5) > 0
    assert s.set_forgiven(0, b"f") == 1
    assert owed_ns(s, 0, 5) == 0
    assert s.set_forgiven(0, b"f") == 0
    assert s.flow_stats(6 * SECOND, 0)["quotas"][0]["remaining"] == 100
    s.check()
