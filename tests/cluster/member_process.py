"""Runs `schedsvc serve` as a member with a role, in a process that a test may signal."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import yaml
from schedsvc_client.v1 import cluster_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from schedsvc_lab.demo.processes import DIES_WITH_PARENT, free_port
from tests import forked
from tests.waiting import until

from .members import POOL_SET, proof, settings

CAPACITY = 6_400
#: Requests a minute of the tenant `limited`.
QUOTA = 3


class MemberProcess:
    """Runs a member at an address of this host, or of a network of its own.

    `run_in`: a command that runs its arguments there, which must not fork. `keys` replace those
    here in the configuration.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        urls: str | Sequence[str],
        host: str = "127.0.0.1",
        run_in: Sequence[str] = (),
        pool_set: str = POOL_SET,
        **keys: Any,
    ) -> None:
        port = free_port()
        self.target, self._ready = f"{host}:{port}", folder / f"{name}.ready"
        self._config, self._log = folder / f"{name}.yaml", folder / f"{name}.log"
        self._run_in = run_in
        data = settings(folder, name, urls, port, advertise=self.target, set=pool_set) | {
            "listeners": [{"tcp": self.target}],
            # It grants without an engine's stream, which a paused leader loses.
            "pools": [{"name": "probed", "capacity_tokens": CAPACITY}],
            "tenants": [
                {"name": "heavy", "weight": 3},
                {"name": "light"},
                {"name": "limited", "quota": {"requests_per_minute": QUOTA}},
            ],
            # With this ledger the reservations of all leases add up.
            "scheduler": {"headroom": 0, "expert": {"ledger": "sum"}},
            "log": {"format": "json"},
            "metrics": {"listen": "127.0.0.1:0"},
        }
        self._config.write_text(yaml.safe_dump(data | keys))
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._ready.unlink(missing_ok=True)  # the file of a life that was killed
        command = [sys.executable, "-m", "schedsvc", "serve", "--config", str(self._config)]
        self._begin([*command, "--ready-file", str(self._ready)])
        await until(self._ready.exists, "the member listens")

    def _begin(self, command: Sequence[str]) -> None:
        with self._log.open("ab") as log:
            words = [*DIES_WITH_PARENT, *self._run_in, *command]
            self.process = forked.Popen(words, stdout=log, stderr=log)

    @property
    def metrics_url(self) -> str:
        return str(json.loads(self._ready.read_text())["metrics"])

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def stopped(self) -> None:
        """Wait until the process is paused."""
        assert self.process is not None
        stat = Path(f"/proc/{self.process.pid}/stat")
        await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it stops")

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    async def stats(self) -> pb.StatsResponse:
        async with grpc.aio.insecure_channel(self.target) as channel:
            stub = stubs.SchedulerServiceStub(channel)
            return await stub.Stats(pb.StatsRequest(), metadata=proof(), timeout=5)

    async def pool_set(self) -> cluster_pb2.SetStats:
        return (await self.stats()).cluster.set

    async def served(self) -> dict[str, int]:
        """Return the input tokens that it counts for each tenant."""
        flows = (await self.stats()).flows
        return {flow.tenant: flow.input_tokens for flow in flows}


async def leads(member: MemberProcess) -> bool:
    with suppress(grpc.aio.AioRpcError):  # its listener follows another one
        return (await member.pool_set()).leads
    return False


async def is_followed(member: MemberProcess) -> bool:
    """Return whether a member has followers. It opens its port again when it changes its role."""
    with suppress(grpc.aio.AioRpcError):
        return bool((await member.pool_set()).followers)
    return False


async def start_set(leader: MemberProcess, standby: MemberProcess) -> None:
    """Start two members, of which the second follows the first."""
    await leader.start()
    await until(lambda: leads(leader), "the first member leads")
    await standby.start()
    await until(lambda: is_followed(leader), "the second member follows")


async def stands_by(member: MemberProcess) -> bool:
    """Return whether it knows that another member leads under a later term than the first."""
    with suppress(grpc.aio.AioRpcError):
        found = await member.pool_set()
        return not found.leads and found.leadership.term > 1
    return False
