"""Tests `schedsvc cluster status` and `schedsvc stats` of a leader and its standby process."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from schedsvc.cli import main
from schedsvc.cluster.store import Address, connect
from tests.waiting import until

from .member_process import MemberProcess, is_followed, leads, start_set
from .members import POOL_SET, TOKEN, ready_store
from .store_server import ADMIN_PASSWORD, StoreServer

NO_STANDBY = f"Error: set {POOL_SET} has no standby that follows the leader\n"
NO_LEADER = f"Error: set {POOL_SET} has no leader"


async def status(member: MemberProcess, *options: str) -> Result:
    words = ["cluster", "status", "--config", str(member._config), *options]
    return await asyncio.to_thread(CliRunner().invoke, main, words)


async def status_until(member: MemberProcess, holds: Callable[[Result], object]) -> Result:
    found: list[Result] = []

    async def is_so() -> object:
        found.append(await status(member))
        return holds(found[-1])

    await until(is_so, "the status says so")
    return found[-1]


async def stats(member: MemberProcess) -> Result:
    words = ["stats", "--target", member.target, "--token-env", "PROOF"]
    return await asyncio.to_thread(CliRunner(env={"PROOF": TOKEN}).invoke, main, words)


@pytest.fixture
async def pair(
    store: StoreServer, tmp_path: Path
) -> AsyncIterator[tuple[MemberProcess, MemberProcess]]:
    await ready_store(store)
    members = MemberProcess(tmp_path, "a", store.url), MemberProcess(tmp_path, "b", store.url)
    yield members
    for member in members:
        member.end()


def rows(result: Result) -> list[list[str]]:
    """Return the table of the members, cut at two blanks."""
    lines = result.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("member "))
    return [[part.strip() for part in line.split("  ") if part.strip()] for line in lines[head:]]


async def test_status_shows_leader_and_standby_and_their_end(
    pair: tuple[MemberProcess, MemberProcess],
) -> None:
    a, b = pair
    await a.start()
    await until(lambda: leads(a), "it leads")
    alone = await status_until(a, lambda found: found.exit_code == 0)
    assert rows(alone)[1][:5] == ["a", POOL_SET, "leader", "1", a.target]
    await b.start()
    await until(lambda: is_followed(a), "it is followed")
    both = await status_until(a, lambda found: "ago" in found.stdout)
    assert both.exit_code == 0, both.output
    head, first, second = rows(both)
    assert head[:8] == [
        "member", "set", "role", "term", "address", "followed since", "lag", "store"
    ]  # fmt: skip
    assert first == ["a", POOL_SET, "leader", "1", a.target, "alive", "as in this file"]
    assert second[:5] == ["b", POOL_SET, "standby", "1", b.target]
    assert second[5].endswith(" s ago")
    assert second[6].endswith(" s")
    assert second[7] == "alive"
    b.send(signal.SIGTERM)
    lost = await status_until(a, lambda found: found.exit_code == 1)
    assert NO_STANDBY in lost.output
    assert "gone for" in lost.stdout
    a.end()
    dead = await status_until(a, lambda found: NO_LEADER in found.output)
    assert dead.exit_code == 1


async def test_stats_of_a_standby_name_the_leader(
    pair: tuple[MemberProcess, MemberProcess],
) -> None:
    a, b = pair
    await start_set(a, b)
    shown = await stats(b)
    assert shown.exit_code == 0
    text = f"member b stands by in set {POOL_SET}; the leader is a at {a.target}\n"
    # The judgement may still be that of the moment in which no leader was known.
    judged, rest = shown.stdout.split("\n", 1)
    assert judged.startswith(("ok: ", "trouble: "))
    assert rest == text


async def test_a_forged_row_makes_no_leader(
    pair: tuple[MemberProcess, MemberProcess], store: StoreServer
) -> None:
    a, _ = pair
    link = await connect(Address("127.0.0.1", store.port, None, ADMIN_PASSWORD))
    await link.command("SET", f"{{schedsvc:prod}}:term:{POOL_SET}", "9 seal x/1 evil:1")
    notes: dict[str, Any] = {"x\x1b[31m": '{"role": 7, "term": "many", "lag_ms": []}', "y": "]"}
    for name, note in notes.items():
        await link.command("HSET", f"{{schedsvc:prod}}:notes:{POOL_SET}", name, f"soon {note}")
    await link.close()
    found = await status(a)
    assert found.exit_code == 1
    assert NO_LEADER in found.output
    assert "\x1b[31m" not in found.output
    shown = json.loads((await status(a, "--json")).stdout)
    assert [each["leader"] for each in shown["sets"]] == [""]
    assert [m["role"] for m in shown["sets"][0]["members"]] == ["unknown", "unknown"]
