"""The contract generates stubs for other languages, with no option that the caller has to know."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.box.tools import IN_CI, need
from tests.conformance.conftest import FOLDER, node

from .sources import ROOT

__all__ = ["node"]  # A fixture; its packages have the plug-in for TypeScript.

PROTO = ROOT / "proto"
TEMPLATE: dict[str, Any] = yaml.safe_load((PROTO / "buf.gen.yaml").read_text())
LANGUAGES = sorted({Path(plugin["out"]).name for plugin in TEMPLATE["plugins"]})
SOURCES = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.rglob("*.proto"))
PACKAGES = {"PATH": f"{FOLDER}/node_modules/.bin:{os.environ['PATH']}"}
HEADER = Path("/usr/include/google/protobuf/message.h")


@dataclass(frozen=True)
class Stub:
    """Describes a file that a plug-in writes, and the line in it that names the package."""

    language: str
    path: str
    line: str
    plain: tuple[str, ...] = ("protoc",)  # programs that protoc needs to write it without buf


_GO = "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
_TYPE = 'type AdmitRequest = Message<"schedsvc.v1.AdmitRequest"> & {'
STUBS = (
    Stub("cpp", "schedsvc/v1/scheduler.pb.h", "namespace schedsvc {"),
    Stub(
        "cpp", "schedsvc/v1/scheduler.grpc.pb.h", "class SchedulerService final {",
        ("protoc", "grpc_cpp_plugin"),
    ),
    Stub("csharp", "Scheduler.cs", "namespace Schedsvc.V1 {"),
    Stub("go", f"{_GO}/scheduler.pb.go", "package schedsvcv1", ("protoc", "protoc-gen-go")),
    Stub(
        "go", f"{_GO}/scheduler_grpc.pb.go", "package schedsvcv1", ("protoc", "protoc-gen-go-grpc")
    ),
    Stub("java", "io/github/schedsvc/v1/AdmitRequest.java", "package io.github.schedsvc.v1;"),
    Stub(
        "java", "io/github/schedsvc/v1/SchedulerServiceGrpc.java",
        "package io.github.schedsvc.v1;", ("protoc", "grpc_java_plugin"),
    ),
    Stub("php", "Schedsvc/V1/AdmitRequest.php", "namespace Schedsvc\\V1;"),
    Stub(
        "php", "Schedsvc/V1/SchedulerServiceClient.php", "namespace Schedsvc\\V1;",
        ("protoc", "grpc_php_plugin"),
    ),
    Stub("php", "Schedsvc/V1/Metadata/Scheduler.php", "namespace Schedsvc\\V1\\Metadata;"),
    Stub("ruby", "schedsvc/v1/scheduler_pb.rb", "module Schedsvc"),
    Stub(
        "ruby", "schedsvc/v1/scheduler_services_pb.rb", "module SchedulerService",
        ("protoc", "grpc_ruby_plugin"),
    ),
    Stub("typescript", "schedsvc/v1/scheduler_pb.ts", f"export {_TYPE}", ()),
    Stub(
        "javascript", "schedsvc/v1/scheduler_pb.d.ts", f"export declare {_TYPE}",
        ("protoc", "protoc-gen-es"),
    ),
)  # fmt: skip


def run(command: Sequence[object], **variables: str) -> None:
    """Run a command in proto/ that has to succeed."""
    words = [str(word) for word in command]
    environment = {**os.environ, **variables}
    done = subprocess.run(
        words, cwd=PROTO, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout}{done.stderr}"


def names_its_package(stub: Stub, folder: Path) -> None:
    """Hold that a plug-in has written this file, and that its package is right."""
    written = folder / stub.path
    assert written.exists(), f"only {sorted(path.name for path in folder.rglob('*.*'))[:20]}"
    lines = [line.strip() for line in written.read_text(errors="replace").splitlines()]
    assert stub.line in lines, f"{stub.path} has no line {stub.line!r}"


@pytest.mark.parametrize("language", LANGUAGES)
def test_buf_generates(language: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    plugins = [p for p in TEMPLATE["plugins"] if Path(p["out"]).name == language]
    variables: dict[str, str] = {}
    if language == "typescript":
        request.getfixturevalue("node")
        variables = PACKAGES
    else:
        need(*(p.get("local", "protoc") for p in plugins))
    template = tmp_path / "buf.gen.yaml"
    template.write_text(yaml.safe_dump({**TEMPLATE, "plugins": plugins}))
    buf = Path(sys.executable).with_name("buf")
    run([buf, "generate", "--template", template, "--output", tmp_path], **variables)
    stubs = [stub for stub in STUBS if stub.language == language]
    assert len(stubs) >= len(plugins), "state in STUBS what each plug-in writes"
    for stub in stubs:
        names_its_package(stub, tmp_path / "out" / language)


@pytest.mark.parametrize("stub", [stub for stub in STUBS if stub.plain], ids=lambda stub: stub.path)
def test_protoc_generates_without_options(
    stub: Stub, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program, variables = stub.plain[-1], dict[str, str]()
    if stub.language == "javascript":
        need("protoc")
        request.getfixturevalue("node")
        variables = PACKAGES
    else:
        need(*stub.plain)
    name = program.removeprefix("protoc-gen-") if len(stub.plain) > 1 else stub.language
    options = [f"--{name}_out={tmp_path}"]
    if program.startswith("grpc_"):  # protoc does not find it by its name
        options = [f"--plugin=protoc-gen-grpc={shutil.which(program)}", f"--grpc_out={tmp_path}"]
    run(["protoc", "-I.", *options, *SOURCES], **variables)
    names_its_package(stub, tmp_path)


def test_stubs_for_cpp_compile(tmp_path: Path) -> None:
    need("protoc", "g++")
    if not HEADER.exists():
        text = f"not found: {HEADER}; `.ci/tools libprotobuf-dev` installs it"
        (pytest.fail if IN_CI else pytest.skip)(text)
    run(["protoc", "-I.", f"--cpp_out={tmp_path}", *SOURCES])
    unit = tmp_path / "all.cc"
    headers = [name.replace(".proto", ".pb.h") for name in SOURCES]
    asks = "int main() { return schedsvc::v1::AdmitRequest().n() + schedsvc::v1::OUTCOME_GRANTED; }"
    unit.write_text("".join(f'#include "{name}"\n' for name in headers) + asks)
    run(["g++", "-std=c++17", "-fsyntax-only", f"-I{tmp_path}", unit])


def test_a_stub_of_another_package_is_found(tmp_path: Path) -> None:
    stub = STUBS[0]
    with pytest.raises(AssertionError, match="only"):
        names_its_package(stub, tmp_path)
    (tmp_path / stub.path).parent.mkdir(parents=True)
    (tmp_path / stub.path).write_text("namespace elsewhere {\n")
    with pytest.raises(AssertionError, match="has no line"):
        names_its_package(stub, tmp_path)
