"""A lease that is cancelled without a count is charged by its time."""

from itertools import count
from typing import Any

import pytest

from schedsvc import _core as core

from .stream import Stream, completing, offering, replaying, reporting
from .support import SECOND, grant, make, pool
from .test_quotas import left
from .test_usage import keeping

MS = SECOND // 1000
NUMBERS = count()


def prefill(s: core.Scheduler, now_ns: int, tokens: int, took_ns: int, cached: int = -1) -> int:
    """Run a request with a prompt whose first token comes after `took_ns`; return that time."""
    lease = grant(s, now_ns, f"prefill-{next(NUMBERS)}", tokens, reports_progress=True).lease_id
    now_ns += took_ns
    s.progress(now_ns, lease, 1, tokens, cached, 1)
    s.complete(now_ns, lease, 1)
    return now_ns


def leave(s: core.Scheduler, now_ns: int, prompt: int, after_ns: int) -> int:
    """Let a client leave some time after its grant; return the input that it is charged."""
    lease = grant(s, now_ns, f"left-{next(NUMBERS)}", prompt, reports_progress=True).lease_id
    ended = s.complete(now_ns + after_ns, lease, 1, core.CANCELLED)
    assert ended is not None
    assert (ended.cached_input_tokens, ended.output_tokens) == (0, 0)
    return ended.input_tokens


def test_leaver_pays_the_time_at_the_rate_of_prefills() -> None:
    s = make()
    now_ns = prefill(s, 0, 100, SECOND)
    assert leave(s, now_ns, 900, 300 * MS) == 31
    assert leave(s, now_ns + SECOND, 900, 0) == 1  # never nothing
    assert leave(s, now_ns + SECOND, 20, SECOND) == 20  # the prompt at most
    s.check()


