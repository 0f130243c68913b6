"""Tests `schedsvc-proxy` before several emulated engines and the real scheduler."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from schedsvc_client.aio import AsyncScheduler

from tests.processes.programs import Programs, at_rest, empty, eventually, pool_of, standing
from tests.waiting import until

POOLS = ("gpu-1", "gpu-2")
#: Served by one engine alone.
OTHER = "gpu-3"
CONFIG = {
    "scheduler": {"flow_queue_max": 200, "queue_ttl_ms": 120_000},
    "tenants": [{"name": "a", "weight": 3}, {"name": "b", "weight": 1}, {"name": "c"}],
    "limits": {"drain_ms": 0},
}
CAPACITY_TOKENS = 2_048
ENGINE = (
    *("--profile", "tiny-cpu", "--block-size", "16"),
    *("--kv-tokens", str(CAPACITY_TOKENS), "--max-model-len", str(CAPACITY_TOKENS)),
)
# It takes five seconds: longer than a machine stalls.
LONG = 1_900


class Several(Programs):
    """Holds a scheduler, engines, and the proxy before all of them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, CONFIG, engine=ENGINE, gated=False)
        self.urls: dict[str, str] = {}
        self.upstreams_file = folder / "upstreams.yaml"

    def serve(self, name: str, model: str = "m") -> None:
        """Start an engine, on the port that it had before."""
        port = self.urls.get(name, "").rpartition(":")[2] or "0"
        counts = str(self.folder / f"{name}.counts")
        self.urls[name] = self.emulate(name, port, "--model", model, "--counts", counts)

    def options(self) -> list[str]:
        return [word for name, url in self.urls.items() for word in ("--upstream", f"{name}={url}")]

    def write(self, *names: str) -> str:
        """Write the file of upstreams with these engines; return its path."""
        rows = [{"name": name, "url": self.urls[name]} for name in names]
        self.upstreams_file.write_text(json.dumps({"upstreams": rows}))
        return str(self.upstreams_file)

    def served(self) -> Counter[str]:
        """Return the whole answers of each engine."""
        total: Counter[str] = Counter()
        for name in self.urls:
            path = self.folder / f"{name}.counts"
            lines = path.read_text().splitlines() if path.exists() else []
            total[name] = sum(json.loads(line)["done"] for line in lines)
        return total

    def client(self, tenant: str = "c", url: str = "") -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            url or self.proxy_url,
            headers={"x-tenant-id": tenant},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )


@contextmanager
def several(*names: str) -> Iterator[Several]:
    with standing(Several) as made:
        made.start_scheduler()
        for name in names:
            made.serve(name)
        yield made


@pytest.fixture(scope="module")
def stand() -> Iterator[Several]:
    with several(*POOLS) as made:
        made.serve(OTHER, "other")
        made.start_proxy(*made.options())
        yield made


@pytest.fixture
def pair() -> Iterator[Several]:
    """Start two engines that a test may stop."""
    with several(*POOLS) as made:
        made.start_proxy(*made.options())
        yield made


def body(output_tokens: int, **fields: Any) -> dict[str, Any]:
    exact = {"emulated_output_tokens": output_tokens, "max_tokens": output_tokens}
    return {"model": "m", "prompt": [5] * 40} | exact | fields


async def ask(http: aiohttp.ClientSession, output_tokens: int = 8, **fields: Any) -> Any:
    """Ask; return the status and the answer."""
    async with http.post("/v1/completions", json=body(output_tokens, **fields)) as response:
        return response.status, await response.json()


async def running(stand: Several, name: str) -> int:
    async with aiohttp.ClientSession(stand.urls[name]) as http, http.get("/metrics") as page:
        lines = (await page.text()).splitlines()
    (line,) = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    return round(float(line.split()[-1]))


async def metrics(stand: Several) -> str:
    async with stand.client() as http, http.get("/metrics") as response:
        return await response.text()


async def runs_at(stand: Several) -> str:
    """Wait until one of the pair runs a request; return its name."""

    async def found() -> str:
        counts = {name: await running(stand, name) for name in POOLS}
        return max(counts, key=lambda name: counts[name]) if any(counts.values()) else ""

    name: str = await until(found)
    return name


async def models(stand: Several) -> list[str]:
    async with stand.client() as http, http.get("/v1/models") as response:
        assert response.status == 200
        return [entry["id"] for entry in (await response.json())["data"]]


async def test_two_upstreams_share_the_load_of_two_tenants(stand: Several) -> None:
    before = stand.served()
    async with AsyncScheduler(stand.target) as scheduler:
        async with stand.client("a") as a, stand.client("b") as b:
            asked = [ask(http, 60, stream=False) for http in (a, b) for _ in range(40)]
            answers = await asyncio.gather(*asked)
        assert Counter(status for status, _ in answers) == {200: 80}
        stats = await at_rest(scheduler)
    served = stand.served() - before
    assert served.total() == 80
    assert set(served) == set(POOLS)
    assert min(served.values()) >= 20
    used = {flow.tenant: (flow.completed, flow.output_tokens) for flow in stats.flows}
    assert used["a"] == used["b"] == (40, 40 * 60)


