"""Tests a term that was renewed late: the scheduler goes on as after a renewal in time."""

import asyncio

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.driver import Driver, Leading, Waiting, new_core
from schedsvc.driver.clock import SteadyClock, boot_ns
from tests.server.conftest import config_of
from tests.waiting import until

SECOND_NS = 10**9


def ask(name: str, ttl_ms: int) -> bytes:
    request = pb.AdmitRequest(
        request_id=name, tenant="a", input_tokens=[1_000], max_output_tokens=400,
        queue_ttl_ms=ttl_ms,
    )  # fmt: skip
    return request.SerializeToString()


async def test_waiting_requests_are_decided_after_a_late_renewal() -> None:
    clock = SteadyClock()
    driver = Driver(new_core(config_of(), clock.now_ns()), clock)
    leading = Leading("main", "a/1", until_ns=boot_ns() + 60 * SECOND_NS)
    driver.leading, driver.is_under_term = leading, True
    assert isinstance(driver.admit(0, ask("first", 0)), bytes)
    waiting = driver.admit(0, ask("second", 50))
    assert isinstance(waiting, Waiting)
    leading.until_ns = boot_ns()
    end_ns = clock.now_ns() + 150_000_000
    await until(lambda: clock.now_ns() > end_ns, "its time is over")
    leading.until_ns = boot_ns() + 60 * SECOND_NS
    async with asyncio.timeout(60):
        answer = pb.AdmitResponse.FromString(await driver.wait(waiting))
    assert answer.outcome == pb.OUTCOME_EVICTED_TTL
    driver.close()
