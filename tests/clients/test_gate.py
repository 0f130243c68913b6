"""Tests the gate around a scripted engine, in front of a scripted scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm import reports
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import Settings

from tests.waiting import until

from .asgi import Exchange, ask, owner
from .bench import TRUST, Bench


async def test_a_completion_is_admitted_and_billed_to_the_token(bench: Bench) -> None:
    bench.engine.cached_tokens = 4
    done = await bench.ask(ask(n=2, max_tokens=50))
    assert done.status == 200
    assert json.loads(done.answer)["usage"]["completion_tokens"] == 5
    assert done.answer_headers["x-schedsvc-mode"] == "enforced"
    assert done.answer_headers["x-schedsvc-queue-duration-ms"] == "1.500"
    await bench.settled()
    admit = bench.fake.admits[0]
    assert done.answer_headers["x-schedsvc-request-id"] == admit.request_id
    assert (admit.tenant, list(admit.input_tokens), admit.n) == ("acme", [3], 2)
    assert (admit.max_output_tokens, admit.pools) == (50, ["default"])
    assert admit.reports_progress
    assert admit.whole_answer
    end = bench.fake.books[1].end
    assert end.outcome == pb.OUTCOME_COMPLETED
    assert (end.input_tokens, end.cached_input_tokens, end.output_tokens) == (7, 4, 5)
    assert bench.engine.bodies[0] == json.loads(ask(n=2, max_tokens=50))
    pool = bench.fake.pools[0]
    assert (pool.capacity_tokens, pool.block_size_tokens) == (4_096, 16)
    assert (pool.max_running, pool.max_model_tokens) == (32, 1_024)
    assert pool.epoch == bench.gate._started_ns


@pytest.mark.parametrize("split", [None, 1, 7])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        {"include_usage": False},
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": True},
        {"continuous_usage_stats": True},
    ],
)
async def test_a_stream_looks_as_if_there_were_no_gate(
    bench: Bench, options: dict[str, bool] | None, end: bytes, split: int | None
) -> None:
    bench.engine.split_every, bench.engine.event_end = split, end
    fields: dict[str, Any] = {"stream": True}
    if options is not None:
        fields["stream_options"] = options
    plain = await Exchange(bench.engine, ask(**fields)).run()
    gated = await bench.ask(ask(**fields))
    assert gated.answer == plain.answer
    assert not gated.sent[-1].get("more_body", False)
    asked = bench.engine.bodies[1]["stream_options"]
    assert asked == {"include_usage": True, "continuous_usage_stats": True}
    await bench.settled()
    assert bench.fake.books[1].end.output_tokens == 5
    assert bench.fake.books[1].end.input_tokens == 7


async def test_a_stream_reports_progress_while_it_runs(bench: Bench) -> None:
    bench.engine.output_tokens, bench.engine.step_s = 100_000, 0.001
    running = bench.exchange(ask(stream=True))
    task = asyncio.ensure_future(running.run())
    await until(lambda: bench.fake.books and len(bench.fake.books[1].progress) > 1)
    running.left.set()
    await task
    await bench.settled()
    assert not bench.fake.admits[0].whole_answer
    totals = [report.output_tokens for report in bench.fake.books[1].progress]
    assert totals == sorted(totals)
    assert bench.fake.books[1].progress[0].input_tokens == 7
    # Aborted: the tokens counted on the way are its usage.
    end = bench.fake.books[1].end
    assert end.outcome == pb.OUTCOME_CANCELLED
    assert totals[-1] <= end.output_tokens <= 100_000
    assert end.output_tokens % 2 == 0
    assert bench.engine.aborted == 1


async def test_reports_of_a_stream_are_gathered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report costs the engine's API process a write: after the first, one a period is enough."""
    bench.engine.output_tokens, bench.engine.tokens_per_event = 60, 1
    bench.engine.step_s = 0.005
    monkeypatch.setattr(reports, "PROGRESS_PERIOD_S", 3_600.0)
    await bench.ask(ask(max_tokens=60, stream=True))
    await bench.settled()
    book = bench.fake.books[1]
    assert 1 <= len(book.progress) <= 2
    assert book.end.output_tokens == 60


async def test_the_first_token_is_reported_at_once_the_second_is_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "PROGRESS_PERIOD_S", 3_600.0)
    bench.engine.output_tokens, bench.engine.step_s = 1_000_000, 0.001
    running = bench.exchange(ask(stream=True))
    task = asyncio.ensure_future(running.run())
    await until(lambda: bench.fake.books and bench.fake.books[1].progress)
    await asyncio.sleep(10 * reports.FIRST_TOKEN_PERIOD_S)
    assert len(bench.fake.books[1].progress) == 1
    running.left.set()
    await task
    await bench.settled()


class Counting:
    """Reports its first total when it is asked for the `nth` time."""

    sequences = 1

    def __init__(self, nth: int) -> None:
        self.nth, self.asked, self.reported = nth, 0, 0

    def begin(self) -> bool:
        self.asked += 1
        return self.asked >= self.nth

    def report(self) -> None:
        self.reported += 1


