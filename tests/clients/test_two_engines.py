"""Tests two engines that offer the same pool, each behind its own gate, at one scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from processes.line import Line
from schedsvc_client.aio import AsyncScheduler, SessionState
from structlog.testing import capture_logs

from schedsvc.config import Config
from schedsvc.server import Server
from tests.waiting import until

from .asgi import Exchange, ask, owner
from .bench import TRUST
from .test_gate_silence import Gated

HOUR_MS = 3_600_000
SENTENCE = "two engines claim pool default; set SCHEDSVC_POOL"


@pytest.fixture
def sign_of_life_ms() -> int:
    return 500


@pytest.fixture
async def server(folder: Path, sign_of_life_ms: int) -> AsyncIterator[Server]:
    keys = {
        "listeners": [{"unix": f"{folder}/s"}],
        "tenants": [{"name": "acme"}],
        # A gate that waited for the end of a lease would wait for an hour.
        "scheduler": {"lease_ttl_ms": HOUR_MS, "expert": {"sign_of_life_ms": sign_of_life_ms}},
    }
    made = Server(Config.model_validate(keys))
    await made.start()
    yield made
    await made.stop(None)


async def health(gate: Gated) -> Exchange:
    app = owner()
    return await Exchange(gate.gate, ask(), "/health", method="GET", owner=app).run()


async def test_the_second_engine_is_refused_until_the_first_has_gone(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Gated(server.targets[0], 3.0), Gated(server.targets[0], 3.0)
    with caplog.at_level(logging.WARNING, "schedsvc_client"):
        assert await first.mode() == "enforced"
        refused = await second.ask()
        # On both sides: in what the second one's clients and log see, and in the first one's log.
        assert refused.status == 503
        assert refused.answer_headers["x-schedsvc-dropped-reason"] == "pool_refused"
        assert refused.error["message"].startswith(SENTENCE)
        assert (await health(second)).status == 503
        sides = [r.getMessage() for r in caplog.records if SENTENCE in r.getMessage()]
        assert any("the other one's client id" in message for message in sides)
        assert any("refuses this client" in message for message in sides)
    # It keeps trying, and never runs a request without the scheduler.
    await until(lambda: second.session._protocol._seq == 0)
    assert (await second.ask()).status == 503
    assert second.engine.bodies == []
    assert await first.mode() == "enforced"
    assert first.session.state is SessionState.CONNECTED
    await first.gate._close()
    await until(lambda: second.session.state is SessionState.CONNECTED)
    assert await second.mode() == "enforced"
    assert second.session.pool_refused is None
    await second.gate._close()


async def test_an_engine_behind_a_cut_link_is_replaced_soon(server: Server, folder: Path) -> None:
    async with Line(server.targets[0], f"unix:{folder}/line") as line:
        lost, again = Gated(line.target, 3.0), Gated(server.targets[0], 3.0)
        assert await lost.mode() == "enforced"
        lease = lost.session.admission(tenant="acme", input_tokens=5, max_output_tokens=9)
        await lease.submit()
        line.part()
        with capture_logs() as logs:
            assert await again.mode() == "enforced"
        voided = [entry for entry in logs if entry["event"] == "leases_voided"]
        assert [(entry["pool"], entry["leases"]) for entry in voided] == [("default", 1)]
        assert "was replaced by" in voided[0]["reason"]
        assert any(entry["event"] == "pool_taken_over" for entry in logs)
        async with AsyncScheduler(server.targets[0]) as scheduler:
            (pool,) = (await scheduler.stats()).pools
        assert pool.epoch == again.gate._started_ns
        # The first engine returns, and is now the newcomer.
        line.heal()
        await until(lambda: lost.session.pool_refused is not None)
        refused = await Exchange(lost.gate, ask(), headers=TRUST, owner=owner()).run()
        assert refused.status == 503
        assert await again.mode() == "enforced"
        await again.gate._close()
        await lost.gate._close()


@pytest.mark.usefixtures("gives_up")
@pytest.mark.parametrize("sign_of_life_ms", [2_000])
async def test_a_newcomer_waits_for_the_decision_and_fails_not_open(
    server: Server, folder: Path
) -> None:
    """It waits longer than for a scheduler that is not there."""
    async with Line(server.targets[0], f"unix:{folder}/line") as line:
        lost, again = Gated(line.target, 60.0), Gated(server.targets[0], 60.0)
        assert await lost.mode() == "enforced"
        line.part()
        assert await again.mode() == "enforced"
        assert await again.mode() == "enforced"
        line.heal()
        await again.gate._close()
        await lost.gate._close()


async def test_api_processes_of_one_engine_serve_side_by_side(server: Server) -> None:
    gates = [Gated(server.targets[0], 3.0, epoch=77) for _ in range(3)]
    assert [await gate.mode() for gate in gates] == ["enforced"] * 3
    for gate in gates:
        await gate.gate._close()


async def test_a_first_start_serves_once_all_api_processes_are_there(server: Server) -> None:
    gates = [Gated(server.targets[0], 3.0, epoch=77, gates=2) for _ in range(2)]
    waits = asyncio.ensure_future(gates[0].mode())
    await until(lambda: gates[0].gate._runtime and gates[0].session.open_requests)
    assert not waits.done()
    assert [await gates[1].mode(), await waits] == ["enforced"] * 2
    for gate in gates:
        await gate.gate._close()
