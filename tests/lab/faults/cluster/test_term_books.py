"""Tests that the auditor of terms catches planted messages, and accepts possible ones."""

import pytest

from schedsvc_lab.faults.auditor import ViolationError
from schedsvc_lab.faults.cluster.term_books import TermBooks

S = 1_000_000_000
A, B, C = "a/0000000000000001", "b/0000000000000002", "c/0000000000000003"


def repeated() -> TermBooks:
    """Term 4 was lost by the store and given twice: to a at second 1, to b at second 2."""
    books = TermBooks()
    books.began(4, A, S)
    books.lost()
    books.began(4, B, 2 * S)
    return books


def test_two_leaders_of_a_repeated_term_end_one_after_the_other() -> None:
    books = repeated()
    books.decided(4, A, 3 * S)
    books.began(5, C, 4 * S)
    books.decided(4, A, 5 * S)
    books.decided(4, B, 5 * S)
    books.decided(5, C, 5 * S)


def test_both_leaders_of_a_repeated_term_have_to_end() -> None:
    books = repeated()
    books.decided(4, B, 5 * S)
    with pytest.raises(ViolationError, match="decides after the next leader has begun"):
        books.decided(4, A, 4 * S)


@pytest.mark.parametrize("leader", [A, B])
def test_a_leader_of_a_repeated_term_goes_on_for_2_s_at_most(leader: str) -> None:
    books = repeated()
    books.began(5, C, 4 * S)
    books.decided(4, leader, 6 * S - 1)
    with pytest.raises(ViolationError, match="decides after the next leader has begun"):
        books.decided(4, leader, 6 * S)


def test_a_leader_of_a_term_below_a_lost_one_goes_on_for_2_s_at_most() -> None:
    books = TermBooks()
    books.began(7, A, S)
    books.lost()
    books.began(6, B, 3 * S)
    books.began(8, C, 4 * S)
    books.decided(6, B, 6 * S - 1)
    with pytest.raises(ViolationError, match="decides after the next leader has begun"):
        books.decided(6, B, 6 * S)


def test_a_term_that_was_given_once_ends_at_once() -> None:
    books = TermBooks()
    books.began(4, A, S)
    books.began(5, B, 2 * S)
    with pytest.raises(ViolationError, match="decides after the next leader has begun"):
        books.decided(4, A, 2 * S)


def test_a_leader_that_handed_over_decides_nothing() -> None:
    books = TermBooks()
    books.began(4, A, S)
    books.decided(4, A, S)
    hold = f"4 seal {A} a.sim:7600".encode()
    books.stored(("FCALL", "schedsvc_term_release", 3, "k", "k", "k", "main", hold))
    with pytest.raises(ViolationError, match="after it has handed its term over"):
        books.decided(4, A, S)
