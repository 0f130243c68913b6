"""Tests answers of the gate itself: refusals, wrong requests, wrong keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.settings import Settings

from .asgi import Exchange, ask
from .bench import TRUST, Bench


@pytest.mark.parametrize(
    ("outcome", "status", "kind", "code"),
    [
        (pb.OUTCOME_REJECTED_QUOTA, 429, "rate_limit_error", "rate_limit_exceeded"),
        (pb.OUTCOME_EVICTED_TTL, 429, "rate_limit_error", "rate_limit_exceeded"),
        (pb.OUTCOME_REJECTED_DEADLINE, 429, "rate_limit_error", "rate_limit_exceeded"),
        (pb.OUTCOME_EVICTED_DEADLINE, 429, "rate_limit_error", "rate_limit_exceeded"),
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
        quota_pb2.Limit(
            kind=quota_pb2.LIMIT_KIND_REQUESTS_PER_MINUTE, limit=8, remaining=0, reset_ms=360_000
        ),
        quota_pb2.Limit(
            kind=quota_pb2.LIMIT_KIND_OUTPUT_TOKENS_PER_MINUTE,
            limit=4_000,
            remaining=12,
            reset_ms=120,
        ),
    ]
    bench.fake.decide = lambda request: refusal(
        outcome, retry_after_ms=1_200, message="no", quota=quota_pb2.QuotaSnapshot(limits=limits)
    )
    refused = await bench.ask(headers=TRUST | {"x-request-id": "abc"})
    assert refused.status == status
    error = refused.error
    message = error.pop("message")
    assert message.startswith("no: ")
    assert message.endswith("it waited 2 s. Retry in 1.2 s (request abc).")
    assert error == {"type": kind, "param": None, "code": code}
    reason = pb.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()
    expected = {
        "retry-after": "2",
        "retry-after-ms": "1200",
        "x-ratelimit-limit-requests": "8",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "6m0s",
        "x-ratelimit-limit-output-tokens": "4000",
        "x-ratelimit-remaining-output-tokens": "12",
        "x-ratelimit-reset-output-tokens": "120ms",
        "x-request-id": "abc",
        "x-schedsvc-dropped-reason": reason,
        "x-schedsvc-queue-duration-ms": "2000.000",
        "x-schedsvc-request-id": bench.fake.admits[0].request_id,
    }
    assert expected.items() <= refused.answer_headers.items()
    assert bench.engine.bodies == []
    await bench.settled()


QUOTAS = {
    "requests": ("REQUESTS_PER_MINUTE", 60),
    "tokens": ("TOKENS_PER_MINUTE", 600),
    "input-tokens": ("INPUT_TOKENS_PER_MINUTE", 500),
    "concurrent-requests": ("CONCURRENT_REQUESTS", 3),
    "tokens-day": ("TOKENS_PER_DAY", 5),
    "tokens-month": ("TOKENS_PER_MONTH", 6),
}


@pytest.mark.parametrize("has_quotas", [True, False])
@pytest.mark.parametrize("is_named", [True, False])
async def test_rate_limit_headers_report_own_quotas_only(
    bench: Bench, has_quotas: bool, is_named: bool
) -> None:
    """The pool's tokens, places in a queue, and limits that unknown tenants share are left out."""
    given = [("POOL_TOKENS", 1), ("QUEUED_REQUESTS", 2), *(QUOTAS.values() if has_quotas else ())]
    limits = [
        quota_pb2.Limit(
            kind=quota_pb2.LimitKind.Value(f"LIMIT_KIND_{name}"), limit=limit, reset_ms=1_000
        )
        for name, limit in given
    ]
    bench.fake.decide = lambda request: refusal(
        pb.OUTCOME_REJECTED_QUOTA,
        retry_after_ms=1_200,
        quota=quota_pb2.QuotaSnapshot(limits=limits),
    )
    refused = await bench.ask(headers=TRUST if is_named else {})
    shown = {
        name: value
        for name, value in refused.answer_headers.items()
        if name.startswith("x-ratelimit-")
    }
    expected = {f"x-ratelimit-limit-{name}": str(limit) for name, (_, limit) in QUOTAS.items()}
    expected |= {f"x-ratelimit-remaining-{name}": "0" for name in QUOTAS}
    expected |= {f"x-ratelimit-reset-{name}": "1s" for name in QUOTAS}
    assert shown == (expected if has_quotas and is_named else {})
    await bench.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("has_quotas", [True, False])
