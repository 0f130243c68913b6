"""Starts the two server processes: the scheduler as `schedsvc serve`, and the echo."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import cpu_ns, server_cores
from bench.messages import POOL_EPOCH, tenant
from bench.processes import started

__all__ = ["FLOWS", "Peer", "echo", "edge", "emulator", "scheduler", "serving"]

#: Tenants of the scheduler.
FLOWS = 1_000


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

    Listeners of the settings replace these two; the first has to be a socket, the last a port.
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
def emulator(
    folder: Path, *options: str, profile: str = "fast", environment: Mapping[str, str] | None = None
) -> Iterator[tuple[int, str]]:
    """Run the emulated engine; gives its process and its URL."""
    ready = folder / "engine.ready"
    command = ["-m", "schedsvc", "emulate", "--port", "0", "--profile", profile, *options]
    command += ["--ready-file", str(ready)]
    log = folder / "engine.log"
    with started(command, ready, environment=environment, log=log) as process:
        yield process.pid, str(json.loads(ready.read_text())["base_url"])


@contextmanager
def _running(
    arguments: list[str], ready: Path, cores: Sequence[int] | None = None
) -> Iterator[Peer]:
    ready.unlink(missing_ok=True)
    on = server_cores() if cores is None else cores
    with started(arguments, ready, cores=on, log=ready.with_suffix(".log")) as process:
        targets: list[str] = json.loads(ready.read_text())["targets"]
        yield Peer(process, targets[0], targets[-1])
