"""Tests why a request waits: what for, behind whom, until when, and the reasons so far."""

from typing import Any

import pytest

from schedsvc import _core as core

from .random_walk import RandomWalk
from .stream import Stream, asking, offering
from .support import SECOND, admit, admit_message, grant, make

MS = 10**6


def story(s: core.Scheduler, now_ns: int, request_id: str, **more: Any) -> dict[str, Any]:
    (found,) = s.explain(now_ns, request_id.encode(), **more)
    return found


def reason(s: core.Scheduler, now_ns: int, request_id: str) -> str:
    return core.WAITS[story(s, now_ns, request_id)["place"]["reason"]]


def waited_ms(s: core.Scheduler, now_ns: int, request_id: str) -> dict[str, int]:
    found = story(s, now_ns, request_id)
    times = {core.WAITS[row["reason"]]: row["time_us"] // 1_000 for row in found["waited"]}
    assert sum(times.values()) == found["queue_duration_us"] // 1_000, (
        "all of the wait has a reason"
    )
    return times


def end(s: core.Scheduler, now_ns: int, lease: core.Decision) -> list[core.Decision]:
    s.complete(now_ns, lease.lease_id, lease.pool_epoch, output_tokens=5)
    return s.poll(now_ns)


def test_each_reason_of_its_wait_is_reported_and_timed() -> None:
    s = make(("a", 1000), ("b", 10_000), capacity=20)
    running = grant(s, 0, "first", flow=1)
    admit(s, 0, "before", flow=0)
    admit(s, 0, "it", flow=0)
    s.poll(0)
    assert reason(s, 0, "before") == "KV"
    assert reason(s, 0, "it") == "QUEUE"
    admit(s, 0, "light", flow=1)
    (running,) = end(s, SECOND, running)  # `before` runs: the other flow's counter is less now
    assert reason(s, SECOND, "it") == "TURN"
    assert reason(s, SECOND, "light") == "KV"
    (running,) = end(s, 3 * SECOND, running)
    assert reason(s, 4 * SECOND, "it") == "KV"
    assert waited_ms(s, 4 * SECOND, "it") == {"QUEUE": 1_000, "TURN": 2_000, "KV": 1_000}
    place = story(s, 4 * SECOND, "it")["place"]
    assert place == {
        "reason": core.WAITS.index("KV"), "reason_ms": 1_000, "queue_ahead": 0, "flows_ahead": 0,
        "work_ahead_tokens": 0, "evicted_in_ms": 26_000,
    }  # fmt: skip
    (lease,) = end(s, 8 * SECOND, running)
    # Granted, and then ended: still answered, for as long as its answer is kept.
    found = story(s, 9 * SECOND, "it")
    assert (found["state"], found["state_ms"], found["age_ms"]) == ("LIVE", 1_000, 9_000)
    assert "place" not in found
    assert waited_ms(s, 9 * SECOND, "it") == {"QUEUE": 1_000, "TURN": 2_000, "KV": 5_000}
    end(s, 10 * SECOND, lease)
    found = story(s, 12 * SECOND, "it")
    assert (found["state"], found["state_ms"]) == ("ENDED", 2_000)
    assert found["outcome"] == core.COMPLETED
    assert waited_ms(s, 12 * SECOND, "it") == {"QUEUE": 1_000, "TURN": 2_000, "KV": 5_000}
    s.poll(400 * SECOND)
    assert s.explain(400 * SECOND, b"it") == []


def test_a_turn_that_is_lost_again_is_a_wait_for_the_turn() -> None:
    s = make(("served", 1000), ("new", 1000), capacity=20)
    lease = grant(s, 0, "first", flow=0, reports_progress=True)
    admit(s, 0, "it", flow=0)
    s.poll(0)
    admit(s, SECOND, "other", flow=1)
    s.progress(SECOND, lease.lease_id, 1, output_tokens=9)
    s.poll(SECOND)
    assert (reason(s, SECOND, "other"), reason(s, SECOND, "it")) == ("KV", "TURN")
    assert story(s, SECOND, "it")["place"]["work_ahead_tokens"] > 0
    assert waited_ms(s, 3 * SECOND, "it") == {"KV": 1_000, "TURN": 2_000}


