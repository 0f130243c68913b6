"""Starts and ends the programs under test: the scheduler, and vLLM behind the launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-vllm"
MODEL = "tiny"
CONTEXT_TOKENS = 2048
BLOCK_TOKENS = 128
GPU_BLOCK_TOKENS = 16
CAPACITY_TOKENS = 160 * BLOCK_TOKENS
MAX_RUNNING = 64
QUEUE_TTL_MS = 4_000
FLOW_QUEUE_MAX = 75
UNASKED_MAX = 60  # the part for requests that are no retries
# The tests' own limits: waiting requests are refused soon.
SETTINGS = {"queue_ttl_ms": QUEUE_TTL_MS, "flow_queue_max": FLOW_QUEUE_MAX}
GATE = "schedsvc_vllm.gate.Gate"
SWITCH = "switch.Switch"
START_S_MAX = 180.0
STOP_S_MAX = 20.0
_TAIL_LINES = 25

ENGINE = (
    *("--served-model-name", MODEL, "--load-format", "dummy"),
    *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(MAX_RUNNING)),
)


@dataclass(frozen=True)
class Machine:
    """Holds the ground of vLLM: its environment, the model's folder, and their settings."""

    environment: Path
    model: Path
    arguments: tuple[str, ...]
    variables: Mapping[str, str]


def on_cpu() -> Machine:
    """Describe the CPU build on the tiny model, as `make test-vllm` installs it.

    In single precision: in half precision the CPU build takes AMX instructions where the processor
    lists them, without asking the kernel for them, and dies of it in a virtual machine.
    """
    blocks = str(CAPACITY_TOKENS // BLOCK_TOKENS)
    return Machine(
        ENVIRONMENT,
        ENVIRONMENT / "model",
        ("--dtype", "float32", "--enforce-eager", "--num-gpu-blocks-override", blocks),
        {"LD_PRELOAD": str(ENVIRONMENT / "sched_yield.so"), "VLLM_CPU_KVCACHE_SPACE": "1"},
    )


def on_gpu(environment: Path, model: Path) -> Machine:
    """Describe a GPU that two servers share, with a cache as large as the CPU build's."""
    blocks = str(CAPACITY_TOKENS // GPU_BLOCK_TOKENS)
    return Machine(
        environment,
        model,
        (
            *("--dtype", "bfloat16", "--gpu-memory-utilization", "0.45"),
            *("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'),
            *("--block-size", str(GPU_BLOCK_TOKENS), "--num-gpu-blocks-override", blocks),
        ),
        {},
    )


def installed() -> bool:
    """Return whether `make test-vllm` has made the environment."""
    return (ENVIRONMENT / ".installed").exists()


def end_on_signal() -> None:
    """Let SIGTERM unwind as Ctrl-C does, so no program is left behind.

    As Ctrl-C itself: asyncio ends its main task for it. An exception in the midst of any task may
    leave the others, and the programs, waiting for ever.
    """
    # If it is ignored, as in the background of a shell, asyncio keeps that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def go_first() -> None:
    """Let this process run before all others, if it has the right to.

    A client has to see the servers' delays and not its own. Niceness is not enough: a busy server
    finishes its turn, and if the kernel shares the processor between sessions first, niceness
    counts only within one.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


@contextlib.contextmanager
def program(
    command: list[str], log: Path, is_up: Callable[[], bool], variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the block is left. Fails with the end of its log if it is not up."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S_MAX
        while not is_up():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
                raise RuntimeError(f"{command[0]} did not come up; the end of {log}:\n{tail}")
            time.sleep(0.1)
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a program and all its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S_MAX)


class Scheduler:
    """Runs `schedsvc serve` on the Unix socket `folder/s`. It can be killed and started again."""

    def __init__(
        self, folder: Path, tenants: list[str], settings: Mapping[str, Any] | None = None
    ) -> None:
        self.target = f"unix:{folder / 's'}"
        self._folder = folder
        self._programs = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        config = {
            "listeners": [{"unix": str(folder / "s")}],
            "scheduler": SETTINGS if settings is None else dict(settings),
            "tenants": [{"name": name} for name in tenants],
            "limits": {"drain_ms": 1_000},
        }
        (folder / "scheduler.yaml").write_text(yaml.safe_dump(config))

    def start(self) -> None:
        """Start it, and wait until it listens."""
        ready = self._folder / "ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "schedsvc", "serve", "--ready-file", str(ready)]
        command += ["--config", str(self._folder / "scheduler.yaml")]
        log = self._folder / "scheduler.log"
        self._process = self._programs.enter_context(program(command, log, ready.exists, {}))

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Scheduler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._programs.close()


@dataclass(frozen=True)
class Server:
    """Holds a running vLLM. Its process is the API server; the engine is a child of it."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def cpu_s(self) -> float:
        """Return the processor time that the API server has used, without the engine's."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def engine_pids(self) -> list[int]:
        """Return the processes that the server has started, but other API servers: the engine's."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        titles = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in text.split()}
        return [pid for pid, title in titles.items() if b"APIServer" not in title]

    @contextlib.contextmanager
    def engine_paused(self) -> Iterator[None]:
        """Pause the engine while the block runs."""
        pids = self.engine_pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def vllm(
    folder: Path,
    *,
    gated: bool,
    edge: bool = False,
    switch: bool = False,
    target: str | None = None,
    machine: Machine | None = None,
    arguments: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run vLLM, through the launcher where it is gated; on the CPU where nothing else is said.

    `edge`: with the clock of edge.py around everything; `switch`: with switch.py instead of the
    gate. The launcher can add neither. `target`: of the schedulers; else the socket `folder/s`.
    """
    target = target or f"unix:{folder / 's'}"
    own = {"SCHEDSVC_TARGET": target, "SCHEDSVC_TENANT_HEADERS": "x-tenant-id"}
    launched = gated and not (edge or switch)
    name = "schedsvc-vllm" if launched else "vllm"
    machine = machine or on_cpu()
    command = [str(machine.environment / "bin" / name), "serve", str(machine.model), *ENGINE]
    command += ["--host", "127.0.0.1", *machine.arguments, *arguments]
    if launched:
        command += ["--schedsvc-target", target]
        command += ["--schedsvc-tenant-headers=x-tenant-id"]
    elif gated:
        command += ["--middleware", SWITCH if switch else GATE]
    if edge:
        command += ["--middleware", "edge.Edge"]
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **machine.variables,
        **({"PYTHONPATH": _path(Path(__file__).parent)} if edge or switch else {}),
        **(own if gated and not launched else {}),
        **(variables or {}),
    }
    log = folder / f"{name}.log"
    with held_port() as port:
        command += ["--port", str(port)]
        url = f"http://127.0.0.1:{port}"
        with program(command, log, lambda: _answers(url), environment) as process:
            yield Server(url, process, log)


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Hold a TCP port for a program that listens there much later; the kernel gives it to no other.

    vLLM needs a minute until it listens. If the port were free meanwhile, a second server or a
    connection could take it. A socket with SO_REUSEADDR may bind a held port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _path(folder: Path) -> str:
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
