"""Tests that goals in words are read, and that errors in one are named."""

import pytest

from schedsvc_lab.advise.goals import Goal, GoalError, parse_goal, subject_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("production p99 first token <= 2 s", ("production", "first token", 2.0, 99.0)),
        ("production p99 first token ≤ 2 s", ("production", "first token", 2.0, 99.0)),
        ("team a/b p99.9 wait<=250ms", ("team a/b", "wait", 0.25, 99.9)),
        ("* p50  first   token <= 0.5 s", ("*", "first token", 0.5, 50.0)),
        ("batch refusals <= 5 %", ("batch", "refusals", 0.05, 0.0)),
        ("refusals refusals <= 0%", ("refusals", "refusals", 0.0, 0.0)),
        ("class:flex share >= 12.5 %", ("class:flex", "share", 0.125, 0.0)),
        ("* throughput >= 1500 tokens/s", ("*", "throughput", 1_500.0, 0.0)),
    ],
)
def test_a_goal_is_read(text, expected):
    subject, kind, limit, percent = expected
    assert parse_goal(text) == Goal(text, subject, kind, limit, percent)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("production p99 first token 2 s", "has no bound; write SUBJECT pNN first token <= X s"),
        ("p99 first token <= 2 s", "'p99 first token' is no subject with a measure"),
        ("a p99 latency <= 2 s", "'a p99 latency' is no subject with a measure"),
        ("a p99 wait <= soon", "'soon' is no number with a unit"),
        ("a p99 wait >= 2 s", "a time takes <=, not >="),
        ("a p99 wait < 2 s", "a time takes <=, not <"),
        ("a share <= 5 %", "share takes >=, not <="),
        ("a p99 wait <= 2", "the bound of a time has to be up to 3600 s, in s or ms"),
        ("a p99 wait <= 2 h", "in s or ms"),
        ("a p99 wait <= 0 s", "up to 3600 s"),
        ("a p100 wait <= 2 s", "p100 has to lie between p1 and p99.9"),
        ("a share >= 0 %", "the bound of share has to be a percentage"),
        ("a refusals <= 101 %", "the bound of refusals has to be a percentage"),
        ("a throughput <= 5 tokens/s", "throughput takes >=, not <="),
        ("a throughput >= 5 %", "the bound of throughput has to be above 0, in tokens/s"),
        ("a throughput >= 0 tokens/s", "the bound of throughput has to be above 0"),
        ("a refusals <= 5 s", "the bound of refusals has to be a percentage"),
    ],
)
def test_a_wrong_goal_is_named(text, complaint):
    with pytest.raises(GoalError) as caught:
        parse_goal(text)
    assert str(caught.value).startswith(repr(text))
    assert complaint in str(caught.value)


def test_a_subject_is_a_tenant_a_class_or_all():
    def found(subject):
        goal = parse_goal(f"{subject} p50 wait <= 1 s")
        return subject_of(goal, ["a", "both", "class:x"], ["flex", "both"])

    assert found("a") == ("tenant", "a")
    assert found("flex") == ("class", "flex")
    assert found("*") == ("all", "")
    assert found("class:both") == ("class", "both")
    assert found("class:x") == ("tenant", "class:x")
    with pytest.raises(GoalError, match="write tenant:both or class:both"):
        found("both")
    with pytest.raises(GoalError, match="'c' sends no request; tenants: a, both, class:x; classes"):
        found("c")
