"""Runs one side in real time: its scheduler, its emulator with the gate, its load, its output."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.machine import cpu_ns
from schedsvc_lab.demo import engine
from schedsvc_lab.demo.processes import DemoError, Program, running
from schedsvc_lab.load.generator import LoadRun, Pace, RunResult
from schedsvc_lab.load.report import client_lag_ms_p99
from schedsvc_lab.load.samples import Fate
from schedsvc_lab.load.target import TENANT_HEADER
from schedsvc_lab.workload import TraceRequest
from tests.lab.sim.filling import Filled

from .arms import Arm

PERIOD_S = 0.25
"""Between two looks at the engine; as often as in virtual time."""

_LOST = re.compile(r"^schedsvc_emulator_lost_seconds_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Look:
    """Holds the engine's metrics at one moment, and the CPU time of each process so far."""

    at_s: float
    cache_used: float
    preemptions: int
    waiting: int
    lost_s: float
    cpu_ns: dict[str, int]


@dataclass(frozen=True)
class Found:
    """Holds the result of one side between the warm-up and the last arrival.

    `learning`: preemptions before it. `lost`: the part of the time by which the emulator's steps
    came too late. `cpu`: of one core. `failed` counts every request of the run that was refused or
    broke, by reason.
    """

    filled: Filled
    learning: int
    lost: float
    cpu: dict[str, float]
    client_lag_ms: float
    sent: int
    failed: dict[str, int] = field(default_factory=dict)


@dataclass
class Side:
    """Runs programs for one arm, and the load on them; `looks` grow while it goes."""

    arm: Arm
    url: str
    programs: tuple[Program, ...]
    http: aiohttp.ClientSession
    load: LoadRun
    looks: list[Look] = field(default_factory=list)

    async def look(self) -> None:
        """Ask the engine once. Raises DemoError."""
        at_s = self.load.now_s()
        try:
            async with self.http.get(f"{self.url}/metrics") as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise DemoError(f"{self.url}/metrics: {error or type(error).__name__}") from None
        state, lost = engine.parse(text), _LOST.search(text)
        if lost is None:
            raise DemoError(f"{self.url}/metrics lacks the time that the emulator lost")
        used_ns = {each.name.split("-")[0]: cpu_ns(each.process.pid) for each in self.programs}
        used_ns["client"] = time.process_time_ns()
        self.looks.append(
            Look(at_s, state.cache_used, state.preemptions, state.waiting, float(lost[1]), used_ns)
        )

    async def keep_looking(self) -> None:
        """Ask every PERIOD_S until cancelled."""
        due_s = time.monotonic()
        while True:
            await self.look()
            due_s = max(due_s + PERIOD_S, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())

    def line(self) -> str:
        """Write the last look on one line."""
        if not self.looks:
            return f"{self.arm.short}: -"
        last = self.looks[-1]
        return f"{self.arm.short}: KV {last.cache_used:.2f}, {last.preemptions} preempted"


@asynccontextmanager
async def standing(
    arm: Arm, trace: Sequence[TraceRequest], profile: str, speed: float, folder: Path, seed: int
) -> AsyncIterator[Side]:
    """Start a scheduler and an emulator with the gate. Raises DemoError."""
    socket, config = folder / f"{arm.short}.sock", folder / f"{arm.short}.yaml"
    tenants = sorted({request.tenant for request in trace})
    # JSON is YAML.
    config.write_text(json.dumps(arm.settings(tenants, {"unix": str(socket)})))
    emulate = ("emulate", "--profile", profile, "--speed", str(speed), "--port", "0")
    gate = {
        "SCHEDSVC_TARGET": f"unix:{socket}",
        "SCHEDSVC_TENANT_HEADERS": TENANT_HEADER,
        # Should the scheduler be away, it fails rather than measure without it.
        "SCHEDSVC_UNREACHABLE": "closed",
    }
    async with (
        running(f"scheduler-{arm.short}", ("serve", "--config", str(config)), folder) as scheduler,
        running(
            f"emulator-{arm.short}",
            (*emulate, "--middleware", "schedsvc_vllm.gate.Gate"),
            folder,
            gate,
        ) as emulator,
        aiohttp.ClientSession() as http,
    ):
        url = json.loads(emulator.ready)["base_url"]
        # Requests that wait at the last arrival are not served, as in virtual time.
        pace = Pace(seed=seed, warmup_requests=2, drain_s=0.0)
        load = LoadRun(arm.target(url), list(trace), pace)
        yield Side(arm, url, (scheduler, emulator), http, load)


def found(side: Side, result: RunResult, warmup_s: float) -> Found:
    """Sum a side up, from the end of the warm-up to the last arrival."""
    samples = result.recorder.samples
    ends_s = [s.end_s for s in samples if s.fate is Fate.COMPLETED]
    ended = sum(warmup_s <= end_s <= result.last_arrival_s for end_s in ends_s)
    failed: dict[str, int] = {}
    for reason in _reasons(result):
        failed[reason] = failed.get(reason, 0) + 1
    looks = [each for each in side.looks if warmup_s <= each.at_s <= result.last_arrival_s]
    return summed(looks, ended, client_lag_ms_p99(result), len(samples), failed)


def summed(
    looks: Sequence[Look], ended: int, client_lag_ms: float, sent: int, failed: dict[str, int]
) -> Found:
    """Sum up the steady phase. Raises DemoError if it is too short."""
    if len(looks) < 2:
        raise DemoError("the steady phase is too short: the engine was seen less than twice")
    first, last = looks[0], looks[-1]
    span_s = last.at_s - first.at_s
    return Found(
        Filled(
            used=sum(look.cache_used for look in looks) / len(looks),
            ended=ended,
            preempted=last.preemptions - first.preemptions,
        ),
        learning=first.preemptions,
        lost=(last.lost_s - first.lost_s) / span_s,
        cpu={name: (ns - first.cpu_ns[name]) / 1e9 / span_s for name, ns in last.cpu_ns.items()},
        client_lag_ms=client_lag_ms,
        sent=sent,
        failed=failed,
    )


def _reasons(result: RunResult) -> Iterator[str]:
    """Return why requests failed; those that still waited at the end did not."""
    for sample in result.recorder.samples:
        if sample.fate is Fate.REFUSED or (
            sample.fate is Fate.ERROR and sample.reason != "unfinished"
        ):
            yield sample.reason or sample.fate.value
