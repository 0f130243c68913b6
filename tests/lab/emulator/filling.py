"""Measures how full an overloaded engine's cache is, in real time beside virtual time.

An emulator with the gate and a scheduler with default policies get 1.5 times their capacity, from
20 tenants whose lengths differ tenfold: once with P90 reservations in peak form, and at the same
time, in processes of its own, once with reservations by an oracle of the lengths. So other load of
this machine affects both, and no side's learning is interrupted. Then the same requests go through
the same configurations in virtual time.
"""

import asyncio
import json
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.console import Console
from rich.table import Table

from bench.machine import commit, describe
from schedsvc_lab.demo.processes import DemoError, guarded
from schedsvc_lab.engine import load_profile
from schedsvc_lab.load.generator import TargetError
from tests.lab.sim.filling import CAPACITY, Filled

from .arms import ARMS, FORETOLD, OVERLOAD, PREDICTED, Arm, faster, imitate, trace_of, traffic
from .side import Found, Side, found, standing

FILLED_MIN = 0.90
"""Of what the oracle's side fills."""
PREEMPTED_MAX = 1 / 1_000
LOST_MAX = 0.01
"""Of the time: an emulator that loses more was held up by this machine, not by its scheduler."""
LAG_MS_MAX = 1_000.0
"""Of the client: whoever has to wait here waits for longer, so the cache is as full."""
CPU_MAX = 0.8
"""Of one core: an event loop that is busier makes everything wait for its turn."""

_SAYS_S = 15.0
_FILES = 16_384
_TABLE_CHARS = 110
_EPILOG = """\b
Examples:
  python -m tests.lab.emulator.filling
  python -m tests.lab.emulator.filling --runs 3 --json

Exit status 1: less than 0.90 of the oracle's, more than one preemption in 1,000 requests, or this
machine was too slow for the figures to mean anything.
"""


@dataclass(frozen=True)
class Plan:
    """Describes one run: its engine, the speed of its time, and its length after `warmup_s`."""

    profile: str
    speed: float
    seconds: int
    warmup_s: float
    seed: int


def pooled(parts: Sequence[Filled]) -> Filled:
    """Join the runs of one side."""
    return Filled(
        used=sum(part.used for part in parts) / len(parts),
        ended=sum(part.ended for part in parts),
        preempted=sum(part.preempted for part in parts),
    )


def compared(sides: dict[str, Filled]) -> dict[str, Any]:
    """Compare the two sides, by their short names, and report whether both bars hold."""
    predicted, foretold = sides[PREDICTED.short], sides[FORETOLD.short]
    ratio = predicted.used / foretold.used if foretold.used else 0.0
    return {
        "sides": {short: asdict(filled) for short, filled in sides.items()},
        "ratio": ratio,
        "preempted_per_1000": {
            short: 1_000 * each.preempted / each.ended if each.ended else None
            for short, each in sides.items()
        },
        "fills": ratio >= FILLED_MIN,
        "keeps": predicted.ended > 0 and predicted.preempted <= PREEMPTED_MAX * predicted.ended,
    }


def slow(each: Found) -> list[str]:
    """Say what of a side's figures this machine spoils."""
    complaints = []
    if each.lost > LOST_MAX:
        complaints.append(f"the emulator lost {each.lost:.1%} of its time")
    if each.client_lag_ms > LAG_MS_MAX:
        complaints.append(f"the client was late by {each.client_lag_ms:.0f} ms (p99)")
    complaints += [
        f"the {name} used {share:.0%} of a core"
        for name, share in each.cpu.items()
        if share > CPU_MAX
    ]
    return complaints


async def measure(plan: Plan, say: Callable[[str], None]) -> dict[str, Found]:
    """Run both sides at once. Raises DemoError and TargetError; leaves no process behind."""
    trace = trace_of(traffic(plan.profile, plan.speed, plan.seconds, plan.seed))
    # The path of a Unix socket may have 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="filling-") as name:
        async with AsyncExitStack() as stack:
            sides = [
                await stack.enter_async_context(
                    standing(arm, trace, plan.profile, plan.speed, Path(name), plan.seed)
                )
                for arm in ARMS
            ]
            ends = [one.wait_for_end() for side in sides for one in side.programs]
            looking = [side.keep_looking() for side in sides]

            async def loads() -> list[Any]:
                return await asyncio.gather(*(side.load.run() for side in sides))

            results = await guarded(loads(), *ends, *looking, _tell(plan, sides, say))
    return {
        side.arm.short: found(side, result, plan.warmup_s)
        for side, result in zip(sides, results, strict=True)
    }


async def _tell(plan: Plan, sides: Sequence[Side], say: Callable[[str], None]) -> None:
    """Say how far it is, now and then, until cancelled."""
    while True:
        await asyncio.sleep(_SAYS_S)
        at_s = sides[0].load.now_s()
        say(f"{at_s:.0f} of {plan.seconds} s; " + "; ".join(side.line() for side in sides))