async def test_count_that_has_begun_is_not_asked_for_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.ask()
    assert bench.gate._runtime is not None
    kept = bench.gate._runtime.reports
    monkeypatch.setattr(reports, "PROGRESS_PERIOD_S", 0.3)
    early, late, never = Counting(2), Counting(7), Counting(10**9)
    for reporter in (early, late, never):
        kept.watch(reporter)
    await until(lambda: late.asked == 7)
    kept.unwatch(never)
    # No request is left to ask; growth is still reported.
    asked = never.asked
    await until(lambda: early.reported >= 2 and late.reported >= 2)
    assert (early.asked, late.asked, never.asked) == (2, 7, asked)
    assert never.reported <= 1
    assert kept._asking is None
    kept.unwatch(early)
    kept.unwatch(late)
    await until(lambda: kept._reporting is None)


class Broken(Counting):
    """Fails to report its total: before its first one, or after it."""

    def begin(self) -> bool:
        if super().begin():
            raise RuntimeError("no total")
        return False

    def report(self) -> None:
        super().report()
        raise RuntimeError("no total")


@pytest.mark.parametrize("nth", [1, 10**9])
async def test_a_request_without_totals_silences_no_other(
    bench: Bench,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    nth: int,
) -> None:
    await bench.ask()
    assert bench.gate._runtime is not None
    kept = bench.gate._runtime.reports
    monkeypatch.setattr(reports, "PROGRESS_PERIOD_S", 0.1)
    broken, sound = Broken(nth), Counting(5)
    kept.watch(broken)
    kept.watch(sound)
    await until(lambda: sound.asked == 5 and sound.reported >= 2)
    assert (broken.asked == 1, broken.reported) == ((True, 0) if nth == 1 else (False, 1))
    told = [record.message for record in caplog.records if record.exc_info]
    assert told == ["a request cannot report its totals before it ends"]
    kept.unwatch(sound)


def test_many_that_wait_in_the_engine_are_asked_more_seldom() -> None:
    """It is the engine's API process: 5,000 questions a second cost it a hundredth or two."""
    delays_s = [reports.asking_delay_s(sequences) for sequences in (1, 100, 1_000, 100_000)]
    assert delays_s == pytest.approx([0.02, 0.02, 0.2, 1.0])


async def test_chat_is_sized_by_the_server_or_estimated_and_learned(bench: Bench) -> None:
    text = "x" * 400
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    await bench.ask(body, path="/v1/chat/completions")
    bench.engine.prompt_tokens = 206
    await bench.ask(body, path="/v1/chat/completions")
    await bench.ask(body, path="/v1/chat/completions")
    bench.owner.state.count_prompt_tokens = lambda told: [len(told["messages"][0]["content"])]
    await bench.ask(body, path="/v1/chat/completions")
    sizes = [admit.input_tokens[0] for admit in bench.fake.admits]
    # A byte counts 0.3 tokens at first; 7 tokens teach that it is less, 206 that it is more.
    assert sizes[0] == 6 + 120
    assert sizes[1] == 6 + 60
    assert 90 < sizes[2] < 206
    assert sizes[3] == 400
    assert bench.fake.admits[3].max_output_tokens == 1_024 - 400
    await bench.settled()


async def test_a_client_that_leaves_while_it_sends_is_forgotten(bench: Bench) -> None:
    exchange = bench.exchange(ask(), chunks=2)
    exchange._parts.pop()  # the second half never comes
    exchange.left.set()
    exchange._parts.append(b"")
    original = exchange.receive

    async def receive() -> Any:
        message = await original()
        return message if message.get("body") else {"type": "http.disconnect"}

    await bench.gate(exchange.scope, receive, exchange.send)
    assert exchange.sent == []
    assert bench.fake.admits == []


async def test_a_client_that_leaves_the_queue_is_withdrawn_at_once(bench: Bench) -> None:
    bench.fake.decide = lambda request: None
    waiting = bench.exchange()
    task = asyncio.ensure_future(waiting.run())
    await until(lambda: bench.fake.held)
    waiting.left.set()
    await asyncio.wait_for(task, 60)
    await until(lambda: bench.fake.cancelled)
    await until(lambda: not bench.fake.held)
    assert bench.gate._runtime is not None
    session = bench.gate._runtime.session
    await until(lambda: session.open_requests == 0)  # the last answer has come
    assert waiting.sent == []
    assert bench.engine.bodies == []
    await bench.settled()


async def test_the_app_learns_of_a_client_that_leaves_after_waiting(bench: Bench) -> None:
    """The app continues the watch of the queue."""
    bench.fake.decide = lambda request: None
    bench.engine.gate = asyncio.Event()
    waiting = bench.exchange(ask(stream=True))
    task = asyncio.ensure_future(waiting.run())
    await until(lambda: bench.fake.held)
    await asyncio.sleep(0.02)
    bench.fake.release(next(iter(bench.fake.held)))
    await until(lambda: bench.engine.running)
    waiting.left.set()
    await asyncio.wait_for(task, 60)
    await bench.settled()
    assert bench.engine.aborted == 1
    assert bench.fake.books[1].end.outcome == pb.OUTCOME_CANCELLED


