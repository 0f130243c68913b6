"""Tests the bench of authorization: its caller has grants in one half of the rounds only."""

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from bench.authorization import Caller, measure


@pytest.mark.parametrize("is_limited", [False, True])
def test_caller_of_the_bench_is_limited_if_it_says_so(is_limited: bool) -> None:
    caller = Caller()
    caller.limit(is_limited=is_limited)
    request = pb.AdmitRequest(
        request_id="r", tenant="stranger", input_tokens=[1], max_output_tokens=1
    )
    answer = caller.send([pb.SessionEvent(admit=pb.SessionAdmit(tag=1, request=request))])
    assert [fault.code for fault in answer.faults] == ([7] if is_limited else [])


def test_each_round_gives_a_figure_for_both() -> None:
    found = measure(3, 50)
    assert len(found) == 3
    assert all(before > 0 < after for before, after in found)