def test_a_quota_that_is_raised_ends_its_part_of_the_wait() -> None:
    s = make(("a", 1000), capacity=20)
    s.set_flow_quota(0, 0, concurrency=1)
    grant(s, 0, "first")
    admit(s, 0, "it")
    s.poll(0)
    s.set_flow_quota(SECOND, 0, concurrency=2)
    s.poll(SECOND)
    assert waited_ms(s, 3 * SECOND, "it") == {"QUOTA": 1_000, "KV": 2_000}


def test_a_refusal_is_explained_until_its_answer_is_forgotten() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=20, flow_queue_max=1, queue_ttl_ns=5 * SECOND)
    lease = grant(s, 0, "runs")
    assert s.admit(0, 0, b"large", 100, 10) == -core.REJECTED_TOO_LARGE
    found = story(s, SECOND, "large", tenant=b"a")
    assert (found["state"], found["outcome"]) == ("REFUSED", core.REJECTED_TOO_LARGE)
    assert (found["prompt_tokens"], found["max_output_tokens"], found["sequences"]) == (100, 10, 1)
    assert (found["state_ms"], found["age_ms"], found["waited"]) == (1_000, 1_000, [])
    assert "place" not in found
    assert s.explain(SECOND, b"large", tenant=b"b") == []
    admit(s, SECOND, "it", flow=0)
    s.poll(SECOND)
    assert admit(s, 2 * SECOND, "full", flow=0) == -core.REJECTED_FLOW_QUEUE_FULL
    assert story(s, 2 * SECOND, "full")["outcome"] == core.REJECTED_FLOW_QUEUE_FULL
    s.poll(6 * SECOND)  # it has waited for as long as it may
    found = story(s, 7 * SECOND, "it")
    assert (found["state"], found["outcome"]) == ("REFUSED", core.EVICTED_TTL)
    assert (found["state_ms"], found["age_ms"]) == (1_000, 6_000)
    assert waited_ms(s, 7 * SECOND, "it") == {"KV": 5_000}
    end(s, 8 * SECOND, lease)
    again = grant(s, 9 * SECOND, "it", flow=0)  # a retry hides the end of the first
    assert story(s, 9 * SECOND, "it")["state"] == "LIVE"
    end(s, 10 * SECOND, again)
    assert story(s, 300 * SECOND, "full")["state"] == "REFUSED"
    assert s.explain(303 * SECOND, b"full") == []
    s.check()


def test_only_the_last_refusals_are_kept() -> None:
    s = make(capacity=20)
    for number in range(5_000):
        s.admit(0, 0, f"r{number}".encode(), 100, 10)
        s.admit(0, 0, b"again", 100, 10 + number % 2)
    known = [number for number in range(5_000) if s.explain(0, f"r{number}".encode())]
    assert known == list(range(5_000 - 2_048, 5_000))
    assert story(s, 0, "again")["max_output_tokens"] == 11


def test_a_caller_without_the_right_sees_no_refusal() -> None:
    s = make(capacity=20)
    data = asking(1, "large", 100, tenant="f").admit.request.SerializeToString()
    assert isinstance(s.admit_wire(0, 3, data), bytes)
    assert [len(s.explain(0, b"large", principal=who)) for who in (-1, 3, 4)] == [1, 1, 0]


def test_request_with_room_at_once_has_waited_for_nothing() -> None:
    s = make()
    grant(s, SECOND, "it")
    found = story(s, 2 * SECOND, "it")
    assert (found["waited"], found["queue_duration_us"]) == ([], 0)
    assert found["wait_told_ms"] == -1


