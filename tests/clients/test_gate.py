"""The gate around a scripted engine, in front of a scripted scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import Settings

from .asgi import Engine, Exchange, ask, owner
from .conftest import Until
from .fake_scheduler import FakeScheduler, refusal

TRUST = {"x-tenant-id": "acme"}


class Bench:
    """A gate, its engine and its scheduler."""

    def __init__(self, fake: FakeScheduler, settings: Settings) -> None:
        self.fake = fake
        self.engine = Engine()
        self.owner = owner()
        self.gate = Gate(self.engine, settings)

    def exchange(self, body: bytes = b"", **changes: Any) -> Exchange:
        given: dict[str, Any] = {"headers": TRUST, "owner": self.owner}
        return Exchange(self.gate, body or ask(), **(given | changes))

    async def ask(self, body: bytes = b"", **changes: Any) -> Exchange:
        return await self.exchange(body, **changes).run()

    async def settled(self) -> None:
        """Wait until the scheduler knows all that the gate knows."""
        assert self.gate._runtime is not None
        await self.gate._runtime.session.flush(5)
        assert not self.fake.live
        assert self.gate._runtime.limit.running == 0
        assert self.gate._runtime.session.open_requests == 0


@pytest.fixture
async def bench(fake: FakeScheduler) -> AsyncIterator[Bench]:
    settings = Settings(target=fake.target, client_id="g", tenant_headers=("x-tenant-id",))
    made = Bench(fake, settings)
    yield made
    await made.gate._close()


async def test_a_completion_is_admitted_and_billed_to_the_token(bench: Bench) -> None:
    bench.engine.cached_tokens = 4
    done = await bench.ask(ask(n=2, max_tokens=50))
    assert done.status == 200
    assert json.loads(done.answer)["usage"]["completion_tokens"] == 5
    assert done.answer_headers["x-schedsvc-mode"] == "enforced"
    assert done.answer_headers["x-schedsvc-queue-duration-ms"] == "1.500"
    await bench.settled()
    admit = bench.fake.admits[0]
    assert (admit.tenant, list(admit.input_tokens), admit.n) == ("acme", [3], 2)
    assert (admit.max_output_tokens, admit.pool) == (50, "default")
    end = bench.fake.books[1].end
    assert end.outcome == pb.OUTCOME_COMPLETED
    assert (end.input_tokens, end.cached_input_tokens, end.output_tokens) == (7, 4, 5)
    assert bench.engine.bodies[0] == json.loads(ask(n=2, max_tokens=50))
    pool = bench.fake.pools[0]
    assert (pool.capacity_tokens, pool.block_size_tokens) == (4_096, 16)
    assert (pool.max_running, pool.max_model_tokens) == (32, 1_024)
    assert abs(pool.epoch - time.time_ns()) < 60 * 10**9


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


async def test_a_stream_reports_progress_while_it_runs(bench: Bench, until: Until) -> None:
    bench.engine.output_tokens, bench.engine.step_s = 1_000, 0.001
    running = bench.exchange(ask(stream=True))
    task = asyncio.ensure_future(running.run())
    await until(lambda: bench.fake.books and len(bench.fake.books[1].progress) > 3)
    running.left.set()
    await task
    await bench.settled()
    totals = [report.output_tokens for report in bench.fake.books[1].progress]
    assert totals == sorted(totals)
    assert bench.fake.books[1].progress[0].input_tokens == 7
    # Aborted: what was counted on the way is what it has used.
    end = bench.fake.books[1].end
    assert end.outcome == pb.OUTCOME_CANCELLED
    assert totals[-1] <= end.output_tokens <= 1_000
    assert end.output_tokens % 2 == 0
    assert bench.engine.aborted == 1


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
    # 0.3 tokens for a byte to begin with; 7 tokens teach that it is far less, 206 a half.
    assert sizes[0] == 6 + 120
    assert sizes[1] < 20
    assert 90 < sizes[2] < 206
    assert sizes[3] == 400
    assert bench.fake.admits[3].max_output_tokens == 1_024 - 400
    await bench.settled()


@pytest.mark.parametrize(
    ("outcome", "status", "kind", "code"),
    [
        (pb.OUTCOME_REJECTED_QUOTA, 429, "rate_limit_error", "rate_limit_exceeded"),
        (pb.OUTCOME_EVICTED_TTL, 429, "rate_limit_error", "rate_limit_exceeded"),
        (pb.OUTCOME_REJECTED_DEADLINE, 429, "rate_limit_error", "rate_limit_exceeded"),
        (pb.OUTCOME_REJECTED_FLOW_QUEUE_FULL, 429, "rate_limit_error", "slow_down"),
        (pb.OUTCOME_REJECTED_NO_POOL, 503, "service_unavailable_error", "server_is_overloaded"),
        (pb.OUTCOME_REJECTED_DRAINING, 503, "service_unavailable_error", "server_is_overloaded"),
        (pb.OUTCOME_REJECTED_QUEUE_FULL, 503, "service_unavailable_error", "server_is_overloaded"),
        (pb.OUTCOME_EVICTED_DRAINING, 503, "service_unavailable_error", "server_is_overloaded"),
    ],
)
async def test_refusals_that_may_be_retried(
    bench: Bench, outcome: pb.Outcome.ValueType, status: int, kind: str, code: str
) -> None:
    limits = [
        pb.Limit(kind=pb.LIMIT_KIND_QUEUED_REQUESTS, limit=8, remaining=0, reset_ms=360_000),
        pb.Limit(kind=pb.LIMIT_KIND_POOL_TOKENS, limit=4_000, remaining=12, reset_ms=120),
    ]
    bench.fake.decide = lambda request: refusal(
        outcome, retry_after_ms=1_200, message="no", quota=pb.QuotaSnapshot(limits=limits)
    )
    refused = await bench.ask(headers=TRUST | {"x-request-id": "abc"})
    assert refused.status == status
    assert refused.error == {"message": "no", "type": kind, "param": None, "code": code}
    reason = pb.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()
    expected = {
        "retry-after": "2",
        "retry-after-ms": "1200",
        "x-ratelimit-limit-requests": "8",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "6m0s",
        "x-ratelimit-limit-tokens": "4000",
        "x-ratelimit-remaining-tokens": "12",
        "x-ratelimit-reset-tokens": "120ms",
        "x-request-id": "abc",
        "x-schedsvc-dropped-reason": reason,
        "x-schedsvc-queue-duration-ms": "2000.000",
    }
    assert expected.items() <= refused.answer_headers.items()
    assert bench.engine.bodies == []
    await bench.settled()


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        (pb.OUTCOME_REJECTED_TOO_LARGE, 400, "context_length_exceeded"),
        (pb.OUTCOME_EVICTED_TOO_LARGE, 400, "context_length_exceeded"),
        (pb.OUTCOME_REJECTED_UNKNOWN_TENANT, 403, "unknown_tenant"),
    ],
)
async def test_refusals_that_stay_so(
    bench: Bench, outcome: pb.Outcome.ValueType, status: int, code: str
) -> None:
    bench.fake.decide = lambda request: refusal(outcome, message="no")
    refused = await bench.ask()
    assert (refused.status, refused.error["code"]) == (status, code)
    assert refused.answer_headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.answer_headers
    assert refused.error["param"] == ("prompt" if status == 400 else None)


async def test_wrong_bodies_name_the_field(bench: Bench) -> None:
    chat = "/v1/chat/completions"
    wrong: list[tuple[str, bytes, str | None]] = [
        ("/v1/completions", b"", None),
        ("/v1/completions", b"{", None),
        ("/v1/completions", b"[]", None),
        ("/v1/completions", b"\xff\xfe{}", None),
        ("/v1/completions", b"[" * 100_000, None),
        ("/v1/completions", b'{"prompt": 1' + b"0" * 5_000 + b"}", None),
        ("/v1/completions", b"{}", "prompt"),
        ("/v1/completions", ask(prompt=[]), "prompt"),
        ("/v1/completions", ask(prompt=[[]]), "prompt"),
        ("/v1/completions", ask(prompt=[1.5]), "prompt"),
        ("/v1/completions", ask(prompt=["a"] * 1_025), "prompt"),
        ("/v1/completions", ask(n=0), "n"),
        ("/v1/completions", ask(n="5"), "n"),
        ("/v1/completions", ask(n=True), "n"),
        ("/v1/completions", ask(n=2_000), "n"),
        ("/v1/completions", ask(max_tokens=2**31), "max_tokens"),
        ("/v1/completions", ask(max_tokens=-1), "max_tokens"),
        ("/v1/completions", ask(max_tokens=1.0), "max_tokens"),
        ("/v1/completions", ask(max_tokens=1_022), "max_tokens"),
        ("/v1/completions", ask(prompt=[1] * 1_024), "prompt"),
        ("/v1/completions", ask(stream="true"), "stream"),
        ("/v1/completions", ask(stream=1), "stream"),
        ("/v1/completions", ask(stream=True, stream_options=[]), "stream_options"),
        (
            "/v1/completions",
            ask(stream=True, stream_options={"include_usage": 1}),
            "stream_options",
        ),
        (chat, ask(), "messages"),
        (chat, ask(messages=[]), "messages"),
        (chat, ask(messages=["hi"]), "messages"),
        (chat, ask(messages=[{}], max_completion_tokens=-1), "max_completion_tokens"),
    ]
    for path, body, param in wrong:
        refused = (
            await bench.ask(body, path=path)
            if body
            else await Exchange(bench.gate, b"", path, owner=bench.owner).run()
        )
        assert (refused.status, refused.error["param"]) == (400, param), (path, body[:60])
        assert refused.error["type"] == "invalid_request_error"
        assert refused.answer_headers["x-should-retry"] == "false"
    assert bench.engine.bodies == []
    assert bench.fake.admits == []


async def test_a_field_that_only_the_scheduler_dislikes_is_named_too(bench: Bench) -> None:
    fault = pb.SessionFault(code=3, field="request.max_output_tokens", description="is absurd")
    bench.fake.faults = [fault]
    refused = await bench.ask()
    assert refused.status == 400
    assert (refused.error["param"], refused.error["message"]) == (
        "max_tokens",
        "max_tokens: is absurd",
    )


async def test_too_large_bodies_are_refused_before_and_while_they_come(
    fake: FakeScheduler,
) -> None:
    bench = Bench(fake, Settings(target=fake.target, body_bytes_max=1_000))
    for headers in ({}, {"content-length": "chunked"}):
        big = await bench.ask(ask(prompt="x" * 2_000), headers=headers, chunks=5)
        assert big.status == 413
        assert "1000 bytes" in big.error["message"]
    fine = await bench.ask(ask(prompt="x" * 100), chunks=5)
    assert fine.status == 200
    await bench.gate._close()


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


async def test_a_client_that_leaves_the_queue_is_withdrawn_at_once(
    bench: Bench, until: Until
) -> None:
    bench.fake.decide = lambda request: None
    waiting = bench.exchange()
    task = asyncio.ensure_future(waiting.run())
    await until(lambda: bench.fake.held)
    waiting.left.set()
    await asyncio.wait_for(task, 1)
    await until(lambda: bench.fake.cancelled)
    await until(lambda: not bench.fake.held)
    assert waiting.sent == []
    assert bench.engine.bodies == []
    await bench.settled()


async def test_the_app_learns_of_a_client_that_leaves_after_waiting(
    bench: Bench, until: Until
) -> None:
    """The watch that began in the queue goes over to the app."""
    bench.fake.decide = lambda request: None
    bench.engine.gate = asyncio.Event()
    waiting = bench.exchange(ask(stream=True))
    task = asyncio.ensure_future(waiting.run())
    await until(lambda: bench.fake.held)
    await asyncio.sleep(0.02)
    bench.fake.release(next(iter(bench.fake.held)))
    await until(lambda: bench.engine.running)
    waiting.left.set()
    await asyncio.wait_for(task, 1)
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
            await asyncio.wait_for(task, 2)
        await asyncio.sleep(0.001 if steps % 10 == 0 else 0)
    await asyncio.sleep(0.05)
    await bench.settled()
    assert bench.engine.running == 0
    for book in bench.fake.books.values():
        assert len(book.completes) == 1
        assert book.end.output_tokens in (0, 2, 4, 5)


async def test_a_thousand_requests_twice_end_with_empty_books(bench: Bench) -> None:
    """The reserved-KV leak of others: the second run is refused where the first one leaked."""
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
        ("GET", "/v1/completions"),
        ("POST", "/v1/completions/"),
    ],
)
async def test_what_does_not_generate_is_never_gated(
    fake: FakeScheduler, method: str, path: str
) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        assert receive == exchange.receive  # passed as it is

    exchange = Exchange(Gate(app, Settings(target=fake.target)), b"", path, method=method)
    await exchange.run()
    assert seen == [path]
    assert fake.hellos == []


async def test_generation_that_is_not_gated_yet_is_refused_unless_allowed(
    fake: FakeScheduler,
) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])

    settings = Settings(target=fake.target)
    refused = await Exchange(Gate(app, settings), b"{}", "/v1/responses").run()
    assert (refused.status, refused.error["code"]) == (501, "not_gated")
    assert refused.answer_headers["x-should-retry"] == "false"
    await Exchange(Gate(app, replace(settings, refuse_ungated=False)), b"", "/invocations").run()
    assert seen == ["/invocations"]


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


async def test_who_asks(fake: FakeScheduler, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-1").digest()
    key = {"authorization": "Bearer sk-1"}
    trusting = Settings(
        target=fake.target, tenant_headers=("x-a", "x-b"), trust_api_key=True, trust_user_field=True
    )
    cases: list[tuple[Settings, dict[str, str], dict[str, str], str, bytes]] = [
        (trusting, {"x-b": "b", "x-a": "a"} | key, {}, "a", b""),
        (trusting, {"x-b": "b", "x-a": " "} | key, {}, "b", b""),
        (trusting, {"x-tenant-id": "c"} | key, {"user": "u"}, "", digest),
        (trusting, {}, {"user": "u", "safety_identifier": "s"}, "s", b""),
        (trusting, {"authorization": "Basic x"}, {"user": "u"}, "u", b""),
        (Settings(target=fake.target), {"x-tenant-id": "c"} | key, {"user": "u"}, "", digest),
        (
            Settings(target=fake.target, trust_api_key=False),
            {"x-tenant-id": "c"} | key,
            {"user": "u"},
            "",
            b"",
        ),
    ]
    for settings, headers, fields, tenant, sha256 in cases:
        bench = Bench(fake, settings)
        assert (await bench.ask(ask(**fields), headers=headers)).status == 200
        admit = fake.admits[-1]
        assert (admit.tenant, admit.api_key_sha256) == (tenant, sha256)
        await bench.gate._close()
    bench = Bench(fake, trusting)
    for headers in ({"x-a": "x" * 257}, {"x-a": "\xff"}):
        exchange = bench.exchange(headers=headers)
        if headers["x-a"] == "\xff":
            exchange.scope["headers"].insert(0, (b"x-a", b"\xff"))
        await exchange.run()
        assert (exchange.status, exchange.error["param"]) == (400, "x-a")
    await bench.gate._close()


async def test_a_wrong_key_never_reaches_the_scheduler(fake: FakeScheduler) -> None:
    bench = Bench(fake, Settings(target=fake.target))
    bench.owner.state.args = type("Args", (), {"api_key": ["sk-right"]})
    for headers in ({}, {"authorization": "Bearer sk-wrong"}):
        refused = await bench.ask(headers=headers)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert fake.admits == []
    assert (await bench.ask(headers={"authorization": "bearer sk-right"})).status == 200
    await bench.gate._close()


async def test_fail_open_keeps_the_last_level_and_comes_back(bench: Bench, until: Until) -> None:
    bench.engine.gate = asyncio.Event()
    # Three run when the scheduler vanishes.
    tasks = [asyncio.ensure_future(bench.ask()) for _ in range(3)]
    await until(lambda: bench.engine.running == 3)
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


async def test_those_who_wait_locally_ask_the_scheduler_when_it_is_back(
    bench: Bench, until: Until
) -> None:
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


async def test_fail_closed_answers_503(fake: FakeScheduler) -> None:
    await fake.stop()
    bench = Bench(fake, Settings(target=fake.target, fail_open=False))
    refused = await bench.ask()
    assert (refused.status, refused.error["code"]) == (503, "server_is_overloaded")
    assert refused.answer_headers["x-schedsvc-dropped-reason"] == "scheduler_unreachable"
    assert int(refused.answer_headers["retry-after"]) >= 1
    assert bench.engine.bodies == []
    await bench.gate._close()


async def test_telemetry_is_reported(bench: Bench, until: Until) -> None:
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

        inbox.put_nowait({"type": "lifespan.startup"})
        await gate({"type": "lifespan", "app": owner_}, inbox.get, send)
        return sent

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        await send({"type": "lifespan.startup.complete"})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(receive(), 0.2)
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
