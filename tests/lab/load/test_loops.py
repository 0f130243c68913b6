"""Tests closed loop, ramp, and runs that are interrupted."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from schedsvc_lab.load.exchange import Exchange
from schedsvc_lab.load.generator import LoadRun, Pace, RunResult
from schedsvc_lab.load.samples import Fate
from schedsvc_lab.load.target import Target
from schedsvc_lab.workload import TraceRequest, rescale
from tests import forked
from tests.waiting import wait_for_start

from .fake import DONE, TICK_S, Answer, Fake, serving, stream, token, usage
from .test_cli import Thread, server

__all__ = ["server"]


def trace(count: int, gap_s: float = 0.0) -> list[TraceRequest]:
    return [TraceRequest(index * gap_s, "a", 2, 1) for index in range(count)]


class Slow:
    """Answers after a while, and counts how many it had to answer at once."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self.open = 0
        self.most = 0

    async def __call__(self, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            return await stream(request, self.after_s, token(), usage(2, 1), DONE)
        finally:
            self.open -= 1


async def driven(answer: Answer, requests: list[TraceRequest], pace: Pace) -> RunResult:
    async with serving(answer) as fake:
        return await LoadRun(Target(fake.url), requests, pace).run()


def test_a_closed_loop_keeps_its_number_in_flight(in_virtual_time: Any) -> None:
    slow = Slow(0.03)
    # Times of the trace do not count: an open loop would take 100 s.
    result = in_virtual_time(driven(slow, trace(20, 5.0), Pace(concurrency=4)))
    assert slow.most == 4
    samples = result.recorder.samples
    assert [sample.fate for sample in samples] == [Fate.COMPLETED] * 20
    assert result.wall_s == pytest.approx(5 * 0.03, abs=5 * TICK_S)
    # Latency counts from when it was a request's turn, so it holds no wait for that.
    assert max(sample.ttft_ms for sample in samples) <= 30 + TICK_S * 1e3


def test_a_closed_loop_starts_its_users_over_the_ramp(in_virtual_time: Any) -> None:
    result = in_virtual_time(driven(Slow(0.001), trace(2), Pace(concurrency=2, ramp_s=0.4)))
    # The first user takes both requests before the second starts, after half of the ramp.
    assert result.wall_s == pytest.approx(0.2, abs=TICK_S)
    assert max(sample.end_s for sample in result.recorder.samples) <= 0.002 + 2 * TICK_S
    arrived: list[float] = []

    async def hang(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        arrived.append(asyncio.get_running_loop().time())
        return await stream(request, 0.5, token(), usage(2, 1), DONE)

    in_virtual_time(driven(hang, trace(4), Pace(concurrency=4, ramp_s=0.4)))
    gaps = [after - before for before, after in pairwise(arrived)]
    assert gaps == pytest.approx([0.1] * 3, abs=TICK_S)


async def test_a_defect_in_a_closed_loop_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Exchange, "_stream", fail)
    async with serving(Slow(0.0)) as fake:
        with pytest.raises(ZeroDivisionError):
            await LoadRun(Target(fake.url), trace(4), Pace(concurrency=2)).run()


def test_a_ramp_starts_slowly_and_loses_nothing() -> None:
    times = [request.arrival_s for request in rescale(trace(1000, 0.01), ramp_s=4.0)]
    assert len(times) == 1000
    assert times == sorted(times)

    def rate(from_s: float, to_s: float) -> float:
        return sum(from_s <= at < to_s for at in times) / (to_s - from_s)

    # The rate grows linearly to 100/s at 4 s.
    assert rate(0, 1) == pytest.approx(12.5, abs=1)
    assert rate(2, 3) == pytest.approx(62.5, abs=1)
    assert rate(5, 6) == pytest.approx(100, abs=1)
    assert times[-1] == pytest.approx(9.99 + 2.0)
    assert [r.arrival_s for r in rescale(trace(3, 1.0))] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("concurrency", [None, 3])
async def test_an_interrupted_run_keeps_what_it_has(concurrency: int | None) -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(fake.bodies) == 1:
            return await stream(request, token(), usage(2, 1), DONE)
        return await stream(request, token(), 30.0)

    async with serving(answer) as fake:
        run = LoadRun(Target(fake.url), trace(500, 0.05), Pace(concurrency=concurrency))
        task = asyncio.create_task(run.run())
        async with asyncio.timeout(30):
            tally = run.recorder.tally("a")
            while len(fake.bodies) < 3 or not tally.streaming:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
        run.interrupt()
        result = await task
    fates = [sample.fate for sample in result.recorder.samples]
    assert result.interrupted
    assert result.offered == 500
    assert fates[0] is Fate.COMPLETED
    assert set(fates[1:]) == {Fate.INTERRUPTED}
    assert 3 <= len(fates) < 500
    assert (tally.waiting, tally.streaming, tally.errors) == (0, 0, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_partial_result(
    tmp_path: Path, server: Thread, number: signal.Signals
) -> None:
    async def answer(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, token(), usage(2, 1), DONE)

    fake: Fake = server.serve(answer)
    path, out = tmp_path / "trace.csv", tmp_path / "out"
    rows = [f"{index / 20},a,2,1\n" for index in range(2000)]
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n" + "".join(rows))
    command = [sys.executable, "-m", "schedsvc", "load", "--url", fake.url, "--trace", str(path)]
    process = forked.Popen(
        [*command, "--out", str(out), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for_start(process, lambda: len(fake.bodies) >= 10)
    os.kill(process.pid, number)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert b"interrupted" in errors
    assert b"of 2,000 requests were sent" in errors
    result = json.loads((out / "result.json").read_text())
    assert json.loads(output) == result
    assert result["interrupted"] is True
    assert 5 <= result["completed"] < 2000
    assert (out / "requests.csv").read_text().count("\n") == result["sent"] + 1
