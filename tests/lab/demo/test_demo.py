import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from schedsvc_lab.demo.verdict import RUNS, judge

from .test_processes import gone

COMMAND = (sys.executable, "-m", "schedsvc", "demo", "--out")


async def until_the_engine_runs(out: Path) -> int:
    """Wait for the first engine; its process id."""
    ready = out / "engine-alone.ready"
    async with asyncio.timeout(30):
        while not ready.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.05)
    return int(json.loads(ready.read_text())["pid"])


async def start(out: Path) -> Process:
    return await asyncio.create_subprocess_exec(*COMMAND, str(out), stdout=PIPE, stderr=PIPE)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 1), (signal.SIGHUP, 1)]
)
async def test_a_signal_ends_every_program(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    demo = await start(tmp_path / "out")
    engine = await until_the_engine_runs(tmp_path / "out")
    demo.send_signal(number)
    await asyncio.wait_for(demo.communicate(), 60)
    assert demo.returncode == status
    assert gone(engine)


async def test_a_killed_demo_leaves_no_program(tmp_path: Path) -> None:
    demo = await start(tmp_path / "out")
    engine = await until_the_engine_runs(tmp_path / "out")
    demo.kill()
    await asyncio.wait_for(demo.communicate(), 60)
    async with asyncio.timeout(60):
        while not gone(engine):  # noqa: ASYNC110 - the kernel ends it
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_dying_engine_ends_the_demo_with_its_log(tmp_path: Path) -> None:
    demo = await start(tmp_path / "out")
    engine = await until_the_engine_runs(tmp_path / "out")
    os.kill(engine, signal.SIGKILL)
    _, errors = await asyncio.wait_for(demo.communicate(), 60)
    assert demo.returncode == 1
    assert b"engine-alone ended with status -9" in errors
    assert b"emulator ready" in errors


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(240)
async def test_the_demo_holds_its_bars(tmp_path: Path) -> None:
    out = tmp_path / "out"
    demo = await asyncio.create_subprocess_exec(
        *COMMAND, str(out), "--json", stdout=PIPE, stderr=PIPE
    )
    output, errors = await demo.communicate()
    # Its status and its other bars are about time: `make demo`.
    assert demo.returncode in (0, 1), errors.decode()
    report = json.loads(output)
    assert report == json.loads((out / "report.json").read_text())
    assert [bar.name for bar in judge(report, quick=True) if not bar.holds] == []
    assert report["after"] == {"promised_tokens": 0, "live_leases": 0, "queued": 0}
    assert set(report["alone"]["tenants"]) == {"quiet"}
    for run in ("without", "with", "with_again"):
        tenants = report[run]["tenants"]
        assert set(tenants) == {"hog", "quiet", "steady"}
        for tenant in tenants.values():
            fates = tenant["completed"] + tenant["refused"] + tenant["errors"]
            assert tenant["sent"] == fates
    assert report["without"]["tenants"]["hog"]["refused"] == 0
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    details = json.loads((out / "details.json").read_text())
    refusals = details["with"]["tenants"]["hog"]["refusals"]
    assert refusals["with_retry_after"] == sum(refusals["by_reason"].values()) > 0
    assert all((out / f"requests-{run}.csv").exists() for run in RUNS)
