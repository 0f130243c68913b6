"""The two server processes: the scheduler as `schedsvc serve`, and the echo."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import cpu_ns, pinned, server_cores
from bench.messages import POOL_EPOCH, tenant

__all__ = ["FLOWS", "Peer", "echo", "edge", "scheduler", "serving"]

#: Tenants of the scheduler.
FLOWS = 1_000

_START_S_MAX = 60.0
_STOP_S_MAX = 10.0
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Peer:
    """A server process, pinned to its core, and the first and last target it serves on."""

    process: "subprocess.Popen[bytes]"
    unix: str
    tcp: str

    def cpu_ns(self) -> int:
        """Return the CPU time that it has used, in ns."""
        return cpu_ns(self.process.pid)


@contextmanager
def scheduler(folder: Path) -> Iterator[Peer]:
    """Run a scheduler whose one pool has room for all that is asked, with 1,000 tenants."""
    settings = {
        # More run at once here than by default, a thousand.
        "scheduler": {"lease_ttl_ms": 600_000, "each_pool": {"max_running": 0}},
        # The server does not wait for requests that a closed stream leaves behind.
        "limits": {"drain_ms": 0},
        "tenants": [{"name": tenant(flow)} for flow in range(FLOWS)],
        "pools": [{"name": "gpu-0", "capacity_tokens": 1 << 27, "epoch": POOL_EPOCH}],
        "log": {"level": "warning"},
    }
    with serving(folder, settings) as peer:
        yield peer


@contextmanager
def serving(
    folder: Path, settings: Mapping[str, Any], cores: Sequence[int] | None = None
) -> Iterator[Peer]:
    """Run a scheduler with these settings, on its core or on some; a Unix socket and a port.

    Listeners of the settings replace those two; a socket has to be the first, a port the last.
    """
    config, ready = folder / "scheduler.yaml", folder / "scheduler.ready"
    listeners = [{"unix": str(folder / "scheduler.sock")}, {"tcp": "127.0.0.1:0"}]
    # JSON is YAML.
    config.write_text(json.dumps({"listeners": listeners, **settings}))
    command = ["-m", "schedsvc", "serve", "--config", str(config), "--ready-file", str(ready)]
    with _running(command, ready, cores) as peer:
        yield peer


@contextmanager
def edge(folder: Path, cores: Sequence[int] = ()) -> Iterator[Peer]:
    """Run the front of the scheduler that `serving()` runs in this folder, on some cores or any."""
    ready = folder / "edge.ready"
    command = ["-m", "schedsvc", "edge", "--config", str(folder / "scheduler.yaml")]
    with _running([*command, "--ready-file", str(ready)], ready, cores) as peer:
        yield peer


@contextmanager
def echo(folder: Path) -> Iterator[Peer]:
    """Run the reference server."""
    with _running(["-m", "bench.echo", "--folder", str(folder)], folder / "echo.ready") as peer:
        yield peer


@contextmanager
def _running(
    arguments: list[str], ready: Path, cores: Sequence[int] | None = None
) -> Iterator[Peer]:
    log = ready.with_suffix(".log")
    ready.unlink(missing_ok=True)
    on = server_cores() if cores is None else list(cores)
    with log.open("wb") as output, pinned(on):
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=_ROOT, stdout=output, stderr=output
        )
    try:
        targets = _when_ready(process, ready, log)
        yield Peer(process, *targets)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _when_ready(process: "subprocess.Popen[bytes]", ready: Path, log: Path) -> tuple[str, str]:
    deadline = time.monotonic() + _START_S_MAX
    while not ready.exists():
        if process.poll() is not None:
            raise RuntimeError(f"a server did not start:\n{log.read_text(errors='replace')}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"a server is not ready:\n{log.read_text(errors='replace')}")
        time.sleep(0.01)
    targets: list[str] = json.loads(ready.read_text())["targets"]
    return targets[0], targets[-1]
