"""Admit, Progress, Complete and Stats over real grpc.aio."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc.driver import slices
from schedsvc.server import Server
from schedsvc.service.stats_response import snapshot
from tests.waiting import until

from .conftest import ask, calling, failure, in_time, serving, totals

pytestmark = pytest.mark.usefixtures("both_transports")


# gRPC sends 29.901 s as 30.0 s.
@pytest.mark.parametrize(
    ("deadline_s", "waits_ns_max"),
    [(29.901, 29_851_000_000), (2.501, 2_451_000_000), (0.04, 1_000_000)],
)
async def test_a_calls_deadline_bounds_its_wait(
    deadline_s: float,
    waits_ns_max: int,
    server: Server,
    stub: SchedulerServiceStub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait is 50 ms shorter than the deadline, and at least a little."""
    await stub.Stats(pb.StatsRequest(), wait_for_ready=True)
    ttls_ns: list[int] = []
    admit = server.driver.admit

    def spy(principal: int, data: bytes, queue_ttl_ns: int = 0) -> Any:
        ttls_ns.append(queue_ttl_ns)
        return admit(principal, data, queue_ttl_ns)

    monkeypatch.setattr(server.driver, "admit", spy)
    # A call whose deadline passes while it connects, or while the machine stalls, does not arrive:
    # then the test repeats it.
    for _ in range(50):
        with suppress(grpc.aio.AioRpcError):
            await stub.Admit(ask(100), timeout=deadline_s)
        await asyncio.sleep(0.05)
        if ttls_ns:
            break
    assert 0 < ttls_ns[0] <= waits_ns_max


async def admitted_in_time(
    stub: SchedulerServiceStub, request: pb.AdmitRequest
) -> pb.AdmitResponse:
    async def admit(deadline_s: float) -> pb.AdmitResponse:
        return await stub.Admit(request, timeout=deadline_s)

    return await in_time(admit)


async def test_a_request_that_was_withdrawn_can_be_asked_for_again(
    server: Server, stub: SchedulerServiceStub
) -> None:
    held = await stub.Admit(ask(1_500))
    request = ask(1_000)
    call = stub.Admit(request)
    await until(lambda: totals(server)["queued"] == 1, "it waits")
    call.cancel()
    await until(lambda: totals(server)["queued"] == 0, "it leaves")
    again = asyncio.ensure_future(stub.Admit(request))
    await until(lambda: totals(server)["queued"] == 1, "it waits again")
    await stub.Complete(pb.CompleteRequest(lease_id=held.grant.lease_id, pool_epoch=1))
    assert (await again).outcome == pb.OUTCOME_GRANTED


async def test_a_client_that_vanishes_leaves_the_queue(server: Server) -> None:
    async with calling(server.targets[0]) as stub:
        await stub.Admit(ask(1_500))
        calls = [asyncio.ensure_future(stub.Admit(ask(1_000))) for _ in range(20)]
        await until(lambda: totals(server)["queued"] == 20, "they wait")
    await until(lambda: totals(server)["queued"] == 0, "they leave")
    await asyncio.gather(*calls, return_exceptions=True)


def calls_waiting(server: Server) -> int:
    return sum(waiting.calls for waiting in server.driver._waiting.values())


async def test_a_burst_is_answered_to_the_last_call(stub: SchedulerServiceStub) -> None:
    calls = [stub.Complete(pb.CompleteRequest(lease_id=n + 1)) for n in range(3_000)]
    errors = await asyncio.gather(*(failure(call) for call in calls))
    assert {error.code() for error in errors} == {grpc.StatusCode.NOT_FOUND}


async def test_a_call_that_joins_in_keeps_its_own_deadline(
    server: Server, stub: SchedulerServiceStub
) -> None:
    await stub.Admit(ask(1_500))
    request = ask(1_000)
    first = stub.Admit(request)
    await until(lambda: totals(server)["queued"] == 1, "the first call waits")
    joined = await admitted_in_time(stub, request)
    assert joined.outcome == pb.OUTCOME_EVICTED_TTL
    assert joined.refusal.retry_after_ms > 0
    assert totals(server)["queued"] == 1
    first.cancel()
    await until(lambda: totals(server)["queued"] == 0, "the first call left")


async def test_the_last_of_two_calls_withdraws(server: Server, stub: SchedulerServiceStub) -> None:
    await stub.Admit(ask(1_500))
    request = ask(1_000)
    calls = [stub.Admit(request) for _ in range(2)]
    await until(lambda: calls_waiting(server) == 2, "both calls wait")
    for call in calls:
        call.cancel()
    await until(lambda: totals(server)["queued"] == 0, "the request leaves")


