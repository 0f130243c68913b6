"""Builds Go from Debian's sources of gRPC, with no module proxy."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.box.tools import IN_CI, need

FOLDER = Path(__file__).resolve().parents[2] / "clients/go"
MODULE = "github.com/schedsvc/schedsvc/clients/go"
#: Where Debian's packages golang-*-dev put sources.
SOURCES = Path("/usr/share/gocode/src")
#: The modules of gRPC 1.33 that the client needs. Each gets a go.mod that requires nothing, because
#: Debian has no sources of what only their tests need.
MODULES = (
    "github.com/golang/protobuf",
    "golang.org/x/net",
    "golang.org/x/sys",
    "golang.org/x/text",
    "google.golang.org/genproto/googleapis/rpc",
    "google.golang.org/grpc",
    "google.golang.org/protobuf",
)
_GO = "go 1.19\n"


def need_go() -> None:
    """Skip the test that calls this without Go and Debian's sources; in CI fail instead."""
    need("go", "gofmt")
    missing = [name for name in MODULES if not (SOURCES / name).is_dir()]
    if missing:
        text = f"no sources of {missing}; `.ci/tools golang-google-grpc-dev` installs them"
        (pytest.fail if IN_CI else pytest.skip)(text)


def run(
    command: Sequence[object], variables: Mapping[str, str], cwd: Path = FOLDER, text: str = ""
) -> str:
    """Run a command that has to succeed; return what it prints on stdout."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **variables},
        input=text,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def replacements() -> str:
    """Return the lines of a go.mod that take Debian's sources."""
    return "".join(f"replace {name} => {SOURCES / name}\n" for name in MODULES)


def empty_module(folder: Path) -> dict[str, str]:
    """Make a module that has nothing but the client; return the environment to build it in."""
    asks = f"require {MODULE} v0.0.0\n\nreplace {MODULE} => {FOLDER}\n"
    text = f"module example.org/elsewhere\n\n{_GO}\n{asks}{replacements()}"
    (folder / "go.mod").write_text(text)
    return _offline(folder, "")


def client_module(folder: Path) -> dict[str, str]:
    """Return the environment to build the client in, with all that Go writes in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / "client.mod"
    module.write_text((FOLDER / "go.mod").read_text() + replacements())
    return _offline(folder, f" -modfile={module}")


def _offline(folder: Path, flags: str) -> dict[str, str]:
    replaced = {}
    for number, name in enumerate(MODULES):
        plain = folder / f"{number}.mod"
        plain.write_text(f"module {name}\n\n{_GO}")
        replaced[str(SOURCES / name / "go.mod")] = str(plain)
    overlay = folder / "overlay.json"
    overlay.write_text(json.dumps({"Replace": replaced}))
    return {
        "GO111MODULE": "on",
        "GOFLAGS": f"-mod=mod -overlay={overlay}{flags}",
        "GOPROXY": "off",
        "GOWORK": "off",
    }
