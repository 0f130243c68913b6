"""Who may operate, as the configuration says it."""

from pathlib import Path

import pytest

from schedsvc.config import Config, ModeOverlay, needs_restart

from .conftest import config_of
from .test_config import MINIMAL, found, reading

TOKENS = "auth: {tokens: [{name: ops, sha256: '" + "a" * 64 + "'}], operators: [%s]}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TOKENS % "ops" + MINIMAL, []),
        (
            TOKENS % "ops, alice" + MINIMAL,
            [
                "1:124 auth.operators[1]: no token has this name, and no listener asks for client"
                " certificates"
            ],
        ),
        (
            TOKENS % "ops, ops" + MINIMAL,
            [
                "1:124 auth.operators[1]: this operator stands twice, first at auth.operators[0];"
                " remove one"
            ],
        ),
        ("auth: {operators: ops}\n" + MINIMAL, ["1:19 auth.operators: has to be a list, not text"]),
        (
            TOKENS % "ops" + "listeners: [{tcp: '127.0.0.1:0', operate: true}]",
            [
                "2:43 listeners[0].operate: is for listeners without authentication; name operators"
                " in auth.operators"
            ],
        ),
        (
            "listeners: [{tcp: '127.0.0.1:0', operate: maybe}]",
            ["1:43 listeners[0].operate: has to be true or false, not text"],
        ),
    ],
)
def test_what_is_wrong_is_named_by_place(text: str, expected: list[str], tmp_path: Path) -> None:
    assert found(tmp_path, text) == expected


def test_who_may_operate_where_nothing_is_said(tmp_path: Path) -> None:
    text = (
        TOKENS
        % "ops"
        + "listeners: [{tcp: 'a:1', auth: none}, {unix: s, auth: none}, {tcp: 'a:2'}, {unix: t},"
        " {unix: u, operate: false}, {tcp: 'a:3', auth: none, operate: true}]"
    )
    config = reading(tmp_path, text).config
    assert config is not None
    may = [config.may_operate(listener) for listener in config.listeners]
    assert may == [False, True, True, True, False, True]


def test_a_change_needs_a_restart() -> None:
    tokens = [{"name": "ops", "sha256": "a" * 64}]
    before = config_of(auth={"tokens": tokens})
    assert needs_restart(config_of(auth={"tokens": tokens, "operators": ["ops"]}), before) == [
        "auth"
    ]
    other = config_of(listeners=[{"tcp": "127.0.0.1:0", "operate": True}])
    assert needs_restart(other, config_of()) == ["listeners"]


def modes(config: Config) -> dict[str, bool]:
    return {tenant.name: config.is_dry_run(tenant) for tenant in config.tenants}


def test_an_overlay_goes_before_the_file() -> None:
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