async def _until_signalled(plan: Plan, say: Callable[[str], None]) -> dict[str, Found]:
    """Measure; SIGTERM and SIGHUP end it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    return await measure(plan, say)


def play(plan: Plan) -> dict[str, Filled]:
    """Run both sides in virtual time."""
    profile = faster(load_profile(plan.profile), plan.speed)
    learnt = plan.warmup_s / plan.seconds
    return {
        arm.short: imitate(
            traffic(plan.profile, plan.speed, plan.seconds, plan.seed), profile, arm, learnt
        )
        for arm in ARMS
    }


def report(
    plan: Plan, real: Sequence[dict[str, Found]], virtual: Sequence[dict[str, Filled]]
) -> dict[str, Any]:
    """Join all runs of one plan. O(runs)."""
    filled = [{short: each.filled for short, each in run.items()} for run in real]

    def all_of(runs: Sequence[dict[str, Filled]]) -> dict[str, Any]:
        return compared({arm.short: pooled([run[arm.short] for run in runs]) for arm in ARMS})

    complaints = sorted(
        f"{short}: {what}" for run in real for short, each in run.items() for what in slow(each)
    )
    failed = [each.failed for run in real for each in run.values() if each.failed]
    measured = all_of(filled)
    return {
        "machine": describe(),
        "commit": commit(),
        "plan": asdict(plan) | {"runs": len(real), "overload": OVERLOAD},
        "real": measured,
        "virtual": all_of(virtual),
        "runs": [
            {
                "real": {short: asdict(each) for short, each in side.items()},
                "virtual": {short: asdict(each) for short, each in twin.items()},
            }
            for side, twin in zip(real, virtual, strict=True)
        ],
        "slow": complaints,
        "failed": failed,
        "holds": measured["fills"] and measured["keeps"] and not complaints and not failed,
    }


@click.command(epilog=_EPILOG)
@click.option(
    "--profile",
    type=click.Choice(sorted(CAPACITY)),
    default="tiny-cpu",
    show_default=True,
    help="The emulator's; its capacity is known.",
)
@click.option(
    "--speed",
    type=click.FloatRange(0.1, 10),
    default=0.5,
    show_default=True,
    help="Factor by which the emulator is faster than the profile, and gets more requests.",
)
@click.option("--seconds", type=click.IntRange(10), default=210, show_default=True)
@click.option(
    "--warmup",
    "warmup_s",
    type=click.FloatRange(min=0),
    default=80.0,
    show_default=True,
    help="Seconds that do not count: lengths are learned, and the first search for the headroom "
    "takes up to 64 s.",
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--runs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of runs after each other, each with the next seed, counted together.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def main(
    profile: str, speed: float, seconds: int, warmup_s: float, seed: int, runs: int, as_json: bool
) -> None:
    """Measure how full an emulator's cache is at 1.5 times its capacity, beside an oracle's."""
    if warmup_s > seconds - 5:
        raise click.UsageError("--warmup: has to end at least 5 s before --seconds")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    real, virtual = [], []
    plan = Plan(profile, speed, seconds, warmup_s, seed)
    for number in range(runs):
        each = Plan(profile, speed, seconds, warmup_s, seed + number)

        def say(text: str, number: int = number) -> None:
            click.echo(f"run {number + 1} of {runs}: {text}", err=True)

        say(f"both sides start; it takes {seconds} s")
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                real.append(runner.run(_until_signalled(each, say)))
        except (DemoError, TargetError) as error:
            raise click.ClickException(str(error)) from None
        except asyncio.CancelledError:
            raise click.Abort from None
        say("the same in virtual time")
        virtual.append(play(each))
    made = report(plan, real, virtual)
    if as_json:
        click.echo(json.dumps(made))
    else:
        _show(made, real)
    if not made["holds"]:
        sys.exit(1)


def _show(made: dict[str, Any], real: Sequence[dict[str, Found]]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    # Without a terminal the console has no width.
    console.width = max(console.width, _TABLE_CHARS)
    table = Table("cache in use", *(arm.name for arm in ARMS), "ratio", "preempted of 1,000")
    for where in ("real", "virtual"):
        row = made[where]
        sides = [row["sides"][arm.short] for arm in ARMS]
        told = [row["preempted_per_1000"][arm.short] for arm in ARMS]
        table.add_row(
            f"{where} time",
            *(f"{side['used']:.3f}" for side in sides),
            f"{row['ratio']:.3f}",
            ", ".join(
                f"{'-' if per is None else f'{per:.2f}'} ({side['preempted']} of {side['ended']:,})"
                for per, side in zip(told, sides, strict=True)
            ),
        )
    console.print(table)
    for arm in ARMS:
        console.print(_told(arm, [run[arm.short] for run in real]))
    real_, plan = made["real"], made["plan"]
    console.print(
        f"{plan['profile']} at {plan['speed']:g} times its speed, {plan['overload']:g} times its "
        f"capacity, {plan['runs']} run(s) of {plan['seconds']} s without the first "
        f"{plan['warmup_s']:g}"
    )
    for name, holds in (
        (f"cache in use at least {FILLED_MIN:.2f} of the oracle's", real_["fills"]),
        ("at most one preemption in 1,000 requests", real_["keeps"]),
    ):
        console.print(f"{name}: {'holds' if holds else 'missed'}")
    for complaint in made["slow"]:
        console.print(f"too slow a machine, the figures mean nothing: {complaint}")
    for failed in made["failed"]:
        console.print(f"requests failed: {failed}")


def _told(arm: Arm, parts: Sequence[Found]) -> str:
    """Say what a side's figures do not count, and how far this machine held it up at most."""
    cpu = {name: max(part.cpu[name] for part in parts) for name in parts[0].cpu}
    return (
        f"{arm.name}: {sum(part.learning for part in parts)} preemptions in the warm-up; the "
        f"emulator lost {max(part.lost for part in parts):.2%} of its time, the client was late by "
        f"{max(part.client_lag_ms for part in parts):.0f} ms (p99); of a core: "
        + ", ".join(f"{name} {share:.0%}" for name, share in cpu.items())
    )


if __name__ == "__main__":
    main(prog_name="python -m tests.lab.emulator.filling")
