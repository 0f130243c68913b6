"""Tests that a set of pools has one leader: its statements, the others' answers, its end."""

import asyncio
import urllib.request
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.cli import main
from schedsvc.cluster.library import term_keys_of
from schedsvc.cluster.term_file import TermFile
from schedsvc.cluster.terms import TERM_MS, Term
from schedsvc.driver.clock import boot_ns
from schedsvc.server.led import LedServer
from schedsvc_lab.demo.processes import free_port
from tests.server.conftest import failure, open_channel
from tests.waiting import until

from .members import POOL_SET, TOKEN, ask, calling, member, proof, ready_store, running, trailer
from .store_server import StoreServer

HOLD, TERMS, _ = term_keys_of("prod", POOL_SET)


async def leads(each: LedServer) -> None:
    await until(lambda: each.leading.until_ns > boot_ns() and each._is_leading, "it leads")


async def health_of(each: LedServer, name: str) -> int:
    async with open_channel(each.targets[0]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)


async def granted(each: LedServer) -> pb.AdmitResponse:
    async with calling(each) as stub:
        answer = await stub.Admit(ask(), metadata=proof(), wait_for_ready=True, timeout=15)
    assert answer.outcome == pb.OUTCOME_GRANTED
    return answer


async def refusal(each: LedServer, term: int = 0) -> grpc.aio.AioRpcError:
    async with calling(each) as stub:
        error = await failure(stub.Admit(ask(), metadata=proof(term=term), wait_for_ready=True))
    assert error.code() == grpc.StatusCode.UNAVAILABLE, error
    return error


def hello(term: int = 0) -> pb.SessionRequest:
    event = pb.SessionEvent(hello=pb.SessionHello(client_id="c"))
    event.hello.leadership_seen.term = term
    return pb.SessionRequest(seq=1, events=[event])


@pytest.fixture
async def pair(store: StoreServer, tmp_path: Path) -> tuple[LedServer, LedServer]:
    await ready_store(store)
    return member(tmp_path, "a", store.url), member(tmp_path, "b", store.url)


async def test_a_leader_states_its_term(pair: tuple[LedServer, LedServer]) -> None:
    a, _ = pair
    async with running(a):
        await leads(a)
        answer = await granted(a)
        assert answer.leadership.term == 1
        assert answer.leadership.leader == a.leading.me
        async with calling(a) as stub:
            refused = await stub.Admit(ask(max_output_tokens=1 << 20), metadata=proof())
        assert refused.HasField("refusal")
        assert refused.leadership == answer.leadership
        lease = {"lease_id": answer.grant.lease_id, "pool_epoch": answer.grant.pool_epoch}
        async with calling(a) as stub:
            report = pb.ProgressRequest(leases=[pb.LeaseProgress(**lease)])
            renewed = await stub.Progress(report, metadata=proof())
            done = await stub.Complete(pb.CompleteRequest(**lease), metadata=proof())
        assert renewed.leadership == done.leadership == answer.leadership
        async with calling(a) as stub:
            call = stub.Session(metadata=proof())
            await call.write(hello())
            welcome = await call.read()
            assert isinstance(welcome, pb.SessionResponse)
            assert welcome.welcome.leadership == answer.leadership
            call.cancel()


async def test_a_standby_refuses_and_names_the_leader(pair: tuple[LedServer, LedServer]) -> None:
    a, b = pair
    async with running(a, b):
        await leads(a)
        await until(lambda: b.leading.term == 1, "it has looked")
        error = await refusal(b)
        assert trailer(error) == a.targets[0]
        assert f"does not lead set main; ask {a.targets[0]}" in (error.details() or "")
        async with calling(b) as stub:
            progress = stub.Progress(pb.ProgressRequest(), metadata=proof())
            assert trailer(await failure(progress)) == a.targets[0]
            complete = stub.Complete(pb.CompleteRequest(lease_id=1), metadata=proof())
            assert trailer(await failure(complete)) == a.targets[0]
            call = stub.Session(metadata=proof())
            await call.write(hello())
            assert trailer(await failure(call.read())) == a.targets[0]
            stats = await stub.Stats(pb.StatsRequest(), metadata=proof())
            assert [pool.name for pool in stats.pools] == ["pool"]
            unknown = await failure(stub.Admit(ask(), metadata=proof("wrong")))
            assert unknown.code() == grpc.StatusCode.UNAUTHENTICATED
        serving, not_serving = 1, 2
        assert await health_of(a, "readiness") == serving
        assert await health_of(b, "liveness") == serving
        assert await health_of(b, "readiness") == not_serving


