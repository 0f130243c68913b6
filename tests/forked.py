"""Starts Python programs by a fork of a process that has done their imports (zygote.py).

`Popen` and `run` are those of subprocess, and save the second of CPU in which a program imports. A
test of an interpreter's start uses subprocess itself.
"""

import atexit
import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from schedsvc_lab.demo.processes import DIES_WITH_PARENT
from tests.waiting import wait_for_start

__all__ = ["Popen", "run", "started"]

_ROOT = Path(__file__).resolve().parents[1]
_PR_SET_CHILD_SUBREAPER = 36
#: Variables that Python, its libraries or the loader read once, before a fork.
_READ_ONCE = ("PYTHON", "GRPC_", "LC_", "LANG", "LD_", "MALLOC_", "OPENBLAS_")
_INTERPRETERS = (sys.executable, str(Path(sys.executable).resolve()))


class _Zygote:
    """Holds the process that forks, and the socket to it."""

    def __init__(self) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", str(its.fileno())],
                cwd=_ROOT,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        self._socket = ours
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self.environment = dict(os.environ)
        atexit.register(self.close)

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Return the pid of a new child of this process."""
        with self._lock:
            self._adopt_orphans(True)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
                pid = self._socket.recv(20)
            finally:
                self._adopt_orphans(False)
        if not pid:
            raise OSError(f"the zygote has ended with status {self._process.wait()}")
        return int(pid)

    def _adopt_orphans(self, yes: bool) -> None:
        if self._prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")

    def close(self) -> None:
        """Let it end."""
        self._socket.close()
        self._process.wait()


_STARTING = threading.Lock()


def _zygote() -> _Zygote:
    # Threads start programs at the same time, and two zygotes would part each other's orphans.
    with _STARTING:
        return _started()


@cache
def _started() -> _Zygote:
    return _Zygote()


def _read_once(environment: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key.startswith(_READ_ONCE)}


def _words(command: list[str]) -> list[str] | None:
    """Return what stands behind `python` in a command, or None if it is another program."""
    command = list(map(os.fspath, command))
    if DIES_WITH_PARENT and tuple(command[:3]) == DIES_WITH_PARENT:
        command = command[3:]  # a forked process does so anyhow
    program = Path(command[0])
    if command[0] in _INTERPRETERS:
        return command[1:]
    # A script that pip has installed beside the interpreter.
    return command if program.parent == Path(sys.executable).parent and is_python(program) else None


@cache
def is_python(program: Path) -> bool:
    """Return whether a file is a script for Python."""
    with program.open("rb") as file:
        first = file.readline()
    return first.startswith(b"#!") and b"python" in first


class Popen(subprocess.Popen[Any]):
    """Starts a process: forked, if its command is a Python program that starts as ours do."""

    def _execute_child(  # type: ignore[override] # subprocess has no other place to start one
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
        creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest
    ):  # fmt: skip
        unusual = shell or preexec_fn or pass_fds or executable or sys.platform != "linux"
        words = None if unusual else _words(args)
        environment = dict(os.environ) if env is None else dict(env)
        if words is None or _read_once(environment) != _read_once(_zygote().environment):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                *rest,
            )  # fmt: skip
            return
        request = {
            "words": words,
            "env": environment,
            "cwd": os.fspath(cwd or os.getcwd()),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "parent": os.getpid(),
        }
        given = zip((p2cread, c2pwrite, errwrite), (0, 1, 2), strict=True)
        streams = [own if stream == -1 else stream for stream, own in given]
        self.pid = _zygote().fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(
    command: list[Any],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float = 60.0,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, as subprocess.run() does."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


@contextmanager
def started(
    command: list[Any],
    up: Path | Callable[[], Any],
    *,
    log: Path | None = None,
    start: Callable[..., subprocess.Popen[Any]] = Popen,
    **options: Any,
) -> Iterator[subprocess.Popen[Any]]:
    """Run a program to the end of the block, which begins once it is up.

    Args:
        command: The program and its arguments.
        up: The file that it writes when it is up, or whether it is.
        log: Where its output goes.
        start: Popen, or that of subprocess.
        options: More of Popen.
    """
    with ExitStack() as stack:
        if log is not None:
            output = stack.enter_context(log.open("ab"))
            options |= {"stdout": output, "stderr": output}
        process = start(command, **options)
        try:
            is_up = up.exists if isinstance(up, Path) else up
            wait_for_start(process, is_up, log.read_text if log else "the start")
            yield process
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
