"""Starts and ends the programs of the demo."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

READY_S_MAX = 30.0
STOP_S_MAX = 10.0
TAIL_LINES = 15
#: The kernel ends the program with the thread that started it, even if that is killed. Every usual
#: Linux can do that; without it a killed demo leaves its programs behind.
DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
_POLL_S = 0.02
_GUARD_SAYS_S = 2.0  # a process is gone a while after its sockets are

_ports = random.SystemRandom()  # Processes that run at once draw others.

T = TypeVar("T")


class DemoError(RuntimeError):
    """The demo cannot go on; the text says why, with the end of a program's log if that helps."""


@dataclass(frozen=True, slots=True)
class Program:
    """Holds a program that runs: its process, its log, and what it wrote into its ready file."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    ready: str

    def tail(self) -> str:
        """Read the last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(f"  {line}" for line in lines) or "  (the log is empty)"

    async def wait_for_end(self) -> None:
        """Wait until it ends by itself; raises DemoError, for that is too early."""
        status = await self.process.wait()
        raise DemoError(
            f"{self.name} ended with status {status}; the end of {self.log}:\n{self.tail()}"
        )


def free_port() -> int:
    """Find a TCP port of this host that nothing uses now, and that no connection gets by itself.

    The kernel takes the ports of connections from 32,768 on, and may name one to two callers.
    """
    while True:
        port = _ports.randrange(16_384, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@asynccontextmanager
async def running(
    name: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Program]:
    """Run `schedsvc ARGUMENTS --ready-file ...` until the block is left, on every way out.

    Raises DemoError if it does not get ready.
    """
    log, ready = folder / f"{name}.log", folder / f"{name}.ready"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "schedsvc", *arguments, "--ready-file", str(ready)]
    with log.open("wb") as output:
        # It has a separate group: Ctrl-C is for the demo, which then ends its programs in order.
        process = await asyncio.create_subprocess_exec(
            *DIES_WITH_PARENT,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    program = Program(name, process, log, "")
    try:
        text = await guarded(_read_when_ready(program, ready), program.wait_for_end())
        yield Program(name, process, log, text)
    finally:
        await asyncio.shield(_stop(process))
        ready.unlink(missing_ok=True)


async def _read_when_ready(program: Program, ready: Path) -> str:
    try:
        async with asyncio.timeout(READY_S_MAX):
            while not (text := _read(ready)):  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise DemoError(
            f"{program.name} was not ready after {READY_S_MAX:.0f} s; the end of {program.log}:\n"
            f"{program.tail()}"
        ) from None
    return text


def _read(ready: Path) -> str:
    """Read a file that another process makes; "" where it is not there yet."""
    return ready.read_text() if ready.exists() else ""


async def guarded(work: Coroutine[Any, Any, T], *guards: Coroutine[Any, Any, None]) -> T:
    """Await some work while guards run beside it.

    A guard ends only by raising; the work is then cancelled, and the error of the first guard that
    ended is raised, also where the work failed before it.
    """
    main = asyncio.create_task(work)
    beside = [asyncio.create_task(guard) for guard in guards]
    try:
        done, _ = await asyncio.wait({main, *beside}, return_when=asyncio.FIRST_COMPLETED)
        if main not in done or main.exception() is not None:
            # A failure of the main task is often due to a program that died. The guards report
            # that, so wait for them first.
            await asyncio.wait({main, *beside}, timeout=_GUARD_SAYS_S)
        for guard in beside:
            if guard.done():
                guard.result()
        return await main
    finally:
        for task in (main, *beside):
            task.cancel()
        await asyncio.gather(main, *beside, return_exceptions=True)


async def until_signalled(work: Coroutine[Any, Any, T]) -> T:
    """Await some work; SIGTERM and SIGHUP end it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await work
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a program and the processes that it started: first by SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            async with asyncio.timeout(STOP_S_MAX):
                await process.wait()
        except TimeoutError:
            continue
