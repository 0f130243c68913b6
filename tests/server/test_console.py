"""Tests the web console over HTTP: its page, its data, and what may ask for them."""

import asyncio
import gc
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc.cli import main
from schedsvc.driver import Broken
from schedsvc.server import Server
from schedsvc.server.console_state import FLOWS_MAX, FRESH_S, ConsoleState
from schedsvc.service import Judge
from tests.waiting import until

from .conftest import (
    POOL,
    SHORT_LEASES,
    abandon_pool,
    ask,
    calling,
    config_of,
    open_channel,
    serving,
    totals,
)
from .test_metrics import use

METRICS = {"listen": "127.0.0.1:0"}
SCRIPT = "<script>alert(1)</script>"
CSP = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}


@asynccontextmanager
async def consoling(**keys: Any) -> AsyncIterator[tuple[Server, aiohttp.ClientSession]]:
    """Run a server, and a client whose base URL is its metrics listener."""
    async with serving(**{"metrics": METRICS} | keys) as server:
        assert server.metrics_url is not None
        base = server.metrics_url.removesuffix("metrics")
        async with aiohttp.ClientSession(base) as http:
            yield server, http


async def read(http: aiohttp.ClientSession, path: str, status: int = 200) -> tuple[str, Mapping]:
    async with http.get(path, allow_redirects=False) as answer:
        assert answer.status == status, await answer.text()
        return await answer.text(), answer.headers


async def state_of(http: aiohttp.ClientSession) -> dict[str, Any]:
    return json.loads((await read(http, "console/state.json"))[0])


async def why(http: aiohttp.ClientSession, status: int = 200, **asked: str) -> dict[str, Any]:
    async with http.get("console/why.json", params=asked) as answer:
        assert answer.status == status
        return await answer.json()


async def test_a_session_that_waits_is_explained_here_and_in_a_terminal() -> None:
    listeners = [{"tcp": "127.0.0.1:0", "operate": True}]
    scheduler = {"headroom": 0, "each_pool": {"sessions_max_tokens": 300}}
    async with consoling(listeners=listeners, scheduler=scheduler) as (server, http):
        channel = open_channel(server.targets[0])
        stub = SchedulerServiceStub(channel)
        await stub.Admit(ask(200, request_id="runs", session="first"))
        call = stub.Admit(ask(200, request_id="it", session="second"))
        await until(lambda: totals(server)["queued"], "it waits")
        (told,) = (await why(http, id="it"))["requests"]
        words = ("why", "it", "--target", server.targets[0])
        shown = await asyncio.to_thread(CliRunner().invoke, main, words)
        said = " ".join(shown.output.split())
        for text in (told["message"], said):
            assert "Its session waits to begin in pool" in text
            assert " of 300 (sessions_max_tokens)" in text
        assert "session: requests that wait or run: 1; active in no pool" in said
        call.cancel()
        await channel.close()


async def test_every_answer_forbids_what_is_from_elsewhere() -> None:
    paths = {
        "": (302, None),
        "console/": (200, "text/html; charset=utf-8"),
        "console/console.css": (200, "text/css; charset=utf-8"),
        "console/console.mjs": (200, "text/javascript; charset=utf-8"),
        "console/icon.svg": (200, "image/svg+xml"),
        "console/state.json": (200, "application/json"),
        "console/why.json?id=x": (200, "application/json; charset=utf-8"),
        "console/nothing": (404, None),
        "console/..%2F..%2Fschedsvc.yaml": (404, None),
    }
    async with consoling() as (_, http):
        for path, (status, content_type) in paths.items():
            _, headers = await read(http, path, status)
            rules = (
                part.strip().partition(" ")
                for part in headers["Content-Security-Policy"].split(";")
            )
            assert {name: value for name, _, value in rules} == CSP, path
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cache-Control"] == "no-store"
            assert "Access-Control-Allow-Origin" not in headers
            assert content_type in (None, headers.get("Content-Type")), path


async def test_root_leads_to_the_page() -> None:
    async with consoling() as (_, http), http.get("/") as answer:
        assert answer.url.path == "/console/"
        assert "<title>schedsvc console</title>" in await answer.text()


async def test_page_names_only_files_that_are_served() -> None:
    async with consoling() as (_, http):
        seen: set[str] = set()
        wanted = {"index.html"}
        while wanted - seen:
            name = (wanted - seen).pop()
            seen.add(name)
            text, _ = await read(http, "console/" + name.removesuffix("index.html"))
            wanted |= set(re.findall(r'(?:src|href)="([^/"]+)"', text))
            wanted |= {f"{found}.mjs" for found in re.findall(r"from '\./(\w+)\.mjs'", text)}
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
            assert not re.search(r"innerHTML|insertAdjacentHTML|outerHTML|document\.write", text)
            assert "style=" not in text
            assert not re.search(r"\son\w+=", text), name
    assert seen == {entry.name for entry in files("schedsvc").joinpath("data/console").iterdir()}


