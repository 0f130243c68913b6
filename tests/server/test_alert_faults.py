"""Tests alerts on a real Prometheus, each provoked by its fault at real processes.

The deployed rules are used with all their times divided by 20. No fault from outside breaks an
invariant, so one scheduler has a defect inside, see `breaking_scheduler.py`.
"""

import asyncio
import copy
import json
import re
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import yaml
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc.records.sqlite_files import HELD_FACTOR, LOG_BYTES_MAX
from schedsvc.records.usage.ledger import Ledger, UsageKey, UsedLease
from schedsvc_lab.demo.processes import free_port
from tests.cluster.members import ready_store, settings
from tests.cluster.store_refusals import REFUSALS
from tests.cluster.store_server import ADMIN_PASSWORD, StoreServer, running_store
from tests.processes.programs import EngineSizes, Programs, config, stream

from .conftest import ask, open_channel
from .prometheus import Prometheus, scraping
from .test_alerts import ALERTS, RULES
from .test_descriptors import without_descriptors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(480),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is missing; install prometheus"
    ),
]

TIMES_FASTER = 20
#: The rule's bound is 30 s, which is no time of the rule: these first tokens really take longer.
SLOW_S = 33.0
TENANTS = ("evicted", "slow", "gone", "liar", "holder")
POOLS = [
    {"name": "pool", "capacity_tokens": 1_000_000},
    {"name": "full", "capacity_tokens": 1_600},
]
#: The alerts that each scheduler's fault, or each tenant's, provokes, and no others.
EXPECTED = {
    "troubled": {
        "SchedsvcStateFailing",
        "SchedsvcStateLost",
        "SchedsvcReloadFailed",
        "SchedsvcPoolDetached",
        "SchedsvcLeasesExpire",
        "SchedsvcReportsLimited",
    },
    "overrun": {"SchedsvcEnginePreempts"},
    "uneven": {"SchedsvcFairnessGap"},
    "killed": {"SchedsvcDown"},
    "starved": {"SchedsvcLoopLags"},
    "broken": {"SchedsvcBroken"},
    "sharing": {"SchedsvcStoreRefusesWrites", "SchedsvcUnsynced"},
    "evicting": {"SchedsvcStoreMayEvict"},
    "leaderless": {"SchedsvcNoLeader", "SchedsvcTermsUnknown"},
    "mute": {"SchedsvcLogLinesDropped"},
    "crowded": {"SchedsvcDescriptorsExhausted"},
    "robbed": {"SchedsvcUsageLost"},
    "unbooked": {"SchedsvcUsageFailing", "SchedsvcUsageLost"},
    "read": {"SchedsvcWriteAheadLogHeld"},
    "tenant evicted": {"SchedsvcRequestsEvicted"},
    "tenant slow": {"SchedsvcFirstTokenSlow"},
}
LATER = (
    "uneven", "sharing", "robbed", "unbooked", "evicting", "leaderless", "mute", "crowded", "read",
)  # fmt: skip
#: A log that is held has more.
HELD_BYTES = HELD_FACTOR * LOG_BYTES_MAX
#: Runs our command with a stderr that is never read.
MUTE = """
import os
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
from schedsvc.cli import main
main()
"""
BREAKING = str(Path(__file__).with_name("breaking_scheduler.py"))


def test_every_alert_is_provoked() -> None:
    assert set().union(*EXPECTED.values()) == ALERTS.keys()


def faster_rules() -> dict[str, Any]:
    """The deployed rules with their windows and their `for` divided."""

    def divided(text: str) -> str:
        return re.sub(r"\b(\d+)m\b", lambda at: f"{int(at[1]) * 60 // TIMES_FASTER}s", text)

    rules: dict[str, Any] = copy.deepcopy(yaml.safe_load(RULES.read_text()))
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\[\d+m\]", lambda at: divided(at[0]), rule["expr"])
            if "for" in rule:
                rule["for"] = divided(rule["for"])
    return rules


