"""Tests the Prometheus page."""

import asyncio
import random
from typing import Any

import aiohttp
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc.metrics.page import written
from schedsvc.server import Server
from tests.waiting import until

from .conftest import ask, calling, config_of, failure, serving, totals
from .test_session import stream

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(server: Server) -> Samples:
    assert server.metrics_url is not None
    async with aiohttp.ClientSession() as http, http.get(server.metrics_url) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = await answer.text()
    return samples_of(text)


def samples_of(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name.removeprefix("schedsvc_"), tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def metered(**keys: Any) -> Any:
    return serving(metrics={"listen": "127.0.0.1:0", "tenants_max": 2}, **keys)


async def use(stub: SchedulerServiceStub, tenant: str, output_tokens: int) -> None:
    granted = await stub.Admit(ask(64, tenant=tenant))
    ended = pb.CompleteRequest(
        lease_id=granted.grant.lease_id,
        pool_epoch=1,
        input_tokens=64,
        cached_input_tokens=16,
        output_tokens=output_tokens,
    )
    await stub.Complete(ended)


async def test_usage_of_each_tenant_is_counted_to_the_token() -> None:
    async with metered() as server, calling(server.targets[0]) as stub:
        for tenant, output_tokens in [("a", 3), ("a", 4), ("b", 5)]:
            await use(stub, tenant, output_tokens)
        held = await stub.Admit(ask(1_500, tenant="b"))
        waiting = asyncio.ensure_future(stub.Admit(ask(1_500, tenant="b")))
        await stub.Admit(ask(100_000, tenant="a"))
        await failure(stub.Complete(pb.CompleteRequest(lease_id=1)))
        async with stream(server):
            await until(lambda: totals(server)["queued"] == 1, "it waits")
            await until(lambda: totals(server)["open_sessions"] == 1, "the stream is open")
            await asyncio.sleep(0.05)  # the least time
            samples = await scrape(server)
        for tenant, output_tokens, requests in [("a", 7, 3), ("b", 5, 3)]:
            assert of(samples, "output_tokens_total", tenant=tenant) == output_tokens
            assert of(samples, "requests_received_total", tenant=tenant) == requests
        assert of(samples, "input_tokens_total", tenant="a") == 128
        assert of(samples, "cached_input_tokens_total", tenant="a") == 32
        assert of(samples, "requests_completed_total", tenant="a") == 2
        assert of(samples, "refusals_total", tenant="a", reason="rejected_too_large") == 1
        reserved = held.grant.reserved_tokens
        assert of(samples, "kv_promised_tokens", tenant="b") == reserved
        assert of(samples, "pool_promised_tokens", pool="pool") == reserved
        assert of(samples, "queued_requests", tenant="b") == 1
        assert of(samples, "oldest_queued_seconds", tenant="b") >= 0.04
        assert of(samples, "open_sessions") == 1
        assert of(samples, "up") == 1
        assert of(samples, "rpc_failures_total", method="Complete", code="NOT_FOUND") == 1
        waiting.cancel()


async def test_output_above_its_limit_is_charged_and_counted() -> None:
    async with metered() as server, calling(server.targets[0]) as stub:
        asked = ask(64, max_output_tokens=100)
        granted = (await stub.Admit(asked)).grant
        ended = pb.CompleteRequest(
            lease_id=granted.lease_id, pool_epoch=1, input_tokens=64, output_tokens=150
        )
        assert (await stub.Complete(ended)).output_tokens == 150
        [pool] = (await stub.Stats(pb.StatsRequest())).pools
        assert pool.output_above_limit_tokens == 50
        samples = await scrape(server)
    assert of(samples, "pool_output_above_limit_tokens_total", pool="pool") == 50
    assert of(samples, "reports_limited_total") == 0


async def test_groups_and_models_have_series_of_their_own() -> None:
    limits: dict[str, Any] = {
        "groups": [
            {"name": "lab", "share": {"tokens_per_minute": 5_000}, "quota": {"concurrency": 3}}
        ],
        "models": [{"name": "m", "pools": ["p"], "quota": {"requests_per_minute": 7}}],
        "tenants": [{"name": "a", "group": "lab"}],
    }
    async with metered(**limits) as server, calling(server.targets[0]) as stub:
        await stub.Admit(ask(64, tenant="a"))
        samples = await scrape(server)
    lab = {"quota": "group:lab"}
    assert of(samples, "quota_open_requests", **lab) == 1
    assert of(samples, "shared_quota_limit", kind="concurrent_requests", **lab) == 3
    assert of(samples, "shared_quota_remaining", kind="concurrent_requests", **lab) == 2
    assert 0 < of(samples, "quota_share_left_tokens", **lab) < 5_000
    assert of(samples, "quota_share_left_tokens", quota="") > 0
    assert of(samples, "shared_quota_limit", kind="requests_per_minute", quota="model:m") == 7
    assert of(samples, "quota_held_flows", quota="") == 0


async def test_page_is_written_in_small_parts() -> None:
    tenants = [{"name": f"t{i}"} for i in range(300)]
    async with serving(metrics={"listen": "127.0.0.1:0"}, tenants=tenants) as server:
        _, parts = server.metrics.parts(openmetrics=False)
        lines = [sum(line[0] != "#" for line in part.decode().splitlines()) async for part in parts]
    assert sum(lines) > 300 * 20
    assert max(lines) < 64 + 20  # a histogram is written whole


async def test_tenants_beyond_the_cap_are_summed_up() -> None:
    tenants = [{"name": f"t{i}"} for i in range(200)]
    async with metered(tenants=tenants) as server, calling(server.targets[0]) as stub:
        for i in range(5):
            await use(stub, f"t{i}", 10 + i)
        await stub.Admit(ask(100_000, tenant="t150"))
        samples = await scrape(server)
        shown = {labels[0][1] for name, labels in samples if name == "output_tokens_total"}
        assert shown == {"t0", "t1", "other"}
        assert of(samples, "output_tokens_total", tenant="t1") == 11
        assert of(samples, "output_tokens_total", tenant="other") == 12 + 13 + 14
        assert of(samples, "refusals_total", tenant="other", reason="rejected_too_large") == 1


def counters_of_other(samples: Samples) -> dict[tuple[str, Any], float]:
    return {
        key: value
        for key, value in samples.items()
        if key[0].endswith("_total") and ("tenant", "other") in key[1]
    }


async def test_counters_of_other_never_go_down_in_reloads() -> None:
    rng = random.Random(7)
    names = [f"t{number}" for number in range(6)]
    async with metered(tenants=[{"name": name} for name in names]) as server:
        before: dict[tuple[str, Any], float] = {}
        async with calling(server.targets[0]) as stub:
            for _ in range(40):
                kept = rng.sample(names, rng.randint(0, 6))
                for name in kept[:3]:
                    await use(stub, name, rng.randint(1, 9))
                    await stub.Admit(ask(100_000, tenant=name))
                before = counters_of_other(await scrape(server))
                used = before["output_tokens_total", (("tenant", "other"),)]
                server.reconfigure(
                    config_of(
                        tenants=[{"name": name} for name in rng.sample(names, len(kept))],
                        metrics={"listen": "127.0.0.1:0", "tenants_max": 2},
                    )
                )
                after = counters_of_other(await scrape(server))
                assert after.keys() >= before.keys()
                assert all(after[key] >= before[key] for key in before)
                # The usage of a tenant before that is in its own series.
                assert after["output_tokens_total", (("tenant", "other"),)] == used
    assert used > 100


async def test_scrape_during_a_reload_shows_one_set_of_tenants() -> None:
    tenants = [{"name": f"t{number}"} for number in range(130)]
    async with metered(tenants=tenants) as server, calling(server.targets[0]) as stub:
        await use(stub, "t129", 5)
        page = asyncio.ensure_future(server.metrics.page())
        await asyncio.sleep(0)  # it has read the first flows
        server.reconfigure(config_of(tenants=tenants[::-1]))
        samples = samples_of((await page).decode())
    assert of(samples, "output_tokens_total", tenant="t129") == 5
    assert of(samples, "output_tokens_total", tenant="other") == 5
    assert {dict(labels).get("tenant") for name, labels in samples if name == "live_leases"} == {
        "t129",
        "t128",
        "other",
    }


async def test_a_tenants_name_cannot_forge_series() -> None:
    name = 'x"} 1\\nschedsvc_up{y="'
    async with metered(tenants=[{"name": name}]) as server:
        samples = await scrape(server)
        assert of(samples, "queued_requests", tenant=name) == 0
        assert of(samples, "up") == 1


async def test_the_event_loop_measures_its_lag() -> None:
    async with metered() as server:
        await asyncio.sleep(0)

        def beats() -> float:
            page = b"".join(written(None, server.metrics.counts, generate_latest))
            return of(samples_of(page.decode()), "event_loop_lag_seconds_count")

        await until(lambda: beats() >= 1, "the heart beats")


async def test_other_paths_are_not_found() -> None:
    async with metered() as server, aiohttp.ClientSession() as http:
        assert server.metrics_url is not None
        async with http.get(f"{server.metrics_url}/nothing") as answer:
            assert answer.status == 404


async def test_help_texts_are_sentences_of_their_own() -> None:
    async with metered(classes=[{"name": "x", "rank": 1}]) as server:
        page = (await server.metrics.page()).decode()
    texts = [line.split(" ", 3)[3] for line in page.splitlines() if line.startswith("# HELP ")]
    assert len(texts) > 50
    fragments = ("Of ", "As ", "To ", "So ", "Its ", "What ", "That ", "Others ", "Not ", "They ")
    for text in texts:
        assert text.endswith("."), text
        assert not text.startswith(fragments), text
        assert len(text.split()) >= 3, text
        assert text[0].isupper() or text[0] in "01", text