async def test_an_answer_shows_the_quotas_of_its_tenant(
    bench: Bench, stream: bool, is_named: bool, has_quotas: bool
) -> None:
    bench.engine.headers = [
        (b"X-RateLimit-Remaining-Requests", b"7"),
        (b"anthropic-ratelimit-requests-limit", b"9"),
        (b"x-kept", b"1"),
    ]
    given = bench.fake.granted()
    if has_quotas:
        given.grant.quota.limits.add(
            kind=quota_pb2.LIMIT_KIND_REQUESTS_PER_MINUTE, limit=60, remaining=59, reset_ms=1_000
        )
    bench.fake.decide = lambda request: given
    answer = await bench.ask(ask(stream=stream), headers=TRUST if is_named else {})
    assert answer.status == 200
    shown = {n: v for n, v in answer.answer_headers.items() if "ratelimit" in n}
    quotas = {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
    }
    # The figures of the engine, or of a proxy's upstream, are of all tenants together.
    assert shown == (quotas if has_quotas and is_named else {})
    assert answer.answer_headers["x-kept"] == "1"
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
        ("/v1/completions", ask(n="5x"), "n"),
        ("/v1/completions", ask(n=True), "n"),
        ("/v1/completions", ask(n=2_000), "n"),
        ("/v1/completions", ask(max_tokens=-1), "max_tokens"),
        ("/v1/completions", ask(max_tokens=1.5), "max_tokens"),
        ("/v1/completions", ask(stream="maybe"), "stream"),
        ("/v1/completions", ask(stream=2), "stream"),
        ("/v1/completions", ask(stream=True, stream_options=[]), "stream_options"),
        (
            "/v1/completions",
            ask(stream=True, stream_options={"include_usage": 2}),
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


async def test_tenant_is_read_from_trusted_fields(fake: FakeScheduler, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "name", ["x-tenant-id", "authorization", "x-api-key"], ids=lambda name: str(name)
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_header_that_names_the_caller_occurs_once(
    fake: FakeScheduler, name: str, path: str
) -> None:
    bench = Bench(fake, Settings(target=fake.target, tenant_headers=("x-tenant-id",)))
    bench.owner.state.args = type("Args", (), {"api_key": ["sk-1"]})
    values = {"authorization": "Bearer sk-1", "x-api-key": "sk-1", "x-tenant-id": "a"}
    others = {} if name == "x-api-key" else {"authorization": values["authorization"]}
    exchange = bench.exchange(ask(), headers=others | {name: values[name]}, path=path)
    second = values[name] if name != "x-tenant-id" else "b"
    exchange.scope["headers"].append((name.encode(), second.encode()))
    await exchange.run()
    if name == "x-tenant-id" and path == "/tokenize":
        assert exchange.status == 200  # no credential is needed there
        return
    assert (exchange.status, exchange.error["param"]) == (400, name)
    assert exchange.error["message"] == f"{name}: the header occurs 2 times; send it once"
    assert fake.admits == []


async def test_a_name_with_a_comma_is_two_headers_that_were_joined(bench: Bench) -> None:
    refused = await bench.ask(ask(), headers={"x-tenant-id": "victim/x, own"})
    assert (refused.status, refused.error["param"]) == (400, "x-tenant-id")
    assert "'victim/x, own' holds a comma" in refused.error["message"]
    assert bench.fake.admits == []
    await bench.gate._close()


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\x07", "a\u202eb", "a\nb"])
async def test_tenant_that_cannot_be_printed_is_refused(fake: FakeScheduler, name: str) -> None:
    bench = Bench(
        fake, Settings(target=fake.target, tenant_headers=("x-a",), trust_user_field=True)
    )
    exchange = bench.exchange(ask())
    exchange.scope["headers"].append((b"x-a", name.encode()))
    await exchange.run()
    assert (exchange.status, exchange.error["param"]) == (400, "x-a")
    assert (await bench.ask(ask(user=name))).error["param"] == "user"
    assert fake.admits == []
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
