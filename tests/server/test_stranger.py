"""Tests that a caller without a credential learns only whether the scheduler serves."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.service.auth import Credentials, Known, Unauthenticated

from .conftest import ask, calling, failure, open_channel, serving
from .test_auth import BEARER, TOKENS, every_call

WRONG = (("authorization", "Bearer wrong-horse-battery"),)


def state(server: Any) -> tuple[int, dict[str, Any]]:
    """Return the decisions and records of the scheduler's core."""
    stats = server.driver.stats(100)
    return stats["digest"], stats["totals"]


@pytest.mark.parametrize("metadata", [(), WRONG], ids=["none", "wrong"])
async def test_a_stranger_changes_nothing_and_gets_the_same_answer(metadata: Any) -> None:
    async with serving(auth=TOKENS) as server, calling(server.targets[0]) as stub:
        granted = await stub.Admit(ask(10), metadata=BEARER)
        before = state(server)
        lease_id = granted.grant.lease_id
        told = set()
        for method, request in (
            (stub.Admit, ask(10)),  # an id that is known
            (stub.Admit, pb.AdmitRequest()),  # and bytes that are no request
            (stub.Progress, pb.ProgressRequest(leases=[pb.LeaseProgress(lease_id=lease_id)])),
            (stub.Complete, pb.CompleteRequest(lease_id=lease_id)),
            (stub.Complete, pb.CompleteRequest(lease_id=lease_id + 1)),
            (stub.Stats, pb.StatsRequest()),
        ):
            error = await failure(method(request, metadata=metadata))
            told.add((error.code(), error.details(), tuple(error.trailing_metadata() or ())))
        ((code, _, trailers),) = told
        assert code == grpc.StatusCode.UNAUTHENTICATED
        assert not trailers
        for _ in range(20):
            await every_call(stub, metadata)
        assert state(server) == before
        assert not any(service.streams for service in server._services)


async def test_reflection_shows_a_stranger_nothing() -> None:
    async with serving(auth=TOKENS) as server, open_channel(server.targets[0]) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        for metadata in ((), WRONG):
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            code = grpc.StatusCode.INTERNAL
            for _ in range(5):
                call = stub.ServerReflectionInfo(iter([question]), metadata=metadata)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(aiter(call))
                code = caught.value.code()
                if code is not grpc.StatusCode.INTERNAL:
                    break  # else the client's own send met the end of the call
            assert code == grpc.StatusCode.UNAUTHENTICATED


async def test_health_shows_a_stranger_only_whether_it_serves() -> None:
    async with serving(auth=TOKENS) as server, open_channel(server.targets[0]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer == health_pb2.HealthCheckResponse(status=answer.SERVING)
        request = health_pb2.HealthCheckRequest(service="production")  # no tenant is a service
        assert (await failure(health.Check(request))).code() == grpc.StatusCode.NOT_FOUND


def test_callers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedsvc.service.auth._PRINCIPALS_MAX", 3)
    known = Credentials([Known("shim", tokens=(b"s" * 32,))])
    assert [known.of_certificate((), (name,)) for name in ("a", "b", "a")] == [2, 3, 2]
    with pytest.raises(Unauthenticated, match="too many different callers"):
        known.of_certificate((), ("c",))
    assert known.of_certificate((), ("b",)) == 3
