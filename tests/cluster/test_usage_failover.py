"""Tests that the ledgers of two members hold each lease once, for every end of a leader."""

import json
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from schedsvc_client import ClientOptions
from schedsvc_client.aio import SchedulerSession, SessionState
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.cli import main
from tests.waiting import until

from .failover_load import Failover, Load
from .member_process import MemberProcess, is_followed, leads, start_set
from .members import TOKEN, ready_store
from .store_server import StoreServer, one_store
from .usage_audit import Sums, UsageBooks, differences, exported

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
#: Leases of a gate that died expire soon.
SHORT = {"headroom": 0, "expert": {"ledger": "sum"}, "lease_ttl_ms": 1_000, "lease_grace_ms": 500}
LOOPS = 12


def ledger(folder: Path, name: str) -> Path:
    return folder / f"{name}.usage.db"


def member(folder: Path, name: str, store: StoreServer, **keys: Any) -> MemberProcess:
    usage = {"path": str(ledger(folder, name))}
    return MemberProcess(folder, name, store.url, usage=usage, **keys)


async def pair(
    folder: Path, store: StoreServer, stack: AsyncExitStack, **keys: Any
) -> tuple[MemberProcess, MemberProcess]:
    """Start two members, of which `a` leads."""
    await ready_store(store)
    a, b = (member(folder, name, store, **keys) for name in "ab")
    for each in (a, b):
        stack.callback(each.end)
    await start_set(a, b)
    return a, b


@one_store
@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(SIGNALS))
async def test_each_lease_is_in_the_exports_once(
    tmp_path: Path, store: StoreServer, kind: str
) -> None:
    """One leader ends after the other under load; each starts again as a standby."""
    async with AsyncExitStack() as stack:
        a, b = await pair(tmp_path, store, stack)
        seen = Failover(kind=kind)
        load = Load(f"{a.target},{b.target}", seen)
        load.start(LOOPS)
        stack.push_async_callback(load.stop)
        leader, standby = a, b
        for _ in range(3):
            await until(lambda: load.audit.highest[0] > 0, "a leader is known")
            before = sum(load.audit.granted.values())
            await until(
                lambda: sum(load.audit.granted.values()) >= before + 5 * LOOPS,  # noqa: B023
                "requests are granted",
            )
            term = max(load.audit.granted)
            leader.send(SIGNALS[kind])
            await until(lambda: max(load.audit.granted) > term, "the next one grants")  # noqa: B023
            leader.end()
            await leader.start()
            leader, standby = standby, leader
            await until(lambda: is_followed(leader), "it follows")  # noqa: B023
        await load.stop()
        assert seen.wrong == []
        assert load.audit.used.sums().requests > 15 * LOOPS
        files = [ledger(tmp_path, "a"), ledger(tmp_path, "b")]
        assert differences(load.audit.used, files) == []
        assert exported([files[0]]).requests > 0
        assert exported([files[1]]).requests > 0
        words = [
            "usage",
            "export",
            "--config",
            str(tmp_path / "a.yaml"),
            "--json",
            "--by",
            "tenant",
        ]
        found = CliRunner().invoke(main, [*words, "--ledger", str(files[1])])
        rows = json.loads(found.stdout)
        assert sum(row["output_tokens"] for row in rows) == load.audit.used.sums().output_tokens


@one_store
@pytest.mark.slow
async def test_an_end_that_two_leaders_saved_counts_once(
    tmp_path: Path, store: StoreServer
) -> None:
    """The first leader saves an end, and dies before the gate hears so."""
    async with AsyncExitStack() as stack:
        a, b = await pair(tmp_path, store, stack)
        session = SchedulerSession(
            f"{a.target},{b.target}", client_id="gate", incarnation=1, token=TOKEN,
        )  # fmt: skip
        session.register_pool(pool="p", epoch=1, capacity_tokens=6_400, block_size_tokens=16)
        session.start()
        stack.push_async_callback(session.close)
        books, admissions = UsageBooks(), []
        for n in range(4):
            it = session.admission(
                tenant="light", pools=["p"], input_tokens=100 + n, max_output_tokens=40
            )
            await it.submit()
            admissions.append(it)
        for n, it in enumerate(admissions):
            assert it.lease is not None
            end = pb.CompleteRequest(
                lease_id=it.lease.lease_id, outcome=pb.OUTCOME_COMPLETED, input_tokens=100 + n,
                output_tokens=7,
            )  # fmt: skip
            books.ended(end)
        # The gate reads no more, so it hears of no end that a saves.
        hears = session._protocol.receive
        session._protocol.receive = lambda now_ns, response: []  # type: ignore[method-assign]
        for n, it in enumerate(admissions):
            it.complete(input_tokens=100 + n, output_tokens=7)
        await until(lambda: exported([ledger(tmp_path, "a")]).requests == 4, "a has saved them")
        a.send(signal.SIGKILL)
        # Answers that the leader sent before its death are lost with the connection alone.
        await until(lambda: session.state is SessionState.CONNECTING, "the gate has lost a")
        session._protocol.receive = hears  # type: ignore[method-assign]
        await until(lambda: leads(b), "b leads")
        assert await session.flush(20)
        assert exported([ledger(tmp_path, "b")]).requests == 4
        assert differences(books, [ledger(tmp_path, name) for name in "ab"]) == []
        assert differences(books, [ledger(tmp_path, name) for name in "ba"]) == []


@one_store
@pytest.mark.slow
async def test_a_gate_that_dies_with_the_leader_is_estimated(
    tmp_path: Path, store: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate reports Progress at both leaders, and dies: its last report counts."""
    async with AsyncExitStack() as stack:
        a, b = await pair(tmp_path, store, stack, scheduler=SHORT)
        options = ClientOptions(progress_delay_s=0.01)
        session = SchedulerSession(
            f"{a.target},{b.target}", client_id="gate", incarnation=1, token=TOKEN, options=options
        )
        session.register_pool(pool="p", epoch=1, capacity_tokens=6_400, block_size_tokens=16)
        session.start()
        it = session.admission(tenant="light", pools=["p"], input_tokens=100, max_output_tokens=40)
        await it.submit()
        it.progress(input_tokens=100, output_tokens=10)
        a.send(signal.SIGKILL)
        await until(lambda: leads(b), "b leads")
        it.progress(input_tokens=100, output_tokens=25)
        await until(lambda: reported(b, 25), "b has the report")
        monkeypatch.setattr(type(it), "progress", lambda *_, **__: None)  # the rest is cut off
        session._protocol.complete = lambda *end: False  # type: ignore[method-assign]
        await session.close()
        files = [ledger(tmp_path, name) for name in "ab"]
        await until(lambda: exported(files, estimated=True).requests == 1, "it has expired")
        assert exported(files, estimated=True) == Sums(1, 100, 25)
        assert exported(files) == Sums(0, 0, 0)


async def reported(each: MemberProcess, tokens: int) -> bool:
    return sum(flow.output_tokens for flow in (await each.stats()).flows) == tokens
