import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsvc_lab.emulator.output import WORDS, OutputRule, plan_output, prompt_digest


def rule(tokens_max=100, tokens_min=0, ignore_eos=False, stop=(), include_stop=False):
    return OutputRule(tokens_max, tokens_min, ignore_eos, None, tuple(stop), include_stop)


def plan(prompt="a prompt", choice=0, seed=None, **options):
    return plan_output(prompt_digest(prompt, seed), choice, rule(**options))


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"tokens_min": 100}])
def test_length_is_the_limit_where_the_request_says_so(options):
    for prompt in "abcdefgh":
        output = plan(prompt, **options)
        assert (output.tokens, output.finish_reason) == (100, "length")


@given(st.text(), st.integers(1, 3000), st.integers(0, 3000))
def test_drawn_lengths_keep_to_their_limits(prompt, tokens_max, tokens_min):
    tokens_min = min(tokens_min, tokens_max)
    output = plan(prompt, tokens_max=tokens_max, tokens_min=tokens_min)
    assert max(1, tokens_min) <= output.tokens <= tokens_max
    assert (output.finish_reason == "stop") == (output.tokens < tokens_max)


def test_drawn_lengths_have_the_documented_median():
    lengths = [plan(f"prompt {i}", tokens_max=10**6).tokens for i in range(2_000)]
    assert 115 <= statistics.median(lengths) <= 141
    assert len(set(lengths)) > 300


def test_equal_requests_get_equal_answers_and_others_do_not():
    assert plan() == plan()
    assert plan(prompt=[1, 2, 3]) == plan(prompt=[1, 2, 3])
    text = plan(ignore_eos=True).text(0, 20)
    others = [plan(choice=1), plan(seed=7), plan("other"), plan([1]), plan([1, 2])]
    texts = {output.text(0, 20) for output in others}
    assert len(texts) == 5
    assert text not in texts


@given(st.lists(st.integers(0, 40), max_size=6), st.booleans(), st.booleans())
def test_deltas_join_to_the_whole_text(cuts, stopped, include):
    stop = (plan(ignore_eos=True).text(20, 23)[1:8],) if stopped else ()
    output = plan(ignore_eos=True, stop=stop, include_stop=include)
    ends = sorted({0, output.tokens, *(min(c, output.tokens) for c in cuts)})
    parts = [output.text(a, b) for a, b in pairwise(ends)]
    assert "".join(parts) == output.text(0, output.tokens)


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it():
    free = plan(ignore_eos=True)
    text = free.text(0, 100)
    stop = free.text(10, 12)[2:8]
    output = plan(ignore_eos=True, stop=[stop, "never there"])
    assert (output.tokens, output.finish_reason, output.stop_reason) == (12, "stop", stop)
    assert output.text(0, 12) == text[: text.index(stop)]
    kept = plan(ignore_eos=True, stop=[stop], include_stop=True)
    assert kept.text(0, 12) == text[: text.index(stop) + len(stop)]


def test_the_earliest_of_several_stop_strings_wins():
    free = plan(ignore_eos=True)
    early, late = free.text(5, 6), free.text(30, 31)
    assert plan(ignore_eos=True, stop=[late, early]).stop_reason == early


def test_a_stop_string_waits_for_min_tokens():
    free = plan(ignore_eos=True)
    stop = free.text(5, 6)
    assert plan(ignore_eos=True, stop=[stop], tokens_min=6).tokens == 6
    assert plan(ignore_eos=True, stop=[stop], tokens_min=7).tokens == 100


def test_words_are_distinct_and_of_one_length():
    assert len(set(WORDS)) == len(WORDS) == 6_400
    assert {len(word) for word in WORDS} == {5}
