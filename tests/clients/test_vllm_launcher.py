from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from schedsvc_vllm import settings
from schedsvc_vllm.launcher import (
    MIDDLEWARE,
    OPTIONS,
    LaunchError,
    options_text,
    prepare,
    split,
    usage,
)
from schedsvc_vllm.proxy_cli import parser
from schedsvc_vllm.settings import SettingsError

from tests import forked

TARGET = ["--schedsvc-target", "unix:/run/s.sock"]


def test_vllm_gets_its_own_arguments_and_the_middleware() -> None:
    environment: dict[str, str] = {}
    arguments = ["serve", "m", *TARGET, "--port", "1", "--schedsvc-pool=gpu-1", "--seed", "-1"]
    assert prepare(arguments, environment) == [
        *("serve", "m", "--port", "1", "--seed", "-1"),
        *("--middleware", MIDDLEWARE),
    ]
    epoch = environment.pop("SCHEDSVC_POOL_EPOCH")
    assert environment == {"SCHEDSVC_TARGET": "unix:/run/s.sock", "SCHEDSVC_POOL": "gpu-1"}
    assert int(epoch) > 1_700_000_000 * 10**9


def test_option_overrides_its_variable_and_epoch_is_kept() -> None:
    environment = {"SCHEDSVC_TARGET": "unix:/old", "SCHEDSVC_POOL_EPOCH": "7"}
    prepare(["serve", "m", *TARGET], environment)
    assert environment == {"SCHEDSVC_TARGET": "unix:/run/s.sock", "SCHEDSVC_POOL_EPOCH": "7"}


@pytest.mark.parametrize(
    ("arguments", "gates"),
    [
        (["--api-server-count", "4"], "4"),
        (["--api-server-count=4", "-asc", "3"], "3"),
        (["--api_server_count=2"], "2"),
        (["--api-server-count", "0"], None),
        (["--api-server-count"], None),
        ([], None),
    ],
)
def test_the_number_of_api_servers_is_that_of_gates(
    arguments: list[str], gates: str | None
) -> None:
    environment: dict[str, str] = {}
    prepare(["serve", "m", *TARGET, *arguments], environment)
    assert environment.get("SCHEDSVC_POOL_GATES") == gates
    environment = {"SCHEDSVC_POOL_GATES": "9"}
    prepare(["serve", "m", *TARGET, *arguments], environment)
    assert environment["SCHEDSVC_POOL_GATES"] == "9"


def test_a_later_start_has_a_higher_epoch() -> None:
    epochs = []
    for _ in range(2):
        environment: dict[str, str] = {}
        prepare(["serve", "m", *TARGET], environment)
        epochs.append(int(environment["SCHEDSVC_POOL_EPOCH"]))
    assert epochs[0] < epochs[1]


def test_middleware_of_the_user_stays() -> None:
    rest = prepare(["serve", "m", *TARGET, "--middleware", "their.Own"], {})
    assert rest[2:] == ["--middleware", "their.Own", "--middleware", MIDDLEWARE]


@pytest.mark.parametrize(
    ("arguments", "variables", "told"),
    [
        (["bench", "m"], {}, "only `schedsvc-vllm serve"),
        (["serve", "m"], {"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND"),
        (["serve", "m", "--grpc"], {}, "--grpc"),
        (["serve", "m", "--middleware", MIDDLEWARE], {}, "leave it out"),
        (["serve", "m", f"--middleware={MIDDLEWARE}"], {}, "leave it out"),
        (["serve", "m", "--schedsvc-tenant-header", "x"], {}, "--schedsvc-tenant-headers"),
        (["serve", "m", "--schedsvc-token", "s3cret"], {}, "--schedsvc-token-file"),
        (["serve", "m", "--schedsvc-pool"], {}, "--schedsvc-pool needs a value"),
        (["serve", "m", "--schedsvc-pool", "--port"], {}, "--schedsvc-pool needs a value"),
        (["serve", "m", "--schedsvc-pool="], {}, "--schedsvc-pool needs a value"),
    ],
)
def test_setting_that_cannot_work_is_named(
    arguments: list[str], variables: dict[str, str], told: str
) -> None:
    with pytest.raises(LaunchError, match=re.escape(told)) as raised:
        prepare([*arguments, *TARGET][: None if "needs" not in told else -2], dict(variables))
    assert "s3cret" not in str(raised.value)


def test_settings_are_checked_before_the_engine_starts() -> None:
    with pytest.raises(SettingsError, match="SCHEDSVC_TARGET"):
        prepare(["serve", "m"], {})
    with pytest.raises(SettingsError, match="SCHEDSVC_POOL_MAX_RUNNING"):
        prepare(["serve", "m", *TARGET, "--schedsvc-pool-max-running", "many"], {})


def test_every_setting_has_its_option() -> None:
    source = Path(settings.__file__).read_text()
    named = set(re.findall(r'read\.\w+\(\s*"(SCHEDSVC_\w+)"', source))
    named |= set(re.findall(r'self\.\w+\(\s*"(SCHEDSVC_\w+)"', source))
    named |= {f"SCHEDSVC_TLS_{part}_FILE" for part in ("CA", "CERT", "KEY")}
    # On the command line other users of the host could read it.
    named.remove("SCHEDSVC_TOKEN")
    variables = set()
    for name in OPTIONS:
        variables |= set(split([f"--schedsvc-{name}=x"])[1])
    assert variables == named
    assert all(f"--schedsvc-{name}" in usage() for name in OPTIONS)


FAKE_VLLM = """#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ.get("SCHEDSVC_TARGET")]))
sys.exit(7)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    fake = folder / "vllm"
    fake.write_text(FAKE_VLLM.format(python=sys.executable))
    fake.chmod(0o755)
    return forked.run(
        [sys.executable, "-c", "from schedsvc_vllm.launcher import main; main()", *arguments],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for text in (usage(), parser().format_help()):
        assert [line for line in text.splitlines() if len(line) > 80] == []
    for line in options_text().split("\n  --")[1:]:
        sentence = " ".join(line.split()[1:])
        assert sentence[0].isupper(), line
        assert sentence.endswith("."), line


def test_it_becomes_vllm(tmp_path: Path) -> None:
    done = run(tmp_path, "serve", "m", *TARGET)
    assert json.loads(done.stdout) == [
        ["serve", "m", "--middleware", MIDDLEWARE],
        "unix:/run/s.sock",
    ]
    assert done.returncode == 7


def test_vllm_explains_its_own_options(tmp_path: Path) -> None:
    done = run(tmp_path, "serve", "--help=all")
    assert json.loads(done.stdout) == [["serve", "--help=all"], None]


def test_help_and_mistakes(tmp_path: Path) -> None:
    shown = run(tmp_path, "--help")
    assert shown.returncode == 0
    assert "Example:" in shown.stdout
    wrong = run(tmp_path, "serve", "m")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("schedsvc-vllm: SCHEDSVC_TARGET is not set")
    assert run(tmp_path).returncode == 2


@pytest.mark.parametrize("program", ["schedsvc-vllm", "schedsvc-proxy"])
def test_program_prints_its_version_and_needs_nothing_for_it(program: str) -> None:
    command = [str(Path(sys.executable).with_name(program)), "--version"]
    done = forked.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{program} 0.1.0\n")
