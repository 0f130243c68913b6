"""Periods of budgets in time zones, over steps of the clock and restarts."""

import asyncio
import sys
import time
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client.v1 import operator_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc.records.usage.budgets import period_of
from schedsvc.server import Server
from tests.server.conftest import ask, calling, config_of, serving
from tests.server.test_config import MINIMAL, found
from tests.server.test_operator import OPEN, Both, operating
from tests.server.test_usage import saved
from tests.waiting import until

DAY, MONTH = 0, 1


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("now", "which", "zone", "begin", "end"),
    [
        ("2026-11-30T23:30", DAY, "UTC", "2026-11-30", "2026-12-01"),
        ("2026-11-30T23:30", DAY, "Europe/Paris", "2026-11-30T23:00", "2026-12-01T23:00"),
        ("2026-11-30T23:30", MONTH, "Europe/Paris", "2026-11-30T23:00", "2026-12-31T23:00"),
        # The clocks go back, so the day has 25 hours; and forward, so it has 23.
        ("2026-10-25T12:00", DAY, "Europe/Paris", "2026-10-24T22:00", "2026-10-25T23:00"),
        ("2026-03-29T12:00", DAY, "Europe/Paris", "2026-03-28T23:00", "2026-03-29T22:00"),
        ("2026-12-31T12:00", MONTH, "Asia/Kathmandu", "2026-11-30T18:15", "2026-12-31T18:15"),
        # Midnight is left out here, and comes twice there.
        ("2026-09-06T12:00", DAY, "America/Santiago", "2026-09-06T04:00", "2026-09-07T03:00"),
        ("2026-11-01T12:00", DAY, "America/Havana", "2026-11-01T04:00", "2026-11-02T05:00"),
    ],
)
def test_period_is_the_local_day_or_month(
    now: str, which: int, zone: str, begin: str, end: str
) -> None:
    period = period_of(at(now), which, zone)
    assert (period.begin_s, period.end_s) == (at(begin), at(end))
    assert period_of(period.end_s, which, zone).number == period.number + 1
    assert period_of(period.begin_s - 1, which, zone).number == period.number - 1


