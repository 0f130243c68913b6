"""Failovers between two `schedsvc serve` processes with a real store, under a client's load.

Each has fresh processes. The leader is killed (kill), ends by itself (term), is paused (stop), or
is cut off from its clients, the store and the other member by dropped packets (cut).

`python -m tests.cluster.failovers --help` says how to run many.
"""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from tests.waiting import until

from .cut_network import CutNetwork, cut_network
from .failover_load import HOLD_S, LOOPS, Failover, Load
from .member_process import MemberProcess, is_followed, leads, stands_by
from .members import proof, ready_store
from .store_server import StoreServer, running_store
from .usage_audit import differences

STOPPED_S = 5.0
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
KINDS = (*SIGNALS, "cut")
#: The targets, in s. A client leaves a paused leader after 1.5 s without an answer, and the
#: leader's term ends after 2 s.
GAP_S_MAX = {"kill": 3.0, "term": 0.2, "stop": 3.5, "cut": 3.0}


class NotBegunError(Exception):
    """The members did not come up, so no leader could end."""


class World:
    """Holds two members, of which `a` leads first, their store, and the load on them."""

    def __init__(
        self,
        store: StoreServer,
        folder: Path,
        network: CutNetwork | None,
        seen: Failover,
        **load: Any,
    ) -> None:
        self.store, self.seen, self.network = store, seen, network
        self._ledgers = {name: folder / f"{name}.usage.db" for name in "ab"}
        if network is None:
            self.a = MemberProcess(folder, "a", store.url, **self._ledger("a"))
            self.b = MemberProcess(folder, "b", store.url, **self._ledger("b"))
        else:
            url, inside = f"redis://{network.host}:{store.port}", network.inside
            self.a = MemberProcess(folder, "a", url, inside, network.run_in, **self._ledger("a"))
            self.b = MemberProcess(folder, "b", url, network.host, **self._ledger("b"))
        self.load = Load(f"{self.a.target},{self.b.target}", seen, **load)

    def _ledger(self, name: str) -> dict[str, Any]:
        return {"usage": {"path": str(self._ledgers[name])}}

    async def check_usage(self) -> None:
        """Compare the ledgers' exports of both members with the client engine's service."""
        await self.load.stop()
        self.seen.violations += differences(self.load.audit.used, list(self._ledgers.values()))

    async def begin(self, loops: int) -> None:
        """Start the members and the load, until requests are granted. Raises AssertionError."""
        await self.a.start()
        await until(lambda: leads(self.a), "a leads")
        await self.b.start()
        await until(lambda: is_followed(self.a), "b follows")
        self.load.start(loops)
        await self.load.spend()
        await until(lambda: self.load.granted(1) >= 10 * loops, "requests are granted")

    async def end_leader(self, kind: str, stopped_s: float) -> None:
        """Let the leader end in one way; if it resumes, it has to stand by then."""
        if self.network is not None:
            self.network.cut()
            await until(lambda: self.load.granted_later() > 0, "b grants")
            self.network.heal()
        else:
            self.a.send(SIGNALS[kind])
            if kind == "stop":
                await self._wake(stopped_s)
        if kind in ("stop", "cut"):
            await until(lambda: stands_by(self.a), "the former leader stands by")

    async def _wake(self, stopped_s: float) -> None:
        """Ask a paused leader, let it resume, and note each grant of its old term."""
        await self.a.stopped()
        async with grpc.aio.insecure_channel(self.a.target) as channel:
            stub = stubs.SchedulerServiceStub(channel)
            asked: list[Any] = []
            end_s = time.monotonic() + stopped_s
            while time.monotonic() < end_s:
                request = pb.AdmitRequest(
                    request_id=f"probe-{len(asked)}", tenant="light", pools=["probed"],
                    input_tokens=[16], max_output_tokens=16,
                )  # fmt: skip
                asked.append(stub.Admit(request, metadata=proof(), timeout=stopped_s + 5))
                await asyncio.sleep(0.05)
            # So that the leader does not learn from the store that its term is over.
            self.store.pause()
            self.a.send(signal.SIGCONT)
            await asyncio.wait([asyncio.ensure_future(call.code()) for call in asked], timeout=0.5)
            self.store.resume()
            for call in asked:
                with suppress(grpc.aio.AioRpcError):
                    answer = await call
                    if answer.outcome == pb.OUTCOME_GRANTED:
                        text = f"a woken leader granted: {answer.leadership}"
                        self.seen.over_grants.append(text)


@contextmanager
def _maybe_cut(kind: str) -> Iterator[CutNetwork | None]:
    if kind != "cut":
        yield None
        return
    with cut_network() as network:
        yield network


@asynccontextmanager
async def _world(kind: str, folder: Path, seen: Failover, **load: Any) -> AsyncIterator[World]:
    with _maybe_cut(kind) as network:
        options = ("--bind", f"127.0.0.1 {network.host}") if network else ()
        with running_store(folder / "store", *options) as store:
            await ready_store(store)
            world = World(store, folder, network, seen, **load)
            try:
                yield world
            finally:
                await world.load.stop()
                world.a.end()
                world.b.end()


async def one(
    kind: str,
    folder: Path,
    *,
    stopped_s: float = STOPPED_S,
    loops: int = LOOPS,
    hold_s: float = HOLD_S,
) -> Failover:
    """Let the leader of two members end in one way, and return the client's figures."""
    seen = Failover(kind=kind)
    with _noted(seen):
        await _fail_over(kind, folder, seen, stopped_s, loops, hold_s)
    return seen


@contextmanager
def _noted(seen: Failover) -> Iterator[None]:
    """Count an error as a violation, with the audit's findings until then."""
    try:
        yield
    except NotBegunError:
        raise
    except Exception as error:
        seen.violations.append(f"{type(error).__name__}: {error}")


async def _fail_over(
    kind: str, folder: Path, seen: Failover, stopped_s: float, loops: int, hold_s: float
) -> None:
    async with _world(kind, folder, seen, hold_s=hold_s) as world:
        b, load = world.b, world.load
        try:
            await world.begin(loops)
        except AssertionError as error:
            raise NotBegunError(str(error)) from None
        before = await world.a.served()
        began_s = time.monotonic()
        await world.end_leader(kind, stopped_s)
        await until(lambda: load.granted_later() >= 5 * loops, "b grants")
        seen.gap_s = min(at_s for term, at_s in load.audit.first_s.items() if term > 1) - began_s
        await load.check_spent("after the failover")
        after = await b.served()
        # The rows follow every 0.1 s: the latest service may be missing.
        for tenant in ("heavy", "light"):
            if after.get(tenant, 0) < before[tenant] // 2:
                seen.violations.append(f"{tenant}: {before[tenant]} became {after.get(tenant)}")
        await world.check_usage()


if __name__ == "__main__":
    from .failover_runs import main

    sys.exit(main())
