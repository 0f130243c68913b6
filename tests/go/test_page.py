"""Builds the programs of the page in an empty module that replaces the client by this checkout."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from pathlib import Path

import aiohttp
import pytest

from schedsvc_lab.demo.processes import free_port
from tests.conformance.loads import script
from tests.conformance.runner import run as run_steps
from tests.conformance.server import running, serving
from tests.waiting import until

from .conftest import Go
from .toolchain import FOLDER, empty_module, run

EMULATOR = ["emulate", "--port", "0", "--profile", "fast"]


@pytest.fixture(scope="module")
def samples(go: Go, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the programs of the page, built as they stand there."""
    folder = tmp_path_factory.mktemp("elsewhere")
    variables = empty_module(folder)
    blocks = re.findall(r"^```go\n(.*?)^```", (FOLDER / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        package = folder / f"page{number}"
        package.mkdir()
        (package / "main.go").write_text(block)
    assert run(["gofmt", "-l", "."], variables, folder) == ""
    run(["go", "vet", "./..."], variables, folder)
    run(["go", "build", "-o", f"built{os.sep}", "./..."], variables, folder)
    return [folder / "built" / f"page{number}" for number in range(len(blocks))]


def complete(sample: Path, target: str, engine: str) -> subprocess.CompletedProcess[str]:
    """Ask for one completion through the scheduler."""
    return subprocess.run(
        [str(sample), target, engine, "Once upon a time there was"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_sample_completes(samples: list[Path], tmp_path: Path) -> None:
    with serving(script(), tmp_path) as target, running(EMULATOR, tmp_path) as engine:
        done = complete(samples[0], target, engine["base_url"])
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) > 3
        books = {"completed": 1, "input_tokens": {"$min": 4}, "output_tokens": {"$min": 4}}
        asyncio.run(run_steps([{"call": "Stats", "expect": {"flows": {"$has": books}}}], target))


def test_sample_is_refused(samples: list[Path], tmp_path: Path) -> None:
    served = script(pools=[{"name": "tiny", "capacity_tokens": 32}])
    with serving(served, tmp_path) as target, running(EMULATOR, tmp_path) as engine:
        done = complete(samples[0], target, engine["base_url"])
    assert done.returncode == 1
    assert done.stdout == ""
    assert "REJECTED_TOO_LARGE" in done.stderr


async def test_sample_gates(samples: list[Path], tmp_path: Path) -> None:
    with serving(script(), tmp_path) as target:
        address = f"127.0.0.1:{free_port()}"
        gating = await asyncio.create_subprocess_exec(samples[1], target, address)
        try:
            async with aiohttp.ClientSession() as session:

                async def is_up() -> bool:
                    try:
                        async with session.post(f"http://{address}/summary", data="a text") as got:
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