async def test_console_is_read_only() -> None:
    async with consoling() as (_, http):
        for path in ("", "console/", "console/state.json", "console/why.json"):
            for method in ("POST", "PUT", "DELETE"):
                async with http.request(method, path) as answer:
                    assert answer.status == 405, (method, path)


async def test_without_metrics_there_is_no_console() -> None:
    async with serving() as server:
        assert server.metrics_url is None


async def test_state_shows_waiting_requests_and_promises() -> None:
    tenants = [{"name": "a", "weight": 3, "quota": {"concurrency": 9}}, {"name": SCRIPT}]
    async with consoling(tenants=tenants) as (server, http), calling(server.targets[0]) as stub:
        await use(stub, "a", 7)
        await stub.Admit(ask(1_500, tenant="a"))
        waiting = asyncio.ensure_future(stub.Admit(ask(1_000, tenant=SCRIPT, request_id="w")))
        await until(lambda: totals(server)["queued"] == 1, "it waits")
        await stub.Admit(ask(100_000, tenant="a"))
        state = await state_of(http)
        flows = {flow["tenant"]: flow for flow in state["flows"]}
        assert flows[SCRIPT]["queued"] == 1
        assert flows[SCRIPT]["queued_input_tokens"] == 1_000
        assert flows["a"]["weight_milli"] == 3_000
        assert flows["a"]["output_tokens"] == 7
        assert flows["a"]["refusals"] == {"rejected_too_large": 1}
        [limit] = flows["a"]["quotas"]
        assert (limit["kind"], limit["limit"], limit["remaining"]) == ("concurrent_requests", 9, 8)
        [pool] = state["pools"]
        assert pool["capacity_tokens"] == POOL["capacity_tokens"]
        assert pool["promised_tokens"] == server.driver.stats(0)["pools"][0]["promised_tokens"]
        assert pool["needs"] == "needs KV cache"
        assert state["totals"]["queued"] == 1
        assert state["other"] is None
        assert state["problem"] == ""
        assert state["mode"] == {"configured": "enforce", "overlay": "", "tenants": 0}
        assert state["prices"] == {"input": 1, "cached": 0.1, "output": 2, "kv": 0}
        assert state["judgement"]["level"] in ("ok", "notice")
        assert set(state["point"]["of"]) == {"", "a", SCRIPT, "unknown"}
        waiting.cancel()


async def test_flows_beyond_the_cap_are_summed_up_as_other() -> None:
    tenants = [{"name": f"t{number}"} for number in range(300)]
    async with consoling(tenants=tenants) as (server, http), calling(server.targets[0]) as stub:
        for number in range(250):
            await use(stub, f"t{number}", 1)
        await stub.Admit(ask(1_500, tenant="t0"))
        waiting = asyncio.ensure_future(stub.Admit(ask(1_000, tenant="t299")))
        await until(lambda: totals(server)["queued"] == 1, "it waits")
        state = await state_of(http)
        waiting.cancel()
    assert len(state["flows"]) == FLOWS_MAX
    # A flow that waits has a row, even with little service.
    assert "t299" in {flow["tenant"] for flow in state["flows"]}
    assert state["other"]["queued"] == 0
    shown = sum(flow["completed"] for flow in state["flows"])
    assert state["other"]["flows"] + FLOWS_MAX == state["totals"]["flows"]
    assert state["other"]["completed"] + shown == 250
    assert len(state["point"]["of"]) == 51


async def test_ten_thousand_tenants_give_a_bounded_document() -> None:
    tenants = [{"name": f"{number:0128d}"} for number in range(10_000)]
    metrics = METRICS | {"histogram_tenants_max": 1_000}
    async with consoling(tenants=tenants, metrics=metrics) as (_, http):
        text, _ = await read(http, "console/state.json")
    assert len(text) < 150_000


async def test_document_is_made_in_slices_without_garbage() -> None:
    classes = [{"name": f"c{number}", "rank": number} for number in range(1, 8)]
    tenants = [{"name": f"t{number}"} for number in range(1_000)]
    metrics = METRICS | {"histogram_tenants_max": 1_000}
    async with serving(tenants=tenants, metrics=metrics, classes=classes) as server:
        state = ConsoleState(server.driver, server.metrics, 1, Judge(server.driver))
        collections: list[int] = []

        def note(phase: str, about: dict[str, int]) -> None:
            if phase == "stop":
                collections.append(about["generation"])

        gc.collect()
        gc.callbacks.append(note)
        try:
            making = asyncio.ensure_future(state.document())
            turns = 0
            while not making.done():
                turns += 1
                await asyncio.sleep(0)
        finally:
            gc.callbacks.remove(note)
        assert json.loads((await making)[0])["problem"] == ""
    # A turn has 16 tenants at once; the collector goes through the process if much is kept.
    assert turns > 1_000 // 16
    assert sum(generation > 0 for generation in collections) <= 1


