"""`schedsvc demo --failover` kills the leader of two schedulers while tenants are served."""

import asyncio
import itertools
import os
import signal
import tempfile
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from schedsvc_lab.demo.engine import gated_engine
from schedsvc_lab.demo.failover_plot import draw
from schedsvc_lab.demo.harness import Scene, Stage, table_of
from schedsvc_lab.demo.members import (
    Member,
    Seen,
    init_store,
    running_store,
    write_members,
)
from schedsvc_lab.demo.processes import Program, free_port, guarded, running
from schedsvc_lab.demo.scheduler import SETTLE_S_MAX
from schedsvc_lab.demo.traffic import Tenant, generate
from schedsvc_lab.demo.verdict import Bar
from schedsvc_lab.load.files import write_requests
from schedsvc_lab.load.generator import LoadRun, Pace, RunResult
from schedsvc_lab.load.report import percentile, tenant_report
from schedsvc_lab.load.samples import Sample
from schedsvc_lab.load.table import View, duration, watch
from schedsvc_lab.load.target import OutputMode, Target

#: About three quarters of the engine's capacity.
FAILOVER_TENANTS = (
    Tenant("chat", 5.0, 0.0, 120, 0.6, 60, 0.6, 256),
    Tenant("batch", 2.5, 0.0, 250, 0.6, 120, 0.6, 512),
)
KILL_S, RUN_S = 8.0, 20.0
QUICK_KILL_S, QUICK_RUN_S = 2.0, 6.0
#: docs/operate/cluster.md states it: the term of a killed leader ends within 2 s.
TAKEOVER_S_MAX = 3.0
_LEADS_S_MAX = 15.0
_DRAIN_S_MAX = 45.0


@dataclass(frozen=True, slots=True)
class Failed:
    """Holds one run: its requests, what each member's Stats were, and the time of the kill."""

    result: RunResult
    members: list[Member]
    kill_s: float

    @property
    def takeover_s(self) -> float | None:
        """Return the seconds from the kill to the next leader's first grant; None: no grant."""
        return next(
            (seen.at_s - self.kill_s for seen in self.members[1].seen if seen.granted), None
        )


async def play(stage: Stage) -> Failed:
    """Run it with every program that it needs."""
    out, seed = stage.out, stage.seed or 0
    kill_s, run_s = (QUICK_KILL_S, QUICK_RUN_S) if stage.quick else (KILL_S, RUN_S)
    trace = generate(seed, run_s, FAILOVER_TENANTS)
    stage.say(
        f"{len(trace)} requests of two tenants over {run_s:.0f} s, to an engine that asks two "
        f"schedulers; the leader gets SIGKILL after {kill_s:.0f} s; output in {out}"
    )
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="schedsvc-")))
        port = free_port()
        await stack.enter_async_context(running_store(out, port))
        members = write_members(folder, ("first", "second"), port, FAILOVER_TENANTS)
        await init_store(members[0].config)
        programs = []
        for member in members:
            serve = ("serve", "--config", str(member.config))
            programs.append(await stack.enter_async_context(running(member.name, serve, out)))
            if len(programs) == 1:
                await member.until("it leads", lambda seen: seen.leads, _LEADS_S_MAX)
        engine, url = await stack.enter_async_context(
            gated_engine(
                out, "with", ",".join(member.target for member in members), token=members[0].token
            )
        )
        target = Target(
            url=url,
            output=OutputMode.EMULATED,
            max_tokens_of={each.name: each.output_tokens_max for each in FAILOVER_TENANTS},
        )
        load = LoadRun(target, trace, Pace(seed=seed, warmup_requests=3, drain_s=_DRAIN_S_MAX))
        view = View("two schedulers, one engine", lambda: [_line(members)])
        result = await guarded(
            load.run(),
            engine.wait_for_end(),
            programs[1].wait_for_end(),
            watch(load, view, stage.console),
            *(member.watch(load.now_s) for member in members),
            _kill(programs[0], load, kill_s, stage),
        )
        await members[1].until("it holds no lease", lambda seen: not _held(seen), SETTLE_S_MAX)
    return Failed(result, members, kill_s)


async def _kill(program: Program, load: LoadRun, kill_s: float, stage: Stage) -> None:
    """Kill the leader at its time. Never ends by itself: it guards the load."""
    while not load.recorder.samples:  # noqa: ASYNC110 - the clock starts after the warm-up
        await asyncio.sleep(0.01)
    await asyncio.sleep(max(0.0, kill_s - load.now_s()))
    os.killpg(program.process.pid, signal.SIGKILL)
    stage.say(f"killed the leader ({program.name}, SIGKILL)")
    await asyncio.Event().wait()