class Wall:
    """Sets a wall clock for the server's ledger and budgets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = at("2026-11-15T12:00")
        monkeypatch.setattr("time.time", lambda: self.now_s)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    return Wall(monkeypatch)


def config_with(folder: Path, budget: dict[str, Any]) -> dict[str, Any]:
    return {
        "usage": {"path": str(folder / "usage.db")},
        "tenants": [{"name": "a", "budget": budget}],
    }


async def spend(stub: SchedulerServiceStub) -> int:
    """Use 116 tokens if the budget allows it; return the outcome."""
    answer = await stub.Admit(ask())
    if answer.HasField("grant"):
        lease = {"lease_id": answer.grant.lease_id, "pool_epoch": answer.grant.pool_epoch}
        await stub.Complete(pb.CompleteRequest(**lease, input_tokens=100, output_tokens=16))
    return answer.outcome


async def spend_all(stub: SchedulerServiceStub) -> int:
    """Use all that is left; return the number of requests."""
    count = 0
    while await spend(stub) == pb.OUTCOME_GRANTED:
        count += 1
    return count


def look(server: Server) -> None:
    server._budgets.look()


async def test_a_budget_holds_over_restarts(tmp_path: Path, wall: Wall) -> None:
    keys = config_with(tmp_path, {"tokens_per_day": 600})
    granted = 0
    for _ in range(4):
        async with serving(**keys) as server, calling(server.targets[0]) as stub:
            granted += await spend(stub) == pb.OUTCOME_GRANTED
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        granted += await spend_all(stub)
        assert granted == 5  # 580 tokens
        wall.now_s = at("2026-11-16T00:00")
        look(server)
        assert await spend_all(stub) == 5


async def test_a_clock_set_back_opens_no_period_again(tmp_path: Path, wall: Wall) -> None:
    keys = config_with(tmp_path, {"tokens_per_day": 600})
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        assert await spend_all(stub) == 5
        for moment in ("2026-11-14T12:00", "2026-11-15T12:00", "2026-10-01T00:00"):
            wall.now_s = at(moment)
            look(server)
            assert await spend_all(stub) == 0
        wall.now_s = at("2026-11-16T00:00")
        look(server)
        assert await spend_all(stub) == 5


async def test_a_clock_that_ran_ahead_for_a_while_leaves_the_day(
    tmp_path: Path, wall: Wall
) -> None:
    """Without a refill, and the next day begins in time."""
    keys = config_with(tmp_path, {"tokens_per_day": 600})
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        for _ in range(2):
            assert await spend(stub) == pb.OUTCOME_GRANTED
        wall.now_s = at("2027-03-01T00:00")
        look(server)
        assert await spend_all(stub) == 5
        wall.now_s = at("2026-11-15T13:00")
        figures = server.driver.ledgering
        assert figures is not None
        while figures.waiting_rows:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        figures.waiting_rows = 1
        look(server)
        assert await spend_all(stub) == 0  # until the ledger knows the day's usage
        figures.waiting_rows = 0
        look(server)
        assert await spend_all(stub) == 3
        wall.now_s = at("2026-11-16T00:00")
        look(server)
        assert await spend_all(stub) == 5


async def test_a_month_outlives_its_days(tmp_path: Path, wall: Wall) -> None:
    budget = {"tokens_per_day": 250, "tokens_per_month": 600, "timezone": "Europe/Paris"}
    async with (
        serving(**config_with(tmp_path, budget)) as server,
        calling(server.targets[0]) as stub,
    ):
        used = []
        for day in (15, 16, 17, 18):
            wall.now_s = at(f"2026-11-{day}T12:00")
            look(server)
            used.append(await spend_all(stub))
        assert used == [2, 2, 1, 0]


async def test_a_refusal_says_when_the_next_period_begins(tmp_path: Path, wall: Wall) -> None:
    keys = config_with(tmp_path, {"tokens_per_day": 150})
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        await spend_all(stub)
        refusal = (await stub.Admit(ask())).refusal
        assert 12 * 3_600 - 5 <= refusal.retry_after_ms / 1_000 <= 12 * 3_600 + 10
        assert "tokens per day" in refusal.message
        for hours in (1, -2):  # the clock is set, and the day ends sooner or later by this
            wall.now_s += hours * 3_600
            look(server)
            left_s = at("2026-11-16T00:00") - wall.now_s
            refusal = (await stub.Admit(ask())).refusal
            assert left_s - 5 <= refusal.retry_after_ms / 1_000 <= left_s + 10


async def test_a_reload_gives_a_new_budget_what_was_spent(tmp_path: Path, wall: Wall) -> None:
    keys = config_with(tmp_path, {"tokens_per_day": 5_000})
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        for _ in range(3):
            await spend(stub)
        assert server._usage is not None
        while server._usage._waiting:
            await server._usage.write()
        server.reconfigure(config_of(**config_with(tmp_path, {"tokens_per_month": 600})))
        assert await spend_all(stub) == 2


async def set_budget(both: Both, **fields: Any) -> operator_pb2.TenantBudget:
    request = operator_pb2.SetTenantRequest(name="a", **fields)
    budget: operator_pb2.TenantBudget = (await both.operator.SetTenant(request)).tenant.budget
    return budget


async def test_operator_gives_a_budget_what_was_spent(tmp_path: Path, wall: Wall) -> None:
    keys: dict[str, Any] = {
        "usage": {"path": str(tmp_path / "usage.db")},
        "state": {"file": str(tmp_path / "state.db")},
        "tenants": [{"name": "a"}],
        "tenant_rules": [{"match": "*"}],
    }
    async with operating(**keys) as (server, both):
        for _ in range(3):
            await spend(both.scheduler)
        await until(lambda: saved(server) == 3, "the ledger has all three")
        told = await set_budget(both, budget_tokens_per_day=600, budget_timezone="Asia/Tokyo")
        assert (told.tokens_per_day, told.tokens_per_month) == (600, 0)
        assert await spend_all(both.scheduler) == 2
        # The day of Tokyo begins at 15:00 UTC.
        wall.now_s = at("2026-11-15T15:00")
        look(server)
        assert await spend_all(both.scheduler) == 5
        # A reload does not stop its periods.
        server.reconfigure(config_of(**OPEN | keys | {"tenants": []}))
        wall.now_s = at("2026-11-16T15:00")
        look(server)
        assert await spend_all(both.scheduler) == 5
    async with operating(**keys) as (server, both):
        assert await spend_all(both.scheduler) == 0
        told = await set_budget(both, budget_timezone="")
        assert (told.tokens_per_day, told.timezone) == (600, "UTC")
        told = await set_budget(both, budget_tokens_per_day=0)
        assert told == operator_pb2.TenantBudget()
        for _ in range(10):
            assert await spend(both.scheduler) == pb.OUTCOME_GRANTED
        server.driver._core.check()


@pytest.fixture
def without_zones(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run on a machine that has no time zones, neither in a folder nor in a package."""
    known = [name for name in sys.modules if name.startswith("tzdata.")]  # of other tests
    for name in ("tzdata", *known):
        monkeypatch.setitem(sys.modules, name, None)
    zoneinfo.reset_tzpath(to=())
    zoneinfo.ZoneInfo.clear_cache()
    yield
    zoneinfo.reset_tzpath()
    zoneinfo.ZoneInfo.clear_cache()