def test_pool_names_the_flow_ahead_and_its_lead() -> None:
    s = make(("heavy", 1000), ("light", 1000), capacity=40)
    running = grant(s, 0, "first", 20, 20, flow=0, reports_progress=True)
    admit(s, 0, "light", 10, 30, flow=1)  # lifted to the level, which is 0
    admit(s, 0, "heavy", 10, 10, flow=0)
    s.progress(0, running.lease_id, 1, output_tokens=7)  # 14 tokens of service
    s.poll(0)
    (row,) = story(s, 0, "light")["pools"]
    assert row["is_next"]
    assert "next_tenant" not in row
    # Its need, and the promises with it beside the limit on promises.
    assert (row["need_tokens"], row["load_tokens"], row["load_max_tokens"]) == (40, 80, 40)
    found = story(s, 0, "heavy")
    (row,) = found["pools"]
    assert (row["next_tenant"], row["next_class"], row["is_next"]) == ("light", "default", False)
    assert row["next_lead_tokens"] == 20 + 14
    assert found["place"]["flows_ahead"] == 1
    assert reason(s, 0, "heavy") == "TURN"


def test_a_quota_is_named_with_the_moment_at_which_it_will_do() -> None:
    s = make(("a", 1000), ("b", 1000), queue_ttl_ns=60 * SECOND)
    group = s.set_quota(0, b"team", input_tokens=600)
    s.set_flow_quota(0, 0, group, requests=600)
    for i in range(3):
        grant(s, 0, f"r{i}", 200, 1)
    admit(s, 0, "it", 300, 1)
    admit(s, 0, "behind", 1, 1)
    s.poll(0)
    assert reason(s, 10 * SECOND, "it") == "QUOTA"
    assert reason(s, 10 * SECOND, "behind") == "QUEUE"
    found = story(s, 10 * SECOND, "it")
    assert found["limit"] == {
        "quota": "team", "behind_others": False, "kind": 4, "limit": 600, "remaining": 99,
        "needs": 300, "due_ms": 20_000,
    }  # fmt: skip
    assert found["wait_left_ms"] == 20_000
    s.poll(30 * SECOND)
    assert waited_ms(s, 31 * SECOND, "it") == {"QUOTA": 30_000}
    s.set_flow_quota(31 * SECOND, 1, concurrency=1)
    grant(s, 31 * SECOND, "one", flow=1)
    admit(s, 31 * SECOND, "two", flow=1)
    s.poll(31 * SECOND)
    assert story(s, 31 * SECOND, "two")["limit"] == {
        "quota": "", "behind_others": False, "kind": 7, "limit": 1, "needs": 1, "due_ms": -1,
    }  # fmt: skip


def test_a_model_s_quota_makes_the_pool_wait() -> None:
    s = make()
    s.set_pool_quota(0, b"p", s.set_quota(0, b"model", requests=1))
    grant(s, 0, "first")
    admit(s, 0, "it")
    s.poll(0)
    assert reason(s, SECOND, "it") == "MODEL_QUOTA"
    limit = story(s, 0, "it")["limit"]
    assert (limit["quota"], limit["kind"], limit["due_ms"]) == ("model", 3, 60_000)


def test_a_flow_beyond_its_share_gets_the_time_of_its_tokens() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=100, saturation_ppm=500_000)
    s.set_flow_quota(0, 0, share=600, borrows=0)  # 10 a second
    s.set_flow_quota(0, 1, share=600)
    for i in range(9):
        d = grant(s, 0, f"a{i}", 40, 40)
        s.complete(0, d.lease_id, 1, output_tokens=40)
    grant(s, 0, "runs", 40, 20, flow=1)
    admit(s, 0, "it", 10, 10)
    s.poll(0)
    assert reason(s, 0, "it") == "SHARE"
    limit = story(s, 0, "it")["limit"]
    assert (limit["quota"], limit["limit"], limit["remaining"]) == ("", 600, 0)
    due_ns = (limit["due_ms"] + 1) * MS
    assert 0 < due_ns < 60 * SECOND
    s.set_options(0, queue_ttl_ns=100 * SECOND)
    s.poll(due_ns)
    assert story(s, due_ns, "it")["state"] == "LIVE" or due_ns > 30 * SECOND