async def shown(each: LedServer) -> str:
    arguments = ["stats", "--cluster", "--target", each.targets[0], "--token-env", "PROOF"]
    runner = CliRunner(env={"PROOF": TOKEN})
    return (await asyncio.to_thread(runner.invoke, main, arguments)).output


def series(each: LedServer) -> dict[str, float]:
    with urllib.request.urlopen(each.metrics_url or "", timeout=20) as page:
        lines = page.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    start = "schedsvc_cluster_"
    return {name.removeprefix(start): float(value) for name, _, value in pairs if start in name}


async def test_stats_and_metrics_show_who_leads(store: StoreServer, tmp_path: Path) -> None:
    await ready_store(store)
    metrics = {"metrics": {"listen": "127.0.0.1:0"}}
    a, b = (member(tmp_path, name, store.url, **metrics) for name in "ab")
    async with running(a, b):
        await leads(a)
        await until(lambda: a.leading.followers == ("b",), "b follows")
        leader, standby = await shown(a), await shown(b)
        led_by = f"term 1, led by {a.leading.me} at {a.targets[0]}\n"
        assert f"set main: leader; {led_by}followers that may lead next: b\n" in leader
        assert "terms taken: 1; lost: 0" in leader
        stands_by = f"member b stands by in set main; the leader is a at {a.targets[0]}\n"
        assert f"{stands_by}set main: standby; {led_by}" in standby
        assert "terms taken: 0; lost: 0" in standby
        one, other = await asyncio.to_thread(series, a), await asyncio.to_thread(series, b)
        assert (one["leads"], one["term"], one["terms_taken_total"]) == (1, 1, 1)
        assert (other["leads"], other["term"], other["terms_taken_total"]) == (0, 1, 0)
        assert one["terms_lost_total"] == one["rows_forged_total"] == one["terms_unknown"] == 0
        store.kill()
        await until(lambda: bool(b.leading.problem), "it has noticed")
        assert "terms are unknown: store 127.0.0.1" in await shown(b)
        assert (await asyncio.to_thread(series, b))["terms_unknown"] == 1