def test_while_no_prefill_was_seen_it_is_the_whole_prompt() -> None:
    s = make()
    assert leave(s, 0, 900, 1) == 900
    prefill(s, SECOND, 100, SECOND)
    s.set_pool(2 * SECOND, b"p", 1, 2_000, 1, 0, 0)  # another size: the same engine
    assert leave(s, 2 * SECOND, 900, SECOND // 10) == 11


def test_leaver_50_ms_after_the_grant_pays_a_tenth_at_most() -> None:
    s = make(capacity=10_000)
    now_ns = prefill(s, 0, 3_000, 3_000 * SECOND // 4_000)  # 4,000 tokens a second
    assert 200 <= leave(s, now_ns, 3_000, 50 * MS) <= 400


def test_the_greatest_rate_of_the_last_64_prefills_counts() -> None:
    s = make()
    now_ns = prefill(s, 0, 500, SECOND)
    for _ in range(63):
        now_ns = prefill(s, now_ns, 100, SECOND)
    assert leave(s, now_ns, 900, SECOND) == 501
    now_ns = prefill(s, now_ns + SECOND, 100, SECOND)
    assert leave(s, now_ns, 900, SECOND) == 101
    assert pool(s, now_ns + SECOND)["prefills_judged"] == 65


def test_the_rate_of_short_prompts_is_trusted_as_far_as_they_reach() -> None:
    s = make()
    now_ns = prefill(s, 0, 100, SECOND)
    assert leave(s, now_ns, 900, SECOND) == 101
    assert leave(s, now_ns + SECOND, 900, 1_010 * MS) == 900
    assert leave(s, now_ns + 3 * SECOND, 90, 1_010 * MS) == 90


def test_the_longest_prompt_counts_that_was_about_as_fast_as_the_fastest() -> None:
    s = make(capacity=10_000)
    now_ns = prefill(s, 0, 100, SECOND)
    now_ns = prefill(s, now_ns, 900, 10 * SECOND)  # 90 tokens a second
    assert leave(s, now_ns, 1_000, 5 * SECOND) == 501
    s = make(capacity=10_000)
    now_ns = prefill(s, 0, 100, SECOND)
    now_ns = prefill(s, now_ns, 900, 18 * SECOND)  # it shared the engine
    assert leave(s, now_ns, 1_000, 5 * SECOND) == 1_000


def test_input_that_a_prefill_had_cached_was_not_computed_in_its_time() -> None:
    s = make()
    now_ns = prefill(s, 0, 500, SECOND, cached=400)
    assert leave(s, now_ns, 900, SECOND) == 101


@pytest.mark.parametrize("reported", [(7, -1, -1), (0, 0, 0)])
def test_a_count_of_its_holder_outranks_the_time(reported: tuple[int, int, int]) -> None:
    s = make()
    lease = grant(s, 0, "r", 90).lease_id
    ended = s.complete(SECOND, lease, 1, core.CANCELLED, *reported)
    assert ended == core.Ended(core.CANCELLED, max(0, reported[0]), 0, 0, False)


def test_counter_quota_budget_and_ledger_have_the_same_number() -> None:
    s = keeping()
    s.set_flow_quota(0, 0, input_tokens=6_000, day_tokens=10_000)
    s.set_budget_period(0, b"tenant:f", 0, 1, 3600 * SECOND)
    now_ns = prefill(s, 0, 100, SECOND)
    before = s.flow_stats(now_ns, 0)
    spent = s.budget_spent(b"tenant:f", 0)
    s.take_usage()
    now_ns += 60 * SECOND  # the quota is full again
    lease = grant(s, now_ns, "r", 900, reports_progress=True).lease_id
    s.complete(now_ns + 300 * MS, lease, 1, core.CANCELLED)
    flow = s.flow_stats(now_ns + 300 * MS, 0)
    assert flow["input_tokens"] - before["input_tokens"] == 31
    assert flow["vtc_micro"] - before["vtc_micro"] == 31 * 1_000_000
    assert s.budget_spent(b"tenant:f", 0) - spent == 31
    assert [row[5:] for row in s.take_usage()] == [(True, 31, 0, 0, False)]
    assert (
        left(s, now_ns + 300 * MS)["INPUT_TOKENS_PER_MINUTE"] == 6_000 - 31 + 30
    )  # refilled meanwhile
    s.check()


def test_over_a_stream_an_absent_total_is_no_count() -> None:
    s = keeping()
    stream = Stream(s)
    stream.send(0, offering("p"))
    leases = [stream.grant(0, tag, f"r{tag}", tenant="f") for tag in (1, 2, 3)]
    stream.send(1, reporting(leases[1], 0))
    stream.send(2, *(completing(lease, outcome=core.CANCELLED) for lease in leases[:2]))
    none = {"input_tokens": 0, "cached_input_tokens": 0, "output_tokens": 0}
    stream.send(2, completing(leases[2], outcome=core.CANCELLED, **none))
    assert [(row[0], row[5:]) for row in s.take_usage()] == [
        (lease, (True, 10, 0, 0, False)) for lease in leases[:2]
    ]


def test_time_of_a_lease_of_another_process_is_not_known() -> None:
    s = keeping()
    stream = Stream(s)
    prefill(s, 0, 100, SECOND)
    s.take_usage()
    now_ns = answer(s, SECOND, 5 * SECOND, 50)
    s.take_usage()
    for number, whole in enumerate((False, True), start=1 << 40):
        lease = replaying(number, f"r{number}", whole_answer=whole)
        stream.send(now_ns, offering("p"), lease)
        now_ns += SECOND
        stream.send(now_ns, completing(number, outcome=core.CANCELLED))
        assert [row[5:] for row in s.take_usage()] == [(True, 10, 0, 0, True)]


def give_up(s: core.Scheduler, now_ns: int, after_ns: int, **more: Any) -> tuple[int, int]:
    """Give an answer in one piece up, of at most 100 tokens; return its charge."""
    given = {"output": 100, "reports_progress": True, "whole_answer": True} | more
    lease = grant(s, now_ns, f"given-up-{next(NUMBERS)}", 40, **given).lease_id
    ended = s.complete(now_ns + after_ns, lease, 1, core.CANCELLED)
    assert ended is not None
    return ended.input_tokens, ended.output_tokens


def answer(s: core.Scheduler, now_ns: int, took_ns: int, tokens: int) -> int:
    """Let an answer in one piece end after `took_ns`; return that time."""
    more = {"reports_progress": True, "whole_answer": True}
    lease = grant(s, now_ns, f"whole-{next(NUMBERS)}", 40, 100, **more).lease_id
    s.complete(now_ns + took_ns, lease, 1, core.COMPLETED, 40, 0, tokens)
    return now_ns + took_ns


def test_an_answer_in_one_piece_that_is_given_up_is_charged_by_time() -> None:
    s = keeping()
    now_ns = answer(s, 0, 5 * SECOND, 50)
    s.take_usage()
    assert give_up(s, now_ns, 2 * SECOND) == (40, 20)
    assert [row[5:9] for row in s.take_usage()] == [(True, 40, 0, 20)]
    assert give_up(s, now_ns + 2 * SECOND, 8 * SECOND, sequences=2, n=2) == (40, 158)
    assert give_up(s, now_ns + 10 * SECOND, 9_000 * MS, output=30) == (40, 30)  # its max_tokens
    assert give_up(s, now_ns + 20 * SECOND, 2 * SECOND, whole_answer=False) == (40, 0)
    s.check()


def test_its_output_begins_with_the_first_token_that_is_expected() -> None:
    s = make()
    now_ns = prefill(s, 0, 40, SECOND)  # a second for 40 tokens
    now_ns = answer(s, now_ns, 6 * SECOND, 50)  # so 49 tokens in 5 s after the first
    assert give_up(s, now_ns, 900 * MS) == (37, 0)
    assert give_up(s, now_ns + SECOND, 3 * SECOND) == (40, 20)
    s.check()


@pytest.mark.parametrize("reported", [2, 50])
def test_an_answer_that_is_reported_before_its_end_is_no_prefill(reported: int) -> None:
    s = make()
    more = {"reports_progress": True, "whole_answer": True}
    lease = grant(s, 0, "reported", 40, 100, **more).lease_id
    s.progress(5 * SECOND, lease, 1, 40, 0, reported)  # its client has read a part of it
    s.complete(5 * SECOND, lease, 1, core.COMPLETED, 40, 0, 50)
    assert pool(s, 5 * SECOND)["prefills_judged"] == 0
    assert give_up(s, 5 * SECOND, 2 * SECOND) == (40, 20)
    s.check()


def test_while_its_pool_has_no_pace_an_answer_costs_what_was_promised() -> None:
    s = make()
    assert give_up(s, 0, 1) == (40, 100)


def test_a_count_of_no_output_outranks_the_time_of_an_answer() -> None:
    s = make()
    now_ns = answer(s, 0, 5 * SECOND, 50)
    more = {"reports_progress": True, "whole_answer": True}
    lease = grant(s, now_ns, "r", 40, 100, **more).lease_id
    ended = s.complete(now_ns + SECOND, lease, 1, core.CANCELLED, output_tokens=0)
    assert ended == core.Ended(core.CANCELLED, 40, 0, 0, False)
