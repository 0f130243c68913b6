"""Runs a store with a replica and a sentinel, which promotes it once the primary is gone."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from schedsvc_lab.demo.processes import free_port
from tests.waiting import wait_until

from .store_server import ADMIN_PASSWORD, StoreServer, running_store

#: The sentinel takes a primary for dead that has not answered for this time.
DOWN_MS = 1_000
_CONFIG = """\
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor main 127.0.0.1 {primary} 1
sentinel auth-pass main {password}
sentinel down-after-milliseconds main {down_ms}
sentinel failover-timeout main 5000
"""


class ReplicatedStore:
    """Runs two servers of one store. `primary` is killed by a test; `replica` is promoted then."""

    def __init__(self, primary: StoreServer, replica: StoreServer) -> None:
        self.primary, self.replica = primary, replica

    @property
    def urls(self) -> list[str]:
        return [self.primary.url, self.replica.url]

    def cut_off(self) -> None:
        """Cut the replica off from all later writes."""
        self.replica.ask("CONFIG", "SET", "masterauth", "wrong")
        self.primary.ask("CLIENT", "KILL", "TYPE", "replica")
        wait_until(lambda: not self._is_linked(), "the replica is cut off")

    def fail_over(self) -> None:
        """Kill the primary, and wait until the sentinel has promoted the replica."""
        self.primary.kill()
        wait_until(self.is_promoted, "the replica is promoted")

    def is_promoted(self) -> bool:
        return b"role:master" in self._replication()

    def is_followed(self) -> bool:
        """Return whether all that the primary has is at the replica too."""
        written = self.primary.ask("WAIT", "1", "1000") == b":1\r\n"
        return written and self._is_linked()

    def _is_linked(self) -> bool:
        return b"master_link_status:up" in self._replication()

    def _replication(self) -> bytes:
        """Return what the replica reports; nothing while its promotion closes its connections."""
        try:
            return self.replica.ask("INFO", "replication")
        except ConnectionError:
            return b""


@contextlib.contextmanager
def replicated_store(folder: Path, program: Path) -> Iterator[ReplicatedStore]:
    """Run a primary, a replica that follows it, and a sentinel that knows both."""
    password = ("--masterauth", ADMIN_PASSWORD)
    with contextlib.ExitStack() as stack:
        primary, replica = (
            stack.enter_context(running_store(folder / name, *password, program=program))
            for name in ("primary", "replica")
        )
        replica.ask("REPLICAOF", "127.0.0.1", str(primary.port))
        store = ReplicatedStore(primary, replica)
        wait_until(store.is_followed, "the replica follows")
        stack.enter_context(_sentinel(folder, primary, program))
        yield store


@contextlib.contextmanager
def _sentinel(folder: Path, primary: StoreServer, program: Path) -> Iterator[None]:
    file, port = folder / "sentinel.conf", free_port()
    words = {"port": port, "folder": folder, "primary": primary.port, "down_ms": DOWN_MS}
    file.write_text(_CONFIG.format(**words, password=ADMIN_PASSWORD))
    with (folder / "sentinel.log").open("ab") as log:
        command = [str(program), str(file), "--sentinel"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        # It has read the primary's INFO once its log names the replica.
        log_file = folder / "sentinel.log"
        wait_until(lambda: b"+slave " in log_file.read_bytes(), "the sentinel knows the replica")
        yield
    finally:
        process.kill()
        process.wait()
