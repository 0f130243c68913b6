"""Former names of keys, modes and commands keep working, and say what to write instead."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from schedsvc_client.operator import MODES, MODES_RENAMED

from schedsvc.cli import main
from schedsvc.config import ModeOverlay
from schedsvc.lab.engine import load_profile
from schedsvc.lab.sim.overrides import override

from .certificates import Authority
from .conftest import config_of
from .test_config import MINIMAL, found, reading

EDGE = "auth: {principals: [{name: a, env: A}]}\n"
SOCKET = "listeners: [{unix: s.sock, auth: token}]\n" + EDGE


@pytest.mark.parametrize(
    ("text", "value", "warning"),
    [
        (
            SOCKET + "front: {tcp: '127.0.0.1:7603'}\n",
            lambda config: config.edge.tcp == "127.0.0.1:7603",
            (("front",), "is deprecated; write edge instead"),
        ),
        (
            MINIMAL + "scheduler: {stagger: off}\n",
            lambda config: config.core_options()["grant_pacing"] == 0,
            (("scheduler", "stagger"), "is deprecated; write scheduler.grant_pacing instead"),
        ),
        (
            MINIMAL + "scheduler: {lift: queued}\n",
            lambda config: config.core_options()["credit_max_micro"] == 0,
            (("scheduler", "lift"), "'queued' is deprecated; write credit_max: 0 instead"),
        ),
        (
            MINIMAL + "scheduler: {lift: active}\n",
            lambda config: config.core_options()["lift"] == "active",
            (
                ("scheduler", "lift"),
                "'active' is deprecated: a tenant that sends little for hours is then served alone"
                " for minutes; remove this line, or set credit_max",
            ),
        ),
        (
            MINIMAL + "mode: audit\n",
            lambda config: config.mode == "dry_run",
            (("mode",), "'audit' is deprecated; write 'dry_run' instead"),
        ),
        (
            MINIMAL + "tenants: [{name: a, mode: audit}]\n",
            lambda config: config.is_dry_run(config.tenants[0]),
            (("tenants", 0, "mode"), "'audit' is deprecated; write 'dry_run' instead"),
        ),
    ],
)
def test_former_key_is_read_with_a_warning(
    tmp_path: Path, text: str, value: Any, warning: tuple[tuple[str, ...], str]
) -> None:
    read = reading(tmp_path, text, A="token-of-16-bytes")
    assert not read.problems
    assert value(read.config)
    assert [(one.path, one.message) for one in read.warnings] == [warning]


def test_error_below_a_former_key_names_what_the_user_wrote(tmp_path: Path) -> None:
    assert found(tmp_path, MINIMAL + "scheduler:\n  stagger: 7\n") == [
        "3:12 scheduler.stagger: has to be true or false, not a number"
    ]


def test_former_key_beside_its_new_name_is_refused(tmp_path: Path) -> None:
    text = MINIMAL + "scheduler:\n  stagger: on\n  grant_pacing: off\n"
    assert found(tmp_path, text) == [
        "3:12 scheduler.stagger: is the former name of scheduler.grant_pacing, which is set too;"
        " remove this one"
    ]


def test_former_lift_beside_the_credit_is_refused(tmp_path: Path) -> None:
    text = MINIMAL + "scheduler:\n  lift: queued\n  credit_max: 10\n"
    assert found(tmp_path, text) == [
        "3:9 scheduler.lift: 'queued' means credit_max: 0, which is set too; remove this one"
    ]


def test_simulator_override_accepts_a_former_key() -> None:
    config = config_of()
    _, changed = override(load_profile("fast"), config, {"scheduler.stagger": False})
    assert config.scheduler.grant_pacing
    assert not changed.scheduler.grant_pacing
    _, changed = override(load_profile("fast"), config, {"scheduler.lift": "queued"})
    assert changed.core_options()["credit_max_micro"] == 0


def test_saved_mode_of_a_former_version_is_restored() -> None:
    overlay = ModeOverlay.restored(b'{"everyone": "audit", "tenants": {"a": "audit"}}')
    assert (overlay.everyone, overlay.tenants) == ("dry_run", {"a": "dry_run"})


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("front", "--help"), "schedsvc front is deprecated; use schedsvc edge"),
        (("mode", "audit"), "mode 'audit' is deprecated; use 'dry_run'"),
    ],
)
def test_former_command_works_with_a_warning(words: tuple[str, ...], warning: str) -> None:
    result = CliRunner().invoke(main, [*words, *(() if "--help" in words else TARGET)])
    assert result.stderr.splitlines()[0] == warning
    assert "No such command" not in result.output
    assert result.exit_code == (0 if "--help" in words else 1)


TARGET = ("--target", "unix:/nowhere/at/all.sock")


def test_former_modes_of_the_client_lead_to_known_ones() -> None:
    assert MODES_RENAMED == {"audit": "dry_run"}
    assert set(MODES_RENAMED.values()) <= set(MODES)


FORMER_AUTH = """
auth:
  tokens:
    - {name: ops, sha256: %s}
    - {name: gpu, file: token}
  operators: [ops, alice.example]
listeners:
  - {tcp: '127.0.0.1:0'}
  - {tcp: '127.0.0.1:0', tls: {cert: scheduler.pem, key: scheduler.key, client_ca: ca.pem}}
""" % ("a" * 64)


def test_former_tokens_are_principals_that_may_do_what_they_could(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("scheduler")
    (tmp_path / "token").write_text("a-token-of-enough-length")
    text = FORMER_AUTH.replace("scheduler.pem", str(own.cert_file))
    text = text.replace("scheduler.key", str(own.key_file)).replace("ca.pem", str(authority.file))
    answer = reading(tmp_path, text)
    assert answer.problems == []
    assert [(w.path, w.place.line) for w in answer.warnings if "deprecated" in w.message] == [
        (("auth", "tokens"), 3),
        (("auth", "operators"), 6),
    ]
    assert answer.config is not None
    auth = answer.config.auth
    rights = [(p.name, p.pools, p.may_vouch_for, p.stats, p.operator) for p in auth.principals]
    assert rights == [
        ("ops", ["*"], ["*"], "all", True),
        ("gpu", ["*"], ["*"], "all", False),
        ("alice.example", ["*"], ["*"], "all", True),
    ]
    assert auth.principals[2].certificate == "alice.example"
    assert auth.lets_unlisted_in  # other certificates of the CA were let in


@pytest.mark.parametrize(
    ("auth", "expected"),
    [
        ("{operators: ops}", "2:19 auth.operators: has to be a list"),
        ("{tokens: [{name: x, env: NOT_SET}]}", "2:32 auth.tokens[0].env: this environment"),
        ("{tokens: [{name: x, file: gone}]}", "2:33 auth.tokens[0].file: cannot read"),
        ("{tokens: [{name: x, sha256: a, more: 1}]}", "2:38 auth.tokens[0].more: unknown key"),
        ("{operators: [ops]}", "2:20 auth.operators[0]: no listener asks for client"),
    ],
)
def test_wrong_former_callers_are_named_as_they_stand(
    auth: str, expected: str, tmp_path: Path
) -> None:
    problems = found(tmp_path, MINIMAL + f"auth: {auth}\n")
    assert any(problem.startswith(expected) for problem in problems), problems
