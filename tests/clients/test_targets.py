"""Target lists and fences, without any connection."""

from __future__ import annotations

import pytest
from schedsvc_client import ClientOptions
from schedsvc_client.errors import call_error
from schedsvc_client.fence import Fence, Rank, fence_of
from schedsvc_client.targets import (
    FAILOVER_JITTER_S,
    NAMED_AGAIN_S,
    NAMED_JITTER_S,
    NAMED_S,
    TARGETS_MAX,
    Targets,
    check_targets,
)

A, B, C = "a:1", "b:2", "unix:/c"


def test_list_is_split_and_checked() -> None:
    assert check_targets(" a:1, b:2 ,unix:/c") == (A, B, C)
    assert check_targets(A) == (A,)
    assert not Targets(A).several


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a:1,", "target '' must be host:port"),
        ("a:1,b", "target 'b' must be host:port"),
        ("a:1,b:2,a:1", "target 'a:1' is listed twice"),
        (",".join(f"h:{n}" for n in range(1, TARGETS_MAX + 2)), "list at most 16"),
    ],
)
def test_wrong_list_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_targets(text)


def test_next_target_follows_in_order() -> None:
    targets = Targets(f"{A},{B},{C}")
    seen = []
    for _ in range(4):
        seen.append(targets.current)
        targets.move_on(targets.current)
    assert seen == [A, B, C, A]


def test_single_target_stays() -> None:
    targets = Targets(A)
    targets.move_on(A, leader=B)
    assert targets.current == A


def test_call_that_comes_late_moves_nothing() -> None:
    targets = Targets(f"{A},{B},{C}")
    targets.move_on(A)
    targets.move_on(A)
    assert targets.current == B


def test_leader_is_followed_only_inside_the_list() -> None:
    targets = Targets(f"{A},{B},{C}")
    targets.move_on(A, leader=C)
    assert targets.current == C
    targets.answered()
    targets.move_on(C, leader="evil:6")
    assert targets.current == A


def test_leader_that_failed_is_not_followed() -> None:
    # A is dead, and B does not know it yet: C must be asked too.
    targets = Targets(f"{A},{B},{C}")
    targets.move_on(A)
    targets.move_on(B, leader=A)
    assert targets.current == C


def test_silent_target_is_passed_over_while_others_answer() -> None:
    targets = Targets(f"{A},{B}")
    targets.move_on(A, now_s=1.0, silent_s=1.5)
    for now_s in (1.1, 2.4):
        targets.move_on(B, leader=A, now_s=now_s)
        assert targets.current == B
    targets.move_on(B, leader=A, now_s=2.5)
    assert targets.current == A


def test_next_target_follows_where_all_are_silent() -> None:
    targets = Targets(f"{A},{B},{C}")
    seen = []
    for now_s in range(4):
        seen.append(targets.current)
        targets.move_on(targets.current, now_s=now_s, silent_s=9.0)
    assert seen == [A, B, C, A]


def test_target_that_answers_is_silent_no_more() -> None:
    targets = Targets(f"{A},{B}")
    targets.move_on(A, now_s=1.0, silent_s=9.0)
    targets.answered()
    targets.move_on(B, now_s=1.1)
    assert targets.current == A


def test_pauses_are_short_only_in_the_failover_wait() -> None:
    options = ClientOptions(failover_wait_s=5.0, backoff_max_s=2.0)
    several, single = Targets(f"{A},{B}"), Targets(A)
    pauses = [several.pause_s(options, 20, 4.9, 9.0) for _ in range(1_000)]
    assert 0 <= min(pauses) < 0.05
    assert FAILOVER_JITTER_S - 0.05 < max(pauses) <= FAILOVER_JITTER_S
    assert min(several.pause_s(options, 20, 5.0, 9.0) for _ in range(100)) >= 1.0
    assert min(single.pause_s(options, 20, 0.0, 9.0) for _ in range(100)) >= 1.0


def longest_s(targets: Targets, now_s: float) -> float:
    return max(targets.pause_s(ClientOptions(), 1, 0.1, now_s) for _ in range(1_000))


def test_pauses_are_shorter_after_the_leader_is_named() -> None:
    targets = Targets(f"{A},{B}")
    targets.move_on(A, leader=B, now_s=100.0)
    assert targets.current == B
    targets.move_on(B, now_s=100.1)  # it does not listen yet
    assert 0.5 * NAMED_JITTER_S < longest_s(targets, 100.1) <= NAMED_JITTER_S
    assert longest_s(targets, 100.0 + NAMED_S) > NAMED_JITTER_S


def test_a_dead_leader_that_is_named_shortens_no_pauses() -> None:
    """It is named by two standbys until its term ends."""
    targets, quick = Targets(f"{A},{B},{C}"), 0
    for step in range(190):
        now_s = 100.0 + step / 100
        quick += longest_s(targets, now_s) <= NAMED_JITTER_S
        targets.move_on(targets.current, leader="" if targets.current == C else C, now_s=now_s)
    assert 0 < quick <= NAMED_S * 100
    if targets.current == C:
        targets.move_on(C, now_s=102.0)
    targets.answered()
    targets.move_on(targets.current, leader=C, now_s=100.1 + NAMED_AGAIN_S)
    assert targets.current == C
    assert longest_s(targets, 100.1 + NAMED_AGAIN_S) <= NAMED_JITTER_S


def test_a_name_outside_the_list_shortens_no_pauses() -> None:
    targets = Targets(f"{A},{B}")
    targets.move_on(A, leader="evil:6", now_s=100.0)
    assert longest_s(targets, 100.0) > NAMED_JITTER_S


def test_error_keeps_the_named_leader() -> None:
    error = call_error(14, "another scheduler leads", leader=B)
    assert error.again().leader == B


def test_fence_compares_term_then_leader() -> None:
    fence = Fence()
    assert fence.obeys(Rank())  # no cluster at all
    assert fence.metadata() == ()
    assert fence.obeys(Rank(3, "a/1"))
    assert fence.obeys(Rank(3, "a/1"))
    assert not fence.obeys(Rank(3, "b/1"))
    assert not fence.obeys(Rank(2, "a/1"))
    assert not fence.obeys(Rank())
    assert fence.obeys(Rank(4, "b/1"))
    assert not fence.obeys(Rank(3, "a/1"))
    assert fence.highest == Rank(4, "b/1")
    assert fence.metadata() == (("schedsvc-term", "4"),)


def test_fence_of_one_target_obeys_without_a_term() -> None:
    fence = Fence(strict=False)
    assert fence.obeys(Rank(3, "a/1"))
    assert fence.obeys(Rank())
    assert not fence.obeys(Rank(2, "a/1"))


def test_clients_of_the_same_targets_share_a_fence() -> None:
    assert fence_of((A, B)) is fence_of((B, A))
    assert fence_of((A, B)) is not fence_of((A, C))
