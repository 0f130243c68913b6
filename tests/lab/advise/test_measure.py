"""Runs are held to goals: refused requests wait for ever, and figures are exact."""

from math import inf

import numpy as np
import pytest

from schedsvc_lab.advise.goals import parse_goal
from schedsvc_lab.advise.measure import Table, judge, tenant_rows


def table(first_s, client=None, classes=None, service=None):
    """Make requests in order of arrival; an infinite first token stands for a refusal."""
    first = np.array(first_s, dtype=float)
    count = len(first)
    return Table(
        client=np.array(client or [0] * count),
        first_s=first,
        wait_s=first / 2,
        refused=np.isinf(first),
        service=np.array(service or [1.0] * count),
        classes=np.array(classes or ["default"] * count),
        clients=("a", "b"),
        span_s=2.0,
    )


def judged(rows, text, subject=("all", "")):
    return judge(rows, parse_goal(text), subject)


def test_a_percentile_counts_refused_requests_as_waits_for_ever():
    rows = table([1.0] * 97 + [3.0, 4.0, inf])
    assert judged(rows, "* p97 first token <= 2 s") == (1.0, 0.5)
    assert judged(rows, "* p97 wait <= 2 s") == (0.5, 0.25)
    assert judged(rows, "* p99 first token <= 4 s") == (4.0, 1.0)
    figure, badness = judged(rows, "* p99.9 first token <= 4 s")
    assert figure == inf
    # One of 100 misses if one of 1,000 may.
    assert badness == pytest.approx(11.0)
    assert judged(rows, "* p98 first token <= 2 s").badness == pytest.approx(1 + 0.03 / 0.02)


def test_refusals_and_shares_are_parts_of_one():
    rows = table([1.0, inf, 1.0, 1.0], client=[0, 0, 1, 1], service=[1.0, 5.0, 1.0, 2.0])
    a, b = ("tenant", "a"), ("tenant", "b")
    assert judged(rows, "a refusals <= 25 %", a) == (0.5, 2.0)
    assert judged(rows, "b refusals <= 0 %", b) == (0.0, 0.0)
    assert judged(rows, "a refusals <= 0 %", a).badness > 1.0
    assert judged(rows, "b share >= 60 %", b) == (0.75, pytest.approx(0.8))
    assert judged(rows, "a share >= 50 %", a) == (0.25, 2.0)


def test_throughput_is_the_service_in_a_second():
    rows = table([1.0, inf, 3.0, 1.0], client=[0, 0, 0, 1], service=[10.0, 20.0, 30.0, 60.0])
    assert judged(rows, "* throughput >= 25 tokens/s") == (50.0, 0.5)
    assert judged(rows, "a throughput >= 25 tokens/s", ("tenant", "a")) == (20.0, 1.25)
    assert judged(rows.part(0.5, 1.0), "* throughput >= 25 tokens/s").figure == 90.0


def test_a_class_is_that_of_the_request_and_parts_are_by_arrival():
    rows = table([1.0, 9.0, 2.0, 8.0], classes=["x", "y", "x", "y"])
    assert judged(rows, "x p99 first token <= 4 s", ("class", "x")) == (2.0, 0.5)
    half = rows.part(0.0, 0.5)
    assert judged(half, "x p99 first token <= 4 s", ("class", "x")) == (1.0, 0.25)
    # Without a request there is nothing to miss.
    assert judged(half, "z p99 first token <= 4 s", ("class", "z")) == (0.0, 0.0)


def test_rows_of_tenants_sum_up_what_was_served():
    rows = tenant_rows(table([1.0, inf, 3.0, inf], client=[0, 0, 0, 1]))
    assert rows["a"]["requests"] == 3.0
    assert rows["a"]["refused"] == pytest.approx(1 / 3)
    assert rows["a"]["first_token_p50_s"] == 2.0
    assert rows["a"]["share"] == 1.0
    assert rows["a"]["tokens_s"] == 1.0
    assert rows["b"] == {
        "requests": 1.0,
        "refused": 1.0,
        "share": 0.0,
        "tokens_s": 0.0,
        "first_token_p50_s": None,
        "first_token_p99_s": None,
        "wait_p50_s": None,
        "wait_p99_s": None,
    }