def test_a_wait_for_a_share_ends_in_the_line_of_a_pool() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=100, saturation_ppm=500_000,
             lease_ttl_ns=3_600 * SECOND, queue_ttl_ns=3_600 * SECOND)  # fmt: skip
    s.set_flow_quota(0, 0, share=600, borrows=0)  # 10 a second
    s.set_flow_quota(0, 1, share=600)
    for i in range(9):
        d = grant(s, 0, f"a{i}", 40, 40)
        s.complete(0, d.lease_id, 1, output_tokens=40)
    grant(s, 0, "fills", 80, 20, flow=1)
    admit(s, 0, "it", 10, 10)
    s.poll(0)
    due_ms = story(s, 0, "it")["limit"]["due_ms"] + 1
    s.poll(due_ms * MS)
    assert waited_ms(s, due_ms * MS + SECOND, "it") == {"SHARE": due_ms, "KV": 1_000}


@pytest.mark.parametrize(
    ("limits", "made", "asks", "wanted"),
    [
        ({}, {"max_running": 1}, {}, "MAX_RUNNING"),
        ({"max_total_tokens": 30}, {}, {}, "MAX_TOTAL"),
        ({"batch_max_tokens": 15}, {}, {"reports_progress": True}, "ROUND"),
        ({"max_loras": 1}, {}, {"adapter": b"two"}, "ADAPTERS"),
        ({}, {"leases_max": 1}, {}, "LIMIT"),
        ({}, {"headroom_ppm": 900_000, "headroom_max_ppm": 900_000}, {"output": 80}, "HEADROOM"),
    ],
)
def test_pool_names_the_resource_that_it_lacks(
    limits: dict[str, int], made: dict[str, int], asks: dict[str, Any], wanted: str
) -> None:
    s = make(capacity=1_000, **made)
    s.set_pool_limits(0, b"p", **limits)
    grant(s, 0, "runs", reports_progress=True, adapter=b"one")
    admit(s, 0, "it", **asks)
    s.poll(0)
    assert reason(s, 0, "it") == wanted
    assert story(s, 0, "it")["pools"][0]["reason"] == core.WAITS.index(wanted)


def test_a_pool_that_is_away() -> None:
    s = core.Scheduler()
    s.set_flow(b"f", 1000)
    shim, other = Stream(s), Stream(s)
    shim.push(0, offering("p", capacity=30))
    other.push(0, offering("q", capacity=30))
    shim.push(0, asking(1, "runs", 10, pools=["p"]))
    keeper = Stream(s)
    keeper.push(
        0, asking(1, "there", 10, pools=["p"]), asking(2, "anywhere", 10, max_output_tokens=20)
    )
    keeper.push(0, asking(3, "next", 10, max_output_tokens=20))
    shim.session.close(SECOND)
    s.poll(SECOND)
    assert reason(s, SECOND, "there") == "DETACHED"
    assert story(s, SECOND, "anywhere")["state"] == "LIVE"
    assert reason(s, SECOND, "next") == "KV"
    other.session.close(2 * SECOND)
    s.poll(2 * SECOND)
    assert reason(s, 3 * SECOND, "next") == "DETACHED"
    assert waited_ms(s, 3 * SECOND, "next") == {"KV": 2_000, "DETACHED": 1_000}
    assert not any(row["attached"] for row in story(s, 3 * SECOND, "next")["pools"])


def test_the_time_goes_on_where_another_pool_waits_for_the_same() -> None:
    s = make(capacity=30)
    s.set_pool(0, b"q", 1, 30, 1)
    leases = [grant(s, 0, f"r{i}", 10, 10 + i) for i in range(2)]
    admit(s, 0, "it", 10, 20)
    s.poll(0)
    assert reason(s, 0, "it") == "KV"
    end(s, SECOND, leases[1])
    admit(s, SECOND, "into q", 10, 20, pool=1)
    s.poll(SECOND)
    found = story(s, SECOND, "it")
    if found["state"] == "QUEUED":
        assert found["place"]["reason_ms"] == 1_000


def test_only_permitted_callers_learn_of_a_request() -> None:
    s = make(("a", 1000), ("b", 1000))
    grant(s, 0, "same", flow=0, principal=1)
    grant(s, 0, "same", flow=1, principal=2)
    grant(s, 0, "other", flow=1, principal=2)
    assert [found["tenant"] for found in s.explain(0, b"same")] == ["a", "b"]
    assert [found["tenant"] for found in s.explain(0, b"same", b"b")] == ["b"]
    assert [found["tenant"] for found in s.explain(0, b"same", principal=1)] == ["a"]
    assert s.explain(0, b"other", principal=1) == []
    assert s.explain(0, b"other", b"b", 1) == []
    assert s.explain(0, b"never asked") == []
    assert s.explain(0, b"same", b"nobody") == []
    for wrong in (b"", b"x" * 129):
        with pytest.raises(core.CallerError, match="request_id"):
            s.explain(0, wrong)


