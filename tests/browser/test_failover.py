"""Tests the console of a standby while its leader is killed, in a real browser."""

import re
import signal
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.cluster.failover_load import Failover, Load
from tests.cluster.member_process import MemberProcess, is_followed, leads
from tests.cluster.members import ready_store
from tests.cluster.store_server import running_store
from tests.waiting import until

from .conftest import LOOKS, SCREENS, Screen, browsing, opened
from .test_console import AXE

pytestmark = pytest.mark.browser
#: As many as the pool has room for: the members share the machine with Chromium.
LOOPS = 8


async def looked_at(screens: list[Screen], axe: str, situation: str) -> None:
    """Take each screen's picture, and check it with axe."""
    for screen, (width, scheme) in zip(screens, LOOKS, strict=True):
        page = screen.page
        await page.bring_to_front()
        await page.screenshot(path=SCREENS / f"{situation}-{width}-{scheme}.png", full_page=True)
        overflow = "document.scrollingElement.scrollWidth - document.body.clientWidth"
        assert await page.evaluate(overflow) <= 0, "the page scrolls sideways"
        await page.evaluate(axe)
        assert await page.evaluate(AXE) == []
        # While the member takes over, its listener is away for a moment.
        problems = [text for text in screen.problems if "ERR_CONNECTION" not in text]
        assert problems == []


@pytest.mark.timeout(240)
async def test_failover_is_seen_at_the_standby(tmp_path: Path, chromium: str, axe: str) -> None:
    with running_store(tmp_path) as store:
        await ready_store(store)
        a, b = (MemberProcess(tmp_path, name, store.url) for name in "ab")
        load = Load(f"{a.target},{b.target}", Failover())
        try:
            async with browsing(chromium) as browser:
                await a.start()
                await until(lambda: leads(a), "a leads")
                await b.start()
                await until(lambda: is_followed(a), "b follows")
                screens = [await opened(browser, b, width, scheme) for width, scheme in LOOKS]
                for screen in screens:
                    state, notices = (screen.page.locator(at) for at in ("#state", "#notices"))
                    await expect(state).to_have_text("stands by for the set main · policy vtc")
                    await expect(notices).to_contain_text(f"the member a leads, at {a.target}.")
                await looked_at(screens, axe, "standby")
                load.start(LOOPS)
                await until(lambda: load.granted(1) > 20, "a grants")
                a.send(signal.SIGKILL)
                for screen in screens:
                    await taken_over(screen)
                await looked_at(screens, axe, "failover")
        finally:
            await load.stop()
            a.end()
            b.end()


async def taken_over(screen: Screen) -> None:
    """Wait until the page shows that its member leads, and its service."""
    page = screen.page
    await page.bring_to_front()
    text = re.compile("serving, leads the set main in term [2-9]")
    await expect(page.locator("#state")).to_contain_text(text, timeout=30_000)
    notices = page.locator("#notices")
    await expect(notices).to_contain_text("No member follows this leader", timeout=30_000)
    await expect(page.locator("#tenants tbody")).to_contain_text("heavy")
    line = page.locator("#charts path").first
    await expect(line).to_have_attribute("d", re.compile("L.*L"), timeout=30_000)