async def test_a_drained_leader_hands_over(
    pair: tuple[LedServer, LedServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the other member may need longer to take the term.
    monkeypatch.setattr("schedsvc.server.led._SUCCESSOR_S", 30.0)
    a, b = pair
    async with running(a, b):
        await leads(a)
        async with calling(a) as stub:
            call = stub.Session(metadata=proof())
            await call.write(hello())
            await call.read()
            await until(lambda: a.leading.followers == ("b",), "b follows")
            await a.drain()
            assert TermFile(tmp_path / "a.db", POOL_SET).number == 2, "its next life knows of it"
            error = await failure(call.read())
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert trailer(error) == b.targets[0]
        # It serves already, so a client that is sent to it need not wait.
        async with calling(b) as stub:
            answer = await stub.Admit(ask(), metadata=proof())
        assert answer.leadership.term == 2


async def test_a_drained_leader_waits_for_no_dead_standby(
    pair: tuple[LedServer, LedServer],
) -> None:
    a, b = pair
    async with running(a, b):
        await until(lambda: a.leading.followers == ("b",), "b follows")
        b._task.cancel()
        async with calling(a) as stub:
            call = stub.Session(metadata=proof())
            await call.write(hello())
            await call.read()
            began_ns = boot_ns()
            await a.drain()
            assert boot_ns() - began_ns < TERM_MS * 1_000_000
            error = await failure(call.read())
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert trailer(error) is None


async def test_a_lost_term_ends_the_streams(
    pair: tuple[LedServer, LedServer], store: StoreServer
) -> None:
    a, _ = pair
    async with running(a):
        await leads(a)
        terms = a._campaign._terms
        other = Term(7, "c/0000000000000063", "c.example:7600")
        hold, counter = terms._sealed(other)
        async with calling(a) as stub:
            call = stub.Session(metadata=proof())
            await call.write(hello())
            await call.read()
            store.ask("HSET", TERMS, "counter", counter.decode())
            store.ask("SET", HOLD, hold.decode())
            error = await failure(call.read())
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert trailer(error) == "c.example:7600"
        await until(lambda: not a._is_leading, "it stands by")
        assert trailer(await refusal(a)) == "c.example:7600"
        assert a.leading.lost == 1
        store.ask("DEL", HOLD)
        await leads(a)
        # It knows no rows of that leader, so it grants nothing yet; but it decides.
        async with calling(a) as stub:
            large = ask(max_output_tokens=1 << 20)
            refused = await stub.Admit(large, metadata=proof(), wait_for_ready=True, timeout=15)
        assert refused.leadership.term == 8


async def test_an_expired_term_grants_nothing(pair: tuple[LedServer, LedServer]) -> None:
    a, _ = pair
    async with running(a):
        await leads(a)
        server = a._server
        async with calling(a) as stub:
            held = [await stub.Admit(ask(max_output_tokens=1_400), metadata=proof())]
            queued = stub.Admit(ask(max_output_tokens=1_400), metadata=proof())
            await until(lambda: server.driver.stats(0)["totals"]["queued"] == 1, "it waits")
            a._task.cancel()  # type: ignore[union-attr] # no task renews the term any more
            a.leading.until_ns = boot_ns()
            done = pb.CompleteRequest(lease_id=held[0].grant.lease_id, outcome=16)
            await failure(stub.Complete(done, metadata=proof()))
            error = await failure(stub.Admit(ask(), metadata=proof()))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert not queued.done()
            queued.cancel()


async def test_a_leader_goes_on_if_no_other_member_exists(
    pair: tuple[LedServer, LedServer], store: StoreServer
) -> None:
    a, _ = pair
    async with running(a):
        await leads(a)
        await until(lambda: a._campaign._rivals is not None, "it has renewed")
        store.kill()
        end_ns = a.leading.until_ns + TERM_MS * 1_000_000 // 2
        await until(lambda: a.leading.until_ns > end_ns, "it goes on")
        assert a.leading.problem
        assert (await granted(a)).leadership.term == 1


async def test_a_leader_that_knows_no_rivals_yet_ends(pair: tuple[LedServer, LedServer]) -> None:
    """The store was gone before it could say which members may take the next term."""
    a, _ = pair
    async with running(a):
        await leads(a)
        assert a._task is not None
        a._task.cancel()  # so that no other task renews it
        campaign = a._campaign
        campaign._rivals = None
        until_ns = a.leading.until_ns = boot_ns() + 10**9
        campaign._extend()
        assert a.leading.until_ns == until_ns
        campaign._rivals = frozenset()
        campaign._extend()
        assert a.leading.until_ns > until_ns


async def test_a_leader_stops_if_another_member_may_lead(
    pair: tuple[LedServer, LedServer], store: StoreServer
) -> None:
    a, _ = pair
    async with running(a):
        await leads(a)
        a._campaign._rivals = frozenset({"b"})
        store.ask("HSET", term_keys_of("prod", POOL_SET)[2], "b", "99999999999999")
        await until(lambda: "b" in a._campaign._rivals, "it knows of b")
        store.kill()
        await until(lambda: not a._is_leading, "it stands by")
        await refusal(a)


async def test_a_leader_survives_one_renewal_that_hangs(
    pair: tuple[LedServer, LedServer], store: StoreServer
) -> None:
    a, _ = pair
    async with running(a):
        await leads(a)
        store.ask("HSET", term_keys_of("prod", POOL_SET)[2], "b", "99999999999999")
        await until(lambda: "b" in a._campaign._rivals, "it knows of b")
        renewed_ns = a.leading.until_ns
        await until(lambda: a.leading.until_ns > renewed_ns, "it has just renewed its term")
        store.pause()
        await until(lambda: bool(a.leading.problem), "a renewal has failed")
        store.resume()
        await until(lambda: not a.leading.problem or not a.driver.leads, "the next one")
        assert a.driver.leads


async def test_a_promise_lets_a_leader_go_on(
    pair: tuple[LedServer, LedServer], store: StoreServer
) -> None:
    a, _ = pair
    async with running(a):
        await leads(a)
        await until(lambda: a._campaign._rivals is not None, "it has renewed")
        store.kill()
        await until(lambda: bool(a.leading.problem), "it has noticed")
        a._campaign._rivals = frozenset({"b"})
        before_ns = a.leading.until_ns
        a._campaign.promised("b", boot_ns())
        await until(lambda: a.leading.until_ns > before_ns, "it goes on")


async def test_a_set_without_a_store_has_no_leader(tmp_path: Path) -> None:
    a = member(tmp_path, "a", f"redis://127.0.0.1:{free_port()}")
    async with running(a):
        await until(lambda: bool(a.leading.problem), "it has tried")
        error = await refusal(a)
        assert trailer(error) is None
        assert "its leader is not known" in (error.details() or "")


async def test_a_hostile_token_deposes_no_leader(pair: tuple[LedServer, LedServer]) -> None:
    a, _ = pair
    async with running(a):
        await leads(a)
        renewals: list[int] = []
        for term in (2, 900, 1 << 60):
            async with calling(a) as stub:
                call = stub.Admit(ask(), metadata=proof(term=term))
                if term < 1_000:
                    assert (await failure(call)).code() == grpc.StatusCode.UNAVAILABLE
                else:
                    await call  # an impossible term: it is not even asked about
                stream = stub.Session(metadata=proof())
                await stream.write(hello(term))
                if term < 1_000:
                    await failure(stream.read())
                stream.cancel()
            renewals.append(a.leading.until_ns)
            await until(lambda: a.leading.until_ns > renewals[-1], "the store was asked")
        assert (await granted(a)).leadership.term == 1
        assert (a.leading.lost, a.leading.taken) == (0, 1)


async def test_a_reported_term_raises_the_next(pair: tuple[LedServer, LedServer]) -> None:
    a, b = pair
    async with running(a, b):
        await leads(a)
        await until(lambda: b._following.term == 1, "it follows")
        await refusal(b, term=41)
        await a.drain()
        await leads(b)
        assert (await granted(b)).leadership.term == 42


async def test_no_term_repeats_if_the_store_forgets_while_all_are_down(
    store: StoreServer, tmp_path: Path
) -> None:
    await ready_store(store)
    first = member(tmp_path, "a", store.url)
    async with running(first):
        await leads(first)
        term = first.leading.term
    store.ask("FLUSHALL")
    again = member(tmp_path, "a", store.url)
    async with running(again):
        await leads(again)
        assert again.leading.term == term + 1


async def test_a_member_that_starts_waits_for_a_leader_unknown_to_it(
    store: StoreServer, tmp_path: Path
) -> None:
    """An earlier life of it may have promised a leader to start no term."""
    await ready_store(store)
    first = member(tmp_path, "a", store.url)
    async with running(first):
        await leads(first)
    store.ask("DEL", HOLD)
    began_ns = boot_ns()
    second = member(tmp_path, "b", store.url)
    async with running(second):
        await leads(second)
        assert boot_ns() - began_ns >= TERM_MS * 1_000_000


async def test_a_standby_waits_for_a_leader_that_the_store_lost(
    store: StoreServer, tmp_path: Path
) -> None:
    await ready_store(store)
    b = member(tmp_path, "b", store.url)
    async with running(b):
        await leads(b)
        terms = b._campaign._terms
        hold, counter = terms._sealed(Term(7, "c/0000000000000063", "c.example:7600"))
        store.ask("HSET", TERMS, "counter", counter.decode())
        store.ask("SET", HOLD, hold.decode())
        await until(lambda: terms.last is not None and not b._is_leading, "it stands by")
        await until(lambda: boot_ns() > b._campaign._unsure_ns, "it is sure of what the store says")
        lost_ns = boot_ns()
        store.ask("FLUSHALL")
        await leads(b)
        assert boot_ns() - lost_ns >= TERM_MS * 1_000_000
        assert b.leading.term == 8


async def test_setting_that_needs_a_restart_stays_over_terms(
    pair: tuple[LedServer, LedServer], tmp_path: Path
) -> None:
    first, second = pair
    async with running(first):
        await leads(first)
        async with running(second):
            before = second._config
            assert before.state is not None
            other = before.state.model_copy(update={"file": tmp_path / "other.db"})
            expert = before.scheduler.expert.model_copy(update={"ledger": "sum"})
            settings = before.scheduler.model_copy(update={"policy": "fcfs", "expert": expert})
            changed = before.model_copy(update={"state": other, "scheduler": settings})
            second.reconfigure(changed)
            assert second._loading.waiting == ("state", "scheduler.expert.ledger")
            await first.drain()
            await leads(second)
            now = second._server._config.scheduler
            assert (now.policy, now.expert.ledger) == ("fcfs", before.scheduler.expert.ledger)
            assert not (tmp_path / "other.db").exists()
            second.reconfigure(changed)
            assert second._loading.waiting == ("state", "scheduler.expert.ledger")


async def test_a_reload_names_a_secret_that_has_changed(
    pair: tuple[LedServer, LedServer],
) -> None:
    first, _ = pair
    async with running(first):
        config = first._config
        assert config.cluster is not None
        first.reconfigure(config)
        assert first._loading.waiting == ()
        secret = config.resolve(config.cluster.secret_file or "")
        secret.write_text("another secret of enough bytes, for all members of the set")
        for _ in range(2):
            first.reconfigure(config)
            assert first._loading.waiting == ("cluster.secret_file",)


async def test_a_standby_takes_no_part_of_a_limit(
    pair: tuple[LedServer, LedServer], store: StoreServer
) -> None:
    a, b = pair
    async with running(a, b):
        await until(lambda: bool(a.leading.followers), "b follows")
        sharing = a.driver.sharing
        assert sharing is not None
        await until(lambda: bool(sharing.members), "a has exchanged totals")
        store.kill()
        await until(lambda: bool(sharing.quota_problem) and sharing.divided_by > 0, "its part")
        assert (sharing.members, sharing.divided_by) == (("a",), 1)
