"""Tests that the auditor counts the KV cache that requests hold, at its price."""

from itertools import count, islice

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.auditor import ViolationError
from schedsvc_lab.faults.cache_price import FIRST
from schedsvc_lab.faults.options import draw
from schedsvc_lab.faults.run import Case, run_case
from tests.lab.faults.test_auditor import Desk

CACHE = {"input_price": 1_000, "output_price": 2_000, "cached_price": 100, "kv_price": 10_000}
#: Input and output: as many tokens by the default prices, and 3 times the token-steps.
SIZES = {"a": (18, 1), "b": (2, 9)}


def take_turns(desk: Desk) -> None:
    """Serve two tenants that always wait, one request each in turn."""
    for number in range(90):
        for tenant, (prompt, output) in SIZES.items():
            desk.ask(0, f"{tenant}{number}", prompt, tenant, output)
    desk.auditor.settled(0)
    for number in range(89):
        for at, (tenant, (prompt, output)) in enumerate(SIZES.items()):
            lease_id = 2 * number + at + 1
            tag = desk.auditor.books.requests[tenant, "", f"{tenant}{number}", 7].tag
            desk.grant(0, tag, lease_id, prompt + output)
            desk.auditor.settled(0)
            desk.say(
                0,
                complete=pb.CompleteRequest(lease_id=lease_id, pool_epoch=1, output_tokens=output),
            )
            desk.auditor.settled(0)


def test_equal_tokens_are_not_equal_service_where_the_cache_has_a_price() -> None:
    take_turns(Desk(work_conserving=False))
    with pytest.raises(ViolationError, match="served too little"):
        take_turns(Desk(work_conserving=False, **CACHE))


def test_runs_with_a_price_of_the_cache_keep_every_promise() -> None:
    seeds = (seed for seed in count(FIRST) if "kv_price_micro" in draw(seed, 500).core)
    cases = [Case(seed, 500) for seed in islice(seeds, 5)]
    assert [run_case(case).violation for case in cases] == [""] * 5
