"""Tests `schedsvc tenants list | get | set | delete | export`, as an operator types them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from schedsvc.config import load

from .conftest import token_of
from .test_cli import run
from .test_config import MINIMAL
from .test_operator import operating
from .test_operator_cli import typed
from .test_tenant_keys import admitted_as, digest, key_ids, owner
from .test_tenants import WITH_RULE, flow, proved


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[Any]]:
    """Return the log of the server, which shares its process with the command."""
    with capture_logs() as events:
        yield events


async def test_set_get_list_and_delete_print_the_tenant(logged: list[Any]) -> None:
    async with operating(**WITH_RULE) as (server, both):
        target = server.targets[0]
        words = ("--weight", "2.5", "--tokens-per-minute", 200_000, "--classes", "low")
        result = await typed(target, "tenants", "set", "new", *words)
        assert result.exit_code == 0, result.output
        assert result.output.splitlines()[1].split() == [
            *("new", "operator", "1", "2.5", "-", "-", "200,000", "tokens_per_minute")
        ]
        assert flow(server, "new")["weight_milli"] == 2_500
        shown = await typed(target, "tenants", "set", "new", "--classes", "", "--json")
        assert json.loads(shown.output) == {
            "name": "new",
            "weight": 2.5,
            "quota": {"tokens_per_minute": 200_000, "over": "wait"},
            "origin": "operator",
            "version": 2,
            "api_keys": 0,
        }
        assert (await typed(target, "tenants", "get", "new", "--json")).output == shown.output
        await both.admit(10, **proved("acme/seen"))
        rows = (await typed(target, "tenants", "list")).output.splitlines()
        assert [row.split()[:4] for row in rows[1:]] == [
            ["a", "file", "-", "4"],
            ["b", "file", "-", "2.5"],
            ["new", "operator", "2", "2.5"],
            ["acme/seen", "rule", "-", "3"],
        ]
        rows = (await typed(target, "tenants", "list", "--origin", "file", "--json")).output
        assert [json.loads(row)["name"] for row in rows.splitlines()] == ["a", "b"]
        gone = await typed(target, "tenants", "delete", "new")
        assert gone.output == "new falls back to the first rule that fits its name\n"
        missing = await typed(target, "tenants", "get", "new")
        assert "no operator, file or request has named a tenant 'new'" in missing.output
    events = [(event["event"], event.get("tenant")) for event in logged if "by" in event]
    assert events == [
        ("operator_tenant_set", "new"),
        ("operator_tenant_set", "new"),
        ("operator_tenant_deleted", "new"),
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--weight", "1.2345"), "'1.2345' has more than 3 decimals"),
        (("--weight", "x"), "'x' is not a number"),
        (("--weight", "0"), "weight: is 0.0; it has to lie between 0.001 and 1000000"),
        (("--group", "nope"), "'nope' is no group; add it to groups (known: 'acme', 'other')"),
        (("--if-version", "3"), "is 3, but the tenant has version 0"),
    ],
)
async def test_wrong_options_are_named(words: tuple[str, ...], text: str) -> None:
    async with operating(**WITH_RULE) as (server, _):
        result = await typed(server.targets[0], "tenants", "set", "a", *words)
        assert result.exit_code != 0
        assert text in result.output


async def test_export_gives_the_same_tenants(tmp_path: Path) -> None:
    share = {"tokens_per_minute": 50_000, "lends": 0}
    tenants = [
        {"name": "yes", "weight": 0.001, "mode": "dry_run", "share": share},
        {"name": "lent"},
        {"name": "a: [b] #1", "api_keys_sha256": ["ab" * 32], "quota": {"over": "refuse"}},
        {"name": "1e3", "group": "acme", "class": "low", "classes": ["default", "low"]},
    ]
    async with operating(**WITH_RULE | {"tenants": tenants}) as (server, both):
        target = server.targets[0]
        words = ("--requests-per-minute", 6, "--concurrency", 2, "--over", "refuse")
        await typed(target, "tenants", "set", "new", *words)
        await typed(target, "tenants", "set", "yes", "--weight", "7")
        words = ("--share-tokens-per-minute", 900, "--share-lends", 5, "--share-borrows", 0)
        await typed(target, "tenants", "set", "lent", *words)
        await both.admit(10, **proved("acme/seen"))
        exported = await typed(target, "tenants", "export")
        wanted = server._handles.listed.in_force
    file = tmp_path / "schedsvc.yaml"
    rest = "groups: [{name: acme}]\nclasses: [{name: low, rank: 5}]\n"
    file.write_text(MINIMAL + rest + exported.stdout)
    assert run("check", str(file)).exit_code == 0
    assert {tenant.name: tenant for tenant in load(file).tenants} == wanted


@pytest.mark.parametrize("words", [("list",), ("get", "a"), ("set", "a"), ("delete", "a")])
async def test_only_operators_may(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSVC_TEST_TOKEN", "shim-token-of-16")
    auth = {"principals": [token_of("shim", "shim-token-of-16")]}
    async with operating(auth=auth, listeners=[{"tcp": "127.0.0.1:0"}]) as (server, _):
        proof = ("--token-env", "SCHEDSVC_TEST_TOKEN")
        result = await typed(server.targets[0], "tenants", *words, *proof)
        assert result.exit_code == 1
        assert "'shim' may not operate" in result.output


async def test_the_commands_make_rotate_list_and_revoke_keys() -> None:
    async with operating(**WITH_RULE) as (server, both):
        target = server.targets[0]
        made = await typed(target, "tenants", "keys", "create", "a", "--expires-in", "3600")
        assert made.exit_code == 0, made.output
        key = made.stdout.strip()
        assert await admitted_as(server, both, key) == "a"
        old_id = (await key_ids(both, "a"))[0]
        assert f"key {old_id} of a, expires 20" in made.stderr
        rotated = await typed(target, "tenants", "keys", "rotate", "a", "--json")
        told = json.loads(rotated.stdout)
        assert await owner(server, told["api_key"]) == await owner(server, key) == "a"
        assert f"key {old_id} expires 20" in rotated.stderr
        shown = await typed(target, "tenants", "keys", "list", "a")
        assert [row.split()[0] for row in shown.stdout.splitlines()] == ["id", old_id, told["id"]]
        rows = (await typed(target, "tenants", "keys", "list", "a", "--json")).stdout.splitlines()
        assert json.loads(rows[1])["expires"] == "never"
        gone = await typed(target, "tenants", "keys", "revoke", "a", old_id)
        assert gone.stdout == f"key {old_id} of a is revoked\n"
        assert await owner(server, key) == ""
        exported = (await typed(target, "tenants", "export")).stdout
        assert digest(told["api_key"]).hex() in exported
