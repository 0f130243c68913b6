"""Measures what attackers cost a victim: both callers, their turns, and the verdict.

A real scheduler serves a victim, whose requests are granted and complete at a steady rate.
Attackers, in a process of their own, attack and rest in turns, so a drift of the machine affects
both. Two figures of one run are compared; a time alone says more of the machine.
"""

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple, Protocol

import click
import grpc
import numpy as np
from numpy.typing import NDArray
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from bench import machine
from bench.machine import run_delay_ns
from bench.peers import Peer
from bench.processes import started

__all__ = [
    "TOKENS",
    "Attackers",
    "Taken",
    "Victim",
    "Watcher",
    "attacking",
    "json_option",
    "percentiles",
    "principal",
    "take_turns",
    "verdict",
]

#: The bearer tokens of both callers.
TOKENS = {"victim": secrets.token_hex(), "attacker": secrets.token_hex()}

_READY_S_MAX = 300.0
_CALL_S_MAX = 30.0

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def principal(name: str, **grants: Any) -> dict[str, Any]:
    """Configure one of the two callers."""
    return {"name": name, "sha256": sha256(TOKENS[name].encode()).hexdigest(), **grants}


class Taken(NamedTuple):
    """Holds the times of one Admit."""

    ms: float
    cpu_ms: float  # of the scheduler
    delay_ms: float  # in which the victim was ready and waited for its core


class Victim:
    """Behaves as a caller should: it asks for `wanted` every `period_s`."""

    def __init__(self, target: str, server: Peer, period_s: float, **wanted: Any) -> None:
        self._server = server
        self._period_s = period_s
        self._wanted = {"input_tokens": [100], "max_output_tokens": 100, **wanted}
        self._metadata = (("authorization", f"Bearer {TOKENS['victim']}"),)
        self._channel = grpc.insecure_channel(target)
        self._stub: Any = SchedulerServiceStub(self._channel)
        self._asked = 0

    def __enter__(self) -> "Victim":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def measure(self, seconds: float) -> list[Taken]:
        """Ask and complete at a steady rate; return the time of each Admit."""
        taken = []
        began_s = time.perf_counter()
        for step in range(round(seconds / self._period_s)):
            time.sleep(max(0.0, began_s + step * self._period_s - time.perf_counter()))
            taken.append(self._one())
        return taken

    def _one(self) -> Taken:
        self._asked += 1
        pid = os.getpid()
        request = pb.AdmitRequest(request_id=f"v-{pid}-{self._asked}", **self._wanted)
        delay_ns = run_delay_ns(pid)
        began_s, began_ns = time.perf_counter(), self._server.cpu_ns()
        answer = self._stub.Admit(request, timeout=_CALL_S_MAX, metadata=self._metadata)
        used_ms = (self._server.cpu_ns() - began_ns) / 1e6
        taken_ms = (time.perf_counter() - began_s) * 1e3
        delay_ms = (run_delay_ns(pid) - delay_ns) / 1e6
        if answer.outcome != pb.OUTCOME_GRANTED:
            raise click.ClickException(f"the victim was not granted: {answer}")
        lease = answer.grant
        done = pb.CompleteRequest(
            lease_id=lease.lease_id, pool_epoch=lease.pool_epoch, input_tokens=100, output_tokens=9
        )
        self._stub.Complete(done, timeout=_CALL_S_MAX, metadata=self._metadata)
        return Taken(taken_ms, used_ms, delay_ms)


@dataclass
class Attackers:
    """Holds the process of the attackers; after the block, `counts` holds what they achieved."""

    process: "Popen[bytes]"
    settle_s: float
    counts: dict[str, int] = field(default_factory=dict)

    def attack(self, attacks: bool) -> None:
        """Start or stop the attack; return when earlier calls have ended."""
        self.process.send_signal(signal.SIGCONT if attacks else signal.SIGSTOP)
        time.sleep(self.settle_s)


@contextmanager
def attacking(
    arguments: Sequence[str],
    ready: Path,
    *,
    before: Sequence[str] = ("nice", "-n", "19"),
    cores: Sequence[int] = (),
    settle_s: float = 0.5,
) -> Iterator[Attackers]:
    """Run attackers: Python with these arguments, which prints counts as JSON after SIGTERM."""
    ready.unlink(missing_ok=True)
    command = [*arguments, "--ready-file", str(ready)]
    with started(
        command, ready, start_s_max=_READY_S_MAX, before=before, cores=cores, stdout=PIPE
    ) as process:
        attackers = Attackers(process, settle_s)
        try:
            yield attackers
            attackers.attack(True)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=_READY_S_MAX)
            attackers.counts |= json.loads(out)
        finally:
            process.kill()  # a stopped process does not get SIGTERM


class Watcher(Protocol):
    """Looks at something during each slice."""

    def begin(self) -> None:
        """Begin a slice."""

    def end(self, attacks: bool) -> None:
        """End a slice."""


def take_turns(
    victim: Victim,
    attackers: Attackers,
    turns: int,
    slice_s: float,
    watchers: Sequence[Watcher] = (),
) -> dict[bool, list[list[Taken]]]:
    """Measure the victim in quiet and attacked slices, two of each a turn: by whether attacked."""
    slices: dict[bool, list[list[Taken]]] = {False: [], True: []}
    for _ in range(turns):
        for attacks in (False, True, True, False):
            attackers.attack(attacks)
            for watcher in watchers:
                watcher.begin()
            slices[attacks].append(victim.measure(slice_s))
            for watcher in watchers:
                watcher.end(attacks)
    return slices


def percentiles(taken_ms: "Sequence[float] | NDArray[np.float64]") -> dict[str, float]:
    """Return p50 and p99; infinite where nothing was measured."""
    if not len(taken_ms):
        return {"p50": float("inf"), "p99": float("inf")}
    return {f"p{q}": round(float(np.percentile(taken_ms, q)), 3) for q in (50, 99)}


def verdict(found: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Print what was found; exit with status 1 if a bound does not hold (`holds`)."""
    if as_json:
        about = {"machine": machine.describe(), "commit": machine.commit()}
        click.echo(json.dumps({**about, **found}))
    else:
        show(found)
    if not found["holds"]:
        sys.exit(1)
