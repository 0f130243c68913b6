"""Has imports done, and forks a child for each Python program that a test starts (forked.py).

It reads requests from the socket whose descriptor is its argument: JSON, with the three standard
streams of the child. It answers with the child's pid. A fork copies one thread alone, so nothing
that it imports may start a thread.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from schedsvc.cli.streams import escape_unprintable

#: The imports of the tests' programs, the command line first: it prepares what others read.
MODULES = (
    "schedsvc.cli",
    "schedsvc.cli.check",
    "schedsvc.cli.edge",
    "schedsvc.cli.serve",
    "schedsvc.cli.stats",
    "schedsvc.cluster.member",
    "schedsvc.edge.serve",
    "schedsvc_lab.emulator.cli",
    "schedsvc_lab.emulator.server",
    "schedsvc.server.server",
    "schedsvc_client.aio",
    "schedsvc_vllm.gate",
    "schedsvc_vllm.proxy_cli",
)
REQUEST_BYTES_MAX = 1 << 17
_PR_SET_PDEATHSIG = 1


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Be as if the program had been started: what a process has from its parent, and at import."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["parent"]:
        os._exit(1)
    os.setsid()
    for wanted, given in enumerate(streams):
        os.dup2(given, wanted)
    os.closerange(3, max(streams) + 1)
    os.chdir(request["cwd"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    for name, mode, descriptor in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
        before = getattr(sys, name)
        stream = open(  # noqa: SIM115 - it stays
            descriptor, mode, 1 if name == "stderr" else -1, before.encoding, before.errors,
            closefd=False,
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    escape_unprintable()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _run(words: list[str]) -> None:
    """Run what stands behind `python` in a command, as Python does."""
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        importlib.reload(sys.modules["schedsvc.cli.early_signals"])  # it looks at the arguments
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        importlib.reload(sys.modules["schedsvc.cli.early_signals"])
        runpy.run_path(words[0], run_name="__main__")


def _fork(opened: socket.socket, request: dict[str, Any], streams: list[int]) -> bool:
    """Fork, and answer with the pid of the child. Returns whether this process is the child.

    A process in between ends at once. So the kernel gives the child to the process of the tests,
    which has asked to be the parent of its orphans, and which waits for it as for any child.
    """
    reaped, reap = os.pipe()
    read, written = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child:
            os.write(written, b"%d" % child)
            os._exit(0)
        os.close(reap)
        os.read(reaped, 1)  # until its parent has ended
        for descriptor in (reaped, read, written):
            os.close(descriptor)
        opened.close()
        _become(request, streams)
        return True
    os.waitpid(between, 0)
    opened.send(os.read(read, 20))
    for descriptor in (reaped, reap, read, written, *streams):
        os.close(descriptor)
    return False


def main() -> None:
    """Serve forks until the socket is closed; a child returns from the loop and runs."""
    opened = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        sys.exit(f"an import has started {len(threads) - 1} threads, which a fork would lose")
    gc.collect()
    gc.freeze()
    while True:
        data, streams, _, _ = socket.recv_fds(opened, REQUEST_BYTES_MAX, 3)
        if not data:
            return
        request = json.loads(data)
        if _fork(opened, request, streams):
            _run(request["words"])
            return


if __name__ == "__main__":
    main()
