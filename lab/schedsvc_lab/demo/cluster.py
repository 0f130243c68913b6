"""`schedsvc demo --cluster` kills the store of four schedulers that share one fairness.

Two tenants of weights 4 and 1 always have requests. `gold` sends to the three large engines only,
nine tenths of all places, and `free` to all four. So a scheduler that looks at its own engine alone
gives gold 0.8 of nine tenths, 0.72. Fair is 0.8. Gold catches up on the time without a store by
`scheduler.expert.lead_max` in each pool; the rest is forgiven.
"""

import asyncio
import signal
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import yaml
from rich.console import Console
from schedsvc_client.channel import open_aio_channel
from schedsvc_client.v1 import scheduler_pb2, scheduler_pb2_grpc

from schedsvc_lab.demo.cluster_plot import draw
from schedsvc_lab.demo.engine import gated_engine
from schedsvc_lab.demo.harness import Scene, Stage, table_of
from schedsvc_lab.demo.members import Store, init_store, running_store
from schedsvc_lab.demo.processes import free_port, guarded, running
from schedsvc_lab.demo.verdict import Bar
from schedsvc_lab.load.target import TENANT_HEADER

WEIGHTS = {"gold": 4, "free": 1}
#: Requests that each engine runs at once, by the name of its scheduler.
PLACES = {"north": 6, "east": 6, "south": 6, "west": 2}
#: Requests that a tenant always has at an engine: more than run there.
LOOPS = {
    ("gold", "north"): 14, ("gold", "east"): 14, ("gold", "south"): 14,
    ("free", "north"): 7, ("free", "east"): 7, ("free", "south"): 7, ("free", "west"): 8,
}  # fmt: skip
FAIR = 0.8
WITHIN = 0.02
#: docs/operate/cluster.md: a call waits for the store for 1 s at most, and calls are 0.25 s apart.
BACK_S_MAX = 2.0
PROMPT_TOKENS, OUTPUT_TOKENS = 50, 20
WATCH_PERIOD_S = 0.2
_BODY = {
    "model": "emulated", "prompt": [7] * PROMPT_TOKENS, "max_tokens": OUTPUT_TOKENS,
    "emulated_output_tokens": OUTPUT_TOKENS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds until figures count, the store is killed, it returns, all agree, the run ends."""

    warm_s: float = 5.0
    killed_s: float = 17.0
    back_s: float = 23.0
    agreed_s: float = 26.0
    end_s: float = 38.0

    @property
    def windows(self) -> dict[str, tuple[float, float]]:
        """Return the parts of the run, by name."""
        return {
            "before": (self.warm_s, self.killed_s),
            "away": (self.killed_s, self.back_s),
            "back": (self.back_s, self.agreed_s),
            "after": (self.agreed_s, self.end_s),
        }


QUICK = Times(1.0, 3.0, 5.0, 6.5, 8.0)


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds one request, when its answer came, and why it failed; empty if it did not."""

    tenant: str
    engine: str
    end_s: float
    error: str = ""


@dataclass(slots=True)
class Shard:
    """Runs a scheduler with a pool of its own; holds by time when its last exchange was."""

    name: str
    config: Path
    target: str
    seen: list[tuple[float, float]] = field(default_factory=list)

    async def watch(self, now_s: Callable[[], float]) -> None:
        """Ask for its Stats until cancelled."""
        async with open_aio_channel(self.target, None) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while True:
                try:
                    stats = await stub.Stats(scheduler_pb2.StatsRequest(), timeout=2.0)
                    self.seen.append((now_s(), stats.cluster.unsynced_ms / 1e3))
                except grpc.aio.AioRpcError:
                    pass  # the guards say if it has ended
                await asyncio.sleep(WATCH_PERIOD_S)

    def synced_s(self, from_s: float) -> float | None:
        """Return when the first exchange after a moment was complete; None: there was none."""
        return next(
            (at_s - unsynced_s for at_s, unsynced_s in self.seen if at_s - unsynced_s >= from_s),
            None,
        )


@dataclass(slots=True)
class Run:
    """Holds one run: the answers, the schedulers' reports, and when the store was away."""

    times: Times
    shards: list[Shard]
    answers: list[Answer] = field(default_factory=list)
    killed_s: float = 0.0
    back_s: float = 0.0


async def play(stage: Stage) -> Run:
    """Run it with every program that it needs."""
    out, times = stage.out, QUICK if stage.quick else Times()
    stage.say(
        f"two tenants of weights 4 and 1 at four schedulers, for {times.end_s:.0f} s; their store "
        f"is killed after {times.killed_s:.0f} s, and back after {times.back_s:.0f} s; output in "
        f"{out}"
    )
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="schedsvc-")))
        port = free_port()
        store = await stack.enter_async_context(running_store(out, port, folder))
        shards = [_shard(folder, name, port) for name in PLACES]
        await init_store(shards[0].config)
        programs, urls = [], {}
        for shard in shards:
            serve = ("serve", "--config", str(shard.config))
            programs.append(await stack.enter_async_context(running(shard.name, serve, out)))
        for shard in shards:
            limit = ("--max-num-seqs", str(PLACES[shard.name]))
            engine, urls[shard.name] = await stack.enter_async_context(
                gated_engine(out, shard.name, shard.target, *limit)
            )
            programs.append(engine)
        run = Run(times, shards)
        began_s = asyncio.get_running_loop().time()

        def now_s() -> float:
            return asyncio.get_running_loop().time() - began_s

        await guarded(
            _kill_store(store, run, now_s, stage),
            *(program.wait_for_end() for program in programs),
            *(shard.watch(now_s) for shard in shards),
            _flood(urls, run, now_s),
        )
    return run


