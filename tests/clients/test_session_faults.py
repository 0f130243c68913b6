"""Tests ends of a stream from inside: a refused pool, a defect of the writer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client import ClientOptions, SchedulerUnavailable
from schedsvc_client.aio import SchedulerSession, SessionState
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.processes.programs import Programs
from tests.waiting import until

QUICK = ClientOptions(backoff_min_s=0.01, backoff_max_s=0.05, unavailable_after_s=30)
POOL = {"pool": "p", "epoch": 1, "capacity_tokens": 1_000, "block_size_tokens": 10}


def session(target: str, **changes: Any) -> SchedulerSession:
    return SchedulerSession(
        target, **{"client_id": "shim", "incarnation": 1, "options": QUICK} | changes
    )


def delayed(target: str, end_delay_s: float, **changes: Any) -> SchedulerSession:
    """Make a session whose ends wait for `delay_s` for an event to share a message with."""
    options = ClientOptions(end_delay_s=end_delay_s, unavailable_after_s=30)
    opened = session(target, options=options, **changes)
    opened.register_pool(**POOL)
    return opened


async def ask(opened: SchedulerSession, runs_s: float = 0.0) -> None:
    async with opened.admission(input_tokens=5, max_output_tokens=9):
        await asyncio.sleep(runs_s)


async def test_a_refused_pool_is_offered_again_until_it_is_taken(fake: FakeScheduler) -> None:
    states: list[SessionState] = []
    fake.pool_fault = pb.SessionFault(code=9, field="pool", description="is offered by another")
    opened = session(fake.target, on_state=states.append)
    opened.register_pool(**POOL)
    async with opened:
        await until(lambda: len(fake.pools) > 3)
        assert not opened.available
        assert states == []  # a welcome to such a stream does not count
        with pytest.raises(SchedulerUnavailable, match="pool: is offered by another"):
            await ask(opened)
        fake.pool_fault = None
        await until(lambda: opened.state is SessionState.CONNECTED)
        await ask(opened)
        streams = len(fake.hellos)
        opened.telemetry(pool="other", epoch=1, running=0, waiting=0, used_tokens=0, preemptions=0)
        opened.telemetry(pool="p", epoch=1, running=0, waiting=0, used_tokens=0, preemptions=0)
        await until(lambda: fake.telemetry)
        assert [report.pool for report in fake.telemetry] == ["p"]
        assert len(fake.hellos) == streams


async def test_one_refused_pool_of_several_leaves_the_others_usable(
    fake: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    fake.pool_fault = pb.SessionFault(code=9, field="pool", description="is offered by another")
    fake.faulty_pool = "q"
    opened = session(fake.target)
    opened.register_pool(**POOL)
    opened.register_pool(**{**POOL, "pool": "q"})
    with caplog.at_level(logging.ERROR, logger="schedsvc_client.session"):
        async with opened:
            await until(lambda: opened.state is SessionState.CONNECTED)
            await ask(opened)
            await until(lambda: caplog.records)
            assert len(fake.hellos) == 1
            # It is offered and refused again, but it is still one pool.
            opened.register_pool(**{**POOL, "pool": "q"})
            await until(lambda: len(fake.pools) == 3)
            await ask(opened)
            fake.faulty_pool = ""
            for name in ("p", "q"):
                opened.register_pool(**{**POOL, "pool": name})
            await until(lambda: len(fake.hellos) > 1)
            assert not opened.available
    assert "refused a pool of this client: " in caplog.records[0].getMessage()


async def test_a_pool_of_another_caller_is_taken_over_when_that_one_leaves() -> None:
    """A shim starts with a new token before the old shim is gone; the scheduler is real."""
    with tempfile.TemporaryDirectory(prefix="own-") as name:
        folder = Path(name)
        principals = [
            {
                "name": name,
                "sha256": hashlib.sha256(name.encode()).hexdigest(),
                "pools": ["*"],
            }
            for name in ("old", "new")
        ]
        listener = {"unix": f"{folder}/s", "auth": "token"}
        config = folder / "c.yaml"
        config.write_text(json.dumps({"auth": {"principals": principals}, "listeners": [listener]}))
        programs = Programs(folder)
        try:
            programs.start("scheduler", "serve", "--config", str(config))
            old = session(programs.target, token="old")
            new = session(programs.target, token="new")
            old.register_pool(**POOL)
            new.register_pool(**POOL)
            async with old:
                await ask(old)
                async with new:
                    await until(lambda: not new.available)
                    assert "two engines claim pool p" in str(new.last_error)
                    with pytest.raises(SchedulerUnavailable):
                        await ask(new)
                    await ask(old)
                    await old.close()
                    await until(lambda: new.available)
                    await ask(new)
        finally:
            programs.stop()


async def test_a_token_that_is_away_and_a_callback_that_raises_cost_only_time(
    fake: FakeScheduler,
) -> None:
    fake.token = "right"
    absent = [FileNotFoundError("token"), RuntimeError("no vault")]
    told: list[SessionState] = []

    def token() -> str:
        if absent:
            raise absent.pop(0)
        return "right"

    def on_state(state: SessionState) -> None:
        told.append(state)
        raise ZeroDivisionError

    async with session(fake.target, token=token, on_state=on_state) as opened:
        await ask(opened)
        assert not absent
        fake.hang_up()
        await until(lambda: len(fake.hellos) == 2)
        await ask(opened)
    assert told[:3] == [SessionState.CONNECTED, SessionState.CONNECTING, SessionState.CONNECTED]


async def test_a_defect_of_the_writer_ends_the_stream_not_the_session(
    fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with session(fake.target) as opened:
        await ask(opened)
        protocol = opened._protocol
        real = protocol.data_to_send

        def fail(_: int) -> bytes:
            monkeypatch.setattr(protocol, "data_to_send", real)
            raise ZeroDivisionError

        monkeypatch.setattr(protocol, "data_to_send", fail)
        await asyncio.wait_for(ask(opened), 60)
        assert len(fake.hellos) == 2
        assert "ZeroDivisionError" in str(opened.last_error)


async def test_an_end_waits_a_moment_for_something_to_leave_with(fake: FakeScheduler) -> None:
    async with delayed(fake.target, 60.0) as opened:
        await ask(opened, 0.02)
        await asyncio.sleep(0.05)
        assert not fake.books[1].completes
        await ask(opened, 0.02)  # takes it along
        assert fake.books[1].completes
        assert not fake.books[2].completes
        # A caller that waits for the ends does not wait for more.
        assert await opened.flush(20)
    async with delayed(fake.target, 0.02, incarnation=2) as opened:
        await ask(opened)
        await until(lambda: fake.books[3].completes)


async def test_an_end_that_a_request_may_wait_for_leaves_at_once(fake: FakeScheduler) -> None:
    opened = delayed(fake.target, 60.0)
    async with opened, opened.admission(input_tokens=5, max_output_tokens=9) as first:
        fake.decide = lambda request: None
        second = asyncio.ensure_future(ask(opened))
        await until(lambda: len(fake.held) == 1)
        first.complete()
        await until(lambda: fake.books[1].completes)
        second.cancel()


def test_a_delay_is_not_negative() -> None:
    assert ClientOptions(end_delay_s=0, progress_delay_s=0).end_delay_s == 0
    with pytest.raises(ValueError, match="end_delay_s"):
        ClientOptions(end_delay_s=-1)


async def test_session_sends_goodbye_on_close_and_not_on_loss(fake: FakeScheduler) -> None:
    opened = session(fake.target)
    opened.register_pool(**POOL)
    async with opened:
        await ask(opened)
        fake.hang_up()
        await until(lambda: len(fake.hellos) == 2)
        await ask(opened)  # the new stream has its Welcome
        assert fake.goodbyes == 0
    await until(lambda: fake.goodbyes == 1)
    async with session(fake.target) as without_pools:
        await ask(without_pools)
    assert fake.goodbyes == 1
