"""Runs the programs of a stand as processes: scheduler, emulated engine, proxy and shims.

They are killed, stopped and continued by signals. All files are in one short folder, since the path
of a Unix socket has 107 bytes at most.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.demo.processes import free_port
from tests import forked
from tests.waiting import until, wait_for_start, wait_until

LOOK_S = 0.02
GATE = ("--middleware", "schedsvc_vllm.gate.Gate")
TENANTS = ("a", "b", "c")
# Leases end soon after their last renewal, but later than a busy machine may pause a process.
TTL_MS, GRACE_MS = 1_500, 1_500
# For tests in which nothing expires: later than any machine stalls.
PATIENT = {"lease_ttl_ms": 10_000, "lease_grace_ms": 20_000}


def config(expert: Mapping[str, Any] = {}, **scheduler: Any) -> dict[str, Any]:
    """A configuration whose promises are hard: no headroom, and room for every longest output."""
    hard = {"ledger": "sum", "headroom_min": 0, "headroom_max": 0}
    times = {"lease_ttl_ms": TTL_MS, "lease_grace_ms": GRACE_MS}
    return {
        "scheduler": {"headroom": 0} | times | scheduler | {"expert": {**hard, **expert}},
        "tenants": [{"name": name, "weight": 1} for name in TENANTS],
        "limits": {"drain_ms": 0},
        "log": {"level": "warning"},
    }


@dataclass(frozen=True)
class EngineSizes:
    """An engine whose every step takes `step_ms`, whatever it computes."""

    step_ms: int = 20
    kv_tokens: int = 4_096
    context_tokens: int = 2_048
    sequences: int = 2_048
    block_tokens: int = 16

    def profile(self) -> dict[str, Any]:
        step_ns = self.step_ms * 1_000_000
        return {
            "name": "steady",
            "source": "No machine: every step takes the same time.",
            "cost": {
                "step_ns": 0,
                "prefill_ns": step_ns,
                "prefill_token_ns": 0,
                "decode_kv_token_ns": 0,
                "decode_ns": [[0, step_ns]],
            },
            "engine": {
                "kv_tokens": self.kv_tokens,
                "block_size_tokens": self.block_tokens,
                "sequences_max": self.sequences,
                "step_tokens_max": max(2_048, self.kv_tokens),
                "context_tokens_max": self.context_tokens,
            },
        }


class Programs:
    """Holds the programs, by name.

    `engine`: options of `schedsvc emulate`; without any, each step of the engine takes as long.
    `gated`: the gate is inside the engine; else the engine has none.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any] | None = None,
        sizes: EngineSizes | None = None,
        *,
        engine: tuple[str, ...] = (),
        gated: bool = True,
        gate_target: str = "",
    ) -> None:
        self.folder = folder
        self.sizes = sizes or EngineSizes()
        self.target = f"unix:{folder}/s"
        self.engine_url = ""
        self.proxy_url = ""
        self.settings = settings or config()
        self._engine = engine or ("--profile", str(folder / "steady.yaml"))
        self._gated = gated
        self._gate_target = gate_target or self.target
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        # Written once, so that an engine that restarts is the same.
        (folder / "steady.yaml").write_text(json.dumps(self.sizes.profile()))

    # The programs.

    def configure(self) -> None:
        """Write the settings of the scheduler, which listens on its socket beside."""
        beside = {"unix": f"{self.folder}/s", "auth": "none"}
        listeners = [beside, *self.settings.get("listeners", ())]
        written = json.dumps(self.settings | {"listeners": listeners})
        (self.folder / "c.yaml").write_text(written)

    def start_scheduler(self, program: tuple[str, ...] = ("-m", "schedsvc")) -> None:
        """Start it; `program`: Python code that replaces the command."""
        self.configure()
        command = ("serve", "--config", str(self.folder / "c.yaml"))
        self.start("scheduler", *command, program=program)

    def start_edge(self) -> str:
        """Start the edge that the scheduler's settings have; return its target."""
        self.start("edge", "edge", "--config", str(self.folder / "c.yaml"))
        found: list[str] = json.loads(self.ready("edge").read_text())["targets"]
        return found[0]

    @property
    def scheduler_targets(self) -> list[str]:
        """Return where it listens: the Unix socket, and the further listeners of the settings."""
        found: list[str] = json.loads(self.ready("scheduler").read_text())["targets"]
        return found

    def start_engine(self, **environment: str) -> None:
        """Start it, on the port that it had before, with further settings of its gate."""
        port = self.engine_url.rpartition(":")[2] or "0"
        gate = GATE if self._gated else ()
        self.engine_url = self.emulate("engine", port, *gate, **environment)
        if self._gated:
            self.wait_until_connected()

    def start_rival(self) -> str:
        """Start a second engine whose gate claims the pool of the first one; return its URL."""
        return self.emulate("rival", "0", *GATE)

    def emulate(self, name: str, port: str, *options: str, **environment: str) -> str:
        """Start an engine with further options; return its URL."""
        self.start(
            name,
            *("emulate", *self._engine, "--port", port, *options),
            **{
                "SCHEDSVC_TARGET": self._gate_target,
                "SCHEDSVC_TENANT_HEADERS": "x-tenant-id",
                **environment,
            },
        )
        url: str = json.loads(self.ready(name).read_text())["base_url"]
        return url

    def start_proxy(self, *upstreams: str, **environment: str) -> None:
        """Start the gate in a process of its own, before the engine, or as options say."""
        port = free_port()
        self.proxy_url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", "from schedsvc_vllm.proxy_cli import main; main()"]
        command += [*(upstreams or ("--upstream", self.engine_url)), "--port", str(port)]
        command += ["--schedsvc-target", self._gate_target]
        command += ["--schedsvc-tenant-headers=x-tenant-id"]
        self.spawn("proxy", command, environment, self._proxy_answers)
        self.wait_until_connected(self.proxy_url)

    def wait_until_connected(self, gate_url: str = "") -> None:
        """A gate gives up on the scheduler after a second, which this test does not examine."""

        def is_connected() -> object:
            url = f"{gate_url or self.engine_url}/metrics"
            with urllib.request.urlopen(url, timeout=30) as page:
                return re.search(rb"^schedsvc_gate_connected\S* 1$", page.read(), re.MULTILINE)

        wait_until(is_connected, "the gate finds the scheduler")

    def _proxy_answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.proxy_url}/health", timeout=1) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def start_shim(self, name: str, *, wait: bool = True, **asked: Any) -> None:
        """Start a shim (its options are in shim.py); `wait` until it has done all of it."""
        ready = self.ready(name)
        told = json.dumps({"target": self.target, "name": name, "ready": str(ready), **asked})
        program = str(Path(__file__).parent / "shim.py")
        self.spawn(name, [sys.executable, program, told], {}, None if wait else lambda: True)

    def start(
        self,
        name: str,
        *arguments: str,
        program: tuple[str, ...] = ("-m", "schedsvc"),
        **environment: str,
    ) -> None:
        ready = str(self.ready(name))
        command = [sys.executable, *program, *arguments, "--ready-file", ready]
        self.spawn(name, command, environment)

    def spawn(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        is_up: Callable[[], bool] | None = None,
    ) -> None:
        """Start a program, and wait for its ready file, or for `is_up`."""
        ready = self.ready(name)
        ready.unlink(missing_ok=True)
        is_up = is_up or (lambda: ready.exists() and bool(ready.read_text()))
        with self._log(name).open("ab") as log:
            process = forked.Popen(command, env=os.environ | environment, stdout=log, stderr=log)
        self.running[name] = process
        wait_for_start(process, is_up, lambda: self.log(name))

    def ready(self, name: str) -> Path:
        return self.folder / f"{name}.ready"

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")

    # Faults.

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def pause(self, name: str) -> None:
        """Stop it at once, and wait until it is stopped."""
        process = self.running[name]
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def resume(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGCONT)

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a program a signal."""
        self.running[name].send_signal(number)

    def is_running(self, name: str) -> bool:
        return name in self.running and self.running[name].poll() is None

    def resident_mb(self, name: str) -> float:
        """Return the memory of a program that is in use now."""
        pages = int(Path(f"/proc/{self.running[name].pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6

    def files(self, name: str) -> int:
        """Return files and sockets that a program has open."""
        return len(list(Path(f"/proc/{self.running[name].pid}/fd").iterdir()))

    def stop(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


Stand = TypeVar("Stand", bound=Programs)


@contextmanager
def standing(make: Callable[[Path], Stand]) -> Iterator[Stand]:
    """Make a stand in a short folder of its own, and stop all that it started."""
    folder = Path(tempfile.mkdtemp(prefix="st-"))
    made = make(folder)
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder)


def room_for(files: int) -> None:
    """Let this process and its children have `count` files open; fail if it cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < files:
        assert hard == resource.RLIM_INFINITY or hard >= files, f"ulimit -Hn is {hard}"
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


