"""Tests the gate without its scheduler, and its life with the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import Settings

from tests.waiting import until

from .asgi import Exchange, ask, owner
from .bench import Bench, gives_up_soon


async def test_fail_open_keeps_the_last_level_and_ends(bench: Bench) -> None:
    bench.engine.gate = asyncio.Event()
    # Three run when the scheduler vanishes.
    tasks = [asyncio.ensure_future(bench.ask()) for _ in range(3)]
    await until(lambda: bench.engine.running == 3)
    gives_up_soon(bench.gate)
    await bench.fake.stop()
    runtime = bench.gate._runtime
    assert runtime is not None
    await until(lambda: not runtime.session.available)
    tasks += [asyncio.ensure_future(bench.ask()) for _ in range(6)]
    leaving = bench.exchange()
    tasks.append(asyncio.ensure_future(leaving.run()))
    await asyncio.sleep(0.05)
    assert bench.engine.running == 3
    leaving.left.set()
    bench.engine.gate.set()
    done = await asyncio.gather(*tasks)
    assert leaving.sent == []
    assert bench.engine.running_max == 3
    modes = [e.answer_headers["x-schedsvc-mode"] for e in done if e.sent]
    assert modes == ["enforced"] * 3 + ["fail-open"] * 6
    assert runtime.limit.running == 0
    await bench.fake.start()
    await until(lambda: runtime.session.available)
    back = await bench.ask()
    assert back.answer_headers["x-schedsvc-mode"] == "enforced"
    await bench.settled()
    assert len(bench.fake.books) == 4


@pytest.mark.usefixtures("gives_up")
async def test_local_waiters_ask_the_scheduler_when_it_is_back(bench: Bench) -> None:
    bench.engine.gate = asyncio.Event()
    await bench.fake.stop()
    tasks = [asyncio.ensure_future(bench.ask()) for _ in range(3)]
    await until(lambda: bench.engine.running == 1)
    await asyncio.sleep(0.05)
    assert bench.engine.running == 1
    await bench.fake.start()
    await until(lambda: bench.engine.running == 3)
    bench.engine.gate.set()
    done = await asyncio.gather(*tasks)
    modes = sorted(e.answer_headers["x-schedsvc-mode"] for e in done)
    assert modes == ["enforced", "enforced", "fail-open"]
    await bench.settled()


@pytest.mark.usefixtures("gives_up")
async def test_fail_closed_answers_503(fake: FakeScheduler) -> None:
    await fake.stop()
    bench = Bench(fake, Settings(target=fake.target, fail_open=False))
    refused = await bench.ask()
    assert (refused.status, refused.error["code"]) == (503, "server_is_overloaded")
    assert refused.answer_headers["x-schedsvc-dropped-reason"] == "scheduler_unreachable"
    assert int(refused.answer_headers["retry-after"]) >= 1
    assert bench.engine.bodies == []
    await bench.gate._close()


async def test_telemetry_is_reported(bench: Bench) -> None:
    numbers = {"running": 3, "waiting": 2, "used_tokens": 99, "preemptions": 1}
    bench.owner.state.engine_telemetry = lambda: type("Told", (), numbers)
    await bench.ask()
    await until(lambda: bench.fake.telemetry)
    told = bench.fake.telemetry[0]
    assert (told.pool, told.running, told.used_tokens) == ("default", 3, 99)
    assert told.epoch == bench.fake.pools[0].epoch


class TestLifespan:
    async def drive(self, gate: Gate, owner_: Any) -> list[dict[str, Any]]:
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "lifespan.startup.complete":
                self.started = gate._runtime
                inbox.put_nowait({"type": "lifespan.shutdown"})
            if message["type"] == "lifespan.startup.failed":
                server.cancel()  # A server that cannot start ends, and its application with it.

        inbox.put_nowait({"type": "lifespan.startup"})
        server = asyncio.ensure_future(gate({"type": "lifespan", "app": owner_}, inbox.get, send))
        with contextlib.suppress(asyncio.CancelledError):
            await server
        return sent

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        await send({"type": "lifespan.startup.complete"})
        assert (await receive())["type"] == "lifespan.shutdown"
        await send({"type": "lifespan.shutdown.complete"})

    async def test_the_session_lives_as_long_as_the_server(self, fake: FakeScheduler) -> None:
        gate = Gate(self.app, Settings(target=fake.target))
        sent = await self.drive(gate, owner())
        assert [m["type"] for m in sent] == [
            "lifespan.startup.complete",
            "lifespan.shutdown.complete",
        ]
        assert self.started is not None
        assert gate._runtime is None

    async def test_a_wrong_setting_stops_the_server(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("SCHEDSVC_TARGET", "nonsense")
        with caplog.at_level(logging.ERROR):
            gate = Gate(self.app)
        assert "SCHEDSVC_TARGET" in caplog.text
        (failed,) = await self.drive(gate, owner())
        assert failed["type"] == "lifespan.startup.failed"
        assert "SCHEDSVC_TARGET" in failed["message"]
        refused = await Exchange(gate, ask(), owner=owner()).run()
        assert refused.status == 503
        assert "nonsense" not in refused.answer.decode()

    async def test_an_unknown_engine_size_stops_the_server(self, fake: FakeScheduler) -> None:
        gate = Gate(self.app, Settings(target=fake.target))
        (failed,) = await self.drive(gate, None)
        assert "SCHEDSVC_POOL_CAPACITY_TOKENS" in failed["message"]
