"""Gives one process a network of its own, which can be cut: every packet is dropped silently.

The process runs in a network namespace with one link to this host. The rules are in that namespace,
so they and the link end with it. It needs root, `ip`, `iptables` and util-linux.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_TOOLS = ("ip", "iptables", "unshare", "nsenter", "setpriv")
#: For benchmarks of networks (RFC 2544), so no real host has them. Each link takes four addresses.
_FIRST, _LINKS = (198 << 24) | (18 << 16), 1 << 15
#: The names of namespaces and links end with the id of the process that made them.
_PREFIX = "cut"


class CutNetwork:
    """Holds one namespace, whose process may be cut off from this host."""

    def __init__(self) -> None:
        self._name = f"{_PREFIX}{os.getpid()}"
        base = _FIRST + 4 * (os.getpid() % _LINKS)
        #: The addresses of this host and of the process in the namespace.
        self.host, self.inside = (_dotted(base + 1), _dotted(base + 2))

    @property
    def run_in(self) -> tuple[str, ...]:
        """Return a command that runs its arguments in the namespace."""
        return ("nsenter", f"--net=/run/netns/{self._name}")

    def open(self) -> None:
        """Make the namespace and its link, and remove what killed processes have left."""
        for left in Path("/run/netns").glob(f"{_PREFIX}*"):
            if not Path("/proc", left.name.removeprefix(_PREFIX)).exists():
                _remove(left.name)
        _remove(self._name)
        _run("ip", "netns", "add", self._name)
        peer = ("peer", "name", "inside", "netns", self._name)
        _run("ip", "link", "add", self._name, "type", "veth", *peer)
        _run("ip", "addr", "add", f"{self.host}/30", "dev", self._name)
        _run("ip", "link", "set", self._name, "up")
        _run(*self.run_in, "ip", "addr", "add", f"{self.inside}/30", "dev", "inside")
        for link in ("inside", "lo"):
            _run(*self.run_in, "ip", "link", "set", link, "up")

    def close(self) -> None:
        """Take the namespace away, and its link with it."""
        _remove(self._name)

    def cut(self) -> None:
        """Drop all packets. Connections stay open, and receive nothing more."""
        _run(*self.run_in, "iptables", "-A", "INPUT", "-i", "inside", "-j", "DROP")
        _run(*self.run_in, "iptables", "-A", "OUTPUT", "-o", "inside", "-j", "DROP")

    def heal(self) -> None:
        """Let packets through again."""
        _run(*self.run_in, "iptables", "-F")


@contextmanager
def cut_network() -> Iterator[CutNetwork]:
    network = CutNetwork()
    network.open()
    try:
        yield network
    finally:
        network.close()


@cache
def missing() -> str:
    """Return why networks cannot be cut here; empty if they can."""
    if os.geteuid() != 0:
        return "only root can make a network namespace"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"not on the PATH: {', '.join(absent)}"
    tried = subprocess.run(("unshare", "--net", "iptables", "-L"), capture_output=True, check=False)
    return tried.stderr.decode(errors="replace").strip() if tried.returncode else ""


def _remove(name: str) -> None:
    for what in ("link", "netns"):
        subprocess.run(("ip", what, "del", name), stderr=subprocess.DEVNULL, check=False)


def _dotted(address: int) -> str:
    return ".".join(str(address >> shift & 255) for shift in (24, 16, 8, 0))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