# The clients.


@dataclass
class Answer:
    """Describes the end of one HTTP request."""

    status: int = 0
    output_tokens: int = 0
    whole: bool = False
    first_s: float = 0.0
    error: dict[str, Any] = field(default_factory=dict)
    broken: str = ""

    @property
    def fate(self) -> str:
        if self.broken:
            return "broken"
        if self.status != 200:
            return str(self.status)
        return "whole" if self.whole else "short"


async def stream(
    http: aiohttp.ClientSession, tenant: str, output_tokens: int, prompt_tokens: int = 16
) -> Answer:
    """Ask for a stream of exactly `tokens`, and read it to its end of any kind."""
    body = {
        "prompt": [1] * prompt_tokens,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer()
    last = b""
    try:
        async with http.post(
            "/v1/completions", json=body, headers={"x-tenant-id": tenant}
        ) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = (await response.json())["error"]
                return answer
            async for piece in response.content.iter_any():
                answer.first_s = answer.first_s or time.monotonic()
                last = (last + piece)[-4_096:]
    except (aiohttp.ClientError, OSError) as error:
        answer.broken = type(error).__name__
        return answer
    answer.whole = last.endswith(b"data: [DONE]\n\n")
    usages = [line for line in last.split(b"\n\n") if b'"usage":{' in line.replace(b" ", b"")]
    if answer.whole and usages:
        answer.output_tokens = json.loads(usages[-1][6:])["usage"]["completion_tokens"]
    return answer


def fates(answers: list[Answer]) -> Counter[str]:
    return Counter(answer.fate for answer in answers)


# The books.


async def eventually(
    scheduler: AsyncScheduler, condition: Callable[[pb.StatsResponse], object]
) -> pb.StatsResponse:
    """Wait for a condition on Stats; return them."""
    stats = await scheduler.stats()

    async def holds() -> object:
        nonlocal stats
        stats = await scheduler.stats()
        return condition(stats)

    await until(holds, lambda: stats)
    return stats


def empty(stats: pb.StatsResponse) -> bool:
    totals = stats.totals
    return not (totals.live_leases or totals.queued or totals.promised_tokens)


async def at_rest(scheduler: AsyncScheduler) -> pb.StatsResponse:
    """Wait until nothing is held; check that every request has had its one fate."""
    stats = await eventually(scheduler, empty)
    totals = stats.totals
    assert totals.received == totals.granted + totals.rejected + totals.evicted, totals
    assert totals.granted == totals.completed + totals.cancelled + totals.expired, totals
    for pool in stats.pools:
        held = (pool.promised_tokens, pool.posted_tokens, pool.live_leases, pool.overdrawn)
        assert not any(held), pool
    return stats


def pool_of(stats: pb.StatsResponse, name: str = "default") -> pool_pb2.PoolStats:
    return next(pool for pool in stats.pools if pool.name == name)


async def preemptions(engine_url: str) -> int:
    """Return how often the engine preempted: more was let in than it holds."""
    async with aiohttp.ClientSession(engine_url) as http, http.get("/metrics") as page:
        lines = (await page.text()).splitlines()
    (line,) = [line for line in lines if line.startswith("vllm:num_preemptions_total{")]
    return round(float(line.split()[-1]))
