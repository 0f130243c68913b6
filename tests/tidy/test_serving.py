"""Tests that commands import only what they need, by counts: so a start stays short."""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

LAB = ("schedsvc_lab", "schedsvc.cluster")
LAB_PACKAGES = (
    "httptools", "jinja2", "matplotlib", "numpy", "redis", "starlette", "textual", "tokenizers",
    "uvicorn",
)  # fmt: skip
#: Gates, recordings and exports need these.
OTHERS = ("cryptography", "jwt", "opentelemetry", "orjson", "pyarrow")
#: The listener of metrics and of the console needs these.
HTTP = ("aiohttp", "prometheus_client", "schedsvc.server.console", "schedsvc.server.metrics_http")
#: For a command that asks a scheduler; a command that only shows its help needs none of it.
NO_SERVER = ("pydantic", "schedsvc._core", "schedsvc.server", "structlog", "uvloop", "yaml")
NO_CALLS = ("asyncio", "email", "google", "grpc", "rich", "schedsvc.config", "schedsvc_client")

UNUSED = (*LAB, *LAB_PACKAGES, *OTHERS)


def imported(*arguments: str) -> list[str]:
    """Return the modules that `schedsvc` imports until it ends or is ready.

    Python skips the module that a call of import_module() names, but not its imports in turn.
    """
    command = [sys.executable, "-X", "importtime", "-m", "schedsvc", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        names = list[str]()
        for line in process.stderr or ():
            names += re.findall(r"^import time: .*\| +(\S+)$", line)
            if '"event": "ready"' in line:
                names.append("ready")
                process.kill()
                break
    return names


def parts(names: Iterable[str], roots: Iterable[str]) -> list[str]:
    """Return the modules that are one of the roots, or below one."""
    return sorted(n for n in names if any(n == r or n.startswith(r + ".") for r in roots))


@pytest.fixture
def served(tmp_path: Path) -> list[str]:
    """Return the arguments that serve the least configuration."""
    file = tmp_path / "c.yaml"
    file.write_text(f"listeners: [{{unix: {tmp_path}/s.sock}}]\ntenants: [{{name: a}}]\n")
    return ["serve", "--config", str(file)]


def test_serve_imports_neither_laboratory_nor_http(served: list[str]) -> None:
    names = imported(*served)
    assert {"ready", "schedsvc.server.server", "grpc.aio"} <= set(names)
    assert not parts(names, (*UNUSED, *HTTP))


def test_metrics_bring_http_alone(served: list[str]) -> None:
    file = Path(served[-1])
    file.write_text(file.read_text() + "metrics: {listen: '127.0.0.1:0'}\n")
    names = imported(*served)
    assert {"ready", *HTTP} <= set(names)
    assert not parts(names, UNUSED)


@pytest.mark.parametrize(
    ("arguments", "command", "unused"),
    [
        (["--help"], "schedsvc.cli", (*NO_CALLS, *NO_SERVER)),
        (["stats", "--target", "unix:/nowhere"], "schedsvc.cli.connect", NO_SERVER),
    ],
)
def test_other_commands_import_no_server(
    arguments: list[str], command: str, unused: tuple[str, ...]
) -> None:
    names = imported(*arguments)
    assert command in names
    assert not parts(names, (*UNUSED, *HTTP, *unused))


@pytest.mark.parametrize("name", ["numpy.linalg", "schedsvc_lab", "schedsvc_lab.load.runner"])
def test_a_module_of_the_laboratory_is_found(name: str) -> None:
    assert parts([name, "schedsvc.server", "schedsvc.label"], UNUSED) == [name]