def test_an_unknown_tenant_is_found_by_its_name() -> None:
    s = make(("f", 1000), ("unknown", 100))
    s.set_unknown(1)
    stream = Stream(s)
    stream.push(0, asking(1, "r", tenant="whoever"))
    assert story(s, 0, "r", tenant=b"whoever")["tenant"] == "unknown"
    assert s.explain(0, b"r", b"somebody else") == []


def test_places_are_counted_up_to_a_bound() -> None:
    s = make(capacity=20, flow_queue_max=2_000)
    grant(s, 0, "runs")
    for i in range(1_500):
        admit(s, 0, f"r{i}")
    s.poll(0)
    assert story(s, 0, "r7")["place"]["queue_ahead"] == 7
    assert story(s, 0, "r1024")["place"]["queue_ahead"] == 1_024
    assert story(s, 0, "r1400")["place"]["queue_ahead"] == 1_025
    flows = make(*((f"f{i}", 1000) for i in range(50)), capacity=20)
    grant(flows, 0, "runs")
    for i in range(50):
        admit(flows, 0, f"r{i}", flow=i)
    flows.poll(0)
    assert story(flows, 0, "r9")["place"]["flows_ahead"] == 9
    assert story(flows, 0, "r45")["place"]["flows_ahead"] == 33


def test_the_estimate_is_the_reported_one_and_goes_on() -> None:
    s = make(capacity=20, queue_ttl_ns=3_600 * SECOND, lease_ttl_ns=3_600 * SECOND)
    running, now_ns = grant(s, 0, "r0"), 0
    for i in range(1, 30):
        admit(s, now_ns, f"r{i}")
    for _ in range(12):
        now_ns += SECOND
        (running,) = end(s, now_ns, running)
    admit(s, now_ns, "last")
    s.poll(now_ns)
    told = story(s, now_ns, "last")["wait_told_ms"]
    assert told > 10_000
    for _ in range(5):
        now_ns += SECOND
        (running,) = end(s, now_ns, running)
    found = story(s, now_ns, "last")
    assert found["wait_told_ms"] == told
    assert abs(found["wait_left_ms"] - (told - 5_000)) < 3_000
    assert found["ttft_expected_ms"] >= found["wait_left_ms"] + 5_000


def test_asking_changes_nothing() -> None:
    digests = []
    for asks in (False, True):
        walk = RandomWalk(seed=7)
        for _ in range(40):
            walk.run(events=100, check_every=100)
            for serial in range(max(0, walk.ids - 20), walk.ids) if asks else ():
                walk.core.explain(walk.now_ns, b"r%d" % serial)
        digests.append(walk.core.digest())
    assert digests[0] == digests[1]


def test_last_request_ids_are_kept() -> None:
    s = make(("f", 1000), capacity=20)
    for k in range(300):
        s.admit_wire(0, 0, admit_message(f"r{k}").SerializeToString())
    s.admit_wire(0, 0, admit_message("x" * 65).SerializeToString())
    assert s.recent_request_ids() == [b"r%d" % k for k in range(299, 43, -1)]
    # A retry is found again: it is the latest of its caller.
    s.admit_wire(0, 0, admit_message("r290").SerializeToString())
    assert s.recent_request_ids()[:2] == [b"r290", b"r299"]


def test_request_ids_of_other_principals_are_left_out() -> None:
    s = make(("f", 1000), capacity=20)
    for number in (1, 2):
        s.set_principal(0, number, b"gate%d" % number)
    s.admit_wire(0, 1, admit_message("mine").SerializeToString())
    s.admit_wire(0, 2, admit_message("theirs").SerializeToString())
    assert s.recent_request_ids(1) == [b"mine"]
    assert s.recent_request_ids() == [b"theirs", b"mine"]
