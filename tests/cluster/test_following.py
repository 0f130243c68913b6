"""A standby follows its leader, and continues from the leader's rows when it leads."""

import contextlib
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from schedsvc_client.aio import SchedulerSession
from schedsvc_client.v1 import follow_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2
from schedsvc_client.v1.follow_pb2_grpc import FollowServiceStub

from schedsvc.config.cluster import ClusterLeader
from schedsvc.driver import Driver, Leading, new_core
from schedsvc.driver.clock import SteadyClock, boot_ns
from schedsvc.server.cluster import set_fingerprint
from schedsvc.server.led import LedServer
from schedsvc.service import Authenticator, Credentials, FollowService
from schedsvc.service.follow import Rows
from tests.server.conftest import config_of, failure, open_channel
from tests.waiting import until

from .members import PEER_TOKEN, TOKEN, ask, calling, member, proof, ready_store, running
from .store_server import StoreServer

QUOTA = [{"name": "a", "quota": {"requests_per_minute": 3}}, {"name": "b"}]


async def leads(each: LedServer) -> None:
    await until(lambda: each.leading.until_ns > boot_ns() and each._is_leading, "it leads")


@pytest.fixture
async def store_url(store: StoreServer) -> str:
    await ready_store(store)
    return store.url


async def test_a_standby_continues_from_the_rows(store_url: str, tmp_path: Path) -> None:
    a = member(tmp_path, "a", store_url, tenants=QUOTA)
    b = member(tmp_path, "b", store_url, tenants=QUOTA)
    async with running(a):
        await leads(a)
        async with running(b):
            await until(lambda: b._following.term == 1, "it follows")
            async with calling(a) as stub:
                for i in range(3):
                    request = ask(request_id=f"r{i}")
                    answer = await stub.Admit(request, metadata=proof(), timeout=20)
                    lease = answer.grant.lease_id
                    done = scheduler_pb2.CompleteRequest(
                        lease_id=lease, pool_epoch=answer.grant.pool_epoch, input_tokens=100,
                        output_tokens=5,
                    )  # fmt: skip
                    await stub.Complete(done, metadata=proof(), timeout=20)
            hash_key = a._server._keeper.operators().hash_key  # type: ignore[union-attr]
            await a.drain()
            await leads(b)
            assert b._server._keeper.operators().hash_key == hash_key  # type: ignore[union-attr]
            async with calling(b) as stub:
                spent = await stub.Admit(ask(), metadata=proof(), wait_for_ready=True, timeout=8)
                other = await stub.Admit(ask(tenant="b"), metadata=proof(), timeout=20)
            assert spent.leadership.term == other.leadership.term == 2
            assert spent.outcome == scheduler_pb2.OUTCOME_EVICTED_TTL  # its quota is spent
            assert other.outcome == scheduler_pb2.OUTCOME_GRANTED


async def _first(call: Any, hello: pb.FollowRequest) -> Any:
    """Write and read; either fails if the call is refused."""
    await call.write(hello)
    return await call.read()


async def test_only_members_follow(store_url: str, tmp_path: Path) -> None:
    a = member(tmp_path, "a", store_url)
    async with running(a):
        await leads(a)
        async with open_channel(a.targets[0]) as channel:
            stub = FollowServiceStub(channel)
            for token, hello, code in (
                (TOKEN, pb.FollowRequest(member="x"), grpc.StatusCode.PERMISSION_DENIED),
                ("wrong", pb.FollowRequest(member="x"), grpc.StatusCode.UNAUTHENTICATED),
                (PEER_TOKEN, pb.FollowRequest(member="x"), grpc.StatusCode.FAILED_PRECONDITION),
            ):
                error = await failure(_first(stub.Follow(metadata=proof(token), timeout=20), hello))
                assert error.code() == code, error