def field_of(error: grpc.aio.AioRpcError) -> str:
    """Return the field that a BadRequest names."""
    status = next(value for key, value in error.trailing_metadata() if key.startswith("grpc-stat"))
    details = rpc_status.status_pb2.Status.FromString(status)
    bad = error_details_pb2.BadRequest()
    assert details.code == error.code().value[0]
    assert details.details[0].Unpack(bad)
    assert bad.field_violations[0].description
    return bad.field_violations[0].field


@pytest.mark.parametrize("total", ["input_tokens", "cached_input_tokens", "output_tokens"])
async def test_a_negative_total_is_named(total: str, stub: SchedulerServiceStub) -> None:
    granted = await stub.Admit(ask(100))
    lease = {"lease_id": granted.grant.lease_id, "pool_epoch": 1, total: -1}
    good = pb.LeaseProgress(lease_id=granted.grant.lease_id, pool_epoch=1)
    report = pb.ProgressRequest(leases=[good, pb.LeaseProgress(**lease)])
    assert field_of(await failure(stub.Progress(report))) == f"leases[1].{total}"
    assert field_of(await failure(stub.Complete(pb.CompleteRequest(**lease)))) == total


async def test_stats_shows_pools_flows_and_refusals(stub: SchedulerServiceStub) -> None:
    await stub.Admit(ask(100, tenant="b"))
    await stub.Admit(ask(100_000, tenant="b"))
    await stub.Admit(ask(100, tenant="nobody knows me"))
    shown = await stub.Stats(pb.StatsRequest())
    assert [pool.name for pool in shown.pools] == ["pool"]
    assert {flow.tenant for flow in shown.flows} == {"a", "b", "unknown"}
    only = await stub.Stats(pb.StatsRequest(tenants=["b", "nobody"]))
    [flow] = only.flows
    assert (flow.tenant, flow.weight_milli, flow.received, flow.granted) == ("b", 2_500, 2, 1)
    [refused] = flow.refusals
    assert (refused.outcome, refused.count) == (pb.OUTCOME_REJECTED_TOO_LARGE, 1)
    assert only.totals.received == 3
    assert only.incarnation == shown.incarnation != 0
    assert field_of(await failure(stub.Stats(pb.StatsRequest(flow_limit=-1)))) == "flow_limit"
    assert len((await stub.Stats(pb.StatsRequest(flow_limit=1))).flows) == 1


async def test_a_snapshot_may_be_as_old_as_is_asked(stub: SchedulerServiceStub) -> None:
    old = pb.StatsRequest(max_age_ms=3_600_000)
    assert (await stub.Stats(old)).totals.received == 0
    await stub.Admit(ask(100))
    assert (await stub.Stats(old)).totals.received == 0
    for fresh in ({"flow_limit": 5, "max_age_ms": 3_600_000}, {}):
        assert (await stub.Stats(pb.StatsRequest(**fresh))).totals.received == 1
    named = pb.StatsRequest(tenants=["a"], max_age_ms=3_600_000)
    assert (await stub.Stats(named)).totals.received == 1
    assert field_of(await failure(stub.Stats(pb.StatsRequest(max_age_ms=-1)))) == "max_age_ms"


@pytest.mark.parametrize("limit", [1, 4, 7, 40])
async def test_stats_read_in_slices_choose_as_one_sort_does(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "_KEYS_AT_ONCE", 3)
    names = [f"t{number}" for number in range(20)]
    async with (
        serving(tenants=[{"name": name} for name in names]) as server,
        calling(server.targets[0]) as stub,
    ):
        for number in (5, 3, 17, 11, 5, 8):
            granted = await stub.Admit(ask(10 + number, tenant=f"t{number}"))
            await stub.Complete(
                pb.CompleteRequest(
                    lease_id=granted.grant.lease_id, pool_epoch=1, output_tokens=number
                )
            )
        waits = [asyncio.ensure_future(stub.Admit(ask(900, tenant="t4"))) for _ in range(3)]
        await until(lambda: totals(server)["queued"] > 0, "some wait")
        data = await snapshot(server.driver, pb.StatsRequest(flow_limit=limit), 1)
        found = [flow.tenant for flow in pb.StatsResponse.FromString(data).flows]
        _, keys = server.driver.flow_keys(0, 1_000, slices.EVERYBODY)
        best = sorted(sorted(keys, reverse=True)[:limit], key=lambda key: key[1:], reverse=True)
        wanted = [server.driver.flow_stats(-key[2])["tenant"] for key in best]
        assert found == wanted
        assert "t4" in found
        for wait in waits:
            wait.cancel()
