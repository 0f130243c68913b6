import asyncio
import gc
from typing import Any

import pytest
from aiohttp import web

from schedsvc_lab.load.exchange import Exchange
from schedsvc_lab.load.generator import LoadRun, Pace, RunResult, TargetError
from schedsvc_lab.load.report import full_report, run_report
from schedsvc_lab.load.samples import Fate
from schedsvc_lab.load.target import OutputMode, Target
from schedsvc_lab.workload import TraceRequest

from .fake import DONE, TICK_S, Answer, Fake, obey, serving, stream, token, usage


def requests(*rows: tuple[float, str, int, int]) -> list[TraceRequest]:
    return [TraceRequest(*row) for row in rows]


async def drive(
    fake: Fake, trace: list[TraceRequest], pace: Pace | None = None, **target: Any
) -> RunResult:
    return await LoadRun(Target(fake.url, **target), trace, pace or Pace()).run()


async def driven(
    trace: list[TraceRequest], pace: Pace | None = None, answer: Answer = obey
) -> RunResult:
    async with serving(answer) as fake:
        return await drive(fake, trace, pace)


async def test_requests_are_exactly_as_the_trace_says() -> None:
    trace = requests((0.0, "hog", 300, 5), (0.01, "quiet", 1, 2))
    async with serving() as fake:
        result = await drive(fake, trace, api_keys={"hog": "sk-hog"})
    hog, quiet = fake.bodies
    assert (len(hog["prompt"]), len(quiet["prompt"])) == (300, 1)
    assert all(100 <= identifier <= 1999 for identifier in hog["prompt"])
    assert len(set(hog["prompt"])) > 100
    assert (hog["max_tokens"], hog["min_tokens"], hog["ignore_eos"]) == (5, 5, True)
    assert hog["model"] == "fake-model"
    assert hog["stream_options"] == {"include_usage": True}
    assert [headers["x-tenant-id"] for headers in fake.headers] == ["hog", "quiet"]
    assert fake.headers[0]["authorization"] == "Bearer sk-hog"
    assert "authorization" not in fake.headers[1]
    report = full_report(result)["tenants"]
    assert (report["hog"]["prompt_tokens"], report["hog"]["output_tokens"]) == (300, 5)
    assert report["hog"]["queue_ms"] == {"p50": 1.5, "p99": 1.5}


@pytest.mark.parametrize("frozen", [False, True])
async def test_objects_stay_frozen_only_for_a_caller_that_froze(frozen: bool) -> None:
    gc.freeze() if frozen else gc.unfreeze()
    try:
        await driven(requests((0.0, "a", 1, 1)))
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.freeze()  # as conftest.py left them


async def test_the_emulated_length_is_no_cap() -> None:
    caps = {"hog": 512}
    async with serving() as fake:
        await drive(
            fake,
            requests((0.0, "hog", 3, 5), (0.0, "quiet", 3, 5)),
            output=OutputMode.EMULATED,
            max_tokens=64,
            max_tokens_of=caps,
        )
    assert [body["max_tokens"] for body in fake.bodies] == [512, 64]
    assert [body["emulated_output_tokens"] for body in fake.bodies] == [5, 5]
    assert "ignore_eos" not in fake.bodies[0]


async def test_a_defect_of_the_generator_is_no_missing_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = Exchange._stream

    async def fail_once(run: Exchange, response: Any, sample: Any) -> None:
        if sample.tenant == "bad":
            raise ZeroDivisionError
        await answered(run, response, sample)

    monkeypatch.setattr(Exchange, "_stream", fail_once)
    async with serving() as fake:
        with pytest.raises(ZeroDivisionError):
            await drive(fake, requests((0.0, "bad", 1, 1), (0.05, "a", 1, 1)))
    assert len(fake.bodies) == 2


async def test_request_ids_are_never_used_twice() -> None:
    async with serving() as fake:
        for _ in range(2):
            await drive(fake, requests((0.0, "a", 1, 1), (0.0, "a", 1, 1)), Pace(warmup_requests=1))
    ids = [headers["x-request-id"] for headers in fake.headers]
    assert len(ids) == len(set(ids)) == 6


async def test_equal_seeds_make_equal_prompts() -> None:
    async with serving() as fake:
        for seed in (1, 1, 2):
            await drive(fake, requests((0.0, "a", 50, 1)), Pace(seed=seed))
    first, second, third = (body["prompt"] for body in fake.bodies)
    assert first == second != third


