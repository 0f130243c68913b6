"""Tests usage of leases that are replayed too late after a restart, or of an old epoch."""

import pytest

from schedsvc import _core as core

from .stream import Stream, asking, completing, offering, replaying
from .support import SECOND, make, totals
from .test_usage import keeping, saved

LATE_NS = 30 * SECOND  # lease TTL and grace
USED = {"input_tokens": 10, "cached_input_tokens": 4, "output_tokens": 7}
ROW = (7, b"f", b"default", b"p", b"", False, 10, 4, 7, True)
PERIOD_NS = 3600 * SECOND


def late(s: core.Scheduler, **replay: object) -> Stream:
    """Open a stream that has replayed lease 7 too late."""
    stream = Stream(s)
    stream.send(0, offering("p"))
    answer = stream.send(LATE_NS, replaying(7, "r", **replay))
    assert [(one.lease_id, one.state) for one in answer.leases] == [(7, core.LEASE_UNKNOWN)]
    return stream


@pytest.mark.parametrize(
    ("late_ns", "epoch", "refused"),
    [(-1, 1, 0), (0, 1, 1), (-1, 2, 0)],
    ids=["in time", "late", "old epoch"],
)
def test_end_after_a_replay_makes_one_row(late_ns: int, epoch: int, refused: int) -> None:
    s = keeping()
    stream = Stream(s)
    stream.send(0, offering("p", epoch))
    now_ns = LATE_NS + late_ns
    stream.send(now_ns, replaying(7, "r"), completing(7, **USED))
    assert s.take_usage() == [ROW]
    assert totals(s, now_ns)["replays_refused"] == refused
    s.check()


def test_late_lease_reserves_and_charges_nothing() -> None:
    s = keeping()
    stream = late(s)
    before = s.stats(LATE_NS)["flows"]
    stream.send(LATE_NS, completing(7, **USED))
    assert s.stats(LATE_NS)["flows"] == before
    assert totals(s, LATE_NS)["live_leases"] == totals(s, LATE_NS)["promised_tokens"] == 0
    s.check()


def test_late_end_counts_once() -> None:
    s = keeping()
    stream = late(s)
    for _ in range(3):
        stream.send(LATE_NS, completing(7, **USED))
    assert s.take_usage() == [ROW]


def test_late_end_of_another_lease_makes_no_row() -> None:
    s = keeping()
    stream = late(s)
    stream.send(LATE_NS, completing(8, **USED))
    stream.send(LATE_NS, replaying(9, "q"), completing(7, **USED))
    assert s.take_usage() == []


def test_late_end_without_totals_has_those_of_the_replay() -> None:
    s = keeping()
    stream = late(s, input_tokens=10, cached_input_tokens=2, output_tokens=3)
    stream.send(LATE_NS, completing(7, outcome=core.CANCELLED))
    assert [row[5:] for row in s.take_usage()] == [(False, 10, 2, 3, True)]


@pytest.mark.parametrize(("outcome", "estimated"), [(core.CANCELLED, True), (0, False)])
def test_late_end_of_an_uncounted_lease_has_its_prompt(outcome: int, estimated: bool) -> None:
    s = keeping()
    late(s).send(LATE_NS, completing(7, outcome=outcome))
    assert [row[5:] for row in s.take_usage()] == [(estimated, 10, 0, 0, True)]


def test_late_usage_is_limited_to_what_its_request_can_use() -> None:
    s = keeping()
    many = {"input_tokens": 1 << 27, "output_tokens": 1 << 27}
    late(s, max_output_tokens=20, sequences=2).send(LATE_NS, completing(7, **many))
    ((*_, input_tokens, cached, output_tokens, _),) = s.take_usage()
    assert (input_tokens, cached) == (200, 0)  # the context of 100 tokens, for each sequence
    assert output_tokens == 40
    assert totals(s, LATE_NS)["reports_limited"] == 1


def test_late_output_above_the_limit_counts_as_stated() -> None:
    s = keeping()
    used = {"input_tokens": 10, "output_tokens": 25}
    late(s, max_output_tokens=20).send(LATE_NS, completing(7, **used))
    ((*_, output_tokens, _),) = s.take_usage()
    assert output_tokens == 25
    assert s.stats(LATE_NS)["pools"][0]["output_above_limit_tokens"] == 5
    assert totals(s, LATE_NS)["reports_limited"] == 0


def test_late_end_that_used_nothing_makes_no_row() -> None:
    s = keeping()
    late(s).send(LATE_NS, completing(7, input_tokens=0, output_tokens=0))
    assert s.take_usage() == []


def test_late_end_without_a_ledger_makes_no_row() -> None:
    s = make()
    late(s).send(LATE_NS, completing(7, **USED))
    assert s.take_usage() == []


def test_late_usage_is_charged_to_budgets() -> None:
    s = keeping()
    s.set_flow_quota(0, 0, day_tokens=100)
    s.set_budget_period(0, b"tenant:f", 0, 1, PERIOD_NS)
    stream = late(s)
    stream.send(LATE_NS, completing(7, input_tokens=60, output_tokens=10))
    granted = [
        v.response.outcome for v in stream.send(LATE_NS, asking(1, "a", 35, tenant="f")).verdicts
    ]
    assert granted == [core.REJECTED_QUOTA]  # 70 of 100 are spent
    granted = [
        v.response.outcome for v in stream.send(LATE_NS, asking(2, "b", 5, tenant="f")).verdicts
    ]
    assert granted == [core.GRANTED]
    s.check()


def test_late_usage_of_another_callers_pool_makes_no_row() -> None:
    s = keeping()
    owner, stranger = Stream(s, principal=1), Stream(s, principal=2)
    owner.send(0, offering("p"))
    stranger.send(LATE_NS, replaying(7, "r"), completing(7, **USED))
    assert s.take_usage() == []


def test_late_usage_of_a_known_lease_makes_no_row() -> None:
    s = keeping()
    owner, stranger = Stream(s, principal=1), Stream(s, principal=2)
    owner.send(0, offering("p"))
    lease = owner.grant(1, 1, "r", tenant="f")
    stranger.send(1, offering("q"))
    stranger.send(LATE_NS, replaying(lease, "r", pool="q"), completing(lease, **USED))
    assert s.take_usage() == []


def test_late_end_is_saved_once_its_row_is() -> None:
    s = keeping()
    stream = late(s)
    before = stream.seq
    assert saved(stream, LATE_NS, completing(7, **USED)) == before
    s.set_usage_saved(LATE_NS, 1)
    assert saved(stream, LATE_NS) == stream.seq


def test_late_usage_names_adapter_and_class() -> None:
    s = keeping()
    s.set_flow_class(0, 0, (s.set_class(b"batch", 5),))
    late(s, adapter="lora", request_class="batch").send(LATE_NS, completing(7, **USED))
    ((_, tenant, request_class, _, adapter, *_),) = s.take_usage()
    assert (tenant, request_class, adapter) == (b"f", b"batch", b"lora")
