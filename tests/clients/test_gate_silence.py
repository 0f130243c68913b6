"""Tests the gate before a scheduler whose process is stopped, or whose event loop hangs."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from processes.line import Line
from schedsvc_client.aio import AsyncScheduler, SchedulerSession, SessionState
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import PoolSettings, Settings

from tests.processes.programs import Programs, at_rest, standing
from tests.waiting import until

from .asgi import Engine, Exchange, ask, owner
from .bench import TRUST

PROMPT_TOKENS = len(json.loads(ask())["prompt"])

WAYS = {
    "stopped": (signal.SIGSTOP, signal.SIGCONT),
    "hanging": (signal.SIGUSR1, signal.SIGUSR2),
}


SETTINGS = {
    "tenants": [{"name": "acme", "weight": 1}],
    # At the end of a test a dead stream may hold a lease, for which a drain would wait.
    "limits": {"drain_ms": 100},
}


class Scheduler(Programs):
    """Runs a scheduler in a process of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SETTINGS)
        self.start_scheduler((str(Path(__file__).parent / "hanging_scheduler.py"),))

    def signal(self, number: signal.Signals) -> None:
        if number == signal.SIGSTOP:
            self.pause("scheduler")
        else:
            self.send("scheduler", number)

    def stop(self) -> None:
        for number in (signal.SIGCONT, signal.SIGUSR2):
            self.signal(number)
        super().stop()


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    with standing(Scheduler) as made:
        yield made


class Gated:
    """Runs a gate before an engine of the tests, and shows what it sees of its scheduler."""

    def __init__(
        self, target: str, unreachable_after_s: float, epoch: int = 0, gates: int = 1
    ) -> None:
        self.engine = Engine(prompt_tokens=PROMPT_TOKENS)
        self.gate = Gate(
            self.engine,
            Settings(
                target=target,
                pool=PoolSettings(epoch=epoch, gates=gates),
                tenant_headers=("x-tenant-id",),
                unreachable_after_s=unreachable_after_s,
            ),
        )
        self._owner = owner()

    @property
    def session(self) -> SchedulerSession:
        assert self.gate._runtime is not None
        return self.gate._runtime.session

    async def ask(self) -> Exchange:
        return await Exchange(self.gate, ask(), headers=TRUST, owner=self._owner).run()

    async def mode(self) -> str:
        return (await self.ask()).answer_headers["x-schedsvc-mode"]


Gating = Callable[..., Gated]


@pytest.fixture
async def gated() -> AsyncIterator[Gating]:
    made: list[Gated] = []

    def make(target: str, unreachable_after_s: float) -> Gated:
        made.append(Gated(target, unreachable_after_s))
        return made[-1]

    yield make
    for one in made:
        await one.gate._close()


@pytest.mark.parametrize("way", WAYS)
async def test_requests_go_on_without_a_scheduler_that_is(
    scheduler: Scheduler, gated: Gating, way: str
) -> None:
    stops, goes_on = WAYS[way]
    gate = gated(scheduler.target, 0.3)
    assert await gate.mode() == "enforced"
    scheduler.signal(stops)
    # They are sent on the open stream; the scheduler reads them when it resumes.
    modes = await asyncio.gather(*(gate.mode() for _ in range(4)))
    assert set(modes) == {"fail-open"}
    assert gate.session.state is SessionState.SILENT
    assert await gate.mode() == "fail-open"
    scheduler.signal(goes_on)
    await until(lambda: gate.session.state is SessionState.CONNECTED)
    assert await gate.mode() == "enforced"
    await gate.session.flush(20)
    async with AsyncScheduler(scheduler.target) as client:
        stats = await at_rest(client)
    # A request that ran without the scheduler is withdrawn there: not charged, and not run again.
    assert len(gate.engine.bodies) == 7
    assert stats.totals.completed == 2
    assert stats.totals.received == stats.totals.completed + (
        stats.totals.cancelled + stats.totals.evicted
    )
    (flow,) = (flow for flow in stats.flows if flow.tenant == "acme")
    assert flow.input_tokens == 2 * gate.engine.prompt_tokens
    assert flow.output_tokens == 2 * gate.engine.output_tokens


async def enforces(gate: Gated) -> bool:
    """Return whether it asks now: beside other work an answer may be late once."""
    return bool(await gate.mode() == "enforced")


async def test_dead_connection_is_replaced_before_pings_end(
    scheduler: Scheduler, gated: Gating
) -> None:
    async with Line(scheduler.target, f"unix:{scheduler.folder}/line") as line:
        gate = gated(line.target, 0.1)
        await until(lambda: enforces(gate), "the scheduler answers in time")
        line.part()
        assert await gate.mode() == "fail-open"
        # The open connection stays dead, and gRPC's own pings find that after 20 s.
        line.heal(only_new=True)
        await until(lambda: enforces(gate), "the gate asks on a new connection")
        assert line.opened > 1


async def test_a_gate_that_stood_still_does_not_fail_open(
    scheduler: Scheduler, gated: Gating, caplog: pytest.LogCaptureFixture
) -> None:
    gate = gated(scheduler.target, 0.3)
    assert await gate.mode() == "enforced"
    pulse = gate.session._heartbeat._pulse
    scheduler.signal(signal.SIGSTOP)
    await until(lambda: pulse._is_asked)
    with caplog.at_level(logging.WARNING, "schedsvc_client"):
        # Together with the time until here it exceeds the bound.
        time.sleep(0.3)  # noqa: ASYNC251 - the event loop has to stall
        scheduler.signal(signal.SIGCONT)
        assert await gate.mode() == "enforced"
    assert "did not answer" not in caplog.text


async def test_a_scheduler_that_takes_no_beats_is_sent_none(
    fake: FakeScheduler, gated: Gating
) -> None:
    gate = gated(fake.target, 0.02)
    assert await gate.mode() == "enforced"
    sent = len(fake.messages)
    await asyncio.sleep(0.1)
    assert await gate.mode() == "enforced"
    await until(lambda: len(fake.messages) > sent)
    events = [
        event.WhichOneof("event")
        for data in fake.messages
        for event in pb.SessionRequest.FromString(data).events
    ]
    assert "beat" not in events