@pytest.mark.usefixtures("without_zones")
def test_a_machine_without_zones_knows_utc_and_says_so(tmp_path: Path) -> None:
    text = (
        "usage: {path: /tmp/u}\ntenants: [{name: a, budget: {tokens_per_day: 5, timezone: %s}}]\n"
    )
    assert found(tmp_path, MINIMAL + text % "UTC") == []
    assert period_of(at("2026-11-30T23:30"), DAY, "UTC").end_s == at("2026-12-01")
    assert found(tmp_path, MINIMAL + text % "Europe/Paris") == [
        "3:59 tenants[0].budget.timezone: 'Europe/Paris' cannot be looked up: this machine has no"
        " time zones; install the package tzdata (pip install tzdata)"
    ]


async def test_time_zone_of_the_process_moves_no_budget(
    tmp_path: Path, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = config_with(tmp_path, {"tokens_per_day": 600, "timezone": "Europe/Paris"})
    wall.now_s = at("2026-11-15T22:30")  # an hour and a half before midnight in Kiritimati
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        assert await spend_all(stub) == 5
        for zone in ("Pacific/Kiritimati", "America/Los_Angeles"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            look(server)
            assert await spend_all(stub) == 0
        refusal = (await stub.Admit(ask())).refusal
        assert 1_800 - 5 <= refusal.retry_after_ms / 1_000 <= 1_800 + 10
        wall.now_s = at("2026-11-15T23:00")
        look(server)
        assert await spend_all(stub) == 5
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "tenants: [{name: a, budget: {tokens_per_day: 5}}]\n",
            ["2:29 tenants[0].budget: is kept in the usage ledger; give usage.path too"],
        ),
        (
            "usage: {path: /tmp/u}\ngroups: [{name: g, budget: {timezone: Mars}}]\n",
            [
                "3:28 groups[0].budget: limits nothing; give tokens_per_day or tokens_per_month",
                "3:39 groups[0].budget.timezone: 'Mars' is no time zone; write a name such as"
                " Europe/Paris",
            ],
        ),
    ],
)
def test_a_wrong_budget_is_named(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert found(tmp_path, MINIMAL + text) == expected
