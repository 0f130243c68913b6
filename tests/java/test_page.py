"""Builds the programs of the page in an empty project that takes the client from a repository."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from schedsvc_lab.demo.processes import free_port
from tests.conformance.loads import script
from tests.conformance.runner import run as run_steps
from tests.conformance.server import running, serving
from tests.waiting import until

from .conftest import Java
from .toolchain import FOLDER, class_path, maven

EMULATOR = ["emulate", "--port", "0", "--profile", "fast"]
#: The server of the page's second program.
SERVER = """\
<dependency>
  <groupId>org.apache.tomcat.embed</groupId>
  <artifactId>tomcat-embed-core</artifactId>
  <version>10.1.60</version>
</dependency>
"""
POM = """\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>org.example</groupId>
  <artifactId>elsewhere</artifactId>
  <version>1</version>
  <properties>
    <maven.compiler.release>11</maven.compiler.release>
    <project.build.sourceEncoding>UTF-8</project.build.sourceEncoding>
  </properties>
  <dependencies>
{}
  </dependencies>
</project>
"""


@pytest.fixture(scope="module")
def samples(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    """Return the command of the programs of the page, built as they stand there."""
    folder = tmp_path_factory.mktemp("elsewhere")
    page = (FOLDER / "README.md").read_text()
    (dependencies,) = re.findall(r"^```xml\n(.*?)^```", page, re.M | re.S)
    (folder / "pom.xml").write_text(POM.format(dependencies + SERVER))
    blocks = re.findall(r"^```java\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 2
    sources = folder / "src/main/java"
    sources.mkdir(parents=True)
    for block in blocks:
        (name,) = re.findall(r"^public final class (\w+)", block, re.M)
        (sources / f"{name}.java").write_text(block)
    maven("-q", "compile", cwd=folder)
    return ["java", "-cp", class_path(folder, "runtime")]


def complete(samples: Sequence[str], target: str, engine: str) -> subprocess.CompletedProcess[str]:
    """Ask for one completion through the scheduler."""
    return subprocess.run(
        [*samples, "Complete", target, engine, "Once upon a time there was"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_sample_completes(samples: Sequence[str], tmp_path: Path) -> None:
    with serving(script(), tmp_path, "tcp") as target, running(EMULATOR, tmp_path) as engine:
        done = complete(samples, target, engine["base_url"])
        assert done.returncode == 0, done.stderr
        assert "completion_tokens" in done.stdout
        books = {"completed": 1, "input_tokens": {"$min": 4}, "output_tokens": {"$min": 4}}
        asyncio.run(run_steps([{"call": "Stats", "expect": {"flows": {"$has": books}}}], target))


def test_sample_is_refused(samples: Sequence[str], tmp_path: Path) -> None:
    served = script(pools=[{"name": "tiny", "capacity_tokens": 32}])
    with serving(served, tmp_path, "tcp") as target, running(EMULATOR, tmp_path) as engine:
        done = complete(samples, target, engine["base_url"])
    assert done.returncode == 1
    assert done.stdout == ""
    assert "REJECTED_TOO_LARGE" in done.stderr


async def test_sample_gates(samples: Sequence[str], tmp_path: Path) -> None:
    with serving(script(), tmp_path, "tcp") as target:
        port = free_port()
        gating = await asyncio.create_subprocess_exec(
            *samples, "Gated", target, str(port), cwd=tmp_path
        )
        try:
            async with aiohttp.ClientSession() as session:

                async def is_up() -> bool:
                    url = f"http://127.0.0.1:{port}/summary"
                    try:
                        async with session.post(url, data="a text") as got:
                            return got.status == 200 and await got.text() == "in short\n"
                    except aiohttp.ClientConnectionError:
                        return False

                await until(is_up, "it serves")
            books = {"completed": 1, "input_tokens": 480, "output_tokens": 90}
            steps = [{"call": "Stats", "until": {"flows": {"$has": books}}}]
            await run_steps(steps, target)
        finally:
            gating.kill()
            await gating.wait()
