import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from schedsvc_lab.demo.processes import DemoError, guarded, running
from schedsvc_lab.demo.scheduler import write_config


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def serve(tmp_path: Path) -> tuple[str, ...]:
    return ("serve", "--config", str(write_config(tmp_path, tmp_path / "s.sock")))


async def test_a_program_runs_as_long_as_the_block(tmp_path: Path) -> None:
    async with running("scheduler", serve(tmp_path), tmp_path) as program:
        assert json.loads(program.ready)["targets"] == [f"unix:{tmp_path}/s.sock"]
        assert not gone(program.process.pid)
    assert gone(program.process.pid)
    assert program.process.returncode == 0
    assert "ready" in program.tail()


@pytest.mark.slow
async def test_a_program_ends_with_an_error_or_a_cancellation(tmp_path: Path) -> None:
    pids = []

    async def fail(error: BaseException) -> None:
        async with running("scheduler", serve(tmp_path), tmp_path) as program:
            pids.append(program.process.pid)
            raise error

    for error in (ValueError(), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            await fail(error)
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


@pytest.mark.slow
async def test_one_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("listeners: 7\n")
    with pytest.raises(DemoError, match=r"scheduler ended with status 1(.|\n)*wrong\.yaml"):
        async with running("scheduler", ("serve", "--config", str(config)), tmp_path):
            pytest.fail("it cannot have started")


async def test_work_ends_when_its_program_dies(tmp_path: Path) -> None:
    async def work() -> None:
        await asyncio.sleep(60)

    async with running("scheduler", serve(tmp_path), tmp_path) as program:
        os.kill(program.process.pid, signal.SIGKILL)
        with pytest.raises(DemoError, match="scheduler ended with status -9"):
            await guarded(work(), program.wait_for_end())


async def test_guarded_work_gives_its_result() -> None:
    async def work() -> int:
        return 7

    async def guard() -> None:
        await asyncio.sleep(60)

    assert await guarded(work(), guard()) == 7


async def test_guarded_work_raises_its_own_error() -> None:
    async def work() -> int:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await guarded(work(), asyncio.sleep(60))
