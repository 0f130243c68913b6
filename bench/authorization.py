"""Measure what authorization adds to each Session event, paired in one process.

One caller sends admits, Progress and Complete on one stream. In each round it does so twice: with
patterns for pools, tenants and classes and a share of the places, and without limits. Both use the
same core, because two cores differ by more than what is measured.
"""

import gc
import statistics
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import click
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from bench.harness import json_option, verdict
from bench.machine import need_release_core
from schedsvc._core import Scheduler

__all__ = ["BOUND_NS", "Caller", "main", "measure"]

#: The most that authorization may add to an event, median over the rounds.
BOUND_NS = 20.0
_TENANTS = 64
_ROOM = 1 << 40
_PRINCIPAL = 1
_RESAMPLES = 2_000


class Caller:
    """Streams to a core whose pool has room for all."""

    def __init__(self) -> None:
        # The table of answers is full: in both halves each Complete evicts one.
        self._core = core = Scheduler(session_open_max=8_192, answers_max=1_024)
        for number in range(_TENANTS):
            core.set_flow(b"team-%d" % number, 1_000)
        self._session = core.open_session(_PRINCIPAL)
        self._seq = self._asked = 0
        hello = pb.SessionHello(client_id="bench", incarnation=1)
        pool = pool_pb2.PoolRegistration(
            pool="gpu-1", epoch=1, capacity_tokens=_ROOM, block_size_tokens=16
        )
        self._timed([pb.SessionEvent(hello=hello), pb.SessionEvent(pool=pool)])

    def limit(self, *, is_limited: bool) -> None:
        """Give the caller grants, or none, and let it name each tenant."""
        grants = ([b"gpu-*"], [b"lab-*", b"team-*"], [b"default", b"batch-*"], 999_000)
        self._core.set_principal(1, _PRINCIPAL, b"gate", *(grants if is_limited else ()))
        self.round_ns(2 * _TENANTS)

    def send(self, events: Sequence[pb.SessionEvent]) -> pb.SessionResponse:
        """Send one message; return the messages that wait for the caller."""
        self._timed(events)
        return self._take()

    def _take(self) -> pb.SessionResponse:
        self._core.poll(1)
        whole = pb.SessionResponse()
        while (data := self._session.take(1)) is not None:
            whole.MergeFromString(data)
        return whole

    def _timed(self, events: Sequence[pb.SessionEvent]) -> int:
        self._seq += 1
        data = pb.SessionRequest(seq=self._seq, events=events).SerializeToString()
        receive = self._session.receive
        began_ns = time.thread_time_ns()
        receive(1, data)
        return time.thread_time_ns() - began_ns

    def _asks(self, count: int) -> list[pb.SessionEvent]:
        asks = []
        for number in range(self._asked, self._asked + count):
            request = pb.AdmitRequest(
                request_id=f"r{number}", tenant=f"team-{number % _TENANTS}", pools=["gpu-1"],
                input_tokens=[100], max_output_tokens=100,
            )  # fmt: skip
            asks.append(pb.SessionEvent(admit=pb.SessionAdmit(tag=number + 1, request=request)))
        self._asked += count
        return asks

    def round_ns(self, count: int) -> int:
        """Admit, report and complete `count` requests; return the CPU time of it, in ns."""
        spent_ns = self._timed(self._asks(count))
        leases = [v.response.grant.lease_id for v in self._take().verdicts]
        if len(leases) != count:
            raise RuntimeError(f"{len(leases)} of {count} were granted")
        progress = [
            pb.LeaseProgress(lease_id=lease, pool_epoch=1, output_tokens=10) for lease in leases
        ]
        spent_ns += self._timed([pb.SessionEvent(progress=each) for each in progress])
        ends = [
            pb.CompleteRequest(lease_id=lease, pool_epoch=1, input_tokens=100, output_tokens=20)
            for lease in leases
        ]
        spent_ns += self._timed([pb.SessionEvent(complete=each) for each in ends])
        self._take()
        return spent_ns


def measure(rounds: int, count: int) -> list[tuple[float, float]]:
    """Return the ns of an event without and with authorization, for each round."""
    caller, found = Caller(), []
    for number in range(rounds + 1):
        spent = {}
        for is_limited in (False, True) if number % 2 else (True, False):
            caller.limit(is_limited=is_limited)
            spent[is_limited] = caller.round_ns(count) / (3 * count)
        if number:  # the first round makes tables and caches grow
            found.append((spent[False], spent[True]))
    return found


def _interval(values: Sequence[float], draws: Random) -> tuple[float, float]:
    """Return the 95 % interval of the median, by resampling."""
    medians = sorted(
        statistics.median(draws.choices(values, k=len(values))) for _ in range(_RESAMPLES)
    )
    return medians[_RESAMPLES // 40], medians[-_RESAMPLES // 40]


@click.command(epilog="Example: python -m bench.authorization --rounds 400")
@click.option("--rounds", default=400, show_default=True, type=click.IntRange(min=2))
@click.option("--events", default=1_000, show_default=True, type=click.IntRange(1, 4_096))
@json_option
def main(rounds: int, events: int, as_json: bool) -> None:
    """Show what authorization adds to an event; exit with status 1 if that exceeds 20 ns."""
    need_release_core()
    gc.collect()
    gc.disable()
    found = measure(rounds, events)
    plain, limited = (statistics.median(column) for column in zip(*found, strict=True))
    more = [after - before for before, after in found]
    median, interval = statistics.median(more), _interval(more, Random(1))
    report = {"rounds": rounds, "plain_ns": plain, "limited_ns": limited}
    report |= {"more_ns": median, "interval_95": interval, "holds": median <= BOUND_NS}
    verdict(report, as_json, _show)


def _show(report: dict[str, Any]) -> None:
    low, high = report["interval_95"]
    click.echo(
        f"an event without authorization: {report['plain_ns']:.1f} ns,"
        f" with it: {report['limited_ns']:.1f} ns\n"
        f"paired difference, median of {report['rounds']}: {report['more_ns']:.1f} ns"
        f" [{low:.1f}, {high:.1f}]; at most {BOUND_NS:g} ns"
    )


if __name__ == "__main__":
    main(prog_name="python -m bench.authorization")