async def _kill_store(store: Store, run: Run, now_s: Callable[[], float], stage: Stage) -> None:
    """Kill the store at its time and start it again; ends with the run."""
    times = run.times
    await asyncio.sleep(times.killed_s - now_s())
    await store.end(signal.SIGKILL)
    run.killed_s = now_s()
    stage.say("killed the store (SIGKILL)")
    await asyncio.sleep(times.back_s - now_s())
    await store.start()
    run.back_s = now_s()
    stage.say("started the store again")
    await asyncio.sleep(times.end_s - now_s())


async def _flood(urls: dict[str, str], run: Run, now_s: Callable[[], float]) -> None:
    """Have requests of all tenants at all times. Never ends by itself."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
        for (tenant, engine), loops in LOOPS.items():
            for _ in range(loops):
                group.create_task(_loop(http, tenant, engine, urls[engine], run, now_s))


async def _loop(
    http: aiohttp.ClientSession,
    tenant: str,
    engine: str,
    url: str,
    run: Run,
    now_s: Callable[[], float],
) -> None:
    while True:
        error = ""
        try:
            async with http.post(
                f"{url}/v1/completions", json=_BODY, headers={TENANT_HEADER: tenant}
            ) as response:
                text = await response.text()
                if response.status != 200:
                    error = f"{response.status}: {text[:200]}"
        except (aiohttp.ClientError, OSError) as failure:
            error = str(failure) or type(failure).__name__
        run.answers.append(Answer(tenant, engine, now_s(), error))
        if error:
            await asyncio.sleep(0.1)


def _shard(folder: Path, name: str, store_port: int) -> Shard:
    """Write the configuration of one scheduler."""
    socket = folder / f"{name}.sock"
    config = {
        "listeners": [{"unix": str(socket)}],
        "tenants": [{"name": tenant, "weight": weight} for tenant, weight in WEIGHTS.items()],
        # The requests of free wait for long while gold catches up.
        "scheduler": {"queue_ttl_ms": 120_000},
        "limits": {"drain_ms": 0},
        "cluster": {
            "name": "demo",
            "member": name,
            "store": {"urls": [f"redis://127.0.0.1:{store_port}"]},
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return Shard(name, path, f"unix:{socket}")


def report_of(run: Run) -> dict[str, Any]:
    """Sum up a run: the share of gold in each part, failures, and when exchanges resumed."""
    windows = {name: _part(run.answers, *part) for name, part in run.times.windows.items()}
    synced_s = {shard.name: shard.synced_s(run.back_s) for shard in run.shards}
    return {
        "fair": FAIR,
        "store_killed_s": round(run.killed_s, 2),
        "store_back_s": round(run.back_s, 2),
        "windows": windows,
        "synced_after_s": {
            name: None if at_s is None else round(at_s - run.back_s, 2)
            for name, at_s in synced_s.items()
        },
        "failed": sum(bool(answer.error) for answer in run.answers),
        "answered": sum(not answer.error for answer in run.answers),
        "errors": sorted({answer.error for answer in run.answers if answer.error})[:5],
    }


def _part(answers: Iterable[Answer], from_s: float, until_s: float) -> dict[str, Any]:
    """Count the service in a part of the run. All requests are charged alike."""
    counts = dict.fromkeys(WEIGHTS, 0)
    for answer in answers:
        if not answer.error and from_s <= answer.end_s < until_s:
            counts[answer.tenant] += 1
    total = sum(counts.values())
    share = round(counts["gold"] / total, 4) if total else None
    return {"from_s": from_s, "until_s": until_s, **counts, "share": share}


def judge(report: dict[str, Any], quick: bool = False) -> list[Bar]:
    """Hold a report against every bar; `quick`: only against those that compare no shares."""
    late = {
        name: after_s
        for name, after_s in report["synced_after_s"].items()
        if after_s is None or after_s > BACK_S_MAX
    }
    times = ", ".join(
        f"{name} {'never' if after_s is None else f'{after_s:.2f} s'}"
        for name, after_s in report["synced_after_s"].items()
    )
    bars = [
        Bar(
            "no request failed",
            report["answered"] > 0 and not report["failed"],
            f"{report['answered']} answered, {report['failed']} failed"
            + "".join(f"; {error}" for error in report["errors"]),
        ),
        Bar(f"all exchange again within {BACK_S_MAX:.0f} s of the store's return", not late, times),
    ]
    shares = {
        "before": "gold has 0.8 before the store is killed",
        "after": "gold has 0.8 again 3 s after the store's return",
    }
    for name, title in () if quick else shares.items():
        share = report["windows"][name]["share"]
        holds = share is not None and abs(share - FAIR) <= WITHIN
        bars.append(Bar(title, holds, "nothing was served" if share is None else f"{share:.3f}"))
    return bars


def _show(_: Run, report: dict[str, Any], console: Console) -> None:
    columns = ("", "seconds", "gold", "free", "share of gold")
    table = table_of("Answers by the time of their end", *columns)
    titles = {
        "before": "the store is there", "away": "the store is away",
        "back": "it is back", "after": "later",
    }  # fmt: skip
    for name, title in titles.items():
        part = report["windows"][name]
        share = "" if part["share"] is None else f"{part['share']:.3f}"
        span = f"{part['from_s']:g} to {part['until_s']:g}"
        table.add_row(title, span, str(part["gold"]), str(part["free"]), share)
    console.print()
    console.print(table)


def _draw(run: Run, report: dict[str, Any], path: Path) -> None:
    draw(run.answers, {shard.name: shard.seen for shard in run.shards}, report, path)


SCENE = Scene(play, report_of, judge, _draw, _show, "cluster.png")
