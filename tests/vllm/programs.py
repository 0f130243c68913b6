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
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-vllm"
MODEL = "tiny"
CONTEXT_TOKENS = 2048
BLOCK_TOKENS = 128
CAPACITY_TOKENS = 160 * BLOCK_TOKENS
MAX_RUNNING = 64
QUEUE_TTL_MS = 4_000
FLOW_QUEUE_MAX = 60
START_S_MAX = 100.0
STOP_S_MAX = 20.0
_TAIL_LINES = 25

# In single precision: in half precision the CPU build takes AMX instructions where the processor
# lists them, without asking the kernel for them, and dies of it in a virtual machine.
ENGINE = (
    *("--served-model-name", MODEL, "--load-format", "dummy", "--dtype", "float32"),
    *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(MAX_RUNNING)),
    *("--num-gpu-blocks-override", str(CAPACITY_TOKENS // BLOCK_TOKENS), "--enforce-eager"),
)


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
    """End a program and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S_MAX)


class Scheduler:
    """`schedsvc serve` on the Unix socket `folder/s`. It can be killed and started again."""

    def __init__(self, folder: Path, tenants: list[str]) -> None:
        self.target = f"unix:{folder / 's'}"
        self._folder = folder
        self._programs = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        config = {
            "listeners": [{"unix": str(folder / "s")}],
            "scheduler": {"queue_ttl_ms": QUEUE_TTL_MS, "flow_queue_max": FLOW_QUEUE_MAX},
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


@contextlib.contextmanager
def vllm(folder: Path, *, gated: bool, arguments: tuple[str, ...] = ()) -> Iterator[str]:
    """Run vLLM on the tiny model, through the launcher where it is gated; gives its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    name = "schedsvc-vllm" if gated else "vllm"
    command = [str(ENVIRONMENT / "bin" / name), "serve", str(ENVIRONMENT / "model"), *ENGINE]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    if gated:
        command += ["--schedsvc-target", f"unix:{folder / 's'}"]
        command += ["--schedsvc-tenant-headers=x-tenant-id"]
    variables = {
        "LD_PRELOAD": str(ENVIRONMENT / "sched_yield.so"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with program(command, folder / "vllm.log", lambda: _answers(url), variables):
        yield url


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
