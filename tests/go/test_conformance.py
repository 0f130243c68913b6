"""Runs what a client of unary calls has to pass through the Go client, over each transport."""

from tests.cluster.conftest import program, store
from tests.conformance.unary_client import (
    test_a_load_ends_when_a_request_fails,
    test_cancelled_requests_leave_nothing,
    test_cancelled_requests_leave_nothing_at_another_version,
    test_no_request_fails_when_the_leader_is_killed,
    test_runner_fails_if_a_step_does_not_hold,
    test_script_holds,
    test_script_holds_if_each_side_says_more_than_the_other_knows,
)

__all__ = [
    "program",
    "store",
    "test_a_load_ends_when_a_request_fails",
    "test_cancelled_requests_leave_nothing",
    "test_cancelled_requests_leave_nothing_at_another_version",
    "test_no_request_fails_when_the_leader_is_killed",
    "test_runner_fails_if_a_step_does_not_hold",
    "test_script_holds",
    "test_script_holds_if_each_side_says_more_than_the_other_knows",
]
