"""After a start without saved state a pool waits for all streams of its engine to replay."""

from typing import Any

import pytest
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import Stream, asking, fates, faults, replaying
from .support import SECOND, pool

BEAT = pb.SessionEvent(beat=pb.SessionBeat())
TTL, GRACE = 10 * SECOND, 20 * SECOND
WINDOW = TTL + GRACE


def scheduler(**options: Any) -> core.Scheduler:
    given: dict[str, Any] = {"lease_ttl_ns": TTL, "lease_grace_ns": GRACE, "headroom_ppm": 0}
    s = core.Scheduler(**given | options)
    s.set_flow(b"f", 1000)
    return s


def offering(gates: int, capacity: int = 100) -> pb.SessionEvent:
    return pb.SessionEvent(
        pool=pool_pb2.PoolRegistration(
            pool="p", epoch=1, capacity_tokens=capacity, block_size_tokens=1, gates=gates
        )
    )


def test_a_pool_grants_once_all_gates_have_replayed() -> None:
    s = scheduler()
    first, second = Stream(s), Stream(s)
    first.send(0, offering(2))
    assert first.send(0, asking(1, "r", 60, pools=["p"])).verdicts == []
    assert pool(s, 0)["wait_reason"] == "DETACHED"
    # The other process runs a request: without its replay, both would not fit.
    answer = second.send(
        0, offering(2), replaying(77, "runs", reserved_tokens=70, prompt_tokens=60)
    )
    assert fates(answer) == []
    assert fates(first.pull(0)) == []
    second.send(0, BEAT)
    assert pool(s, 0)["wait_reason"] == "KV"
    assert fates(first.pull(0)) == []
    second.send(0, pb.SessionEvent(complete=pb.CompleteRequest(lease_id=77, pool_epoch=1)))
    assert fates(first.pull(0)) == [(1, core.GRANTED)]
    s.check()


@pytest.mark.parametrize("gates", [0, 1])
def test_a_single_gate_is_granted_with_its_first_request(gates: int) -> None:
    stream = Stream(scheduler())
    stream.send(0, offering(gates))
    stream.grant(0, 1, "r", pools=["p"])


def test_a_gate_of_the_version_before_is_not_waited_for() -> None:
    s = scheduler()
    asks, offers = Stream(s), Stream(s)
    offers.send(0, offering(0))
    asks.grant(0, 1, "r")


def test_a_gate_that_never_comes_is_waited_for_until_its_leases_are_over() -> None:
    s = scheduler(queue_ttl_ns=10 * WINDOW)
    stream = Stream(s)
    stream.send(SECOND, offering(3))
    stream.send(SECOND, asking(1, "r", pools=["p"]))
    assert s.next_deadline() == SECOND + WINDOW
    s.poll(SECOND + WINDOW - 1)
    assert fates(stream.pull(SECOND + WINDOW - 1)) == []
    s.poll(SECOND + WINDOW)
    assert fates(stream.pull(SECOND + WINDOW)) == [(1, core.GRANTED)]
    s.check()


def test_a_gate_counts_once_while_it_is_there() -> None:
    s = scheduler()
    for _ in range(3):
        stream = Stream(s)
        stream.send(0, offering(2), BEAT)
        stream.session.close(0)
    stays = Stream(s)
    stays.send(0, offering(2), BEAT, BEAT, asking(1, "r", pools=["p"]))
    assert fates(stays.pull(0)) == []
    # A stream that replayed before it offered the pool counts too.
    other = Stream(s)
    other.send(0, BEAT)
    other.send(0, offering(2))
    assert fates(stays.pull(0)) == [(1, core.GRANTED)]


def test_a_pool_waits_once() -> None:
    s = scheduler()
    streams = [Stream(s), Stream(s)]
    for stream in streams:
        stream.send(0, offering(2), BEAT)
    streams[1].session.close(0)
    streams[0].grant(0, 1, "r", pools=["p"])
    streams[0].send(0, offering(4))
    streams[0].grant(0, 2, "r2", pools=["p"])
    s.check()


def test_saved_state_knows_what_runs() -> None:
    before = scheduler()
    before.set_flow(b"f", 2000)
    Stream(before).send(0, offering(0))
    before.save_all()
    rows = [(key, value, 0) for key, value in before.save(0, 1_000)]
    assert rows
    s = scheduler()
    s.set_saved(0, rows)
    stream = Stream(s)
    stream.send(0, offering(3))
    stream.grant(0, 1, "r", pools=["p"])


@pytest.mark.parametrize("gates", [-1, (1 << 16) + 1])
def test_a_number_of_gates_out_of_range_is_named(gates: int) -> None:
    stream = Stream(scheduler())
    assert faults(stream.send(0, offering(gates))) == [(0, 3, "pool.gates")]
