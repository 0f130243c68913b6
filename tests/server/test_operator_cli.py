"""Tests the operator's commands: `drain`, `leases` and `mode`, as a person types them."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import Result
from schedsvc_client.operator import Operator
from schedsvc_client.v1 import operator_pb2
from structlog.testing import capture_logs

from schedsvc.cli import leases as leases_cli
from tests.waiting import until

from .conftest import ask, config_of, token_of, totals
from .test_cli import run
from .test_operator import OPEN, Both, operating
from .test_session import stream

TWO_POOLS = {"pools": [{"name": name, "capacity_tokens": 1_600} for name in ("p", "q")]}


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[Any]]:
    """Return the log of the server, which shares its process with the command."""
    with capture_logs() as events:
        yield events


async def typed(target: str, *words: object) -> Result:
    return await asyncio.to_thread(run, *words, "--target", target)


async def grants(both: Both, count: int, **fields: Any) -> list[int]:
    return [(await both.admit(10, **fields)).grant.lease_id for _ in range(count)]


# drain


async def test_a_drain_waits_until_nothing_runs() -> None:
    async with operating(**TWO_POOLS) as (server, both):
        target = server.targets[0]
        [lease] = await grants(both, 1, pools=["p"])
        waiting = asyncio.ensure_future(typed(target, "drain", "p", "--wait", "60", "--json"))
        await until(lambda: server.driver.stats(0)["pools"][0]["draining"], "it drains")
        assert not waiting.done()
        await both.complete(lease)
        result = await waiting
        assert result.exit_code == 0, result.output
        shown = json.loads(result.stdout)
        assert (shown["pool"], shown["draining"], shown["live_leases"]) == ("p", True, 0)
        assert not shown["outlives_restart"]
        assert "1 running\n0 running\n" in result.stderr
        stats = await typed(target, "stats")
        assert "p (draining)" in stats.output
        undone = await typed(target, "drain", "p", "--undo")
        assert undone.output == "pool p admits again; 0 run\n"


async def test_a_drain_says_so_where_the_time_is_up() -> None:
    async with operating() as (server, both):
        await grants(both, 2)
        result = await typed(server.targets[0], "drain", "--all", "--wait", "0.1")
        assert result.exit_code == 1
        told = "the scheduler drains until the next restart (no state file is kept); 2 run"
        assert told in result.output
        assert "still something that runs" in result.output
        assert totals(server)["live_leases"] == 2


async def test_a_drain_reports_that_it_was_undone_meanwhile() -> None:
    async with operating() as (server, both):
        await grants(both, 1)
        target = server.targets[0]
        waiting = asyncio.ensure_future(typed(target, "drain", "pool", "--wait", "60"))
        await until(lambda: server.driver.stats(0)["pools"][0]["draining"], "it drains")
        assert (await typed(target, "drain", "pool", "--undo")).exit_code == 0
        result = await waiting
        assert result.exit_code == 1
        assert "the drain is over: another operator has undone it" in result.output


# leases


async def test_leases_are_a_table_or_lines_of_json() -> None:
    async with operating() as (server, both):
        ids = await grants(both, 5)
        target = server.targets[0]
        table = (await typed(target, "leases", "list")).stdout.splitlines()
        assert table[0].split() == list(leases_cli._COLUMNS)
        assert {int(line.split()[0]) for line in table[1:]} == set(ids)
        lines = (await typed(target, "leases", "list", "--json", "--limit", 0)).stdout.splitlines()
        rows = [json.loads(line) for line in lines]
        assert {row["lease_id"] for row in rows} == set(map(str, ids))
        assert rows[0]["tenant"] == "a"
        assert rows[0]["state"] == "live"
        few = await typed(target, "leases", "list", "--limit", 2)
        assert len(few.stdout.splitlines()) == 3
        assert "more than 2; --limit 0 shows all" in few.stderr
        none = await typed(target, "leases", "list", "--older-than", 3_600)
        assert none.exit_code == 0
        assert len(none.stdout.splitlines()) == 1


def test_a_list_of_any_length_is_shown_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leases_cli, "_PAGE", 10)
    held: set[int] = set()

    def some() -> Any:
        for i in range(1, 1_001):
            held.add(i)
            lease = operator_pb2.Lease(lease_id=i, tenant="\x1b[31mred", client_id="x" * (i % 40))
            yield lease
            printed = capsys.readouterr().out
            assert "\x1b" not in printed
            held.difference_update(int(line.split()[0]) for line in printed.splitlines()[-1:])

    leases_cli._table(some())
    # All but the first page and the row that is under way were printed before the next was asked.
    assert len(held) <= 12


async def test_leases_are_revoked_by_id() -> None:
    async with operating() as (server, both):
        first, second = await grants(both, 2)
        target = server.targets[0]
        one = await typed(target, "leases", "revoke", first)
        assert (one.exit_code, one.output) == (0, "1 revoked\n")
        assert "void" in (await typed(target, "leases", "list")).output
        two = await typed(target, "leases", "revoke", first, second)
        assert two.exit_code == 1
        assert "this would revoke 2 leases; add --yes" in two.output
        both_ = await typed(target, "leases", "revoke", first, second, "--yes", "--json")
        assert json.loads(both_.stdout) == {"revoked": 1, "unknown_lease_ids": []}
        unknown = await typed(target, "leases", "revoke", 77)
        assert unknown.exit_code == 1
        assert "no such lease, or it has ended: 77" in unknown.output


async def test_leases_are_revoked_by_what_they_are(logged: list[Any]) -> None:
    async with operating(**TWO_POOLS) as (server, both):
        await grants(both, 3, pools=["p"])
        await grants(both, 1, pools=["q"], tenant="b")
        target = server.targets[0]
        asked = await typed(target, "leases", "revoke", "--pool", "p")
        assert asked.exit_code == 1
        assert "this would revoke 3 leases; add --yes" in asked.output
        assert server.driver.stats(0)["totals"]["promised_tokens"] > 0
        done = await typed(target, "leases", "revoke", "--pool", "p", "--yes")
        assert done.output == "3 revoked\n"
        alone = await typed(target, "leases", "revoke", "--flow", "b")
        assert alone.output == "1 revoked\n"
        told = [event["revoked"] for event in logged if event["event"] == "operator_revoke"]
        assert told == [3, 1]
        assert server.driver.stats(0)["totals"]["promised_tokens"] == 0


async def test_leases_are_listed_and_revoked_by_principal() -> None:
    async with operating(**TWO_POOLS) as (server, both):
        await grants(both, 2, pools=["p"])
        target = server.targets[0]
        listed = await typed(target, "leases", "list", "--json")
        [name] = {json.loads(line)["principal"] for line in listed.stdout.splitlines()}
        shown = await typed(target, "leases", "list", "--principal", name, "--json")
        assert len(shown.stdout.splitlines()) == 2
        wrong = await typed(target, "leases", "revoke", "--principal", "gate", "--yes")
        assert wrong.exit_code == 1
        assert "no caller 'gate' is known" in wrong.output
        done = await typed(target, "leases", "revoke", "--principal", name, "--yes")
        assert done.output == "2 revoked\n"


# mode


async def test_log_of_an_operator_names_caller_and_action(logged: list[Any]) -> None:
    async with operating() as (server, _):
        target = server.targets[0]
        await typed(target, "mode", "dry_run")
        await typed(target, "drain", "--all")
    mode, drain = (event for event in logged if event["event"].startswith("operator_"))
    assert (mode["mode"], mode["tenant"], drain["pool"]) == ("dry_run", "all", "all")
    for event in (mode, drain):
        assert event["by"] == "listener:127.0.0.1:0"


async def test_log_of_a_session_names_its_caller(logged: list[Any]) -> None:
    async with operating() as (server, _), stream(server):
        await until(lambda: totals(server)["open_sessions"] == 1, "it is open")
    opened = [event for event in logged if event["event"] == "session_opened"]
    assert [event["caller"] for event in opened] == ["listener:127.0.0.1:0"]
    assert "principal" not in opened[0]


async def test_modes_are_said_shown_and_taken_back() -> None:
    async with operating() as (server, _):
        target = server.targets[0]
        assert (await typed(target, "mode")).output == "mode enforce, as configured\n"
        assert (await typed(target, "mode", "dry-run")).exit_code == 0
        result = await typed(target, "mode", "dry_run")
        assert result.output == "mode dry_run for all, an operator's word (configured: enforce)\n"
        assert "a (dry)" in (await typed(target, "stats")).output
        assert "an operator's word" in " ".join((await typed(target, "stats")).output.split())
        shown = json.loads(
            (await typed(target, "mode", "enforce", "--tenant", "a", "--json")).output
        )
        assert shown == {
            "configured": "enforce",
            "overlay": "dry_run",
            "tenants": {"a": "enforce"},
            "tenants_overlaid": 1,
        }
        assert (await typed(target, "mode", "configured")).output == "mode enforce, as configured\n"
        snapshot = json.loads((await typed(target, "stats", "--json")).output)
        assert snapshot["mode"]["overlay"] == "MODE_UNSPECIFIED"


# Errors.


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("drain", "nowhere"), "pool: no pool of that name; the pools are pool"),
        (("pools", "release", "nowhere"), "pool: no pool of that name; the pools are pool"),
        (("leases", "list", "--pool", "nowhere"), "filter.pool: no pool of that name; the pools"),
        (("leases", "list", "--tenant", "nobody"), "filter.tenant: no tenant of that name"),
        (("leases", "revoke", "--shim", "gone", "--yes"), "no open Session of that name"),
        (
            ("mode", "dry_run", "--tenant", "nobody"),
            "neither file nor operator lists a tenant 'nobody'",
        ),
    ],
)
async def test_unknown_names_are_reported(words: tuple[str, ...], part: str) -> None:
    async with operating() as (server, _):
        result = await typed(server.targets[0], *words)
        assert result.exit_code == 1
        assert part in result.output
        assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("drain",), "name a pool, or give --all"),
        (("drain", "p", "--all"), "'p' and --all exclude each other: name the pool alone, or"),
        (("drain", "p", "--undo", "--wait", "1"), "--wait goes with a drain"),
        (("leases", "revoke"), "give lease ids, or options"),
        (("leases", "revoke", "1", "--pool", "p"), "exclude each other; give one"),
        (("leases", "revoke", "x"), "not a whole number"),
        (("leases", "list", "--older-than", "-1"), "--older-than"),
        (("mode", "loud"), "'enforce', 'dry_run', 'configured'"),
        (("mode", "--tenant", "a"), "say a mode for the tenant"),
        (("drain", "p", "--token-env", "NOT_SET_AT_ALL"), "NOT_SET_AT_ALL is not set"),
    ],
)
def test_a_wrong_command_line_says_what_to_type(words: tuple[str, ...], part: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert part in result.output


COMMANDS = [
    ("drain", "pool"),
    ("drain", "--all", "--undo"),
    ("leases", "list"),
    ("leases", "revoke", "1"),
    ("leases", "revoke", "--tenant", "a"),
    ("mode", "dry_run"),
    ("tenants", "forgive", "a"),
    ("pools", "release", "pool"),
    ("mode",),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_scheduler_that_is_not_there_is_named(words: tuple[str, ...]) -> None:
    result = run(*words, "--target", "unix:/nowhere/at/all.sock")
    assert result.exit_code == 1
    assert "Error: unix:/nowhere/at/all.sock: no scheduler answers" in result.output
    assert "(No such file or directory)" in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize("command", ["stats", "mode", "drain --all", "why x", "leases list"])
def test_target_that_is_a_url_is_refused(command: str) -> None:
    result = run(*command.split(), "--target", "http://127.0.0.1:7600")
    assert result.exit_code == 2
    words = " ".join(result.output.split())
    assert "--target or SCHEDSVC_TARGET: target 'http://127.0.0.1:7600' is a URL" in words
    assert words.endswith("write 127.0.0.1:7600")


@pytest.mark.parametrize(
    ("target", "variable", "parts"),
    [
        ("127.0.0.1:9", "https_proxy", ["at ipv4:127.0.0.1:9 (Connection refused); start one"]),
        ("[::1]:9", "grpc_proxy", ["start one with `schedsvc serve`"]),
        (
            "scheduler.invalid:9",
            "http_proxy",
            ["at ipv4:127.0.0.1:9 (", "http_proxy names a proxy"],
        ),
    ],
)
def test_unreachable_target_names_the_address_tried(
    monkeypatch: pytest.MonkeyPatch, target: str, variable: str, parts: list[str]
) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    result = run("stats", "--target", target)
    assert result.exit_code == 1
    assert f"Error: {target}: no scheduler answers" in result.output
    assert all(part in result.output for part in parts), result.output


async def test_refused_callers_learn_what_to_configure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIM_TOKEN", "shim-token-of-16")
    principals = [
        token_of("shim", "shim-token-of-16"),
        token_of("ops", "ops-token-of-16", operator=True),
    ]
    keys = {"listeners": [{"tcp": "127.0.0.1:0"}]}
    async with operating(**keys, auth={"principals": principals}) as (server, _):
        target = server.targets[0]
        for words in COMMANDS[:-1]:
            result = await typed(target, *words, "--token-env", "SHIM_TOKEN")
            assert result.exit_code == 1
            assert "PERMISSION_DENIED: 'shim' may not operate: write `operator: t" in result.output
        assert (await typed(target, "mode", "--token-env", "SHIM_TOKEN")).exit_code == 0
        assert not server.driver.stats(0)["draining"]
        for words in (("stats",), *COMMANDS):  # without a token
            result = await typed(target, *words)
            assert result.exit_code == 1
            assert "UNAUTHENTICATED" in result.output
            assert "a file that --token-file names" in " ".join(result.output.split())
    async with operating(**keys) as (server, _):
        result = await typed(server.targets[0], "drain", "--all")
        assert "give it `operate: true`" in result.output


# tenants, pools


async def test_tenant_that_is_forgiven_owes_nothing() -> None:
    def keys(limit: int) -> dict[str, Any]:
        tenants = [{"name": "a", "quota": {"tokens_per_minute": limit}}]
        return OPEN | {"tenants": tenants}

    async with operating(**keys(10_000)) as (server, both):
        await both.scheduler.Admit(ask(1_000))
        server.reconfigure(config_of(**keys(20)))  # so it owes a minute of the new limit
        target = server.targets[0]
        result = await typed(target, "tenants", "forgive", "a")
        assert "a owed on 1 limit, and owes nothing now" in result.output
        result = await typed(target, "tenants", "forgive", "a")
        assert "a owed nothing" in result.output
        result = await typed(target, "tenants", "forgive", "a", "--json")
        assert json.loads(result.output) == {"tenant": "a", "limits": 0}


async def test_pool_is_released_once_no_stream_offers_it() -> None:
    async with operating() as (server, _):
        target = server.targets[0]
        result = await typed(target, "pools", "release", "pool")
        assert "pool is free: another caller can offer it now" in result.output
        result = await typed(target, "pools", "release", "nowhere")
        assert result.exit_code == 1
        assert "pool: no pool of that name" in result.output


# The client.


async def test_a_client_pages_through_all_leases() -> None:
    async with operating() as (server, both):
        ids = await grants(both, 7)

        def listed() -> list[int]:
            with Operator(server.targets[0]) as operator:
                return [lease.lease_id for lease in operator.leases(page_size=2)]

        assert sorted(await asyncio.to_thread(listed)) == sorted(ids)


def test_a_client_knows_its_modes() -> None:
    with Operator("127.0.0.1:1") as operator, pytest.raises(ValueError, match="enforce, dry_run"):
        operator.set_mode("loud")
