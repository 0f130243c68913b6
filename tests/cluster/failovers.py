"""Failovers between two `schedsvc serve` processes with a real store, under a client's load.

`python -m tests.cluster.failovers --count N --kind kill|term|stop` runs N of them, each with fresh
processes, appends a line of JSON for each to a file, goes on after an interruption, and prints how
long no request was granted. It exits with 1 if a failover broke a rule.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import yaml
from schedsvc_client import Refused, SchedulerError
from schedsvc_client.aio import Admission, SchedulerSession
from schedsvc_client.fence import Fence
from schedsvc_client.v1 import cluster_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from .members import TOKEN, proof, ready_store, settings
from .store_server import StoreServer, free_port, running_store

CAPACITY = 6_400
#: A lease is held for this long, and more loops ask than the pool has room for.
HOLD_S = 0.04
LOOPS = 40
#: Requests a minute of the tenant `limited`, which uses them up before the leader ends.
QUOTA = 3
STOPPED_S = 5.0
_WAIT_S = 30.0
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}


async def until(condition: Callable[[], object | Awaitable[object]], what: str) -> None:
    """Wait for a condition, for 30 s at most."""
    end_s = time.monotonic() + _WAIT_S
    while True:
        found = condition()
        if await found if isinstance(found, Awaitable) else found:
            return
        assert time.monotonic() < end_s, f"not within {_WAIT_S:g} s: {what}"
        await asyncio.sleep(0.01)


class MemberProcess:
    """`schedsvc serve` as a member with a role."""

    def __init__(self, folder: Path, name: str, url: str) -> None:
        port = free_port()
        self.target, self._ready = f"127.0.0.1:{port}", folder / f"{name}.ready"
        self._config, self._log = folder / f"{name}.yaml", folder / f"{name}.log"
        data = settings(folder, name, url, port) | {
            # It grants without an engine's stream, which a leader that stands still loses.
            "pools": [{"name": "probed", "capacity_tokens": CAPACITY}],
            "tenants": [
                {"name": "heavy", "weight": 3},
                {"name": "light"},
                {"name": "limited", "quota": {"requests_per_minute": QUOTA}},
            ],
            # With this ledger the reservations of all leases add up.
            "scheduler": {"headroom": 0, "ledger": "sum"},
            "log": {"format": "json"},
            "metrics": {"listen": "127.0.0.1:0"},
        }
        self._config.write_text(yaml.safe_dump(data))
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "schedsvc", "serve", "--config", str(self._config)]
        await asyncio.to_thread(self._begin, [*command, "--ready-file", str(self._ready)])
        await until(self._ready.exists, "the member listens")

    def _begin(self, command: list[str]) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def metrics_url(self) -> str:
        return str(json.loads(self._ready.read_text())["metrics"])

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def stopped(self) -> None:
        """Wait until the process stands still."""
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


@dataclass
class Failover:
    """How one failover went."""

    kind: str
    #: From the signal to the first grant of the next leader, as the client sees it.
    gap_s: float = 0.0
    granted: int = 0
    #: The most that leases of the client reserved at one time.
    reserved_max: int = 0
    violations: list[str] = field(default_factory=list)


class Load:
    """An engine's client that has both members as targets, and tenants who always ask."""

    def __init__(self, targets: str, seen: Failover) -> None:
        self._seen, self._running = seen, set[Admission]()
        self.fence = Fence()
        self.session = SchedulerSession(
            targets, client_id="shim", incarnation=1, token=TOKEN, fence=self.fence
        )
        self.session.register_pool(
            pool="p", epoch=1, capacity_tokens=CAPACITY, block_size_tokens=16
        )
        self._tasks: list[asyncio.Task[None]] = []
        #: Term and time of the first grant under it.
        self.first_s: dict[int, float] = {}
        self.granted: dict[int, int] = {}

    def start(self, loops: int = LOOPS) -> None:
        self.session.start()
        self._tasks = [
            asyncio.create_task(self._ask("light" if i % 4 else "heavy")) for i in range(loops)
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.session.close()

    async def _ask(self, tenant: str) -> None:
        shape: dict[str, Any] = {"tenant": tenant, "pool": "p", "input_tokens": 200}
        while True:
            try:
                async with self.session.admission(**shape, max_output_tokens=40) as it:
                    self._grant(it)
                    try:
                        for tokens in (10, 20, 30, 40):
                            await asyncio.sleep(HOLD_S / 4)
                            it.progress(input_tokens=200, output_tokens=tokens)
                    finally:
                        self._running.remove(it)
                if it.lost is not None:
                    self._seen.violations.append(f"a lease was lost: {it.lost}")
            except SchedulerError as error:
                self._seen.violations.append(f"the application got {error!r}")
                await asyncio.sleep(0.1)

    def _grant(self, it: Admission) -> None:
        term = self.fence.highest.term
        self.first_s.setdefault(term, time.monotonic())
        self.granted[term] = self.granted.get(term, 0) + 1
        self._running.add(it)
        self._seen.granted += 1
        reserved = sum(each.lease.reserved_tokens for each in self._running if each.lease)
        self._seen.reserved_max = max(self._seen.reserved_max, reserved)
        if reserved > CAPACITY:
            self._seen.violations.append(f"{reserved} of {CAPACITY} tokens are reserved")

    async def spend(self) -> None:
        """Use the quota of the tenant `limited` up."""
        for _ in range(QUOTA):
            async with self.session.admission(**LIMITED):
                pass
        await self.check_spent("before the failover")

    async def check_spent(self, when: str) -> None:
        with suppress(Refused):
            async with self.session.admission(**LIMITED, queue_ttl_ms=200):
                self._seen.violations.append(f"a spent quota was granted {when}")


LIMITED: dict[str, Any] = {
    "tenant": "limited", "pool": "probed", "input_tokens": 16, "max_output_tokens": 16,
}  # fmt: skip


async def served(member: MemberProcess) -> dict[str, int]:
    """Return the input tokens that the leader counts for each tenant."""
    flows = (await member.stats()).flows
    return {flow.tenant: flow.input_tokens for flow in flows}


async def fail_over(store: StoreServer, folder: Path, kind: str) -> Failover:
    """Let the leader of two members end in one way, and return how the client fared."""
    a, b = (MemberProcess(folder, name, store.url) for name in "ab")
    seen = Failover(kind)
    load = Load(f"{a.target},{b.target}", seen)
    try:
        await a.start()
        await until(lambda: leads(a), "a leads")
        await b.start()
        await until(lambda: is_followed(a), "b follows")
        load.start()
        await load.spend()
        await until(lambda: load.granted.get(1, 0) >= 10 * LOOPS, "requests are granted")
        before = await served(a)
        began_s = time.monotonic()
        a.send(SIGNALS[kind])
        if kind == "stop":
            await _stop_and_wake(a, store, seen)
        await until(lambda: load.granted.get(2, 0) >= 5 * LOOPS, "b grants")
        seen.gap_s = load.first_s[2] - began_s
        await load.check_spent("after the failover")
        after = await served(b)
        # The rows follow every 0.1 s: what was served since then may be missing.
        for tenant in ("heavy", "light"):
            if after.get(tenant, 0) < before[tenant] // 2:
                seen.violations.append(f"{tenant}: {before[tenant]} became {after.get(tenant)}")
    finally:
        await load.stop()
        a.end()
        b.end()
    return seen


async def _stop_and_wake(leader: MemberProcess, store: StoreServer, seen: Failover) -> None:
    """Ask a leader that stands still, let it go on, and note each grant of its old term."""
    await leader.stopped()
    async with grpc.aio.insecure_channel(leader.target) as channel:
        stub = stubs.SchedulerServiceStub(channel)
        asked: list[Any] = []
        end_s = time.monotonic() + STOPPED_S
        while time.monotonic() < end_s:
            request = pb.AdmitRequest(
                request_id=f"probe-{len(asked)}", tenant="light", pool="probed",
                input_tokens=[16], max_output_tokens=16,
            )  # fmt: skip
            asked.append(stub.Admit(request, metadata=proof(), timeout=STOPPED_S + 5))
            await asyncio.sleep(0.05)
        store.pause()  # so that the leader does not learn from the store that its term is over
        leader.send(signal.SIGCONT)
        await asyncio.wait([asyncio.ensure_future(call.code()) for call in asked], timeout=0.5)
        store.resume()
        for call in asked:
            with suppress(grpc.aio.AioRpcError):
                answer = await call
                if answer.outcome == pb.OUTCOME_GRANTED:
                    seen.violations.append(f"a woken leader granted: {answer.leadership}")
    await until(lambda: _stands_by(leader), "the woken leader stands by")


async def leads(member: MemberProcess) -> bool:
    with suppress(grpc.aio.AioRpcError):  # its listener follows another one
        return (await member.pool_set()).leads
    return False


async def is_followed(member: MemberProcess) -> bool:
    return bool((await member.pool_set()).followers)


async def _stands_by(member: MemberProcess) -> bool:
    with suppress(grpc.aio.AioRpcError):
        found = await member.pool_set()
        return not found.leads and found.leadership.term == 2
    return False


async def one(kind: str, folder: Path) -> Failover:
    """Run one failover with a store of its own."""
    with running_store(folder / "store") as store:
        await ready_store(store)
        return await fail_over(store, folder, kind)


def shown(results: list[dict[str, Any]]) -> str:
    """Describe the gaps of failovers of one kind, and what was violated."""
    gaps = sorted(result["gap_s"] for result in results)
    p95 = gaps[min(len(gaps) - 1, int(len(gaps) * 0.95))]
    wrong = [violation for result in results for violation in result["violations"]]
    spread = f"least {gaps[0]:.2f}, median {statistics.median(gaps):.2f}, p95 {p95:.2f}"
    text = f"{len(gaps)} failovers: gap in s: {spread}, most {gaps[-1]:.2f};"
    return "\n".join([f"{text} {len(wrong)} violations", *wrong[:20]])


def main() -> int:
    """Run failovers of one kind until the file holds as many as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--kind", choices=sorted(SIGNALS), default="kill")
    parser.add_argument("--out", type=Path, default=Path("out/failovers"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"{given.kind}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    while len(lines) < given.count:
        with tempfile.TemporaryDirectory(prefix="fo-") as folder:
            lines.append(json.dumps(asdict(asyncio.run(one(given.kind, Path(folder))))))
        with file.open("a") as out:
            out.write(lines[-1] + os.linesep)
    results = [json.loads(line) for line in lines]
    print(shown(results))
    return int(any(result["violations"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
