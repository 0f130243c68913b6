"""Tests `limits.message_max_bytes`: clients split messages, and none is refused twice."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from schedsvc_client import ClientOptions, InvalidRequest
from schedsvc_client.aio import AsyncScheduler, SchedulerSession
from schedsvc_client.operator import Operator
from schedsvc_client.sync import Scheduler as Client

from schedsvc._core import Scheduler
from schedsvc.config import Config
from schedsvc.driver import new_core
from schedsvc.server import Server
from tests.waiting import until

from .conftest import POOL, ask, calling, failure, serving, totals

pytestmark = pytest.mark.usefixtures("both_transports")

# Together the message of these 200 admissions would take 8 KB.
SMALL = {"message_max_bytes": 2_048}
LEAST = {"message_max_bytes": 1_024}
ROOMY = [POOL | {"capacity_tokens": 160_000}]
PATIENT = ClientOptions(unavailable_after_s=30.0)


@asynccontextmanager
async def session(server: Server) -> AsyncIterator[SchedulerSession]:
    async with SchedulerSession(
        server.targets[0], client_id="shim", incarnation=1, options=PATIENT
    ) as opened:
        yield opened


def outputs(server: Server) -> int:
    """Return the output tokens that tenant a has reported."""
    [flow] = [flow for flow in server.driver.stats(10)["flows"] if flow["tenant"] == "a"]
    return int(flow["output_tokens"])


async def admit_200(opened: SchedulerSession) -> None:
    admissions = [
        opened.admission(tenant="a", input_tokens=[10], max_output_tokens=10) for _ in range(200)
    ]
    await asyncio.wait_for(asyncio.gather(*(one.submit() for one in admissions)), 30)
    for one in admissions:
        one.complete(input_tokens=10, output_tokens=5)


@pytest.mark.parametrize("limits", [SMALL, LEAST])
async def test_batch_over_the_limit_is_split(limits: dict[str, int]) -> None:
    async with serving(limits=limits, pools=ROOMY) as server, session(server) as opened:
        await admit_200(opened)
        await until(lambda: totals(server)["completed"] == 200, "all are completed")
        assert opened.last_error is None


async def test_limit_that_is_not_stated_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(config: Config, now_ns: int, **options: Any) -> Scheduler:
        return new_core(config, now_ns, **options | {"message_bytes_max": 0})

    monkeypatch.setattr("schedsvc.server.server.new_core", silent)
    async with serving(limits=SMALL, pools=ROOMY) as server, session(server) as opened:
        await admit_200(opened)
        await until(lambda: totals(server)["completed"] == 200, "all are completed")
        assert "larger than max" in str(opened.last_error)


async def test_request_that_cannot_fit_fails_alone() -> None:
    async with serving(limits=SMALL, pools=ROOMY) as server, session(server) as opened:
        large = opened.admission(tenant="a", input_tokens=[300] * 1_000, max_output_tokens=1)
        first = large.submit()
        [failed, _] = await asyncio.gather(first, admit_200(opened), return_exceptions=True)
        assert isinstance(failed, InvalidRequest)
        [violation] = failed.violations
        assert violation.field == "request"
        assert "a message has room for 2037" in violation.description
        # Now the limit is known.
        with pytest.raises(InvalidRequest, match=r"limits\.message_max_bytes"):
            opened.admission(tenant="a", input_tokens=[300] * 1_000, max_output_tokens=1).submit()
        assert opened.last_error is None


@pytest.mark.parametrize("known", [False, True])
async def test_hashes_that_do_not_fit_are_left_out(known: bool) -> None:
    async with serving(limits=SMALL, pools=ROOMY) as server, session(server) as opened:
        if known:
            await admit_200(opened)
        hinted = opened.admission(
            tenant="a", input_tokens=[10], max_output_tokens=1, prefix_block_hashes=range(1, 2_000)
        )
        await asyncio.wait_for(hinted.submit(), 30)
        hinted.complete(input_tokens=10)
        assert opened.last_error is None


@pytest.mark.parametrize("hashes", [4_097, 8_180, 20_000])
async def test_too_many_hashes_are_refused_with_their_number(hashes: int) -> None:
    asked = {"input_tokens": [10], "max_output_tokens": 1, "prefix_block_hashes": range(hashes)}
    said = f"prefix_block_hashes: has {hashes:,} hashes; at most 4,096 are allowed"
    async with serving(pools=ROOMY) as server, session(server) as opened:
        with pytest.raises(InvalidRequest, match=said):
            await opened.admission(tenant="a", **asked).submit()
        with Client(server.targets[0]) as unary, pytest.raises(InvalidRequest, match=said):
            unary.admission(tenant="a", **asked).__enter__()
        assert opened.last_error is None


async def test_the_scheduler_names_the_number_of_hashes() -> None:
    async with serving(pools=ROOMY) as server, calling(server.targets[0]) as stub:
        error = await failure(stub.Admit(ask(prefix_block_hashes=range(4_097))))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "has 4,097 hashes; at most 4,096 are allowed" in str(error.details())


async def test_reconnect_replays_within_a_smaller_limit() -> None:
    async with serving(pools=ROOMY) as large, session(large) as opened:
        held = [
            opened.admission(tenant="a", input_tokens=[10], max_output_tokens=10)
            for _ in range(100)
        ]
        await asyncio.gather(*(one.submit() for one in held))
        address = large.targets[0]
        await large.stop(None)
        keys = {"listeners": [{"tcp": address}], "limits": LEAST, "pools": ROOMY}
        async with serving(**keys) as small:
            await until(lambda: totals(small)["live_leases"] == 100, "all are replayed")
            for one in held:
                one.complete(input_tokens=10, output_tokens=5)
            await until(lambda: totals(small)["completed"] == 100, "all are completed")


async def test_threads_client_splits_progress() -> None:
    def reports(target: str, reported: threading.Event) -> None:
        with Client(target) as scheduler, ExitStack() as stack:
            held = [
                stack.enter_context(
                    scheduler.admission(tenant="a", input_tokens=[10], max_output_tokens=10)
                )
                for _ in range(100)
            ]

            def report() -> None:
                for one in held:
                    one.progress(input_tokens=10, output_tokens=1)

            scheduler._thread.soon(report)  # so that one report has all of them
            assert reported.wait(30)

    async with serving(limits=LEAST, pools=ROOMY) as server:
        reported = threading.Event()
        work = asyncio.create_task(asyncio.to_thread(reports, server.targets[0], reported))
        try:
            await until(lambda: outputs(server) == 100, "all have reported")
        finally:
            reported.set()
            await work


async def test_asyncio_client_splits_progress() -> None:
    async with (
        serving(limits=LEAST, pools=ROOMY) as server,
        AsyncScheduler(server.targets[0]) as scheduler,
    ):
        held = [
            scheduler.admission(tenant="a", input_tokens=[10], max_output_tokens=10)
            for _ in range(100)
        ]
        await asyncio.gather(*(one.submit() for one in held))
        for one in held:
            one.progress(input_tokens=10, output_tokens=1)
        await until(lambda: outputs(server) == 100, "all have reported")
        for one in held:
            one.complete()


async def test_operator_splits_revocations() -> None:
    keys = {"listeners": [{"tcp": "127.0.0.1:0", "operate": True}], "limits": LEAST}
    async with serving(**keys) as server:
        with Operator(server.targets[0]) as operator:
            answer = await asyncio.to_thread(operator.revoke, range(1, 1_001))
        assert list(answer.unknown_lease_ids) == list(range(1, 1_001))
