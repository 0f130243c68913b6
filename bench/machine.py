"""Describes the machine, its cores, and the CPU time of a process."""

import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import tomllib

from schedsvc._core import BUILD_FLAGS

__all__ = [
    "FLAGS",
    "commit",
    "cpu_ns",
    "describe",
    "generator_cores",
    "need_release_core",
    "pinned",
    "run_delay_ns",
    "server_cores",
]

_ROOT = Path(__file__).resolve().parents[1]
#: The flags with which the C compiler builds the core of a release.
FLAGS: list[str] = tomllib.loads((_ROOT / "_core/flags.toml").read_text())["release"]


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


_CORES = _cores()


def server_cores() -> list[int]:
    """Return the one core that servers run on; empty where there are not two to choose from."""
    return _CORES[:1] if len(_CORES) > 1 else []


def generator_cores() -> list[int]:
    """Return the one core that everything else runs on; empty where it cannot be chosen."""
    return _CORES[-1:] if len(_CORES) > 1 else []


@contextmanager
def pinned(cores: list[int]) -> Iterator[None]:
    """Keep this thread, and the threads and processes it starts, on some cores (none: any)."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_ns(pid: int) -> int:
    """Return the CPU time that all threads of a process have used, in ns (Linux)."""
    # The clock of another process, as clock_getcpuclockid(3) makes it.
    return time.clock_gettime_ns((~pid << 3) | 2)


def run_delay_ns(pid: int) -> int:
    """Return how long threads of a process were ready to run and waited for a core, in ns (Linux).

    O(threads). A thread that has ended counts no more.
    """
    waited_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            waited_ns += int((task / "schedstat").read_text().split()[1])
    return waited_ns


def describe() -> dict[str, Any]:
    """Return what a reader needs to know of the machine and its software."""
    return {
        "cpu": _cpu_model(),
        "cores": len(_CORES) or os.cpu_count(),
        "server_cores": server_cores(),
        "generator_cores": generator_cores(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("grpcio", "uvloop", "protobuf")},
        "core_flags": BUILD_FLAGS,
        "load_1_min": round(os.getloadavg()[0], 2),
    }


def need_release_core() -> None:
    """Raise ClickException if the core is built for development: its times would mean nothing."""
    if " ".join(FLAGS) != BUILD_FLAGS:
        built = f"with {BUILD_FLAGS}" if BUILD_FLAGS else "with unknown flags"
        raise click.ClickException(
            f"the core was built {built}; run `make build-release` before you measure it"
        )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def commit() -> str | None:
    """Return the commit that is measured, "+" behind it where the tree has changed; else None."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],  # whichever git the person uses
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
