"""A process without a free file descriptor says so, once, and counts it."""

import http.client
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests import forked
from tests.waiting import wait_for_start

from .test_metrics import Samples, of, samples_of

CONFIG = f"""
listeners: [{{unix: s.sock, auth: token}}]
metrics: {{listen: "127.0.0.1:0"}}
edge: {{tcp: "127.0.0.1:0"}}
auth: {{principals: [{{name: shim, sha256: "{"a" * 64}"}}]}}
"""


class Program:
    """Runs a command of ours, with a log of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, ready: Path) -> None:
        self.process, self._log, self._ready = process, log, ready

    @property
    def metrics(self) -> str:
        return str(json.loads(self._ready.read_text())["metrics"])

    def events(self, start: str) -> list[str]:
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [line["event"] for line in lines if line["event"].startswith(start)]

    def wait(self, events: list[str]) -> None:
        wait_for_start(self.process, lambda: self.events("descriptors_") == events)


@contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """Lower a process's limit to what it has open, until the end."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # The lowest free number: an open one above it is no hindrance.
    numbers = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = next(number for number in range(len(numbers) + 1) if number not in numbers)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def running(folder: Path, command: str) -> Iterator[Program]:
    (folder / "c.yaml").write_text(CONFIG)
    ready, log = folder / "ready.json", folder / "log"
    words = [sys.executable, "-m", "schedsvc", command, "--config", str(folder / "c.yaml")]
    with forked.started([*words, "--ready-file", str(ready)], ready, log=log) as process:
        yield Program(process, log, ready)


def scrape(connection: http.client.HTTPConnection) -> Samples:
    connection.request("GET", "/metrics")
    return samples_of(connection.getresponse().read().decode())


def test_scheduler_logs_and_counts_exhausted_descriptors(tmp_path: Path) -> None:
    with running(tmp_path, "serve") as program:
        # Its connection is open before.
        http_ = http.client.HTTPConnection(urlsplit(program.metrics).netloc, timeout=60)
        samples = scrape(http_)
        assert of(samples, "descriptors_exhausted_total") == 0
        assert 5 < of(samples, "process_open_fds") < of(samples, "process_max_fds")
        for times in (1, 2):
            with without_descriptors(program.process.pid):
                program.wait(["descriptors_exhausted", "descriptors_free_again"] * (times - 1)
                             + ["descriptors_exhausted"])  # fmt: skip
                assert of(scrape(http_), "descriptors_exhausted_total") == times
            program.wait(["descriptors_exhausted", "descriptors_free_again"] * times)
        http_.close()


def test_edge_logs_exhausted_descriptors(tmp_path: Path) -> None:
    with running(tmp_path, "edge") as program:
        with without_descriptors(program.process.pid):
            program.wait(["descriptors_exhausted"])
        program.wait(["descriptors_exhausted", "descriptors_free_again"])
