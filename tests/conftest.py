"""Holds the fixtures and hooks of all tests."""

import fcntl
import gc
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.seeds import SEED, VARIABLE

# The seed alone decides what is drawn: no memory of earlier runs, and no clock, since another
# process may take the core while an example runs.
settings.register_profile(
    "seeded", database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("seeded")


@pytest.hookimpl(tryfirst=True)  # hypothesis reads its option in the same hook
def pytest_configure(config: pytest.Config) -> None:
    """Seed property tests, and let signals reach the programs that tests start.

    A process in the background is started with Ctrl-C ignored, one of nohup with SIGHUP, and each
    would pass that on to them.
    """
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Not the default action, which would end the tests; their programs get it.
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let one worker compile all tests, if that was not done before; the other then loads them.

    Compiling them takes 12 s of CPU, and two workers that start at once would both compile.
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how to repeat a failure of a random test."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"Random tests drew by the seed {SEED}.")
        terminalreporter.write_line(f"To repeat a failure: {VARIABLE}={SEED} pytest TEST")


CRASHED = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(sched: Any) -> None:
    """Do not retry: a process that died under a test is worse than a failed test."""
    sched.config.stash[CRASHED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Show a crash by the exit status."""
    if CRASHED in session.config.stash:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a folder whose path is short, as that of a socket has to be."""
    made = Path(tempfile.mkdtemp(prefix="t-"))
    yield made
    shutil.rmtree(made)
