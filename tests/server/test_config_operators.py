"""Tests the operators in the configuration."""

from pathlib import Path

import pytest

from schedsvc.config import Config, ModeOverlay, needs_restart

from .conftest import config_of
from .test_config import MINIMAL, found, reading

OPS = "{name: ops, sha256: '" + "a" * 64 + "', operator: true}"
GATE = "{name: gate, sha256: '" + "b" * 64 + "', pools: [gpu-*], share_of_places: 0.5}"
AUTH = "auth: {principals: [" + OPS + ", %s]}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AUTH % GATE + MINIMAL, []),
        (
            "auth: {principals: [{name: a, certificate: alice}]}\n" + MINIMAL,
            [
                "1:44 auth.principals[0].certificate: no listener asks for client certificates;"
                " give one tls.client_ca"
            ],
        ),
        (
            "auth: {principals: [{name: a, env: T}, {name: a, env: U}]}\n" + MINIMAL,
            [
                "1:47 auth.principals[1].name: this name stands twice, first at"
                " auth.principals[0].name; remove one"
            ],
        ),
        (
            "auth: {principals: [{name: a}]}\n" + MINIMAL,
            [
                "1:21 auth.principals[0]: has no proof of who calls; give one of sha256, env,"
                " token_file, certificate, listener"
            ],
        ),
        (
            "auth: {principals: [{name: a, listener: x}]}\n" + MINIMAL,
            [
                "1:41 auth.principals[0].listener: is no `tcp` or `unix` of a listener without"
                " authentication"
            ],
        ),
        (
            "auth: {principals: [{name: a, listener: s, operator: true}]}\nlisteners: [{unix: s}]",
            [
                "1:54 auth.principals[0].operator: is not for a listener's callers; write"
                " `operate: true` to the listener"
            ],
        ),
        (
            "auth: {principals: [{name: a, env: T, share_of_places: 2}]}\n" + MINIMAL,
            ["1:56 auth.principals[0].share_of_places: is 2; it has to be at most 1.0"],
        ),
        (
            AUTH % GATE + "listeners: [{tcp: '127.0.0.1:0', operate: true}]",
            [
                "2:43 listeners[0].operate: is for listeners without authentication; write"
                " `operator: true` to the caller's entry of auth.principals"
            ],
        ),
        (
            "listeners: [{tcp: '127.0.0.1:0', operate: maybe}]",
            ["1:43 listeners[0].operate: has to be true or false, not text"],
        ),
    ],
)
def test_wrong_setting_is_named_by_its_path(text: str, expected: list[str], tmp_path: Path) -> None:
    assert found(tmp_path, text, T="t" * 16, U="u" * 16) == expected


def test_defaults_give_a_shim_all_tenants_and_others_none(tmp_path: Path) -> None:
    config = reading(tmp_path, AUTH % GATE + MINIMAL).config
    assert config is not None
    assert [p.may_vouch_for for p in config.auth.principals] == [[], ["*"]]
    assert [p.stats for p in config.auth.principals] == ["own", "own"]


def test_callers_without_shares_are_warned_of(tmp_path: Path) -> None:
    plain = GATE.replace(", share_of_places: 0.5", "")
    assert reading(tmp_path, AUTH % plain + MINIMAL).warnings == []  # one that is no operator
    both = plain + ", " + plain.replace("gate", "other").replace("b" * 64, "c" * 64)
    both = both.replace("gpu-*]", "gpu-*], tenants: [a]")
    [warning] = reading(tmp_path, AUTH % both + MINIMAL).warnings
    assert warning.path == ("auth", "principals")
    assert "2 callers, and none has share_of_places" in warning.message
    assert (
        reading(
            tmp_path,
            AUTH
            % (both + ", " + GATE.replace("b" * 64, "d" * 64).replace("name: gate", "name: third"))
            + MINIMAL,
        ).warnings
        == []
    )


def test_callers_that_act_for_all_tenants_are_warned_of(tmp_path: Path) -> None:
    other = GATE.replace("gate", "other").replace("b" * 64, "c" * 64)
    [warning] = reading(tmp_path, AUTH % f"{GATE}, {other}" + MINIMAL).warnings
    assert warning.path == ("auth", "principals")
    assert warning.message == (
        "2 callers (gate, other) have pools and no tenants, so each may spend the share and the"
        " quotas of every tenant, and they divide the places in a tenant's queue; give each the"
        ' tenants that it serves, or tenants: ["*"] if each serves all'
    )
    for tenants in ("[a]", '["*"]'):
        stated = other.replace("gpu-*]", f"gpu-*], tenants: {tenants}")
        assert reading(tmp_path, AUTH % f"{GATE}, {stated}" + MINIMAL).warnings == []


def test_default_right_of_listeners_to_operate(tmp_path: Path) -> None:
    text = (
        AUTH
        % GATE
        + "listeners: [{tcp: 'a:1', auth: none}, {unix: s, auth: none}, {tcp: 'a:2'}, {unix: t},"
        " {unix: u, operate: false}, {tcp: 'a:3', auth: none, operate: true}]"
    )
    config = reading(tmp_path, text).config
    assert config is not None
    may = [config.may_operate(listener) for listener in config.listeners]
    assert may == [False, True, True, True, False, True]


def test_change_of_a_listener_needs_a_restart() -> None:
    other = config_of(listeners=[{"tcp": "127.0.0.1:0", "operate": True}])
    assert needs_restart(other, config_of()) == ["listeners"]


def modes(config: Config) -> dict[str, bool]:
    return {tenant.name: config.is_dry_run(tenant) for tenant in config.tenants}


def test_an_overlay_overrides_the_file() -> None:
    config = config_of(mode="dry_run", tenants=[{"name": "a"}, {"name": "b", "mode": "enforce"}])
    said = ModeOverlay()
    assert said.on(config) is config
    assert modes(said.saying("enforce").on(config)) == {"a": False, "b": False}
    assert said.saying("enforce").on(config).mode == "enforce"
    one = said.saying("enforce").saying("dry_run", "b")
    assert modes(one.on(config)) == {"a": False, "b": True}
    assert one.saying(None, "b") == said.saying("enforce")
    assert modes(one.saying(None).on(config)) == {"a": True, "b": False}
    assert one.on(config).resolve("x") == config.resolve("x")


@pytest.mark.parametrize("saved", [b"{", b"[]", b'{"tenants": 1}', b"[" * 100_000])
def test_saved_modes_that_cannot_be_read_are_a_value_error(saved: bytes) -> None:
    with pytest.raises(ValueError, match=r"cannot be read|nested too deeply|Expecting"):
        ModeOverlay.restored(saved)
