"""Tests the judgement on the recorded situations."""

import pytest
from schedsvc_client.v1 import judgement_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.service.judgement import judge

from .plays import WINDOW_S, Pair
from .situations import Label, labels, recorded

#: As many of the situations have to be judged right: 57 of 60.
RIGHT = 0.95


def judged(name: str) -> tuple[str, str]:
    """Return the level and the text of a recorded situation."""
    pair = recorded(name)
    found = judge(pair.then, pair.now, pair.age_ms, WINDOW_S)
    level = judgement_pb2.JudgementLevel.Name(found.level)
    return level.removeprefix("JUDGEMENT_LEVEL_").lower(), found.text


def faults(label: Label) -> list[str]:
    return label.faults(*judged(label.name))


def test_57_of_60_situations_are_judged_right() -> None:
    wrong = {
        label.name: (*judged(label.name), found) for label in labels() if (found := faults(label))
    }
    assert len(wrong) <= (1 - RIGHT) * len(labels()), wrong


def test_many_sequences_of_a_request_are_no_strangers() -> None:
    pair = recorded("fail_open")
    assert pair.then is not None
    for each in (pair.then, pair.now):
        each.pools[0].running_sequences = each.pools[0].engine_running
    found = judge(pair.then, pair.now, 0, WINDOW_S)
    assert found.level == judgement_pb2.JUDGEMENT_LEVEL_OK, found.text


def test_a_pool_that_was_taken_away_for_good_is_no_trouble() -> None:
    pair = recorded("one_engine_down")
    gone = pair.now.pools[1]
    gone.owned_ms = 0
    assert judge(pair.then, pair.now, 0, WINDOW_S).level == judgement_pb2.JUDGEMENT_LEVEL_TROUBLE
    gone.detached_ms = 3_600_000
    assert judge(pair.then, pair.now, 0, WINDOW_S).level == judgement_pb2.JUDGEMENT_LEVEL_OK


def test_an_engine_that_said_goodbye_is_not_missed() -> None:
    pair = recorded("one_engine_down")
    gone = pair.now.pools[1]
    gone.said_goodbye, gone.owned_ms, gone.live_leases, gone.queued = True, 0, 0, 0
    assert gone.detached_ms < 3_600_000
    assert judge(pair.then, pair.now, 0, WINDOW_S).level == judgement_pb2.JUDGEMENT_LEVEL_OK
    gone.queued = 1
    assert "No engine is connected for engine-2" in text_of(pair), "a request waits in vain"


def test_tenants_that_ask_after_the_last_engine_said_goodbye_are_hurt() -> None:
    pair = recorded("idle_without_engine")
    pair.now.pools.add(name="engine", said_goodbye=True, detached_ms=60_000)
    assert text_of(pair).startswith("No engine is connected.")
    pair.now.flows.add(tenant="acme", weight_milli=1_000, received=9).refusals.add(
        outcome=pb.OUTCOME_REJECTED_NO_POOL, count=9
    )
    found = judge(pair.then, pair.now, 0, WINDOW_S)
    assert found.level == judgement_pb2.JUDGEMENT_LEVEL_TROUBLE
    assert found.text.startswith("No engine is connected: all requests are refused.")


def test_an_engine_that_was_taken_away_does_not_hide_that_tenants_wait() -> None:
    pair = recorded("slow_engine")
    pair.now.pools.add(name="engine-2", said_goodbye=True, detached_ms=60_000)
    assert "engines are full" in text_of(pair)


def test_a_tenant_left_out_of_the_earlier_snapshot_has_no_rate() -> None:
    pair = recorded("quota_spent_refuses")
    assert pair.then is not None
    batch = [flow for flow in pair.then.flows if flow.tenant == "batch"]
    pair.then.flows.remove(batch[0])
    found = judge(pair.then, pair.now, 0, WINDOW_S)
    assert "batch" not in found.text, "its counts are of all the time"


def text_of(pair: Pair) -> str:
    return judge(pair.then, pair.now, pair.age_ms, WINDOW_S).text


def test_requests_go_elsewhere_only_if_there_is_another_pool() -> None:
    assert "new requests are refused" in text_of(recorded("only_engine_drained"))
    pair = recorded("only_engine_drained")
    pair.now.ClearField("totals")
    assert "go elsewhere" in text_of(pair), "its caller may not see all pools"
    assert "go elsewhere" in text_of(recorded("pool_drained"))


def test_a_better_class_is_named_as_what_keeps_a_tenant_back() -> None:
    pair = recorded("behind_a_better_class")
    assert "production asks for" not in text_of(pair), "it is alone in its class"
    assert "research runs before production, by its class urgent" in text_of(pair)
    pair.now.classes[0].rank = 10
    assert "runs before" not in text_of(pair)


def test_an_engine_stands_still_only_if_no_request_in_it_progresses() -> None:
    pair = recorded("engine_hangs")
    assert "stands still" in text_of(pair)
    assert "No tenant asks" not in text_of(pair)
    pair.now.pools[0].posted_tokens += 1
    assert "stands still" not in text_of(pair), "only the figures of the engine are missing"


def test_a_new_engine_has_no_preemptions_of_the_old_one() -> None:
    pair = recorded("preemptions")
    pair.now.pools[0].epoch += 1
    assert "preempted" not in text_of(pair)


def test_few_preemptions_and_a_small_log_are_ok() -> None:
    pair = recorded("preemptions")
    assert pair.then is not None
    pair.now.pools[0].engine_preemptions = pair.then.pools[0].engine_preemptions + 9
    pair.now.usage.log_bytes = (64 << 20) - 1
    assert judge(pair.then, pair.now, 0, WINDOW_S).level == judgement_pb2.JUDGEMENT_LEVEL_OK
    pair.now.state.log_bytes = 64 << 20
    assert "log of the state file has 64 MiB" in text_of(pair)


def test_how_long_is_too_long_depends_on_the_longest_wait_of_the_tenant() -> None:
    for longest_ms, are_late in ((60_000, False), (50_000, True), (1_000, True)):
        pair = recorded("slow_engine")
        for flow in pair.now.flows:
            flow.longest_wait_ms = longest_ms
            flow.oldest_queued_ms = 26_000
        assert ("engines are full" in text_of(pair)) is are_late, longest_ms
    for flow in pair.now.flows:
        flow.oldest_queued_ms = 4_000
    assert "engines are full" not in text_of(pair), "a tenant that waits for 4 s is well"


def test_a_long_wait_for_a_limit_or_a_missing_engine_is_no_sign_of_full_engines() -> None:
    for flow_field in ("held_to_share", "waits_for_quota"):
        pair = recorded("slow_engine")
        for flow in pair.now.flows:
            setattr(flow, flow_field, True)
        assert "engines are full" not in text_of(pair), flow_field
    pair = recorded("slow_engine")
    pair.now.pools[0].attached = False
    assert "engines are full" not in text_of(pair)


@pytest.mark.parametrize("label", labels(), ids=lambda label: label.name)
def test_sentences_are_short_and_whole(label: Label) -> None:
    _, text = judged(label.name)
    assert 10 <= len(text) <= 400
    assert text.endswith(".")
    assert "  " not in text
