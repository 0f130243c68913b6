"""Tests the streams that offer a pool, and the epochs of its engine."""

from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import Stream, asking, completing, fates, faults, offering, reporting
from .support import make, pool


def test_a_pool_is_attached_while_a_stream_offers_it() -> None:
    s = core.Scheduler(headroom_ppm=0)
    s.set_flow(b"f", 1000)
    gate, first, second = Stream(s), Stream(s), Stream(s)
    assert fates(gate.send(0, asking(1, "r"))) == [(1, core.REJECTED_NO_POOL)]
    first.send(0, offering("p"), offering("p", capacity=120))
    second.send(0, offering("p", capacity=120))
    gate.grant(0, 2, "r", 100)
    gate.send(0, asking(3, "waits", 100))
    first.session.close(0)
    assert pool(s, 0)["attached"]
    second.session.close(0)
    assert not pool(s, 0)["attached"]
    s.poll(0)
    assert pool(s, 0)["wait_reason"] == "DETACHED"
    assert fates(gate.send(0, completing(1))) == []
    assert fates(gate.send(0, asking(4, "new"))) == [(4, core.REJECTED_NO_POOL)]
    assert fates(Stream(s).send(0, offering("p", epoch=2))) == []
    s.check()


def test_a_reattached_pool_serves_what_waited() -> None:
    s = core.Scheduler(headroom_ppm=0)
    s.set_flow(b"f", 1000)
    gate, engine = Stream(s), Stream(s)
    engine.send(0, offering("p", capacity=20))
    lease_id = gate.grant(0, 1, "runs")
    gate.send(0, asking(2, "waits"))
    engine.session.close(0)
    gate.send(0, completing(lease_id))
    Stream(s).send(0, offering("p", epoch=2, capacity=20))
    assert fates(gate.pull(0)) == [(2, core.GRANTED)]


def test_pools_of_a_stream_are_bounded() -> None:
    stream = Stream(make())
    answer = stream.send(0, *(offering(f"q{i}") for i in range(9)), offering("q0", capacity=50))
    assert faults(answer) == [(0, 8, "pool.pool")]
    assert len(stream.core.stats(0)["pools"]) == 1 + 8
    stream.session.close(0)
    attached = [p["attached"] for p in stream.core.stats(0)["pools"]]
    assert attached == [True] + [False] * 8


def test_telemetry_of_the_pools_epoch_is_shown() -> None:
    stream = Stream(make())
    for epoch, used in ((1, 40), (2, 99)):
        stream.send(0, pb.SessionEvent(
            telemetry=pool_pb2.EngineTelemetry(pool="p", epoch=epoch, used_tokens=used)
        ))  # fmt: skip
    assert pool(stream.core, 0)["engine_used_tokens"] == 40


def test_names_of_pools_without_streams_are_given_away() -> None:
    s = core.Scheduler()
    for n in range(200):
        stream = Stream(s)
        assert not faults(stream.send(0, offering(f"pool-{n}")))
        stream.session.close(0)
    assert len(s.stats(0)["pools"]) == 64
    assert s.pool_index(b"pool-199") >= 0
    assert s.pool_index(b"pool-0") == -1
    open_streams = [Stream(s) for _ in range(9)]
    answers = [
        stream.send(0, *(offering(f"held-{k}-{n}") for n in range(8)))
        for k, stream in enumerate(open_streams)
    ]
    assert [len(faults(answer)) for answer in answers] == [0] * 8 + [8]


def test_a_pool_without_streams_may_begin_at_an_earlier_epoch() -> None:
    s = make()
    first = Stream(s)
    first.send(0, offering("q", epoch=9))
    assert faults(first.send(0, offering("q", epoch=8)))
    lease = first.send(0, asking(1, "r", pools=["q"])).verdicts[0].response.grant
    first.session.close(0)
    again = Stream(s)
    assert not faults(again.send(0, offering("q", epoch=8)))
    assert s.stats(0)["pools"][1]["epoch"] == 8
    assert s.stats(0)["pools"][1]["promised_tokens"] == 0
    state = again.send(0, reporting(lease.lease_id, epoch=9)).leases[0].state
    assert state == pb.LEASE_STATE_VOID
    s.check()


def test_an_epoch_without_streams_hinders_no_earlier_one() -> None:
    # An engine has two processes, and its wall clock was set back: a message of one of them came
    # late. Found by the fault simulator, seed 3298534913999: one was turned away for good.
    s = make()
    first, late = Stream(s), Stream(s)
    first.send(0, offering("q", epoch=5))
    assert not faults(late.send(0, offering("q", epoch=9)))
    assert faults(late.send(0, offering("q", epoch=5)))
    third = Stream(s)
    assert faults(third.send(0, offering("q", epoch=5)))
    late.session.close(0)
    assert not faults(third.send(0, offering("q", epoch=5)))
    assert s.stats(0)["pools"][1]["epoch"] == 5
    third.session.close(0)
    assert s.stats(0)["pools"][1]["attached"]
    first.session.close(0)
    assert not s.stats(0)["pools"][1]["attached"]
    s.check()


def test_a_pool_is_its_principals_while_it_is_offered() -> None:
    s = make()
    owner, other = Stream(s, principal=1), Stream(s, principal=2)
    owner.send(0, offering("q", epoch=1, capacity=100))
    fault = other.send(0, offering("q", epoch=2, capacity=1 << 30)).faults[0]
    assert (fault.code, fault.field) == (9, "pool.pool")
    assert s.stats(0)["pools"][1]["capacity_tokens"] == 100
    telemetry = pool_pb2.EngineTelemetry(pool="q", epoch=1, running=3)
    fault = other.send(0, pb.SessionEvent(telemetry=telemetry)).faults[0]
    assert (fault.code, fault.field) == (9, "telemetry.pool")
    assert not faults(owner.send(0, pb.SessionEvent(telemetry=telemetry)))
    assert not faults(owner.send(0, offering("q", epoch=2, capacity=200)))
    owner.send(0, pb.SessionEvent(goodbye=pb.SessionGoodbye()))
    owner.session.close(0)
    assert not faults(other.send(0, offering("q", epoch=2, capacity=300)))
    s.check()
