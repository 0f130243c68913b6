"""Runs the engine for the demos, and reads its own figures from its metrics."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from schedsvc_lab.demo.processes import DemoError, Program, running
from schedsvc_lab.load.target import TENANT_HEADER

PERIOD_S = 0.5
PROFILE = Path(__file__).with_name("engine.yaml")

_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EngineState:
    """Holds the engine's state at one moment, and its preemptions since it started."""

    running: int
    waiting: int
    cache_used: float
    preemptions: int


def parse(text: str) -> EngineState:
    """Read vLLM's metrics, summed over engines. Raises DemoError if one is missing."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    try:
        return EngineState(
            running=round(sums["vllm:num_requests_running"]),
            waiting=round(sums["vllm:num_requests_waiting"]),
            cache_used=sums["vllm:kv_cache_usage_perc"],
            preemptions=round(sums["vllm:num_preemptions_total"]),
        )
    except KeyError as missing:
        raise DemoError(f"the engine's metrics lack {missing.args[0]}") from None


class EngineWatch:
    """Asks an engine for its metrics now and then."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = f"{url}/metrics"
        self._http = http
        self.state = EngineState(0, 0, 0.0, 0)

    async def ask(self) -> EngineState:
        """Ask once. Raises DemoError."""
        try:
            async with self._http.get(self._url) as response:
                self.state = parse(await response.text())
        except (aiohttp.ClientError, OSError) as error:
            raise DemoError(f"{self._url}: {str(error) or type(error).__name__}") from None
        return self.state

    async def keep_asking(self) -> None:
        """Ask every PERIOD_S until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(PERIOD_S)

    def line(self) -> str:
        """Write the last answer on one line."""
        state = self.state
        return (
            f"engine: {state.running} running, {state.waiting} waiting, KV cache "
            f"{state.cache_used:.0%}, {state.preemptions} preemptions"
        )


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[EngineWatch]:
    """Open a watch on an engine."""
    async with aiohttp.ClientSession() as http:
        yield EngineWatch(url, http)


@asynccontextmanager
async def running_engine(
    folder: Path, name: str, *options: str, environment: dict[str, str] | None = None
) -> AsyncIterator[tuple[Program, str]]:
    """Run a fresh engine; gives it with its URL. Raises DemoError if it does not get ready."""
    arguments = ("emulate", "--profile", str(PROFILE), "--port", "0", *options)
    async with running(f"engine-{name}", arguments, folder, environment) as program:
        yield program, json.loads(program.ready)["base_url"]


@asynccontextmanager
async def gated_engine(
    folder: Path, name: str, target: str, *options: str, token: str = ""
) -> AsyncIterator[tuple[Program, str]]:
    """Run a fresh engine that asks schedulers through the gate. Raises DemoError."""
    environment = {
        "SCHEDSVC_TARGET": target,
        "SCHEDSVC_TENANT_HEADERS": TENANT_HEADER,
        # Without a scheduler the demo fails; it does not measure without one.
        "SCHEDSVC_UNREACHABLE": "closed",
    }
    if token:
        environment["SCHEDSVC_TOKEN"] = token
    gate = ("--middleware", "schedsvc_vllm.gate.Gate")
    async with running_engine(folder, name, *gate, *options, environment=environment) as made:
        yield made