async def test_a_reload_begins_the_histograms_again() -> None:
    tenants = [{"name": f"t{number}"} for number in range(40)]
    async with serving(tenants=tenants, metrics=METRICS) as server:
        state = ConsoleState(server.driver, server.metrics, 1, Judge(server.driver))
        making = asyncio.ensure_future(state.document())
        for _ in range(3):
            await asyncio.sleep(0)  # it has read the first histograms
        server.reconfigure(config_of(tenants=[{"name": "new"}], metrics=METRICS))
        found = json.loads((await making)[0])["point"]["of"]
    assert list(found) == ["", "new", "unknown"]


async def test_watchers_share_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    async with consoling() as (server, http):
        reads = 0
        build = ConsoleState._build

        async def counted(state: ConsoleState) -> bytes:
            nonlocal reads
            reads += 1
            return await build(state)

        # A document is kept for later pages too: the first one at the start, the next 10 s later.
        async def is_kept() -> bool:
            return '"before":null' not in (await read(http, "console/history.json"))[0]

        await until(is_kept, "the first document is kept")
        monkeypatch.setattr(ConsoleState, "_build", counted)
        answers = await asyncio.gather(*(read(http, "console/state.json") for _ in range(20)))
        assert len({text for text, _ in answers}) == 1
        assert reads == 1
        for _, headers in answers:
            assert 0 < int(headers["X-Fresh-Ms"]) <= FRESH_S * 1_000
        first = json.loads(answers[0][0])["now_ms"]

        def is_old() -> bool:
            return server.driver.clock.now_ns() // 1_000_000 - first >= FRESH_S * 1_000

        await until(is_old, "the document is old")
        assert (await state_of(http))["now_ms"] > first
        assert reads == 2


async def test_a_watcher_that_leaves_takes_nothing_from_others() -> None:
    async with serving(metrics=METRICS) as server:
        state = ConsoleState(server.driver, server.metrics, 1, Judge(server.driver))
        leaving = asyncio.ensure_future(state.document())
        staying = asyncio.ensure_future(state.document())
        await asyncio.sleep(0)  # both wait for the same document
        assert leaving.cancel()
        assert json.loads((await staying)[0])["problem"] == ""
        assert leaving.cancelled()


async def test_why_finds_a_request_by_its_id_and_its_body_id() -> None:
    async with consoling() as (server, http), calling(server.targets[0]) as stub:
        await stub.Admit(ask(1_500))
        waiting = asyncio.ensure_future(stub.Admit(ask(1_000, tenant="b", request_id="w1")))
        await until(lambda: totals(server)["queued"] == 1, "it waits")
        for asked in ({"id": "w1"}, {"id": "chatcmpl-w1"}, {"id": "w1", "tenant": "b"}):
            [story] = (await why(http, **asked))["requests"]
            assert (story["tenant"], story["state"]) == ("b", "queued")
            assert "needs KV cache" in story["message"]
            assert story["pools"][0]["reason"] == "KV cache"
            assert story["pools"][0]["next"] == "this request"
        for asked in ({"id": "w2"}, {"id": "w1", "tenant": "a"}):
            assert (await why(http, **asked))["requests"] == []
        waiting.cancel()


@pytest.mark.parametrize(
    "asked", [{}, {"id": ""}, {"id": "x" * 257}, {"id": "x", "tenant": "x" * 257}]
)
async def test_why_refuses_ids_that_cannot_be(asked: dict[str, str]) -> None:
    async with consoling() as (_, http):
        assert "1 to 256 characters" in (await why(http, 400, **asked))["problem"]


async def test_why_answers_any_text() -> None:
    async with consoling() as (_, http):
        for text in (SCRIPT, "\x00\x1b[31m", "\u202e" * 80, "é" * 100, "💥" * 256):
            async with http.get("console/why.json", params={"id": text}) as answer:
                assert answer.status in (200, 400), text
                assert answer.headers["Content-Type"].startswith("application/json")


async def test_a_broken_scheduler_says_so() -> None:
    async with consoling() as (server, http):
        server.driver.broken = "the ledger of pool x does not add up"
        state = await state_of(http)
        assert state == {"problem": "the ledger of pool x does not add up"}
        assert "does not add up" in (await why(http, 503, id="x"))["problem"]
        with pytest.raises(Broken):
            server.driver.stats(0)


async def test_drains_modes_and_reloads_are_shown() -> None:
    async with consoling() as (server, http):
        server.driver.set_draining(b"pool", True)
        server.driver.loading.problem = "line 3: \x1b[31m"
        server.reconfigure(
            config_of(
                metrics=METRICS, mode="dry_run", scheduler={"headroom": 0, "prices": {"output": 4}}
            )
        )
        state = await state_of(http)
        assert state["pools"][0]["draining"]
        assert state["mode"]["configured"] == "dry_run"
        assert state["flows"][0]["audit"]
        assert state["prices"]["output"] == 4
        assert state["config"]["problem"] == "line 3: \\x1b[31m"


async def test_console_leaves_abandoned_pools_out() -> None:
    async with consoling(**SHORT_LEASES) as (server, http):
        await abandon_pool(server, "gone")
        assert [pool["name"] for pool in (await state_of(http))["pools"]] == ["pool"]
