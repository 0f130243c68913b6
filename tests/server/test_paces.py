"""Tests a caller's part of the scheduler's time: events a second, and a part of its turns."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import CallerError
from schedsvc.service import Credentials, Known
from schedsvc.service import pace as pace_module
from schedsvc.service.pace import Paces
from tests.waiting import Stopwatch, until

from .conftest import ask, calling, failure, serving
from .test_principals import bearer

LOUD, CALM = "loud", "calm"
SECOND, MS = 1_000_000_000, 1_000_000


def principals(**limits: Any) -> dict[str, Any]:
    listed = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "tenants": ["*"]}
        for name in (LOUD, CALM)
    ]
    listed[0] |= limits
    return {"principals": listed}


class Clock:
    """Replaces the monotonic clock of the module under test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10 * SECOND
        monkeypatch.setattr(pace_module.time, "monotonic_ns", lambda: self.now_ns)


def paces(**limits: Any) -> Paces:
    return Paces(Credentials([Known("loud", (b"1" * 32,), **limits), Known("calm", (b"2" * 32,))]))


def test_events_beyond_the_rate_are_held_until_it_has_recovered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, limited = Clock(monkeypatch), paces(events_per_second=10)
    for _ in range(10):
        limited.enter(1)
        limited.charge(1, 1, 0)
    limited.enter(1)
    limited.charge(1, 1, 0)
    with pytest.raises(CallerError, match="events_per_second") as caught:
        limited.enter(1)
    assert caught.value.code == 8
    assert limited.pause_s(1) == pytest.approx(0.1)
    limited.enter(2)
    assert limited.pause_s(2) == 0
    assert limited.counts == {("loud", "call"): 1, ("loud", "stream"): 1}
    clock.now_ns += SECOND // 10
    limited.enter(1)


def test_work_beyond_the_part_of_the_loop_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, limited = Clock(monkeypatch), paces(loop_share=0.25)
    limited.charge(1, 4_096, 25 * MS)
    assert limited.pause_s(1) == 0
    limited.charge(1, 1, 10 * MS)
    assert limited.pause_s(1) == pytest.approx(0.04)
    clock.now_ns += 40 * MS
    assert limited.pause_s(1) == 0


def test_nothing_is_limited_by_default() -> None:
    free = paces()
    free.charge(1, 1 << 40, 1 << 60)
    free.enter(1)
    assert free.pause_s(1) == 0
    assert free.counts == {}


async def test_calls_beyond_the_rate_are_refused_and_others_served() -> None:
    async with (
        serving(auth=principals(events_per_second=3)) as server,
        calling(server.targets[0]) as stub,
    ):
        codes = []
        for _ in range(12):
            call = stub.Stats(pb.StatsRequest(), metadata=bearer(LOUD))
            codes.append(await call.code())
        assert codes[:3] == [grpc.StatusCode.OK] * 3
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
        error = await failure(stub.Stats(pb.StatsRequest(), metadata=bearer(LOUD)))
        assert "events_per_second or loop_share (auth.principals)" in (error.details() or "")
        assert (await stub.Admit(ask(10), metadata=bearer(CALM))).outcome == pb.OUTCOME_GRANTED
        page = await server.metrics.page()
        assert b'schedsvc_throttled_total{caller="loud",what="call"}' in page


async def test_a_stream_beyond_the_rate_is_read_later_and_loses_nothing() -> None:
    async with (
        serving(auth=principals(events_per_second=10)) as server,
        calling(server.targets[0]) as stub,
    ):
        call = stub.Session(metadata=bearer(LOUD))
        hello = pb.SessionEvent(hello=pb.SessionHello(client_id="shim", incarnation=1))
        beats = [pb.SessionEvent(beat=pb.SessionBeat())] * 13
        watch = Stopwatch()
        await call.write(pb.SessionRequest(seq=1, events=[hello, *beats]))
        await call.write(pb.SessionRequest(seq=2, events=beats[:1]))
        answer = pb.SessionResponse()
        while answer.ack_seq < 2:
            answer = await call.read()
        # 14 events at 10 a second, of which 10 come at once.
        assert watch.ran_for(0.3)
        # Behind the second message, whose event overdraws the budget again, the stream waits again.
        throttled = server.metrics.counts.throttled
        await until(lambda: throttled["loud", "stream"] > 1, "the stream waits again")
        assert throttled["loud", "stream"] == 2
        call.cancel()
