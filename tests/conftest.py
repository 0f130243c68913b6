"""Fixtures and hooks of all tests."""

import fcntl
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples on every machine and run; HYPOTHESIS_PROFILE=fresh draws others. No clock judges
# an example: another process may take the core while it runs.
_NO_CLOCK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **_NO_CLOCK)
settings.register_profile("fresh", derandomize=False, **_NO_CLOCK)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_configure() -> None:
    """Let Ctrl-C reach the programs that tests start.

    A process in the background is started with Ctrl-C ignored, and would pass that on to them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let one worker compile all tests, if that was not done before; the other then loads them.

    Compiling them takes 12 s of CPU, and two workers that start at once would both do it.
    """
    with Path(__file__).open() as lock:
        last = Path(__file__).parent / "usage/__pycache__"
        if not (sys.dont_write_bytecode or any(last.glob("*-pytest-*.pyc"))):
            fcntl.flock(lock, fcntl.LOCK_EX)
        gc.disable()
        try:
            return (yield)
        finally:
            gc.enable()
            gc.freeze()  # modules and tests stay, so no collection has to look at them


CRASHED = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(sched: Any) -> None:
    """A process that died under a test is worse than a failed test, which is tried again."""
    sched.config.stash[CRASHED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Show a crash by the exit status."""
    if CRASHED in session.config.stash:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
