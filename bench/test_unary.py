"""Measures unary Admit through gRPC beside an empty echo over the same transport."""

from operator import attrgetter

import numpy as np
import pytest

from bench.calls import Admits, give_answer
from bench.compare import abba, compare
from bench.peers import Peer
from bench.record import Recorder
from bench.sizes import SIZES

_TRANSPORTS = {"unix": "Unix socket", "tcp": "TCP"}


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_unary(record: Recorder, ours: Peer, theirs: Peer, transport: str) -> None:
    """Measure one caller, one call at a time, granted at once."""
    target, rounds, calls = attrgetter(transport), SIZES.rounds, SIZES.slice_calls
    name = _TRANSPORTS[transport]
    with (
        Admits(ours, target(ours), is_scheduler=True) as admits,
        Admits(theirs, target(theirs), is_scheduler=False) as echoes,
        Admits(theirs, target(theirs), is_scheduler=False) as again,
    ):
        answers = [admits.admit(admits.next_request())]
        give_answer(theirs, answers[0])
        record.steps(
            lambda data: answers.append(admits.admit(data)),
            lambda: (admits.next_request(),),
            SIZES.calls,
        )
        admits.end(answers)
        control = abba(lambda: echoes.slice(calls), lambda: again.slice(calls), rounds)
        pairs = abba(lambda: admits.slice(calls), lambda: echoes.slice(calls), rounds)
    record.control(f"unary, {name}: the echo beside itself", compare(control[:, :, 0]))
    p99_ns = float(np.quantile(admits.spent_ns, 0.99))
    round_trip, cpu = (compare(pairs[:, :, figure]) for figure in range(2))
    sizes = {"callers": 1}
    record.rung(
        f"unary.{transport}",
        f"Admit, {name}: round trip",
        sizes,
        figures={"median_ns": round_trip.a, "p99_ns": p99_ns},
        reference="empty echo",
        comparison=round_trip,
        reference_ns=round_trip.b,
    )
    record.rung(
        f"unary.{transport}.cpu",
        f"Admit, {name}: server CPU",
        sizes,
        figures={"median_ns": cpu.a},
        reference="empty echo",
        comparison=cpu,
        reference_ns=cpu.b,
    )