def uneven(weight: float) -> dict[str, Any]:
    """Return two tenants of this weight, whose requests wait for a small pool."""
    return config({"credit_max": 0}, lease_ttl_ms=600_000, queue_ttl_ms=600_000) | {
        "pools": [{"name": "pool", "capacity_tokens": 320}],
        "tenants": [{"name": name, "weight": weight} for name in "ab"],
    }


def settings_of(name: str, store: StoreServer, other: StoreServer) -> dict[str, Any]:
    own: dict[str, Any] = {"metrics": {"listen": "127.0.0.1:0"}}
    if name == "troubled":
        own["pools"] = POOLS
        own["tenants"] = [{"name": tenant} for tenant in TENANTS]
        own["state"] = {"file": "state/state.db", "every_ms": 100}
    if name == "overrun":
        own["mode"] = "dry_run"
    if name == "uneven":
        return uneven(0.01) | own
    if name == "mute":
        own["log"] = {"level": "info"}
    if name in ("robbed", "unbooked", "read"):
        own["usage"] = {"path": "ledger/usage.db"}
    if name in ("sharing", "evicting"):
        used = store if name == "sharing" else other
        (used.folder / "password").write_text(ADMIN_PASSWORD)
        reached = {"urls": [used.url], "password_file": str(used.folder / "password")}
        own["cluster"] = {"name": "prod", "member": "a", "store": reached}
    if name == "leaderless":
        own |= settings(store.folder, "a", "redis://127.0.0.1:1", free_port())
    # A lease that is reported each half second must not expire while the machine is busy.
    return config(lease_ttl_ms=4_000, lease_grace_ms=4_000) | own


@contextmanager
def schedulers(store: StoreServer, other: StoreServer) -> Iterator[dict[str, Programs]]:
    """Run a scheduler in a folder of its own for each kind of fault, two with an engine."""
    made: dict[str, Programs] = {}
    with ExitStack() as stack:
        for name in ("troubled", "overrun", "killed", "starved", "broken", *LATER):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="al-")))
            (folder / "state").mkdir()
            (folder / "ledger").mkdir()
            sizes = EngineSizes(kv_tokens=1_024, context_tokens=1_024)
            if name == "read":
                stack.enter_context(log_held(folder / "ledger" / "usage.db"))
            made[name] = Programs(folder, settings_of(name, store, other), sizes)
            stack.callback(made[name].stop)
            program = {"broken": (BREAKING,), "mute": ("-c", MUTE)}.get(name, ("-m", "schedsvc"))
            made[name].start_scheduler(program)
            if name in ("troubled", "overrun"):
                made[name].start_engine()
        yield made


@contextmanager
def log_held(path: Path) -> Iterator[None]:
    """Hold a ledger whose log is large, while another program is in the middle of a query."""
    ledger = Ledger(path, 400)
    ledger.add([UsedLease(0, 0, UsageKey("", "a", "", "", "", ""), False, 1, 0, 1)])
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM usage").fetchone()
        number, log = 1, path.with_name(f"{path.name}-wal")
        while log.stat().st_size < HELD_BYTES:
            keys = [UsageKey("", f"{number + i}", "m" * 2_000, "", "", "") for i in range(1_000)]
            ledger.add([UsedLease(number + i, 0, k, False, 1, 0, 1) for i, k in enumerate(keys)])
            number += len(keys)
        ledger.close()
        yield


def page_of(programs: Programs) -> str:
    return str(json.loads((programs.folder / "scheduler.ready").read_text())["metrics"])