def test_open_loop_sends_on_time_though_nothing_is_answered(in_virtual_time: Any) -> None:
    arrived: list[float] = []

    async def hang(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        arrived.append(asyncio.get_running_loop().time())
        return await stream(request, 0.5, token(), usage(1, 1), DONE)

    trace = requests(*[(0.03 * index, "a", 1, 1) for index in range(10)])
    result = in_virtual_time(driven(trace, answer=hang))
    gaps = [after - arrived[0] for after in arrived]
    assert gaps == pytest.approx([request.arrival_s for request in trace], abs=TICK_S)
    report = run_report(result)["tenants"]["a"]
    assert report["completed"] == 10
    assert report["ttft_ms"]["p50"] == pytest.approx(500, abs=TICK_S * 1e3)


def test_latency_counts_from_the_intended_time(in_virtual_time: Any) -> None:
    """A generator that is blocked for 0.3 s must not hide it."""

    async def blocked() -> RunResult:
        loop: Any = asyncio.get_running_loop()
        loop.call_later(0.02, loop.stall, 0.3)
        return await driven(requests((0.0, "a", 1, 1), (0.1, "a", 1, 1)))

    result = in_virtual_time(blocked())
    late = result.recorder.samples[1]
    assert late.sent_s - late.intended_s == pytest.approx(0.22, abs=2 * TICK_S)
    assert late.ttft_ms >= (late.sent_s - late.intended_s) * 1e3
    assert run_report(result)["client_lag_ms_p99"] == pytest.approx(300, abs=2 * TICK_S * 1e3)
    assert full_report(result)["client"]["void"]


async def test_refusals_are_not_retried_and_keep_their_reasons() -> None:
    async def refuse(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        if request.headers["x-tenant-id"] == "quiet":
            return web.json_response({"error": {"code": "server_is_overloaded"}}, status=503)
        headers = {
            "retry-after": "2",
            "retry-after-ms": "1500",
            "x-schedsvc-dropped-reason": "flow_queue_full",
        }
        return web.json_response({"error": {"code": "slow_down"}}, status=429, headers=headers)

    async with serving(refuse) as fake:
        result = await drive(fake, requests((0.0, "hog", 1, 1), (0.0, "quiet", 1, 1)))
    assert len(fake.bodies) == 2
    tenants = full_report(result)["tenants"]
    assert tenants["hog"]["refused"] == tenants["quiet"]["refused"] == 1
    assert tenants["hog"]["refusals"] == {
        "by_reason": {"429 flow_queue_full": 1},
        "with_retry_after": 1,
        "retry_after_ms": {"p50": 1500.0, "p99": 1500.0},
    }
    assert tenants["quiet"]["refusals"]["by_reason"] == {"503 server_is_overloaded": 1}
    assert tenants["quiet"]["ttft_ms"] == {"p50": None, "p99": None}


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ((token(), usage(1, 1)), "the stream broke off"),
        ((token(), DONE), "the stream has no usage"),
        ((token(), b'data: {"usage":{\n\n', DONE), "an event is not JSON"),
        ((b'data: {"error": {"code": "dead"}}\n\n',), "error in the stream: dead"),
    ],
)
async def test_broken_streams_are_errors(pieces: tuple[bytes, ...], reason: str) -> None:
    async def broken(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, *pieces)

    async with serving(broken) as fake:
        result = await drive(fake, requests((0.0, "a", 1, 1)))
    assert [(sample.fate, sample.reason) for sample in result.recorder.samples] == [
        (Fate.ERROR, reason)
    ]


async def test_a_connection_that_is_cut_is_an_error() -> None:
    async def cut(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = await stream(request, token(), token())
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(cut) as fake:
        result = await drive(fake, requests((0.0, "a", 1, 9)))
    report = full_report(result)["tenants"]["a"]
    assert (report["completed"], report["errors"]) == (0, 1)
    assert list(report["errors_by_reason"]) == ["ClientPayloadError"]


async def test_other_statuses_are_errors() -> None:
    async def reject(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"code": "context_length_exceeded"}}, status=400)

    async with serving(reject) as fake:
        result = await drive(fake, requests((0.0, "a", 1, 1)))
    assert result.recorder.samples[0].reason == "400 context_length_exceeded"


async def test_an_answer_that_does_not_stream_is_an_error() -> None:
    async def plain(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"choices": [{"text": "x"}]})

    async with serving(plain) as fake:
        result = await drive(fake, requests((0.0, "a", 1, 1)))
    assert result.recorder.samples[0].reason.startswith("answered application/json")


def test_request_open_after_the_drain_is_an_error(in_virtual_time: Any) -> None:
    async def hang(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, token(), 30.0)

    trace, pace = requests((0.0, "a", 1, 9)), Pace(drain_s=0.2)
    result = in_virtual_time(driven(trace, pace, answer=hang))
    assert result.wall_s == pytest.approx(0.2, abs=TICK_S)
    report = full_report(result)["tenants"]["a"]
    assert report["errors_by_reason"] == {"unfinished": 1}
    assert report["output_tokens"] == 1
    tally = result.recorder.tallies["a"]
    assert (tally.waiting, tally.streaming, tally.errors) == (0, 0, 1)


async def test_cancelling_a_run_hangs_up_on_the_server() -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        arrived.set()
        try:
            return await stream(request, token(), 30.0)
        finally:
            left.set()

    async with serving(hang) as fake:
        run = asyncio.create_task(drive(fake, requests((0.0, "a", 1, 9), (60.0, "a", 1, 1))))
        await asyncio.wait_for(arrived.wait(), 60)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await asyncio.wait_for(left.wait(), 60)


async def test_an_unreachable_target_is_reported_before_any_request() -> None:
    async with serving() as fake:
        url = fake.url
    with pytest.raises(TargetError, match=url):
        await LoadRun(Target(url), requests((0.0, "a", 1, 1)), Pace()).run()


async def test_a_target_that_refuses_the_warm_up() -> None:
    async def unauthorised(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"code": "invalid_api_key"}}, status=401)

    async with serving(unauthorised) as fake:
        with pytest.raises(
            TargetError, match=r"answered 401 to a warm-up request.*invalid_api_key"
        ):
            await drive(fake, requests((0.0, "a", 1, 1)), Pace(warmup_requests=1))


async def test_an_empty_trace() -> None:
    async with serving(obey) as fake:
        with pytest.raises(TargetError, match="holds no request"):
            await drive(fake, [])