async def test_a_model_that_one_upstream_serves_runs_there(stand: Several) -> None:
    before = stand.served()
    async with stand.client() as http:
        answers = await asyncio.gather(*(ask(http, 8, model="other") for _ in range(10)))
    assert [status for status, _ in answers] == [200] * 10
    assert stand.served() - before == {OTHER: 10}


async def test_the_lists_of_models_are_merged(stand: Several) -> None:
    assert await models(stand) == ["m", "other"]
    async with stand.client() as http:
        async with http.get("/v1/models/other") as response:
            # The emulator has no page of one model: the request has reached an upstream.
            assert (await response.json())["error"].get("code") != "model_not_found"
        async with http.get("/v1/models/none") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_model_that_no_upstream_serves_is_refused_without_a_lease(
    stand: Several, path: str
) -> None:
    async with AsyncScheduler(stand.target) as scheduler:
        before = (await scheduler.stats()).totals.received
        messages = [{"role": "user", "content": "hi"}]
        asked = {"model": "gpt-9", "prompt": "hi", "messages": messages, "max_tokens": 5}
        async with stand.client() as http, http.post(path, json=asked) as response:
            assert response.status == 404
            error = (await response.json())["error"]
        assert (await scheduler.stats()).totals.received == before
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-9'" in error["message"]


