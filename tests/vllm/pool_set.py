"""Runs two schedulers of one set with a store, and reads the books of the leader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from tests.cluster.member_process import MemberProcess, is_followed, leads
from tests.cluster.members import TOKEN, proof, ready_store
from tests.cluster.store_server import running_store
from tests.waiting import until

from .programs import Scheduler, Server
from .stack import Stack

#: The variables of an engine whose gate asks the schedulers of a set.
VARIABLES = {"SCHEDSVC_TOKEN": TOKEN, "SCHEDSVC_UNREACHABLE": "closed"}
_LEADS_S_MAX = 30.0


class PoolSet:
    """Runs the members `a`, which leads first, and `b`."""

    def __init__(self, a: MemberProcess, b: MemberProcess) -> None:
        self.members = [a, b]
        self.target = ",".join(member.target for member in self.members)

    def leader(self) -> MemberProcess:
        """Return the member that leads, once there is one."""
        return self._leading()[0]

    def stats(self) -> pb.StatsResponse:
        """Ask the leader, once there is one."""
        return self._leading()[1]

    def _leading(self) -> tuple[MemberProcess, pb.StatsResponse]:
        end_s = time.monotonic() + _LEADS_S_MAX
        while True:
            for member in self.members:
                found = _stats_of(member.target)
                if found is not None and found.cluster.set.leads:
                    return member, found
            assert time.monotonic() < end_s, "no member leads"
            time.sleep(0.02)


def _stats_of(target: str) -> pb.StatsResponse | None:
    """Ask a member; None: it does not answer."""
    with grpc.insecure_channel(target) as channel:
        stub: Any = SchedulerServiceStub(channel)
        try:
            answer: pb.StatsResponse = stub.Stats(pb.StatsRequest(), metadata=proof(), timeout=5)
        except grpc.RpcError:
            return None
        return answer


@dataclass(frozen=True)
class LedStack(Stack):
    """Holds an engine whose gate asks a set."""

    pool_set: PoolSet
    pool_name: str

    def stats(self) -> pb.StatsResponse:
        """Ask the leader."""
        return self.pool_set.stats()

    @property
    def pool(self) -> pool_pb2.PoolStats:
        """Read the books of its own pool."""
        return next(pool for pool in self.stats().pools if pool.name == self.pool_name)


@contextlib.contextmanager
def running_set(folder: Path, tenants: list[str]) -> Iterator[PoolSet]:
    """Run a store and two schedulers, of which one leads and the other follows it."""
    with running_store(folder / "store") as store:
        keys = {"pools": [], "tenants": [{"name": name} for name in tenants], "scheduler": {}}
        a, b = (MemberProcess(folder, name, store.url, **keys) for name in "ab")

        async def start() -> None:
            await ready_store(store)
            await a.start()
            await until(lambda: leads(a), "a leads")
            await b.start()
            await until(lambda: is_followed(a), "b follows")

        try:
            asyncio.run(start())
            yield PoolSet(a, b)
        finally:
            a.end()
            b.end()


def led_stack(server: Server, pool_set: PoolSet, pool_name: str) -> LedStack:
    """Return what tests ask of an engine in a set."""
    absent: Scheduler = None  # type: ignore[assignment] # the set is in its place
    return LedStack(server, absent, pool_set, pool_name)