def _line(members: Iterable[Member]) -> str:
    """Write what each member said last on one line."""
    parts = []
    for member in members:
        if member.seen:
            seen = member.seen[-1]
            role = f"leads under term {seen.term}" if seen.leads else "stands by"
            state = f"{role}, {seen.live_leases} leases" if member.answers else "is gone"
            parts.append(f"{member.name}: {state}")
    return "; ".join(parts)


def _held(seen: Seen) -> int:
    return seen.live_leases + seen.queued + seen.promised_tokens


def report_of(failed: Failed) -> dict[str, Any]:
    """Sum up a run: who led, and the requests sent before, during and after the takeover."""
    samples, kill_s = failed.result.recorder.samples, failed.kill_s
    takeover_s = failed.takeover_s
    next_s = kill_s + (TAKEOVER_S_MAX if takeover_s is None else takeover_s)
    last = failed.members[1].seen[-1]

    def between(from_s: float, until_s: float) -> dict[str, Any]:
        return tenant_report([one for one in samples if from_s <= one.intended_s < until_s])

    return {
        "kill_s": kill_s,
        "takeover_s": None if takeover_s is None else round(takeover_s, 3),
        "terms": [failed.members[0].seen[-1].term, last.term],
        "running_at_kill": sum(_runs_at(sample, kill_s) for sample in samples),
        "longest_gap_in_stream_ms": percentile(_gaps_ms(samples, kill_s, next_s), 100),
        "before": between(0.0, kill_s),
        "during": between(kill_s, next_s),
        "after": between(next_s, float("inf")),
        "left": {
            "live_leases": last.live_leases,
            "queued": last.queued,
            "promised_tokens": last.promised_tokens,
        },
    }


def _runs_at(sample: Sample, at_s: float) -> bool:
    return sample.first_s <= at_s < sample.end_s


def _gaps_ms(samples: Iterable[Sample], from_s: float, until_s: float) -> list[float]:
    """List the times between two events of a stream, in ms, that end in a window."""
    gaps = []
    for sample in samples:
        times_s = sample.event_times_s()
        gaps += [
            float(end_s - start_s) * 1e3
            for start_s, end_s in itertools.pairwise(times_s)
            if from_s <= end_s < until_s
        ]
    return gaps


def judge(report: dict[str, Any], _quick: bool = False) -> list[Bar]:
    """Hold a report against every bar; a quick run meets them all."""
    parts = [report[name] for name in ("before", "during", "after")]
    sent, completed, refused, errors = (
        sum(part[name] for part in parts) for name in ("sent", "completed", "refused", "errors")
    )
    takeover_s, terms, left = report["takeover_s"], report["terms"], report["left"]
    return [
        Bar(
            "every request was answered in full",
            0 < sent == completed,
            f"{completed} of {sent}; {refused} refused, {errors} failed",
        ),
        Bar(
            f"the standby grants within {TAKEOVER_S_MAX:.0f} s of the kill",
            takeover_s is not None and takeover_s <= TAKEOVER_S_MAX,
            "it granted nothing" if takeover_s is None else f"{takeover_s:.2f} s",
        ),
        Bar("it leads under a higher term", terms[0] < terms[1], f"{terms[0]}, then {terms[1]}"),
        Bar(
            "at the end it holds no lease",
            not any(left.values()),
            ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in left.items()),
        ),
    ]


def _show(_: Failed, report: dict[str, Any], console: Console) -> None:
    columns = ("", "sent", "done", "refused", "failed", "first token p50", "p99")
    table = table_of("Requests by the time of their sending", *columns)
    for name, title in (
        ("before", "before the kill"),
        ("during", "no leader"),
        ("after", "after takeover"),
    ):
        part = report[name]
        table.add_row(
            title,
            *(str(part[key]) for key in ("sent", "completed", "refused", "errors")),
            *(duration(part["ttft_ms"][point]) for point in ("p50", "p99")),
        )
    console.print()
    console.print(table)
    console.print(
        f"{report['running_at_kill']} answers were running at the kill; their longest pause until "
        f"the takeover was {duration(report['longest_gap_in_stream_ms'])}.",
        highlight=False,
    )


def _write(failed: Failed, out: Path) -> None:
    write_requests(failed.result, out / "requests.csv")


def _draw(failed: Failed, _: dict[str, Any], path: Path) -> None:
    draw(failed.result, failed.members, failed.kill_s, failed.takeover_s, path)


SCENE = Scene(play, report_of, judge, _draw, _show, "failover.png", _write)