async def test_an_error_of_the_app_frees_the_lease(bench: Bench) -> None:
    bench.engine.fail_at = 2
    exchange = bench.exchange(ask(stream=True))
    with pytest.raises(RuntimeError, match="engine died"):
        await exchange.run()
    bench.engine.fail_at, bench.engine.status = None, 400
    await bench.ask(ask(stream=True))
    await bench.settled()
    first, second = bench.fake.books[1].end, bench.fake.books[2].end
    assert (first.outcome, first.output_tokens) == (pb.OUTCOME_CANCELLED, 2)
    assert (second.outcome, second.output_tokens) == (pb.OUTCOME_CANCELLED, 0)
    assert second.HasField("input_tokens")


async def test_a_whole_stream_without_the_engines_usage_was_aborted(bench: Bench) -> None:
    bench.engine.aborts = True
    await bench.ask(ask(stream=True))
    await bench.settled()
    end = bench.fake.books[1].end
    assert end.outcome == pb.OUTCOME_CANCELLED
    assert end.output_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["cancel", "leave"])
async def test_cancel_at_every_suspension_leaks_nothing(
    bench: Bench, stream: bool, how: str
) -> None:
    await bench.ask()  # connects
    await bench.settled()
    bench.engine.step_s = 0.0005
    for steps in range(60):
        exchange = bench.exchange(ask(stream=stream))
        task = asyncio.ensure_future(exchange.run())
        for _ in range(steps):
            await asyncio.sleep(0)
        if how == "cancel":
            task.cancel()
        else:
            exchange.left.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)
        await asyncio.sleep(0.001 if steps % 10 == 0 else 0)
    await asyncio.sleep(0.05)
    await bench.settled()
    assert bench.engine.running == 0
    for book in bench.fake.books.values():
        assert len(book.completes) == 1
        assert book.end.output_tokens in (0, 2, 4, 5)


async def test_a_thousand_requests_twice_end_with_empty_books(bench: Bench) -> None:
    """If reserved KV leaks in the first run, the second run is refused."""
    places = 50

    def decide(request: pb.AdmitRequest) -> pb.AdmitResponse | None:
        if len(bench.fake.live) >= places:
            return refusal(pb.OUTCOME_REJECTED_FLOW_QUEUE_FULL, retry_after_ms=1)
        return bench.fake.granted()

    async def one(number: int) -> int:
        exchange = bench.exchange(ask(stream=number % 2 == 0))
        if number % 5 == 0:
            task = asyncio.ensure_future(exchange.run())
            await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return 0
        await exchange.run()
        return exchange.status

    bench.fake.decide = decide
    counts = []
    for _ in range(2):
        statuses: list[int] = []
        for start in range(0, 500, 25):
            statuses += await asyncio.gather(*(one(n) for n in range(start, start + 25)))
            await bench.settled()
        counts.append(statuses.count(200))
    assert counts == [400, 400]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("POST", "/ping"),
        ("GET", "/metrics"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
    ],
)
async def test_request_that_does_not_generate_is_never_gated(
    fake: FakeScheduler, method: str, path: str
) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        assert receive == exchange.receive  # passed unchanged

    gate = Gate(app, Settings(target=fake.target))
    exchange = Exchange(gate, b"", path, method=method, owner=owner())
    await exchange.run()
    assert seen == [path]
    assert fake.admits == []
    await gate._close()


async def test_generation_that_is_not_gated_yet_is_refused_unless_allowed(
    fake: FakeScheduler,
) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])

    settings = Settings(target=fake.target)
    refused = await Exchange(Gate(app, settings), b"{}", "/generative_scoring").run()
    assert (refused.status, refused.error["code"]) == (501, "not_gated")
    assert refused.answer_headers["x-should-retry"] == "false"
    gate = Gate(app, replace(settings, refuse_ungated=False))
    await Exchange(gate, b"", "/generative_scoring", owner=owner()).run()
    assert seen == ["/generative_scoring"]
    await gate._close()


async def test_the_root_path_and_foreign_headers(bench: Bench) -> None:
    exchange = bench.exchange(
        ask(stream=True),
        path="/root/v1/completions",
        headers=TRUST | {"X-Data-Parallel-Rank": "3", "Accept-Encoding": "gzip"},
    )
    exchange.scope["root_path"] = "/root"
    await exchange.run()
    assert exchange.status == 200
    seen = dict(bench.engine.scopes[0]["headers"])
    assert b"x-data-parallel-rank" not in seen
    assert b"accept-encoding" not in seen
    assert bench.engine.scopes[0]["state"] is exchange.scope["state"]
    await bench.ask(headers=TRUST | {"X-Data-Parallel-Rank": "3"})
    assert b"x-data-parallel-rank" not in dict(bench.engine.scopes[1]["headers"])
    await bench.settled()