async def test_where_models_differ_a_request_has_to_name_one(stand: Several) -> None:
    async with stand.client() as http:
        async with http.post("/v1/completions", json={"prompt": "hi"}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "model"
        async with http.post("/tokenize", json={"model": "m", "prompt": "hi"}) as response:
            assert response.status == 501
            assert (await response.json())["error"]["code"] == "not_routed"


async def test_health_and_metrics_stand_for_all(stand: Several) -> None:
    async with stand.client() as http:
        async with http.get("/health") as response:
            assert response.status == 200
        async with http.get("/version") as response:
            assert "emulator" in (await response.json())["version"]
    page = await metrics(stand)
    assert "schedsvc_proxy_upstream_up" in page
    assert all(f'schedsvc_router_up{{upstream="{name}"}} 1\n' in page for name in (*POOLS, OTHER))
    assert "vllm:" not in page


async def shares(a: aiohttp.ClientSession, b: aiohttp.ClientSession) -> Counter[str]:
    """Count the answers of two tenants that keep more in the queue than runs.

    Three times as many wait as run, so no order depends on how soon a client asks again. The
    second one asks for more at a time.
    """
    done: Counter[str] = Counter()

    async def loop(http: aiohttp.ClientSession, tenant: str) -> None:
        while True:
            status, answer = await ask(http, 100)
            assert status == 200, answer
            done[tenant] += 1

    loops = [loop(a, "a") for _ in range(80)] + [loop(b, "b") for _ in range(120)]
    tasks = [asyncio.ensure_future(each) for each in loops]
    await until(lambda: done.total() >= 80)
    first = done.copy()
    await until(lambda: done.total() >= 400)
    counted = done - first
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
    return counted


@pytest.mark.slow
async def test_a_noisy_neighbour_gets_its_weight_over_two_upstreams(stand: Several) -> None:
    before = stand.served()
    async with AsyncScheduler(stand.target) as scheduler:
        async with stand.client("a") as a, stand.client("b") as b:
            counted = await shares(a, b)
        await eventually(scheduler, empty)
    assert 2.4 <= counted["a"] / counted["b"] <= 3.6, counted
    served = stand.served() - before
    assert min(served[name] for name in POOLS) >= 0.4 * served.total()


@pytest.mark.slow
async def test_two_routers_share_one_scheduler_and_one_may_be_killed() -> None:
    """Each tenant comes by a router of its own: the order is the scheduler's."""
    with several(*POOLS) as stand:
        urls = []
        for name in ("first", "second"):
            stand.start_proxy(*stand.options(), SCHEDSVC_POOL_GATES="2")
            stand.running[name] = stand.running.pop("proxy")
            urls.append(stand.proxy_url)
        async with (
            AsyncScheduler(stand.target) as scheduler,
            stand.client("a", urls[0]) as a,
            stand.client("b", urls[1]) as b,
        ):
            counted = await shares(a, b)
            assert 2.4 <= counted["a"] / counted["b"] <= 3.6, counted
            stats = await eventually(scheduler, empty)
            assert {pool.name for pool in stats.pools} == set(POOLS)
            stand.kill("second")
            answers = await asyncio.gather(*(ask(a) for _ in range(20)))
            assert [status for status, _ in answers] == [200] * 20


async def test_without_a_scheduler_requests_go_where_the_least_runs(pair: Several) -> None:
    pair.kill("proxy")
    pair.start_proxy(*pair.options(), SCHEDSVC_UNREACHABLE_CONCURRENCY_MIN="8")
    pair.kill("scheduler")
    async with pair.client() as http:

        async def without() -> bool:
            async with http.post("/v1/completions", json=body(8)) as response:
                assert response.status == 200
                return response.headers["x-schedsvc-mode"] == "fail-open"

        await until(without)
        before = pair.served()
        answers = await asyncio.gather(*(ask(http, 100) for _ in range(8)))
    assert [status for status, _ in answers] == [200] * 8
    assert (pair.served() - before) == dict.fromkeys(POOLS, 4)


@pytest.mark.slow
async def test_an_upstream_killed_before_the_answer_costs_no_request(pair: Several) -> None:
    async with AsyncScheduler(pair.target) as scheduler, pair.client() as http:
        asked = asyncio.ensure_future(ask(http, LONG))
        name = await runs_at(pair)
        pair.kill(name)
        status, answer = await asked
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == LONG
        stats = await at_rest(scheduler)
        flow = next(flow for flow in stats.flows if flow.tenant == "c")
        assert f'schedsvc_router_moved_total{{upstream="{name}"}} 1\n' in await metrics(pair)
        # The failed try is not charged.
        assert (flow.completed, flow.cancelled) == (1, 1)
        assert (flow.input_tokens, flow.output_tokens) == (40, LONG)
        # It is out: all go to the other one.
        answers = await asyncio.gather(*(ask(http) for _ in range(20)))
        assert [status for status, _ in answers] == [200] * 20
        # And it is back once it answers.
        pair.serve(name)

        async def serves() -> bool:
            await asyncio.gather(*(ask(http, 50) for _ in range(4)))
            return bool(pair.served()[name])

        await until(serves)
        await eventually(scheduler, empty)
        assert pool_of(await scheduler.stats(), name).attached


async def test_an_upstream_killed_during_the_answer_breaks_that_answer_alone(
    pair: Several,
) -> None:
    async with AsyncScheduler(pair.target) as scheduler, pair.client() as http:
        streaming = await http.post("/v1/completions", json=body(LONG, stream=True))
        await streaming.content.readany()
        name = await runs_at(pair)
        pair.kill(name)
        with pytest.raises(aiohttp.ClientError):
            await streaming.read()
        answers = await asyncio.gather(*(ask(http) for _ in range(20)))
        assert [status for status, _ in answers] == [200] * 20
        stats = await at_rest(scheduler)
    flow = next(flow for flow in stats.flows if flow.tenant == "c")
    assert flow.completed == 20


@pytest.mark.slow
async def test_a_stopped_upstream_holds_no_request_that_has_not_begun(pair: Several) -> None:
    """It takes connections and never answers: only its probe shows that."""
    async with AsyncScheduler(pair.target) as scheduler, pair.client() as http:
        asked = asyncio.ensure_future(ask(http, LONG))
        name = await runs_at(pair)
        pair.pause(name)
        status, answer = await asked
        assert status == 200, answer
        answers = await asyncio.gather(*(ask(http) for _ in range(20)))
        assert [status for status, _ in answers] == [200] * 20
        pair.resume(name)
        await at_rest(scheduler)


async def test_a_request_that_an_engine_may_keep_is_not_asked_twice(pair: Several) -> None:
    async with pair.client() as http:
        asked = asyncio.ensure_future(ask(http, LONG, store=True))
        pair.kill(await runs_at(pair))
        status, answer = await asked
    assert status == 503, answer


@pytest.mark.slow
async def test_the_file_of_upstreams_may_change(pair: Several) -> None:
    pair.kill("proxy")
    pair.serve(OTHER, "other")
    pair.start_proxy("--upstreams-file", pair.write("gpu-1"))
    assert await models(pair) == ["m"]
    async with pair.client() as http:
        await asyncio.gather(*(ask(http) for _ in range(10)))
        assert pair.served() == Counter({"gpu-1": 10})
        pair.write("gpu-1", "gpu-2", OTHER)

        async def lists_both() -> bool:
            return await models(pair) == ["m", "other"]

        await until(lists_both)
        assert (await ask(http, model="other"))[0] == 200
        # A wrong file changes nothing.
        pair.upstreams_file.write_text("upstreams: 5")
        await until(lambda: "the upstreams stay as they were" in pair.log("proxy"))
        assert (await ask(http))[0] == 200
        pair.write("gpu-1", "gpu-2", OTHER)
        # An upstream that leaves goes on with the requests that it has.
        asked = asyncio.ensure_future(ask(http, LONG))
        gone = await runs_at(pair)
        (kept,) = set(POOLS) - {gone}
        pair.write(kept)

        async def lists_one() -> bool:
            return await models(pair) == ["m"]

        await until(lists_one)
        before = pair.served()
        answers = await asyncio.gather(*(ask(http) for _ in range(10)))
        assert [status for status, _ in answers] == [200] * 10
        assert pair.served()[kept] - before[kept] == 10
        assert (await asked)[0] == 200
