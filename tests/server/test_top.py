"""Tests `schedsvc top` by Textual's pilot, against a real server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub
from textual.pilot import Pilot
from textual.widgets import Static

from schedsvc.cli.connect import Connection
from schedsvc.cli.top_app import Request, Tenant, Tenants, Top
from schedsvc.cli.top_figures import Figures, duration, short
from schedsvc.server import Server
from tests.waiting import until

from .conftest import SHORT_LEASES, abandon_pool, ask, calling, serving, totals
from .test_cli import run_without_lab_packages
from .test_metrics import use

MARKUP = "[red]x[/red] <b>"
TENANTS: list[dict[str, Any]] = [
    {"name": "research"},
    {"name": "production", "weight": 4, "quota": {"requests_per_minute": 600, "concurrency": 8}},
    {"name": MARKUP},
]


@asynccontextmanager
async def topping(
    size: tuple[int, int] = (80, 24), wanted: str = "", **keys: Any
) -> AsyncIterator[tuple[Server, SchedulerServiceStub, Pilot[None]]]:
    """Run a server with served and waiting tenants, and `top` on it."""
    async with serving(**{"tenants": TENANTS} | keys) as server, calling(server.targets[0]) as stub:
        await use(stub, "production", 7)
        await stub.Admit(ask(1_500, tenant="research", request_id="runs"))
        waiting = asyncio.ensure_future(
            stub.Admit(ask(1_000, tenant="production", request_id="waits"))
        )
        await until(lambda: totals(server)["queued"] == 1, "it waits")
        app = Top(Connection(server.targets[0], None, None), every_s=0.2, wanted=wanted)
        try:
            async with app.run_test(size=size) as pilot:
                await until(lambda: bool(names(pilot)), "rows are shown")
                yield server, stub, pilot
        finally:
            waiting.cancel()


def names(pilot: Pilot[None]) -> list[str]:
    """Return the first column of the table of tenants."""
    screen = pilot.app.screen_stack[1] if len(pilot.app.screen_stack) > 1 else None
    if not isinstance(screen, Tenants):
        return []
    table = screen.table
    return [str(table.get_row_at(at)[0]) for at in range(table.row_count)]


def shown(pilot: Pilot[None], selector: str) -> str:
    """Return the text of a part of the screen in front."""
    found = pilot.app.screen.query(selector)
    return "\n".join(str(part.render()) for part in found.results(Static))


async def becomes(pilot: Pilot[None], holds: Callable[[], bool], what: str) -> None:
    for _ in range(400):
        await pilot.pause(0.02)
        if holds():
            return
    pytest.fail(f"{what}: {pilot.app.screen}")


def titles(pilot: Pilot[None]) -> list[str]:
    screen = pilot.app.screen
    assert isinstance(screen, Tenants)
    return [str(column.label) for column in screen.table.ordered_columns]


async def test_tenants_that_wait_come_first_with_the_reason() -> None:
    async with topping() as (_, _, pilot):
        assert names(pilot)[0] == "production"
        assert set(names(pilot)) == {"production", "research", MARKUP, "unknown"}
        screen = pilot.app.screen
        assert isinstance(screen, Tenants)
        row = [str(cell) for cell in screen.table.get_row_at(0)]
        assert row[1] == "1"
        assert row[-1].startswith("turn, KV")
        assert "waiting 1" in shown(pilot, "#head")
        assert "95% of 1,600 KV  1 run  nearly over, waits for KV" in shown(pilot, "#pools")


@pytest.mark.parametrize("width", [80, 100, 140])
async def test_all_columns_fit_the_terminal(width: int) -> None:
    async with topping((width, 24)) as (_, _, pilot):
        screen = pilot.app.screen
        assert isinstance(screen, Tenants)
        assert screen.table.virtual_size.width <= width
        assert {"tenant", "wait▼", "share", "why"} <= set(titles(pilot))
        assert ("weight" in titles(pilot)) == (width == 140)


async def test_sort_by_key_and_reverse() -> None:
    async with topping() as (_, _, pilot):
        await pilot.press("s")
        assert "oldest▼" in titles(pilot)
        for _ in range(5):
            await pilot.press("s")
        assert "tenant▼" in titles(pilot)
        assert names(pilot) == sorted(names(pilot), reverse=True)
        await pilot.press("r")
        assert "tenant▲" in titles(pilot)
        assert names(pilot) == sorted(names(pilot))


async def test_filter_as_one_types_and_drop_it() -> None:
    async with topping() as (_, _, pilot):
        await pilot.press("slash", *"RESE")
        assert names(pilot) == ["research"]
        await pilot.press("enter", "escape")
        assert len(names(pilot)) == 4


async def test_filter_from_the_command_line() -> None:
    async with topping(wanted="prod") as (_, _, pilot):
        assert names(pilot) == ["production"]


async def test_enter_shows_the_tenant_and_escape_goes_back() -> None:
    async with topping() as (_, _, pilot):
        await pilot.press("enter")
        assert isinstance(pilot.app.screen, Tenant)
        await becomes(pilot, lambda: "quota left" in shown(pilot, "#body"), "the tenant is shown")
        text = shown(pilot, "#body")
        assert "weight 4" in text
        assert "1 (1,000 tokens of input)" in text
        assert "of 8 at once" in text
        await pilot.press("escape")
        assert isinstance(pilot.app.screen, Tenants)


async def test_why_shows_a_request_by_the_id_of_its_body() -> None:
    async with topping() as (_, _, pilot):
        await pilot.press("enter", "w")
        await pilot.press(*"chatcmpl-waits", "enter")
        await becomes(pilot, lambda: isinstance(pilot.app.screen, Request), "the request is shown")
        await becomes(pilot, lambda: bool(pilot.app.screen.query("#body")), "it is there")
        body = pilot.app.screen.query_one("#body", Static)
        await becomes(pilot, lambda: "needs KV cache" in rendered(body), "why it waits")
        await pilot.press("escape")
        assert isinstance(pilot.app.screen, Tenant)


def rendered(part: Static) -> str:
    lines = (part.render_line(y) for y in range(part.size.height))
    return " ".join(" ".join(line.text for line in lines).split())


async def test_an_unknown_request_is_said_to_be() -> None:
    async with topping() as (_, _, pilot):
        await pilot.press("w", *"nothing", "enter")
        await becomes(pilot, lambda: isinstance(pilot.app.screen, Request), "the request is shown")
        await becomes(pilot, lambda: "Nothing is known" in shown(pilot, "#body"), "it says so")


async def test_names_are_never_markup() -> None:
    async with topping(wanted="x") as (_, _, pilot):
        assert names(pilot) == [MARKUP]
        await pilot.press("enter")
        assert isinstance(pilot.app.screen, Tenant)
        assert MARKUP in shown(pilot, "#head")


async def test_rates_come_with_the_second_snapshot() -> None:
    async with topping() as (_, stub, pilot):
        await becomes(pilot, lambda: "granted/s 0" in shown(pilot, "#head"), "a rate is known")
        for _ in range(3):
            await stub.Admit(ask(100_000, tenant="research"))
        await becomes(pilot, lambda: "refused/s 0 " not in shown(pilot, "#head"), "refusals")


async def test_a_scheduler_that_ends_is_said_and_keys_work() -> None:
    async with topping() as (server, _, pilot):
        await server.stop(None)
        await becomes(pilot, lambda: "no answer" in shown(pilot, "#problem"), "it is said")
        assert shown(pilot, "#head").startswith("unknown: The figures are old")
        await pilot.press("s")
        assert "oldest▼" in titles(pilot)


async def test_pause_keeps_what_is_shown() -> None:
    async with topping() as (server, _, pilot):
        await pilot.press("p")
        assert "paused" in shown(pilot, "#problem")
        asked = totals(server)
        looks = 0
        stats = pilot.app.client.stats

        async def counted(*given: Any, **more: Any) -> Any:
            nonlocal looks
            looks += 1
            return await stats(*given, **more)

        pilot.app.client.stats = counted
        screen = pilot.app.screen
        assert isinstance(screen, Tenants)
        screen.look()
        await pilot.pause()
        assert looks == 0
        await pilot.press("p")
        await becomes(pilot, lambda: looks > 0, "it goes on")
        assert totals(server)["received"] == asked["received"]


def test_figures_begin_again_with_another_scheduler() -> None:
    from schedsvc_client.v1 import scheduler_pb2 as pb

    times = iter([0.0, 1.0, 2.0])
    figures = Figures(lambda: next(times))
    for incarnation, granted in [(1, 10), (1, 30), (2, 5)]:
        totals_of = {"granted": granted}
        figures.add(pb.StatsResponse(incarnation=incarnation, totals=totals_of))
        rate = figures.rate(lambda found: found.totals.granted)
        assert rate == (20 if granted == 30 else None)


@pytest.mark.parametrize(
    ("ms", "text"),
    [(-1, "-"), (0, "0 ms"), (999, "999 ms"), (1_500, "1.5 s"), (180_000, "3 min"), (1e8, "28 h")],
)
def test_durations_have_units(ms: float, text: str) -> None:
    assert duration(ms) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (9.46, "9.5"), (950, "950"), (9_500, "9,500"), (95_000, "95.0k"),
     (2_500_000, "2.5M"), (3e9, "3.0G")],
)  # fmt: skip
def test_large_numbers_are_short(value: float | None, text: str) -> None:
    assert short(value) == text


def test_without_textual_it_says_what_to_install() -> None:
    done = run_without_lab_packages("top", packages=("textual",))
    said = "schedsvc top needs the package textual: pip install 'schedsvc[top]'"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"Error: {said}\n")
    assert run_without_lab_packages("top", "--help", packages=("textual",)).returncode == 0


async def test_top_leaves_abandoned_pools_out() -> None:
    async with serving(**SHORT_LEASES) as server:
        await abandon_pool(server, "gone")
        app = Top(Connection(server.targets[0], None, None), every_s=0.2, wanted="")
        async with app.run_test(size=(80, 24)) as pilot:
            await becomes(pilot, lambda: "pool" in shown(pilot, "#pools"), "pools are shown")
            assert "gone" not in shown(pilot, "#pools")
