"""Tests every refusal of the gate as a person meets it, through OpenAI's SDK.

A real scheduler refuses where a request can bring that about. A scripted one sends the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
from schedsvc_client import Outcome
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.operator import Operator
from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.answers import FACES, OVERLOADED
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.refusals import Reason, reason_of
from schedsvc_vllm.settings import MAX_QUEUE, JwtSettings, PoolSettings, Settings

from schedsvc.config import Config
from schedsvc.server import Server
from tests.processes.programs import Programs, empty, eventually, standing

from .bench import Bench
from .issuer import AUDIENCE, ISSUER, Signer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "refusals.md"
REFUSES = {"over": "refuse"}
CONFIG: dict[str, Any] = {
    "scheduler": {"flow_queue_max": 4, "queue_max": 5, "queue_ttl_ms": 60_000},
    "tenants": [
        {"name": "a"},
        {"name": "b"},
        {"name": "requests", "quota": {"requests_per_minute": 1, **REFUSES}},
        {"name": "tokens", "quota": {"tokens_per_minute": 60, **REFUSES}},
        {"name": "waits", "quota": {"requests_per_minute": 1}},
        {"name": "day", "quota": REFUSES, "budget": {"tokens_per_day": 1_000}},
    ],
    "unknown_tenants": "refuse",
    "usage": {"path": "usage.db"},
    "limits": {"drain_ms": 100},
}
ENGINE = (
    *("--profile", "tiny-cpu", "--block-size", "16"),
    *("--kv-tokens", "4096", "--max-model-len", "2048"),
)
SMALL = {"prompt": [1] * 20, "max_tokens": 8}
#: Nothing else fits beside it.
LARGE = {"prompt": [1] * 1_900, "max_tokens": 100}
ID = r"\(request [\w~-]+\)\."


def client(url: str, tenant: str, **headers: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="any",
        max_retries=0,
        default_headers={"x-tenant-id": tenant, **headers},
    )


async def refused(sdk: openai.AsyncOpenAI, **body: Any) -> openai.APIStatusError:
    """Ask, and check what all refusals have in common."""
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.completions.create(model="emulated", **(SMALL | body))
    error = caught.value
    headers, message = error.response.headers, error.body["message"]  # type: ignore[index]
    if "retry-after-ms" in headers:
        seconds = int(headers["retry-after-ms"]) / 1_000
        assert f". Retry in {seconds:,.1f}".removesuffix(".0") in message
    else:
        assert headers["x-should-retry"] == "false"
        assert ". A retry does not help" in message
    if (request_id := headers["x-request-id"]) != "-":  # a gate that cannot start gives none
        assert message.endswith(f" (request {request_id}).")
    return error


def said(error: openai.APIStatusError) -> tuple[str, str]:
    """Return the reason of a refusal, and its message."""
    reason = error.response.headers["x-schedsvc-dropped-reason"]
    return reason, error.body["message"]  # type: ignore[index]


# The real scheduler.


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    with standing(lambda folder: Programs(folder, CONFIG, engine=ENGINE)) as made:
        made.start_scheduler()
        made.start_engine()
        yield made


@pytest.mark.parametrize(
    ("tenant", "before", "body", "reason", "text"),
    [
        (
            "requests",
            1,
            {},
            "rejected_quota",
            r"a quota of the tenant is spent: 1 of 1 requests per minute are used, and whole again"
            r" in \d+(\.\d)? s\. Retry in \d+(\.\d)? s",
        ),
        (
            "tokens",
            2,
            {},
            "rejected_quota",
            r"a quota of the tenant is spent: \d\d of 60 tokens per minute are used, and whole"
            r" again in \d+(\.\d)? s\. Retry",
        ),
        (
            "tokens",
            0,
            {"prompt": [1] * 200},
            "rejected_quota_size",
            r"larger than a quota of the tenant can ever hold: the request has 200 input tokens and"
            r" asks for up to 8; the limit is 60 tokens per minute\. A retry does not help",
        ),
        (
            "day",
            1,
            {"prompt": [1] * 600},
            "rejected_quota",
            r".*: 6\d\d of 1,000 tokens of this day are used, and whole again in .*\. Retry in",
        ),
        (
            "a",
            0,
            {"prompt": [[1] * 1_900] * 3},
            "rejected_too_large",
            r"larger than the model's context or the engine's KV cache: the request has 5,700 input"
            r" tokens and asks for up to 24.*\. A retry does not help",
        ),
        (
            "nobody",
            0,
            {},
            "rejected_unknown_tenant",
            r"the tenant is unknown and unknown tenants are refused\. A retry does not help",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
async def test_request_alone_is_refused_with_its_limit(
    programs: Programs, tenant: str, before: int, body: dict[str, Any], reason: str, text: str
) -> None:
    async with client(programs.engine_url, tenant) as sdk:
        for _ in range(before):
            await sdk.completions.create(model="emulated", **(SMALL | body))
        found, message = said(await refused(sdk, **body))
        assert found == reason
        assert re.fullmatch(f"{text}.* {ID}", message), message


@contextlib.asynccontextmanager
async def full(programs: Programs) -> AsyncIterator[Callable[..., Any]]:
    """The pool is held by a lease. Yields what asks and waits until that is queued."""
    asking: list[asyncio.Task[Any]] = []
    async with AsyncScheduler(programs.target) as scheduler, contextlib.AsyncExitStack() as sdks:
        await eventually(scheduler, empty)
        shape: dict[str, Any] = {"input_tokens": [1_800] * 2, "max_output_tokens": 200}
        holding = await scheduler.admission(tenant="b", pools=["default"], **shape).__aenter__()

        async def queue(tenant: str) -> asyncio.Task[Any]:
            sdk = await sdks.enter_async_context(client(programs.engine_url, tenant))
            asking.append(asyncio.ensure_future(refused(sdk, **LARGE)))
            count = len(asking)
            await eventually(scheduler, lambda stats: stats.totals.queued == count)
            return asking[-1]

        try:
            yield queue
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            holding.complete()
            await holding.__aexit__(None, None, None)
            await eventually(scheduler, empty)


async def test_full_queues_refuse_with_their_places(programs: Programs) -> None:
    async with full(programs) as queue:
        for _ in range(4):
            await queue("a")
        async with client(programs.engine_url, "a") as sdk:
            reason, message = said(await refused(sdk, **LARGE))
            assert reason == "rejected_flow_queue_full"
            assert message.startswith("the tenant's queue is full: 4 of 4 places are taken")
        # The fifth place is for a retry that is due.
        async with client(programs.engine_url, "b") as sdk:
            reason, message = said(await refused(sdk, **LARGE))
            assert reason == "rejected_queue_full"
            assert message.startswith("all queues together are full. Retry in ")


async def test_wait_that_ends_is_refused_with_its_length_and_place(programs: Programs) -> None:
    async with full(programs) as queue:
        await queue("a")
        async with client(programs.engine_url, "a", **{MAX_QUEUE: "0"}) as sdk:
            reason, message = said(await refused(sdk, **LARGE))
        assert reason == "evicted_ttl"
        assert re.fullmatch(
            r"its turn did not come while it could wait: it waited \d+(\.\d)? s; requests of its"
            rf" tenant ahead of it: 1\. Retry in \d+(\.\d)? s {ID}",
            message,
        )


async def test_wait_that_a_quota_caused_is_refused_with_the_quota(programs: Programs) -> None:
    async with client(programs.engine_url, "waits", **{MAX_QUEUE: "0"}) as sdk:
        await sdk.completions.create(model="emulated", **SMALL)
        reason, message = said(await refused(sdk))
        assert reason == "evicted_ttl"
        assert "could wait: 1 of 1 requests per minute are used, and whole again in " in message


async def test_requests_of_a_drained_pool_are_refused(programs: Programs) -> None:
    async with full(programs) as queue:
        queued = await queue("a")
        with Operator(programs.target) as operator:
            await asyncio.to_thread(operator.drain, "default")
            try:
                async with client(programs.engine_url, "a") as sdk:
                    assert said(await refused(sdk))[0] == "rejected_draining"
                assert said(await queued)[0] == "evicted_draining"
            finally:
                await asyncio.to_thread(operator.drain, "default", undo=True)


async def test_revoked_request_is_refused(programs: Programs) -> None:
    long = {"prompt": [1] * 1_000, "max_tokens": 1_000, "extra_body": {"ignore_eos": True}}
    async with (
        AsyncScheduler(programs.target) as scheduler,
        client(programs.engine_url, "a") as sdk,
    ):
        running = asyncio.ensure_future(refused(sdk, **long))
        await eventually(scheduler, lambda stats: stats.totals.live_leases == 1)
        with Operator(programs.target) as operator:
            await asyncio.to_thread(operator.revoke_all, Operator.filter(tenant="a"))
        reason, message = said(await running)
        assert reason == "lease_revoked"
        assert message.startswith("the scheduler has ended this request. Retry in 1 s")


# A scripted scheduler, for what needs a race or another engine.


def in_process(bench: Bench, api_key: str = "any") -> openai.AsyncOpenAI:
    async def served(scope: Any, receive: Any, send: Any) -> None:
        await bench.gate({**scope, "app": bench.owner}, receive, send)

    return openai.AsyncOpenAI(
        base_url="http://gate/v1",
        api_key=api_key,
        max_retries=0,
        default_headers={"x-tenant-id": "acme"},
        http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(served)),
    )


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.REJECTED_NO_POOL,
        Outcome.REJECTED_DEADLINE,
        Outcome.REJECTED_LIMIT,
        Outcome.EVICTED_TOO_LARGE,
        Outcome.EVICTED_DEADLINE,
    ],
    ids=lambda outcome: outcome.name,
)
async def test_scripted_refusal_names_quota_wait_and_place(bench: Bench, outcome: Outcome) -> None:
    limits = [
        quota_pb2.Limit(
            kind=quota_pb2.LIMIT_KIND_CONCURRENT_REQUESTS, limit=3, remaining=0, reset_ms=1_500
        )
    ]
    bench.fake.decide = lambda request: refusal(
        pb.Outcome.ValueType(outcome),
        retry_after_ms=1_200,
        message="it is so",
        queue_position=1_047,
        quota=quota_pb2.QuotaSnapshot(limits=limits),
    )
    async with in_process(bench) as sdk:
        reason, message = said(await refused(sdk))
    assert reason == reason_of(outcome)
    facts = "it waited 2 s; requests of its tenant ahead of it: 1,047"
    if outcome in (Outcome.REJECTED_DEADLINE, Outcome.EVICTED_DEADLINE):
        facts = f"3 of 3 requests at once are used, and whole again in 1.5 s; {facts}"
    if outcome is Outcome.EVICTED_TOO_LARGE:
        facts = f"the request has 20 input tokens and asks for up to 8; {facts}"
    assert message.startswith(f"it is so: {facts}. ")
    await bench.settled()


async def test_caller_without_a_name_reads_no_figures_of_others(bench: Bench) -> None:
    limits = [
        quota_pb2.Limit(kind=kind, limit=3, remaining=0, reset_ms=1_500) for kind in (1, 2, 3, 6)
    ]
    bench.fake.decide = lambda request: refusal(
        pb.OUTCOME_REJECTED_QUOTA,
        retry_after_ms=1_200,
        message="no",
        queue_position=9,
        quota=quota_pb2.QuotaSnapshot(limits=limits),
    )
    answer = await bench.ask(headers={"x-request-id": "abc"})
    assert answer.error["message"] == "no: it waited 2 s. Retry in 1.2 s (request abc)."
    await bench.settled()


# The gate's own reasons.

NOWHERE = "unix:/nowhere/schedsvc.sock"
POOL = PoolSettings(capacity_tokens=4_096, block_size_tokens=16)


def made(fake: FakeScheduler, **settings: Any) -> Bench:
    """Return a gate that knows a tenant by its header and passes nothing on its own."""
    given = {"target": fake.target, "tenant_headers": ("x-tenant-id",), "fail_open": False}
    return Bench(fake, Settings(**given | {"header_set_by": "test"} | settings))


def unreachable(fake: FakeScheduler) -> Bench:
    return made(fake, target=NOWHERE)


def full_of_bodies(fake: FakeScheduler) -> Bench:
    bench = made(fake)
    bench.gate._bodies.total = bench.gate._bodies.total_max
    return bench


def without_issuer(fake: FakeScheduler) -> Bench:
    jwt = JwtSettings(issuer=ISSUER, audience=AUDIENCE, jwks="http://127.0.0.1:9/keys")
    return made(fake, jwt=jwt, tenant_headers=())


def without_keys(fake: FakeScheduler) -> Bench:
    return made(fake, target=NOWHERE, asks_for_keys=True, known_keys_file="", tenant_headers=())


def without_upstream(fake: FakeScheduler) -> Bench:
    bench = made(fake, pool=POOL)
    bench.gate.app = Upstream("http://127.0.0.1:9")
    return bench


def misconfigured(fake: FakeScheduler) -> Bench:
    bench = made(fake)
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("SCHEDSVC_TARGET", "nonsense")
        bench.gate = Gate(bench.engine)
    return bench


@pytest.mark.parametrize(
    ("make", "reason", "text"),
    [
        (unreachable, Reason.SCHEDULER_UNREACHABLE, "the admission scheduler cannot be reached"),
        (full_of_bodies, Reason.BODIES_FULL, r"the bodies .* have more than \d+ bytes together .*"),
        (without_issuer, Reason.KEYS_UNAVAILABLE, "the keys of the token's issuer cannot be .*"),
        (without_keys, Reason.API_KEY_NOT_CHECKED, "the API key cannot be checked now: .*"),
        (without_upstream, Reason.UPSTREAM_UNREACHABLE, "the server behind .* cannot be reached"),
        (misconfigured, Reason.GATE_MISCONFIGURED, "the gate of this server is misconfigured.*"),
    ],
    ids=lambda value: value.value if isinstance(value, Reason) else "",
)
async def test_gate_that_cannot_serve_names_its_reason(
    fake: FakeScheduler, make: Callable[[FakeScheduler], Bench], reason: Reason, text: str
) -> None:
    bench = make(fake)
    try:
        async with in_process(bench, api_key=Signer("ES256", "ec").token()) as sdk:
            found, message = said(await refused(sdk, prompt="long " * 30_000))
        assert found == reason.value
        assert re.fullmatch(rf"{text}\. Retry in 1 s( {ID}|\.)", message), message
    finally:
        await bench.gate._close()


@pytest.mark.parametrize(
    ("code", "reason"),
    [("RESOURCE_EXHAUSTED", Reason.SCHEDULER_LIMIT), ("NOT_FOUND", Reason.SCHEDULER_REFUSED)],
)
async def test_call_that_the_scheduler_refuses_passes_its_sentence_on(
    fake: FakeScheduler, code: str, reason: Reason
) -> None:
    bench = made(fake)
    assert (await bench.ask()).status == 200  # it is connected
    number = grpc.StatusCode[code].value[0]
    fake.faults = [pb.SessionFault(code=number, field="tenant", description="not this one")]
    async with in_process(bench) as sdk:
        found, message = said(await refused(sdk))
    assert found == reason.value
    assert "not this one. Retry in 1 s (request " in message
    await bench.gate._close()


async def test_second_engine_of_a_pool_is_refused(tmp_path: Path) -> None:
    config = {"listeners": [{"unix": f"{tmp_path}/s"}], "tenants": [{"name": "acme"}]}
    scheduler = Server(Config.model_validate(config))
    await scheduler.start()
    fake: Any = scheduler
    fake.target = scheduler.targets[0]
    first, second = made(fake, pool=POOL), made(fake, pool=POOL)
    try:
        assert (await first.ask()).status == 200
        async with in_process(second) as sdk:
            reason, message = said(await refused(sdk))
        assert reason == "pool_refused"
        assert message.startswith("two engines claim pool default; set SCHEDSVC_POOL")
    finally:
        await first.gate._close()
        await second.gate._close()
        await scheduler.stop(None)


# The reference.


def rows(section: str) -> dict[str, list[str]]:
    """Return the cells of each reason in a section of the page."""
    text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells[2:] if row and re.fullmatch("[a-z_]+", row[0])}


def test_reference_lists_each_reason_with_its_status_and_code() -> None:
    ends = [one for one in Outcome if one.name.startswith(("REJECTED_", "EVICTED_"))]
    by_scheduler = rows("Reasons of the scheduler")
    assert set(by_scheduler) - {"reason"} == {reason_of(one) for one in ends}
    for one in set(ends) - {Outcome.EVICTED_CANCELLED}:
        face = FACES.get(one, OVERLOADED)
        assert by_scheduler[reason_of(one)][:2] == [str(face.status), face.code]
    assert set(rows("Reasons of the gate")) - {"reason"} == {reason.value for reason in Reason}
