"""Runs the phases of the demo, and holds what was measured in each."""

import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from schedsvc_client.channel import open_aio_channel

from schedsvc_lab.demo.engine import gated_engine, running_engine, watching
from schedsvc_lab.demo.processes import Program, guarded, running
from schedsvc_lab.demo.scheduler import Books, write_config
from schedsvc_lab.demo.traffic import TENANTS, WARMUP_S, only
from schedsvc_lab.load.generator import LoadRun, Pace, RunResult
from schedsvc_lab.load.report import CLIENT_LAG_MS_MAX, client_lag_ms_p99
from schedsvc_lab.load.table import View, watch
from schedsvc_lab.load.target import OutputMode, Target
from schedsvc_lab.workload import TraceRequest

DRAIN_S_MAX = 45.0


@dataclass(frozen=True, slots=True)
class Phase:
    """Holds one run: its name in the report, its result, the engine's preemptions during it."""

    name: str
    result: RunResult
    preemptions: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Holds all phases, and what the scheduler held after the last."""

    phases: dict[str, Phase]
    after: dict[str, int]


@dataclass(frozen=True, slots=True)
class Setting:
    """Holds the settings that all phases share."""

    trace: Sequence[TraceRequest]
    seed: int
    folder: Path
    console: Console
    #: Run a phase a second time if the machine was too busy during the first.
    repeats: bool = True


async def run_all(setting: Setting) -> Measured:
    """Run every phase in turn. Raises DemoError and TargetError; leaves no process behind."""
    phases = {}
    quiet = only(setting.trace, "quiet")
    for name, title, trace in (
        ("alone", "1/4 quiet alone, plain engine", quiet),
        ("without", "2/4 all tenants, plain engine", setting.trace),
    ):
        async with running_engine(setting.folder, name) as (engine, url):
            phases[name] = await _run(setting, name, title, trace, url, (engine,))
    async with _scheduled(setting) as (programs, url, books):
        for name, title in (
            ("with", "3/4 all tenants, engine behind the scheduler"),
            ("with_again", "4/4 the same again, same processes"),
        ):
            phases[name] = await _run(setting, name, title, setting.trace, url, programs, books)
        after = await guarded(books.leftovers(), *(one.wait_for_end() for one in programs))
    return Measured(phases, after)


@asynccontextmanager
async def _scheduled(setting: Setting) -> AsyncIterator[tuple[tuple[Program, ...], str, Books]]:
    """Run a scheduler and an engine that asks it through the gate."""
    # The path of a Unix socket may have 107 bytes only, and the output folder's may be long.
    with tempfile.TemporaryDirectory(prefix="schedsvc-") as short:
        socket = Path(short) / "s.sock"
        config = write_config(setting.folder, socket)
        arguments = ("serve", "--config", str(config))
        address = f"unix:{socket}"
        async with (
            running("scheduler", arguments, setting.folder) as scheduler,
            gated_engine(setting.folder, "with", address) as (engine, url),
            open_aio_channel(address, None) as channel,
        ):
            yield (scheduler, engine), url, Books(channel)


async def _run(
    setting: Setting,
    name: str,
    title: str,
    trace: Sequence[TraceRequest],
    url: str,
    programs: tuple[Program, ...],
    books: Books | None = None,
) -> Phase:
    """Drive one run; repeat it if this machine was too busy for its figures to mean anything."""
    phase = await _drive(setting, name, title, trace, url, programs, books)
    lag_ms = client_lag_ms_p99(phase.result)
    if lag_ms <= CLIENT_LAG_MS_MAX or not setting.repeats:
        return phase
    setting.console.print(
        f"{title}: void; once more\nthe load generator was late by {lag_ms:.0f} ms (p99)",
        highlight=False,
    )
    return await _drive(setting, name, title, trace, url, programs, books)


async def _drive(
    setting: Setting,
    name: str,
    title: str,
    trace: Sequence[TraceRequest],
    url: str,
    programs: tuple[Program, ...],
    books: Books | None,
) -> Phase:
    """Drive one run, show it, and count the engine's preemptions."""
    target = Target(
        url=url,
        output=OutputMode.EMULATED,
        max_tokens_of={tenant.name: tenant.output_tokens_max for tenant in TENANTS},
    )
    pace = Pace(seed=setting.seed, warmup_requests=3, warmup_s=WARMUP_S, drain_s=DRAIN_S_MAX)
    load = LoadRun(target, trace, pace)

    def ends() -> Iterator[Coroutine[Any, Any, None]]:
        return (program.wait_for_end() for program in programs)

    async with watching(url) as engine:
        before = await guarded(engine.ask(), *ends())
        lines = [engine.line, *([books.line] if books else [])]
        view = View(title, lambda: [line() for line in lines])
        result = await guarded(
            load.run(),
            *ends(),
            watch(load, view, setting.console),
            engine.keep_asking(),
            *([books.keep_asking()] if books else []),
        )
        after = await guarded(engine.ask(), *ends())
    setting.console.print(f"{title}: done in {result.wall_s:.1f} s", highlight=False)
    return Phase(name, result, after.preemptions - before.preemptions)