async def ever(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await work()


class Callers:
    """Misbehaves as callers of the troubled scheduler, each a tenant."""

    def __init__(self, stub: SchedulerServiceStub) -> None:
        self._stub = stub
        self._held = 0

    async def fill(self) -> None:
        """Have a lease of the whole pool `full`."""
        self._held = await self._granted("holder", "full", tokens=1_500)

    async def hold(self) -> None:
        """Keep that lease by a report."""
        await self._report(self._held, 0)
        await asyncio.sleep(0.3)

    async def evicted(self) -> None:
        """Wait for the pool `full` until the request is evicted."""
        asked = ask(1_000, tenant="evicted", pools=["full"], queue_ttl_ms=300)
        assert not (await self._stub.Admit(asked)).grant.lease_id

    async def slow(self) -> None:
        """Begin a request each second, whose first token comes after half a minute."""

        async def one() -> None:
            lease = await self._granted("slow", "pool")
            for _ in range(int(SLOW_S / 0.5)):
                await self._report(lease, 0)
                await asyncio.sleep(0.5)
            await self._report(lease, 1)
            await self._complete(lease, 4)

        async with asyncio.TaskGroup() as running:
            while True:
                running.create_task(one())
                await asyncio.sleep(1.0)

    async def gone(self) -> None:
        """Leave a lease without a report."""
        await self._granted("gone", "pool")
        await asyncio.sleep(0.5)

    async def lies(self) -> None:
        """Report more output than the request may have."""
        lease = await self._granted("liar", "pool")
        await self._report(lease, 1_000_000)
        await self._complete(lease, 4)
        await asyncio.sleep(0.3)

    async def _granted(self, tenant: str, pool: str, tokens: int = 100) -> int:
        asked = ask(tokens, tenant=tenant, pools=[pool], reports_progress=True)
        lease: int = (await self._stub.Admit(asked)).grant.lease_id
        assert lease
        return lease

    async def _report(self, lease: int, tokens: int) -> None:
        report = {"lease_id": lease, "pool_epoch": 1, "output_tokens": tokens}
        await self._stub.Progress(pb.ProgressRequest(leases=[report]))

    async def _complete(self, lease: int, tokens: int) -> None:
        end = pb.CompleteRequest(lease_id=lease, pool_epoch=1, output_tokens=tokens)
        await self._stub.Complete(end)


async def test_real_faults_make_the_alerts_fire(tmp_path: Path) -> None:
    with (
        running_store(tmp_path / "store") as store,
        running_store(tmp_path / "other") as other,
        schedulers(store, other) as programs,
    ):
        for each in (store, other):
            await ready_store(each)
        pages = {page_of(each): name for name, each in programs.items()}
        async with AsyncExitStack() as stack:
            prometheus = await stack.enter_async_context(
                scraping(tmp_path, list(pages), faster_rules())
            )
            await until_scraped(prometheus, len(pages))
            overrun = programs["overrun"]
            http = await stack.enter_async_context(aiohttp.ClientSession(overrun.engine_url))
            channel = await stack.enter_async_context(open_channel(programs["troubled"].target))
            callers = Callers(SchedulerServiceStub(channel))

            async def flood() -> None:
                await stream(http, "a", 900)

            async def starve() -> None:
                programs["starved"].pause("scheduler")
                await asyncio.sleep(0.4)
                programs["starved"].resume("scheduler")
                await asyncio.sleep(0.1)

            async def reload() -> None:
                programs["mute"].send("scheduler", signal.SIGHUP)
                await asyncio.sleep(0.5)

            await callers.fill()
            work = (callers.evicted, callers.hold, callers.slow, callers.gone, callers.lies)
            programs["killed"].kill("scheduler")
            await break_invariant(programs["broken"])
            break_things(programs["troubled"])
            await wait_unevenly(programs["uneven"], stack)
            (programs["robbed"].folder / "ledger" / "usage.db").unlink()
            (programs["unbooked"].folder / "ledger").rename(programs["unbooked"].folder / "gone")
            REFUSALS["memory"].begin(store)
            await until_shares(prometheus)
            other.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            with without_descriptors(programs["crowded"].running["scheduler"].pid):
                await asyncio.sleep(2.5)
            watch = asyncio.ensure_future(until_all_fire(prometheus, pages))
            tasks = [
                asyncio.ensure_future(ever(one)) for one in (*work, starve, reload, *[flood] * 8)
            ]
            try:
                done, _ = await asyncio.wait([watch, *tasks], return_when="FIRST_COMPLETED")
                for task in done:  # a working task ends only by an error
                    task.result()
            finally:
                for task in (watch, *tasks):
                    task.cancel()
                await asyncio.gather(watch, *tasks, return_exceptions=True)


async def wait_unevenly(programs: Programs, stack: AsyncExitStack) -> None:
    """Let two tenants wait, one ahead of the other, and raise the weights: the bound falls."""
    channel = await stack.enter_async_context(open_channel(programs.target))
    stub = SchedulerServiceStub(channel)
    assert (await stub.Admit(ask(250, tenant="a", pools=["pool"]))).grant.lease_id
    for count, tenant in enumerate("ba", 1):  # b first: a later flow is lifted to the waiting one
        waits = asyncio.ensure_future(stub.Admit(ask(250, tenant=tenant, pools=["pool"])))
        stack.callback(waits.cancel)
        for _ in range(240):
            if (await stub.Stats(pb.StatsRequest())).totals.queued == count:
                break
            await asyncio.sleep(0.25)
        else:
            pytest.fail("the request does not wait")
    file = programs.folder / "c.yaml"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tenants": uneven(1)["tenants"]}))
    programs.send("scheduler", signal.SIGHUP)


async def break_invariant(programs: Programs) -> None:
    """Let the scheduler decide until it finds its books wrong."""
    programs.send("scheduler", signal.SIGUSR1)
    async with open_channel(programs.target) as channel:
        stub = SchedulerServiceStub(channel)
        for _ in range(240):
            try:
                await stub.Admit(ask(8))
            except grpc.aio.AioRpcError as error:
                code = error.code()
                break
            await asyncio.sleep(0.25)
        else:
            pytest.fail("the scheduler does not break")
    assert code is grpc.StatusCode.INTERNAL


def break_things(programs: Programs) -> None:
    """Kill the engine, spoil the file and reload it, and take the state's folder away."""
    programs.kill("engine")
    (programs.folder / "c.yaml").write_text("scheduler: {queue_ttl_ms: soon}\n")
    programs.send("scheduler", signal.SIGHUP)
    (programs.folder / "state").rename(programs.folder / "gone")
    (programs.folder / "state").write_text("no folder any more")


async def until_scraped(prometheus: Prometheus, count: int) -> None:
    for _ in range(240):
        if await prometheus.values("up == 1") == [1.0] * count:
            return
        await asyncio.sleep(0.25)
    pytest.fail("Prometheus does not scrape all pages")


async def until_shares(prometheus: Prometheus) -> None:
    """Wait until the member with a store of its own is connected: its store gets worse later."""
    for _ in range(240):
        if 1.0 in await prometheus.values("schedsvc_cluster_members == 1"):
            return
        await asyncio.sleep(0.25)
    pytest.fail("no member is connected")


async def until_all_fire(prometheus: Prometheus, pages: dict[str, str]) -> None:
    """Wait until each alert has fired where its fault is; none may fire elsewhere.

    The lag of the event loop is excepted: other load of the machine may cause it.
    """
    names = {page.removeprefix("http://").removesuffix("/metrics"): pages[page] for page in pages}
    seen: dict[str, set[str]] = {name: set() for name in EXPECTED}
    for _ in range(800):
        for labels in await prometheus.firing():
            tenant = f"tenant {labels.get('tenant')}"
            place = names[labels["instance"]] if "instance" in labels else tenant
            seen.setdefault(place, set()).add(labels["alertname"])
        for place, alerts in seen.items():
            expected = EXPECTED.get(place, set())
            assert alerts <= expected | {"SchedsvcLoopLags"}, (place, alerts)
        if all(EXPECTED[place] <= seen[place] for place in EXPECTED):
            return
        await asyncio.sleep(0.5)
    missing = {place: EXPECTED[place] - seen[place] for place in EXPECTED}
    pytest.fail(f"these do not fire: {missing}")
