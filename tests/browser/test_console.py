"""Tests the console in a real browser: by eye, by keyboard and by a screen reader."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import expect
from schedsvc_client.v1 import operator_pb2
from schedsvc_client.v1.operator_pb2_grpc import OperatorServiceStub
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc.server import Server
from tests.server.conftest import ask, config_of, open_channel, totals, until

from .conftest import (
    IMAGE,
    LOOKS,
    SCREENS,
    SCRIPT,
    TENANTS,
    Screen,
    browsing,
    loading,
    opened,
    running,
    scheduling,
)

pytestmark = pytest.mark.browser

#: The rules of WCAG 2.1, levels A and AA.
AXE = """() => axe.run({
    runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'], resultTypes: ['violations'],
}).then((found) => found.violations.map(
    (rule) => `${rule.id}: ${rule.nodes.map((node) => node.html).join(' | ')}`))"""
FLOOD = {"research": 14, "production": 2, "batch_jobs": 3}


@asynccontextmanager
async def quiet(server: Server, stub: SchedulerServiceStub) -> AsyncIterator[str]:
    async with loading(stub, production=1):
        yield "No request waits."


@asynccontextmanager
async def flood(server: Server, stub: SchedulerServiceStub) -> AsyncIterator[str]:
    async with loading(stub, **FLOOD):
        await stub.Admit(ask(100_000, tenant=SCRIPT))
        yield "the requests of research wait"


@asynccontextmanager
async def drain(server: Server, stub: SchedulerServiceStub) -> AsyncIterator[str]:
    async with loading(stub, **FLOOD), open_channel(server.targets[0]) as channel:
        await until(lambda: totals(server)["queued"] > 5, "they wait")
        async with running(stub, "production"):  # a tenant that runs nothing has no share
            await OperatorServiceStub(channel).Drain(operator_pb2.DrainRequest())
            yield "The scheduler drains: new requests are refused."


async def settled(screen: Screen, situation: str) -> None:
    """Wait until the page shows the situation, and has something to draw."""
    page = screen.page
    if situation == "quiet":
        await expect(page.locator("#waiting-none")).to_be_visible()
        await expect(page.locator("#tenants")).to_contain_text("production")
    elif situation == "flood":
        await expect(page.locator("#waiting")).to_contain_text("research")
        await expect(page.locator("#recent")).to_contain_text("too large for any pool")
    else:
        await expect(page.locator("main")).to_contain_text("The scheduler drains")
        await expect(page.locator("#reasons")).to_contain_text("drain")
    if situation != "drain":
        await expect(page.locator("#charts figcaption").nth(2)).to_contain_text(
            re.compile("p99 [0-9]")
        )
    # The charts have a line.
    await expect(page.locator("#charts path").last).to_have_attribute("d", re.compile("L.*L"))
    await expect(page.locator("#tenants tbody")).to_contain_text("its share")
    said = {"quiet": "production is well", "flood": "research", "drain": "drain"}
    await expect(page.locator("#judgement span")).to_contain_text(said[situation])
    level = "ok" if situation == "quiet" else re.compile("notice|trouble|ok")
    await expect(page.locator("#judgement")).to_have_class(level)


@pytest.mark.parametrize("situation", [quiet, flood, drain])
async def test_screens_pass_axe_at_both_widths(chromium: str, axe: str, situation) -> None:
    async with scheduling() as (server, stub), browsing(chromium) as browser:
        screens = [await opened(browser, server, width, scheme) for width, scheme in LOOKS]
        for screen in screens:
            await expect(screen.page.locator("#state")).to_contain_text("serving")
        async with situation(server, stub):
            for screen, (width, scheme) in zip(screens, LOOKS, strict=True):
                page = screen.page
                await page.bring_to_front()
                await settled(screen, situation.__name__)
                await page.screenshot(
                    path=SCREENS / f"{situation.__name__}-{width}-{scheme}.png", full_page=True
                )
                overflow = "document.scrollingElement.scrollWidth - document.body.clientWidth"
                assert await page.evaluate(overflow) <= 0, "the page scrolls sideways"
                await page.evaluate(axe)
                assert await page.evaluate(AXE) == []
                assert screen.problems == []


async def test_a_flood_is_shown(chromium: str) -> None:
    async with scheduling() as (server, stub), browsing(chromium) as browser:
        page = (await opened(browser, server)).page
        await expect(page.locator("#waiting-none")).to_be_visible()
        await expect(page.locator("#state")).to_contain_text("serving")
        async with loading(stub, **FLOOD):
            await until(lambda: totals(server)["queued"] > 5, "they wait")
            await expect(page.locator("#waiting tbody th").first).to_have_text("research")


async def test_a_page_opens_with_what_happened_before(chromium: str) -> None:
    async with scheduling() as (server, stub), browsing(chromium) as browser:
        async with loading(stub, research=2):
            page = (await opened(browser, server)).page
            line = page.locator("#charts path").last
            await expect(line).to_have_attribute("d", re.compile("L.*L.*L"))
        # A second page has the same points as soon as it shows anything.
        second = (await opened(browser, server)).page
        await expect(second.locator("#state")).to_contain_text("serving")
        drawn = await second.locator("#charts path").last.get_attribute("d")
        assert drawn is not None
        assert drawn.count("L") >= 3
        await expect(second.locator("#tenants tbody")).to_contain_text("its share")


async def test_rates_count_the_time_since_the_sample_that_they_compare(chromium: str) -> None:
    compared = """async () => {
        const { History, keyOf } = await import('./figures.mjs');
        const flow = (granted) => ({ tenant: 't', request_class: 'default', granted });
        const history = new History();
        // A document of a minute ago, and the first two of an open page: ten grants a second.
        for (const now_ms of [0, 66_000, 67_000]) {
            history.add({ incarnation: 'a', now_ms, totals: {}, prices: {},
                flows: [flow(now_ms / 100)] });
        }
        return history.each_s(keyOf(flow(0)), (row) => row.granted);
    }"""
    async with scheduling() as (server, _), browsing(chromium) as browser:
        page = (await opened(browser, server)).page
        assert await page.evaluate(compared) == 10


async def test_a_row_leads_to_its_tenant_and_to_the_documents(chromium: str) -> None:
    async with scheduling() as (server, stub), browsing(chromium) as browser:
        screen = await opened(browser, server, 390)
        page = screen.page
        await stub.Admit(ask(1_500, tenant="research"))
        waiting = asyncio.ensure_future(stub.Admit(ask(1_000, tenant="production")))
        await page.locator("#waiting tbody a", has_text="production").click()
        await expect(page.locator("#tenants tbody tr")).to_have_count(1)
        assert await page.input_value("#filter") == "production"
        assert await page.input_value("#chart-tenant") == "production"
        assert await page.locator("#tenants tbody td[data-label=waiting]").text_content() == "1"
        links = page.locator("a[data-docs]")
        root = Path(__file__).parents[2] / "docs"
        for number in range(await links.count()):
            href = str(await links.nth(number).get_attribute("href"))
            name, _, anchor = href.partition("/docs/")[2].partition("#")
            text = (root / name).read_text()
            headings = [re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
                        for line in text.splitlines() if line.startswith("#")]  # fmt: skip
            assert not anchor or anchor in headings, href
        assert screen.problems == []
        waiting.cancel()


async def test_a_promise_above_the_cache_has_a_reason(chromium: str) -> None:
    async with scheduling() as (server, stub), browsing(chromium) as browser:
        page = (await opened(browser, server)).page
        # The short one has ended when the long one is at its longest.
        for number, (prompt, output) in enumerate([(16, 1_400), (700, 16)]):
            request = ask(prompt, tenant="research", max_output_tokens=output,
                          reports_progress=True, request_id=f"r{number}")  # fmt: skip
            assert (await stub.Admit(request)).HasField("grant")
        cell = page.locator("#pools tbody td[data-label='KV promised']")
        await expect(cell).to_contain_text(re.compile(r"1[0-9]{2} % \(outputs end early\)"))


async def test_names_are_text(chromium: str) -> None:
    names = [SCRIPT, IMAGE, "a\u202eb", "<b>", "&lt;"]
    tenants = [{"name": name} for name in names]
    async with scheduling(tenants=tenants) as (server, stub), browsing(chromium) as browser:
        screen = await opened(browser, server)
        page = screen.page
        await stub.Admit(ask(1_500, tenant=SCRIPT))
        waiting = asyncio.ensure_future(stub.Admit(ask(1_000, tenant=IMAGE, request_id=SCRIPT)))
        await until(lambda: totals(server)["queued"] == 1, "it waits")
        await stub.Admit(ask(100_000, tenant=SCRIPT))
        await expect(page.locator("#recent tbody th").first).to_have_text(SCRIPT)
        await expect(page.locator("#waiting tbody th")).to_have_text(IMAGE)
        shown = await page.locator("#tenants tbody th").all_text_contents()
        assert set(shown) >= {SCRIPT, IMAGE, "a\\u202eb", "<b>", "&lt;"}
        await page.fill("#why-id", SCRIPT)
        await page.click("#why button")
        await expect(page.locator("#why-answer")).to_contain_text(IMAGE)
        await page.select_option("#chart-tenant", label=SCRIPT)
        assert await page.title() == "schedsvc console"
        assert (
            await page.locator("body script, img, body b:not(figcaption b, #judgement b)").count()
            == 0
        )
        assert screen.problems == []
        waiting.cancel()


async def test_all_can_be_done_by_keyboard(chromium: str) -> None:
    async with scheduling() as (server, stub), browsing(chromium) as browser:
        screen = await opened(browser, server)
        page = screen.page
        await stub.Admit(ask(100_000, tenant="research", request_id="large"))
        await expect(page.locator("#tenants tbody tr")).to_have_count(len(TENANTS) + 1)
        reached = []
        for _ in range(60):
            await page.keyboard.press("Tab")
            focus = page.locator(":focus")
            if not await focus.count():
                break
            style = (
                "(found) => [found.id || found.textContent, getComputedStyle(found).outlineStyle]"
            )
            name, outline = await focus.evaluate(style)
            assert outline != "none", f"the focus on {name} is not seen"
            reached.append(name)
            if name == "weight":
                await page.keyboard.press("Enter")
                first = page.locator("#tenants tbody th").first
                await expect(first).to_have_text("production")
                await page.keyboard.press("Enter")
                await expect(first).to_have_text("unknown")
            elif name == "filter":
                await page.keyboard.type("RESEARCH")
                await expect(page.locator("#tenants tbody tr")).to_have_count(1)
                await page.keyboard.press("Escape")
                await expect(page.locator("#tenants tbody tr")).to_have_count(len(TENANTS) + 1)
            elif name == "why-id":
                await page.keyboard.type("large")
                await page.keyboard.press("Enter")
                await expect(page.locator("#why-answer")).to_contain_text("larger than any pool")
        assert {"chart-tenant", "filter", "tenant", "weight", "why-id", "why-tenant"} <= {*reached}
        assert screen.problems == []


async def test_a_scheduler_that_ends_is_reported(chromium: str) -> None:
    async with browsing(chromium) as browser:
        async with scheduling() as (server, _):
            assert server.metrics_url is not None
            address = server.metrics_url.removeprefix("http://").removesuffix("/metrics")
            page = (await opened(browser, server)).page
            await expect(page.locator("#state")).to_contain_text("serving")
        await expect(page.locator("#notices")).to_contain_text("No answer from the scheduler since")
        async with scheduling(metrics={"listen": address}):
            await expect(page.locator("#notices")).to_be_empty(timeout=10_000)


async def test_many_tenants_are_one_row_more(chromium: str) -> None:
    tenants = [{"name": f"t{number}"} for number in range(2_000)]
    async with scheduling(tenants=tenants) as (server, _), browsing(chromium) as browser:
        page = (await opened(browser, server)).page
        rows = page.locator("#tenants tbody tr")
        await expect(rows).to_have_count(101)
        await expect(rows.last.locator("th")).to_have_text("1,901 others")


async def test_a_broken_scheduler_is_reported(chromium: str) -> None:
    async with scheduling() as (server, _), browsing(chromium) as browser:
        page = (await opened(browser, server)).page
        await expect(page.locator("#state")).to_contain_text("serving")
        server.driver.broken = "pool x does not add up"
        notice = page.locator("#notices .bad")
        await expect(notice).to_contain_text("grants nothing: pool x does not add up")


async def test_a_reload_that_failed_is_reported(chromium: str) -> None:
    async with scheduling() as (server, _), browsing(chromium) as browser:
        page = (await opened(browser, server)).page
        server.driver.loading.problem = "schedsvc.yaml: line 3"
        await expect(page.locator("#notices")).to_contain_text("line 3")
        server.driver.loading.problem = ""
        server.reconfigure(config_of(mode="dry_run"))
        await expect(page.locator("#state")).to_contain_text("dry run")
        await expect(page.locator("#notices")).to_contain_text("Wait for a restart")
