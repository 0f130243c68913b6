"""Tests the session of an agent that a request belongs to, as Explain shows it."""

from typing import Any

from schedsvc import _core as core

from .support import SECOND, admit, grant
from .test_agent_sessions import capped, one_by_one, run_turn, turn


def session_of(s: core.Scheduler, now_ns: int, request_id: str) -> dict[str, Any] | None:
    (story,) = s.explain(now_ns, request_id.encode())
    found: dict[str, Any] | None = story["session"]
    return found


def test_a_request_without_a_session_has_none() -> None:
    s = one_by_one()
    grant(s, 0, "runs", session=b"a")
    admit(s, 0, "plain")
    assert session_of(s, 0, "plain") is None


def test_a_running_request_says_where_its_session_is_active() -> None:
    s = capped(250)
    lease = grant(s, 0, "a-0", 60, 40, session=b"a").lease_id
    turn(s, 0, "a-1", "a", prompt=60, output=40)
    s.poll(0)
    assert session_of(s, 0, "a-0") == {
        "open_requests": 2, "active_in": "p", "footprint_tokens": 100, "shares_counter": False,
    }  # fmt: skip
    s.complete(0, lease, 1, input_tokens=60, output_tokens=40)
    assert session_of(s, 0, "a-0") is None  # it has ended


def test_request_waiting_for_the_cap_states_need_and_time() -> None:
    s = capped(250, queue_ttl_ns=200 * SECOND)
    for name in "ab":
        run_turn(s, 0, name, 0)
    for name in "cde":
        turn(s, SECOND, f"{name}-0", name, prompt=60, output=40)
    turn(s, SECOND, "e-1", "e", prompt=20, output=10)
    s.poll(SECOND)
    assert session_of(s, 21 * SECOND, "e-1") == {
        "open_requests": 2, "active_in": "", "footprint_tokens": 0, "shares_counter": False,
        "requests_ahead": 1, "cap": {
            "pool": "p", "needs_tokens": 30, "active_tokens": 200, "active_sessions": 2,
            "limit_tokens": 250, "sessions_ahead": 2, "next_in_ms": 40_000,
        },
    }  # fmt: skip
    (story,) = s.explain(21 * SECOND, b"e-1")
    assert (story["wait_left_ms"], story["ttft_expected_ms"]) == (-1, -1)  # until others pause


def test_a_queued_request_says_how_many_sessions_precede_its_own() -> None:
    s = one_by_one()
    runs = grant(s, 0, "runs", session=b"served")
    for k, name in enumerate(("served", "first", "second", "served")):
        turn(s, 0, f"q{k}", name)
    admit(s, 0, "plain")  # the requests without a session are one more
    s.progress(0, runs.lease_id, 1, output_tokens=5)
    s.poll(0)
    places = [session_of(s, 0, f"q{k}") for k in range(4)]
    assert [(row["sessions_ahead"], row["requests_ahead"]) for row in places if row] == [
        (3, 0), (0, 0), (1, 0), (3, 1),
    ]  # fmt: skip


def test_more_than_32_sessions_ahead_are_not_counted() -> None:
    s = one_by_one()
    grant(s, 0, "runs", session=b"served")
    for k in range(50):
        turn(s, 0, f"q{k}", f"s{k}")
    s.poll(0)
    ahead = [(session_of(s, 0, f"q{k}") or {})["sessions_ahead"] for k in (0, 7, 32, 33, 49)]
    assert ahead == [0, 7, 32, 33, 33]


def test_sessions_beyond_those_with_a_counter_share_one() -> None:
    s = one_by_one(flow_queue_max=2_000)
    grant(s, 0, "runs", session=b"a")
    for k in range(1_025):
        turn(s, 0, f"q{k}", f"s{k}")
    shares = [(session_of(s, 0, f"q{k}") or {})["shares_counter"] for k in (0, 1_022, 1_023)]
    assert shares == [False, False, True]
