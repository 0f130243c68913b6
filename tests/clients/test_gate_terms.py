"""Tests terms of a request in its headers: its longest wait, its deadline, its class."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm import turn
from schedsvc_vllm.settings import Settings, SettingsError

from .asgi import ask
from .bench import TRUST, Bench

MAX_QUEUE, DEADLINE = "x-schedsvc-max-queue-ms", "x-schedsvc-deadline-ms"
TTFT, OBJECTIVE = "x-llm-d-slo-ttft-ms", "x-llm-d-inference-objective"
SESSION = "x-session-id"


@pytest.mark.parametrize(
    ("headers", "queue_ttl_ms", "deadline_ms"),
    [
        ({}, 0, 0),
        ({MAX_QUEUE: "0"}, 1, 0),  # the contract's 0 is the scheduler's default
        ({MAX_QUEUE: " 250 "}, 250, 0),
        ({MAX_QUEUE: "0.5", DEADLINE: "1500.2"}, 1, 1_501),
        ({MAX_QUEUE: "86400000"}, 86_400_000, 0),
        ({TTFT: "2000"}, 0, 2_000),
        ({TTFT: "0"}, 0, 0),
        ({TTFT: "2000", DEADLINE: "3000"}, 0, 3_000),
        ({OBJECTIVE: "batch"}, 0, 0),
    ],
)
async def test_terms_in_headers_reach_the_scheduler(
    bench: Bench, headers: dict[str, str], queue_ttl_ms: int, deadline_ms: int
) -> None:
    assert (await bench.ask(headers=TRUST | headers)).status == 200
    admit = bench.fake.admits[0]
    assert (admit.queue_ttl_ms, admit.deadline_ms) == (queue_ttl_ms, deadline_ms)
    assert admit.request_class == ""
    await bench.settled()


@pytest.mark.parametrize("name", [MAX_QUEUE, DEADLINE, TTFT])
@pytest.mark.parametrize("value", ["-1", "5s", "1e3", "nan", "86400001", "1,2", "0x10", "٣"])
async def test_malformed_terms_are_named_and_refused(bench: Bench, name: str, value: str) -> None:
    exchange = bench.exchange(headers=TRUST)
    exchange.scope["headers"].append((name.encode(), value.encode()))
    refused = await exchange.run()
    assert (refused.status, refused.error["param"]) == (400, name)
    shown = value.encode().decode("latin-1")
    assert refused.error["message"].startswith(f"{name}: {shown!r} is not a number of milliseconds")
    assert "or leave the header out" in refused.error["message"]
    assert bench.fake.admits == []


async def test_a_deadline_of_0_is_refused(bench: Bench) -> None:
    refused = await bench.ask(headers=TRUST | {DEADLINE: "0"})
    assert (refused.status, refused.error["param"]) == (400, DEADLINE)
    assert "from 1 to 86400000" in refused.error["message"]


@pytest.mark.parametrize("name", [MAX_QUEUE, DEADLINE, TTFT, OBJECTIVE])
async def test_terms_that_occur_twice_are_refused(fake: FakeScheduler, name: str) -> None:
    known = (MAX_QUEUE, DEADLINE, TTFT, OBJECTIVE)
    bench = Bench(fake, Settings(target=fake.target, request_headers=known))
    exchange = bench.exchange()
    exchange.scope["headers"] += [(name.encode(), b"5")] * 2
    refused = await exchange.run()
    assert (refused.status, refused.error["param"]) == (400, name)
    assert "occurs 2 times" in refused.error["message"]
    await bench.gate._close()


@pytest.mark.parametrize("off", [MAX_QUEUE, DEADLINE, TTFT])
async def test_each_header_can_be_switched_off(fake: FakeScheduler, off: str) -> None:
    names = tuple(name for name in Settings(target="").request_headers if name != off)
    bench = Bench(fake, Settings(target=fake.target, request_headers=names))
    given = {MAX_QUEUE: "7", DEADLINE: "8", TTFT: "9"} | {off: "not read"}
    assert (await bench.ask(headers=given)).status == 200
    admit = fake.admits[0]
    assert admit.queue_ttl_ms == (0 if off == MAX_QUEUE else 7)
    assert admit.deadline_ms == (9 if off == DEADLINE else 8)
    await bench.gate._close()


async def test_a_session_in_its_header_reaches_the_scheduler(fake: FakeScheduler) -> None:
    bench = Bench(fake, Settings(target=fake.target))
    assert (await bench.ask(headers={SESSION: " talk-7 "})).status == 200
    assert (await bench.ask()).status == 200
    assert [admit.session for admit in fake.admits] == ["talk-7", ""]
    refused = await bench.ask(headers={SESSION: "x" * 257})
    assert (refused.status, refused.error["param"]) == (400, SESSION)
    assert "at most 256 printable bytes" in refused.error["message"]
    await bench.gate._close()
    deaf = Bench(fake, Settings(target=fake.target, request_headers=(MAX_QUEUE,)))
    assert (await deaf.ask(headers={SESSION: "talk-7"})).status == 200
    assert fake.admits[-1].session == ""
    await deaf.gate._close()


async def test_an_objective_names_the_class_before_the_tier(fake: FakeScheduler) -> None:
    settings = Settings(target=fake.target, class_from_service_tier=True)
    bench = Bench(fake, replace(settings, request_headers=(OBJECTIVE,)))
    body = ask(service_tier="flex")
    assert (await bench.ask(body, headers={OBJECTIVE: "batch"})).status == 200
    assert (await bench.ask(body)).status == 200
    assert [admit.request_class for admit in fake.admits] == ["batch", "flex"]
    await bench.gate._close()


@pytest.mark.usefixtures("gives_up")
@pytest.mark.parametrize("headers", [{MAX_QUEUE: "0"}, {DEADLINE: "60"}])
async def test_terms_bound_the_wait_without_scheduler(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    monkeypatch.setattr(turn, "LOCAL_WAIT_S_MAX", 3_600.0)
    await bench.fake.stop()
    await bench.ask()
    assert bench.gate._runtime is not None
    holding = bench.gate._runtime.limit.ask()
    assert holding.result()
    refused = await bench.ask(headers=TRUST | headers)
    assert refused.status == 503
    assert refused.answer_headers["x-schedsvc-dropped-reason"] == "scheduler_unreachable"


def test_settings_name_the_headers_that_are_read() -> None:
    target = {"SCHEDSVC_TARGET": "unix:/s"}

    def read(**variables: str) -> Settings:
        return Settings.from_environment(target | variables)

    assert read().request_headers == (MAX_QUEUE, DEADLINE, TTFT, SESSION)
    assert read(SCHEDSVC_REQUEST_HEADERS="off").request_headers == ()
    one = read(SCHEDSVC_REQUEST_HEADERS="X-llm-d-inference-objective, ")
    assert one.request_headers == (OBJECTIVE,)
    with pytest.raises(SettingsError, match=r"SCHEDSVC_REQUEST_HEADERS: .*not x-other"):
        read(SCHEDSVC_REQUEST_HEADERS="x-other")
    preset = read(SCHEDSVC_TENANT_HEADERS="llm-d, x-tenant-id")
    assert preset.tenant_headers == ("x-llm-d-inference-fairness-id", "x-tenant-id")


async def test_a_repeated_trusted_header_is_refused_anywhere(fake: FakeScheduler) -> None:
    environment = {"SCHEDSVC_TARGET": fake.target, "SCHEDSVC_TENANT_HEADERS": "x-tenant-id,llm-d"}
    settings = Settings.from_environment(environment)
    bench = Bench(fake, settings)
    for name in settings.tenant_headers:
        exchange = bench.exchange(headers=TRUST if name != "x-tenant-id" else {})
        exchange.scope["headers"] += [(name.encode(), b"a")] * 2
        refused = await exchange.run()
        assert (refused.status, refused.error["param"]) == (400, name)
    assert (await bench.ask(headers={"x-llm-d-inference-fairness-id": "team"})).status == 200
    assert fake.admits[0].tenant == "team"
    await bench.gate._close()