async def test_a_leader_states_no_later_term(store_url: str, tmp_path: Path) -> None:
    a = member(tmp_path, "a", store_url)
    async with running(a):
        await leads(a)
        async with open_channel(a.targets[0]) as channel:
            call = FollowServiceStub(channel).Follow(metadata=proof(PEER_TOKEN), timeout=20)
            fingerprint = set_fingerprint(a._config)
            await call.write(pb.FollowRequest(member="c", fingerprint=fingerprint))
            while not (await call.read()).is_whole:
                pass
            a.leading.term = 7  # another member leads, and the streams end in a moment
            for _ in range(2):
                assert (await call.read()).leadership.term == 1
            a.leading.term = 1


async def test_a_member_with_other_tenants_does_not_lead(store_url: str, tmp_path: Path) -> None:
    a = member(tmp_path, "a", store_url)
    b = member(tmp_path, "b", store_url, tenants=QUOTA)
    async with running(a, b):
        await leads(a)
        await until(lambda: "other tenants" in b._following.problem, "it is refused")
        await a.drain()
        await until(lambda: b.leading.term == 1 and not b.leading.leader, "no member leads")
        assert not b._is_leading


async def test_a_leader_notes_a_promise(store_url: str, tmp_path: Path, store: StoreServer) -> None:
    a, b = member(tmp_path, "a", store_url), member(tmp_path, "b", store_url)
    async with running(a):
        await leads(a)
        async with running(b):
            await until(lambda: a.leading.followers == ("b",), "it follows")
            store.kill()
            end_ns = a.leading.until_ns + 3_000_000_000
            await until(lambda: a.leading.until_ns > end_ns, "it goes on")
            assert a._is_leading
            assert not b._is_leading


async def test_a_stream_of_an_earlier_term_counts_for_no_other() -> None:
    """It ends late if its follower reads nothing; the leader's next term may run then."""
    leading, services = Leading("main", "a/1"), []
    authenticator, rows = Authenticator(Credentials(), "none"), cast(Rows, None)
    for term in (1, 2):
        clock = SteadyClock()
        driver = Driver(new_core(config_of(), clock.now_ns()), clock)
        driver.leading, driver.is_under_term, leading.term = leading, True, term
        service = FollowService(
            driver, rows, "", lambda member, asked_ns: None, authenticator=authenticator,
            write_stall_s=5.0,
        )  # fmt: skip
        assert leading.followers == ()
        service._count("b", 1)
        assert leading.followers == ("b",)
        services.append(service)
        if term == 1:
            driver.close()
    services[0]._count("b", -1)
    assert leading.followers == ("b",)
    services[1]._count("b", -1)
    assert leading.followers == ()
    services[1]._driver.close()


async def test_a_cold_leader_waits_for_the_gate(store_url: str, tmp_path: Path) -> None:
    """It was refused the leader's rows, so it knows of no lease before its gate replays it."""
    pools: dict[str, Any] = {"pools": [{"name": "p", "capacity_tokens": 400}]}
    (tmp_path / "no-member").write_text(TOKEN)
    a, b = member(tmp_path, "a", store_url, **pools), member(tmp_path, "b", store_url, **pools)
    assert b._config.cluster is not None
    b._following._settings = b._config.cluster.model_copy(
        update={"leader": ClusterLeader(token_file=str(tmp_path / "no-member"))}
    )
    async with running(a, b), contextlib.AsyncExitStack() as stack:
        await leads(a)
        await until(lambda: "member: true" in b._following.problem, "it is refused")
        await a.drain()
        await leads(b)
        stub = await stack.enter_async_context(calling(b))
        spare = ask(pools=["p"], queue_ttl_ms=300)
        refused = await stub.Admit(spare, metadata=proof(), wait_for_ready=True, timeout=20)
        assert refused.outcome == scheduler_pb2.OUTCOME_EVICTED_TTL
        gate = SchedulerSession(b.targets[0], client_id="gate", incarnation=1, token=TOKEN)
        stack.push_async_callback(gate.close)
        gate.register_pool(pool="p", epoch=1, capacity_tokens=400, block_size_tokens=16)
        gate.start()
        granted = await stub.Admit(ask(pools=["p"]), metadata=proof(), timeout=20)
        assert granted.outcome == scheduler_pb2.OUTCOME_GRANTED
