"""Ids and tags that a caller chooses so that they meet in a hash table cost others nothing."""

import os
import random
import time
from collections.abc import Callable

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import Stream, asking, cancelling, offering, replaying, reporting
from .support import meeting_keys

COUNT, MEASURED = 16_000, 3_500  # open at once; events in the measured message
OWNER = 1  # number of the first stream, the lower half of its tags' keys


def secret_core() -> core.Scheduler:
    made = core.Scheduler(
        hash_key=os.urandom(16), leases_max=1 << 20, queue_max=1 << 20, flow_queue_max=1 << 20
    )
    made.set_flow(b"f", 1_000)
    return made


def reports_ms(ids: list[int]) -> float:
    """CPU time of one message that reports the progress of leases with these ids."""
    stream = Stream(secret_core())
    stream.send(0, offering("p", capacity=1 << 30))
    for at in range(0, COUNT, 500):
        stream.send(0, *(replaying(i, f"r{i}") for i in ids[at : at + 500]))
    return cost_ms(stream, [reporting(i) for i in ids[-MEASURED:]])


def cancels_ms(tags: list[int]) -> float:
    """CPU time of one message that withdraws requests with these tags."""
    stream = Stream(secret_core())
    stream.send(0, offering("p", capacity=20))
    for at in range(0, COUNT, 500):
        stream.send(0, *(asking(tag, f"r{tag}") for tag in tags[at : at + 500]))
    return cost_ms(stream, [cancelling(tag) for tag in tags[-MEASURED:]])


def cost_ms(stream: Stream, events: list[pb.SessionEvent]) -> float:
    began = time.process_time_ns()
    stream.send(0, *events)
    return (time.process_time_ns() - began) / 1e6


@pytest.mark.parametrize(("measured", "lower"), [(reports_ms, 0), (cancels_ms, OWNER)])
def test_keys_made_to_meet_in_a_table_cost_as_much_as_any(
    measured: Callable[[list[int]], float], lower: int
) -> None:
    rnd = random.Random(1)
    plain = [rnd.getrandbits(61) + 1 for _ in range(COUNT)]
    met = meeting_keys(COUNT, lower)
    ratio = min(measured(met) / measured(plain) for _ in range(3))
    assert ratio < 2
