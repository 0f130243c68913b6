"""Schedulers as processes with a real store, and tenants that send them more than they can serve.

A lease is held for a fixed time, so a pool of R places serves R / HOLD_S requests a second.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import yaml
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from schedsvc_lab.demo.processes import DIES_WITH_PARENT
from tests import forked
from tests.waiting import wait_for_start

from .store_server import ADMIN_PASSWORD, StoreServer

HOLD_S = 0.05
INPUT = 100
#: The charge of one request, by the default prices.
MICRO = (INPUT + 2) * 10**6
WEIGHTS = {"heavy": 4, "light": 1}


class SchedulerProcess:
    """Runs `schedsvc serve` with these pools (name to places), and other configuration keys."""

    def __init__(
        self,
        folder: Path,
        member: str,
        pools: dict[str, int],
        store: StoreServer | None,
        **keys: Any,
    ) -> None:
        self.name = member
        self._ready = folder / f"{member}.ready"
        self._config = folder / f"{member}.yaml"
        data: dict[str, Any] = {
            "listeners": [{"tcp": "127.0.0.1:0"}],
            "metrics": {"listen": "127.0.0.1:0"},
            "tenants": [{"name": name, "weight": weight} for name, weight in WEIGHTS.items()],
            "scheduler": {"queue_ttl_ms": 120_000, "lease_ttl_ms": 60_000, "headroom": 0},
            "pools": [
                {"name": pool, "capacity_tokens": 1_000_000, "max_running": places}
                for pool, places in pools.items()
            ],
            "limits": {"drain_ms": 0},
            "log": {"level": "warning"},
        }
        if store is not None:
            (folder / "password").write_text(ADMIN_PASSWORD)
            reached = {"urls": [store.url], "password_file": str(folder / "password")}
            data["cluster"] = {"name": "prod", "member": member, "store": reached}
        self._config.write_text(yaml.safe_dump(data | keys))
        self._process: subprocess.Popen[bytes] | None = None
        self.target = self._metrics = ""

    @property
    def config_file(self) -> Path:
        return self._config

    def start(self, log: Path | None = None) -> None:
        """Start it, and wait until it listens; `log`: the file for its lines."""
        command = [
            *DIES_WITH_PARENT,
            sys.executable,
            "-m",
            "schedsvc",
            "serve",
            "--config",
            str(self._config),
        ]
        words = [*command, "--ready-file", str(self._ready)]
        if log is None:
            self._process = forked.Popen(words)
        else:
            with log.open("ab") as file:
                self._process = forked.Popen(words, stderr=file)
        wait_for_start(self._process, self._ready.exists, "the scheduler listens")
        ready = json.loads(self._ready.read_text())
        self.target, self._metrics = ready["targets"][0], ready["metrics"]

    def metrics(self) -> dict[str, float]:
        """Return the series of the cluster, and that of leads, by name."""
        with urllib.request.urlopen(self._metrics, timeout=20) as page:
            lines = page.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs if "cluster" in name}

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


class Load:
    """Repeats requests in closed loops, and counts those served of each tenant since a moment."""

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: list[grpc.aio.Channel] = []
        self._next = 0

    def flood(self, scheduler: SchedulerProcess, tenant: str, pool: str, loops: int) -> None:
        channel = grpc.aio.insecure_channel(
            scheduler.target, [("grpc.use_local_subchannel_pool", 1)]
        )
        self._channels.append(channel)
        stub = stubs.SchedulerServiceStub(channel)
        for _ in range(loops):
            self._tasks.add(asyncio.create_task(self._loop(stub, tenant, pool)))

    async def _loop(self, stub: Any, tenant: str, pool: str) -> None:
        while True:
            self._next += 1
            ask = pb.AdmitRequest(
                request_id=f"{tenant}-{self._next}", tenant=tenant, pools=[pool],
                input_tokens=[INPUT], max_output_tokens=1,
            )  # fmt: skip
            answer = await stub.Admit(ask, timeout=120)
            assert answer.outcome == pb.OUTCOME_GRANTED, answer
            await asyncio.sleep(HOLD_S)
            done = pb.CompleteRequest(
                lease_id=answer.grant.lease_id, pool_epoch=answer.grant.pool_epoch,
                outcome=pb.OUTCOME_COMPLETED, input_tokens=INPUT, output_tokens=1,
            )  # fmt: skip
            await stub.Complete(done, timeout=120)
            self.served[tenant] += 1

    async def share(self, seconds: float) -> float:
        """Return the part of the heavy tenant in what is served from now on."""
        before = self.served.copy()
        await asyncio.sleep(seconds)
        for task in self._tasks:
            assert not task.done(), task.exception()
        got = self.served - before
        return got["heavy"] / got.total()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()


@contextlib.asynccontextmanager
async def loaded(
    schedulers: list[SchedulerProcess], floods: dict[tuple[str, str], int], pools: dict[str, str]
) -> AsyncIterator[Load]:
    """Start schedulers and closed loops: (tenant, pool) to loops, and pool to its scheduler."""
    load = Load()
    named = {scheduler.name: scheduler for scheduler in schedulers}
    try:
        for scheduler in schedulers:
            await asyncio.to_thread(scheduler.start)
        for (tenant, pool), loops in floods.items():
            load.flood(named[pools[pool]], tenant, pool, loops)
        yield load
    finally:
        await load.stop()
        for scheduler in schedulers:
            await asyncio.to_thread(scheduler.stop)
