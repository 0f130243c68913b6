"""Tests that requests are found by the ids that their clients chose, unique or not."""

from __future__ import annotations

from typing import Any

import pytest

from schedsvc import _core as core

from .stream import Stream, asking, completing, faults, offering, replaying
from .support import SECOND, admit_message

CLIENT_IDS_MAX, NAMESAKES_MAX = 65_536, 16


def scheduler(**limits: Any) -> core.Scheduler:
    s = core.Scheduler(headroom_ppm=0, **limits)
    for name in (b"f", b"g"):
        s.set_flow(name, 1_000)
    s.set_pool(0, b"p", 1, 10_000, 1)
    return s


def admit(s: core.Scheduler, request_id: str, tokens: int = 10, who: int = 5, **more: Any) -> bytes:
    """Ask as a unary call does; return the answer, b"": it waits."""
    data = admit_message(request_id, (tokens,), **more).SerializeToString()
    answer = s.admit_wire(0, who, data)
    return answer if isinstance(answer, bytes) else b""


def found(s: core.Scheduler, client_id: str, who: int = -1, tenant: bytes = b"") -> list[Any]:
    rows = s.explain(0, client_id.encode(), tenant, who)
    return [(row["tenant"], row["state"], row["prompt_tokens"]) for row in rows]


def test_a_request_is_found_by_the_id_of_its_client() -> None:
    s = scheduler()
    admit(s, "r1", 6_000, client_request_id="mine")
    admit(s, "r2", 7_000, client_request_id="mine", tenant="g")
    admit(s, "r3", 20_000, client_request_id="mine")
    rows = [("f", "REFUSED", 20_000), ("g", "QUEUED", 7_000), ("f", "LIVE", 6_000)]
    assert found(s, "mine") == rows
    assert found(s, "mine", tenant=b"f") == [rows[0], rows[2]]
    assert found(s, "mine", tenant=b"g") == [rows[1]]
    assert found(s, "r2") == [rows[1]]
    assert found(s, "other") == found(s, "mine", tenant=b"x") == []


def test_two_callers_may_use_one_id_and_see_their_own() -> None:
    s = scheduler()
    admit(s, "r", 10, who=5, client_request_id="mine")
    admit(s, "r", 20, who=6, client_request_id="mine")  # also the same id at the scheduler
    for who, tokens in ((5, [10]), (6, [20]), (7, []), (-1, [20, 10])):
        assert [row[2] for row in found(s, "mine", who)] == tokens


def test_a_request_that_is_asked_for_again_is_listed_once() -> None:
    s = scheduler()
    for request_id in ("r1", "r1", "r2", "r1"):
        admit(s, request_id, 10, client_request_id="mine")
    assert len(found(s, "mine")) == 2


def test_an_id_that_is_also_the_schedulers_is_listed_once() -> None:
    s = scheduler()
    admit(s, "mine", 10, client_request_id="mine")
    assert found(s, "mine") == [("f", "LIVE", 10)]


def test_one_that_is_forgotten_is_not_found() -> None:
    s = scheduler(answer_ttl_ns=SECOND)
    stream = Stream(s, 5)
    lease = stream.grant(0, 1, "r1", client_request_id="mine")
    admit(s, "r2", 20_000, client_request_id="mine")
    assert len(found(s, "mine")) == 2
    stream.send(SECOND, completing(lease))
    s.poll(3 * SECOND)
    assert s.explain(3 * SECOND, b"mine") == []
    s.check()


def test_the_ids_that_are_kept_are_bounded() -> None:
    s = scheduler()
    for number in range(NAMESAKES_MAX + 4):
        admit(s, f"r{number}", 1 + number, client_request_id="many")
    tokens = [row[2] for row in found(s, "many")]
    assert tokens == list(range(NAMESAKES_MAX + 4, 4, -1))
    admit(s, "r", 10, client_request_id="old")
    for number in range(CLIENT_IDS_MAX - 1):
        admit(s, f"n{number}", 20_000, client_request_id=f"c{number % 40_000}")
    assert len(found(s, "old")) == 1
    assert found(s, "many") == []  # they have given way
    admit(s, "z", 20_000, client_request_id="last")
    assert found(s, "old") == []
    assert len(found(s, "last")) == 1
    # Those before the last 4,096 refusals are forgotten, but nothing else hides them.
    admit(s, "again", 10, client_request_id="c0")
    assert found(s, "c0") == [("f", "LIVE", 10)]


def test_a_stream_states_the_id_also_when_it_replays() -> None:
    s = scheduler(lease_id_base=1_000)
    stream = Stream(s, 5)
    lease = stream.grant(0, 1, "r1", 10, client_request_id="mine")
    assert found(s, "mine", 5) == [("f", "LIVE", 10)]
    again = scheduler(lease_id_base=2_000)
    stream = Stream(again, 5)
    replay = replaying(lease, "r1", client_request_id="mine")
    stream.send(0, offering("p", capacity=10_000), replay, replay)
    assert found(again, "mine", 5) == [("f", "LIVE", 10)]
    assert found(again, "mine", 6) == []
    again.check()


@pytest.mark.parametrize("value", ["x" * 129, "a\nb", "a\u202eb"])
def test_a_wrong_id_names_its_field(value: str) -> None:
    s = scheduler()
    with pytest.raises(core.CallerError) as caught:
        admit(s, "r1", client_request_id=value)
    assert caught.value.field == "client_request_id"
    stream = Stream(s, 5)
    answer = stream.send(0, asking(1, "r2", client_request_id=value))
    assert [field for _, _, field in faults(answer)] == ["admit.request.client_request_id"]
    answer = stream.send(0, replaying(7, "r3", client_request_id=value))
    assert [field for _, _, field in faults(answer)] == ["replay.client_request_id"]
    assert found(s, value[:128]) == []
