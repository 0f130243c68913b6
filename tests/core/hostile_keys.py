"""Counts the cost of keys that a caller chose to meet in a table without a secret.

    python -m tests.core.hostile_keys

Ids of leases and tags of requests are such keys. One message reports on leases, or withdraws
requests, with drawn keys; another does the same with keys that would share a place. It prints the
ratio of their instructions (callgrind) as JSON.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
from schedsvc_client.v1 import scheduler_pb2 as pb

from bench.instructions import Counter, under_callgrind
from schedsvc import _core as core
from tests.tidy.sources import ROOT

from .stream import Stream, asking, cancelling, offering, replaying, reporting
from .support import meeting_keys

OPEN, MEASURED = 2_000, 500  # leases or requests; events in the measured message
OWNER = 1  # number of the first stream, the lower half of its tags' keys

Prepared = tuple[Stream, list[pb.SessionEvent]]


def _stream(capacity: int) -> Stream:
    made = core.Scheduler(
        hash_key=os.urandom(16), leases_max=1 << 20, queue_max=1 << 20, flow_queue_max=1 << 20
    )
    made.set_flow(b"f", 1_000)
    stream = Stream(made)
    stream.send(0, offering("p", capacity=capacity))
    return stream


def _reports(ids: list[int]) -> Prepared:
    """Make leases with these ids, and a message that reports on some of them."""
    stream = _stream(1 << 30)
    for at in range(0, OPEN, 500):
        stream.send(0, *(replaying(i, f"r{i}") for i in ids[at : at + 500]))
    return stream, [reporting(i) for i in ids[-MEASURED:]]


def _cancels(tags: list[int]) -> Prepared:
    """Make requests with these tags, and a message that withdraws some of them."""
    stream = _stream(20)
    for at in range(0, OPEN, 500):
        stream.send(0, *(asking(tag, f"r{tag}") for tag in tags[at : at + 500]))
    return stream, [cancelling(tag) for tag in tags[-MEASURED:]]


def _count(folder: Path) -> dict[str, float]:
    counter = Counter(folder)

    def instructions(prepare: Callable[[list[int]], Prepared], keys: list[int]) -> int:
        stream, events = prepare(keys)
        counter.look()
        stream.send(0, *events)
        return counter.look()

    draws = random.Random(1)
    plain = [draws.getrandbits(61) + 1 for _ in range(OPEN)]
    return {
        name: instructions(prepare, meeting_keys(OPEN, lower)) / instructions(prepare, plain)
        for name, prepare, lower in (("reports", _reports, 0), ("cancels", _cancels, OWNER))
    }


@click.command(epilog="Example: python -m tests.core.hostile_keys")
@click.option("--counted-in", type=click.Path(path_type=Path), hidden=True)
def main(counted_in: Path | None) -> None:
    """Print the cost of keys that would meet, beside that of drawn keys."""
    if counted_in is not None:
        click.echo(json.dumps(_count(counted_in)))
        return
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "tests.core.hostile_keys", "--counted-in", name]
        done = subprocess.run(under_callgrind(command, Path(name)), cwd=ROOT, check=False)
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(prog_name="python -m tests.core.hostile_keys")
