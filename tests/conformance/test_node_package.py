"""Tests the packed Node package, installed in an empty folder elsewhere: ESM and CommonJS."""

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import FOLDER, run_node
from .loads import script
from .runner import run
from .server import running, serving

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", ["module", "commonjs"])]

EMULATOR = ["emulate", "--port", "0", "--profile", "fast"]
TSC = ["--strict", "--module", "nodenext", "--target", "es2022"]


def compiled(packed: Path, kind: str, *sources: Path) -> Path:
    """Compile files as a user does who only has the package; return their folder."""
    folder = packed / kind
    folder.mkdir(exist_ok=True)
    (folder / "package.json").write_text(f'{{"type": "{kind}"}}')
    names = [shutil.copy(source, folder) for source in sources]
    run_node(["node", packed / "node_modules/typescript/bin/tsc", *TSC, *names], cwd=folder)
    return folder


def run_sample(folder: Path, target: str, engine: str) -> subprocess.CompletedProcess[str]:
    """Run one completion through the scheduler."""
    return subprocess.run(
        ["node", str(folder / "sample.js"), target, engine, "Once upon a time there was"],
        env={**os.environ, "TENANT": "red"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_sample(packed: Path, kind: str, tmp_path: Path) -> None:
    folder = compiled(packed, kind, FOLDER / "sample.ts")
    has_import = "import " in (folder / "sample.js").read_text()
    assert has_import == (kind == "module")
    with serving(script(), tmp_path) as target, running(EMULATOR, tmp_path) as engine:
        done = run_sample(folder, target, engine["base_url"])
        assert done.returncode == 0, done.stderr
        assert "granted in main after" in done.stderr
        assert len(done.stdout.split()) > 3
        usage = re.search(r"(\d+) input tokens, (\d+) output tokens", done.stderr)
        assert usage, done.stderr
        # The charge of the scheduler equals the figures of the engine.
        books = {"completed": 1, "input_tokens": usage[1], "output_tokens": usage[2]}
        assert int(usage[1]) > 3
        assert int(usage[2]) > 3
        asyncio.run(run([{"call": "Stats", "expect": {"flows": {"$has": books}}}], target))


def test_sample_is_refused(packed: Path, kind: str, tmp_path: Path) -> None:
    folder = compiled(packed, kind, FOLDER / "sample.ts")
    served = script(pools=[{"name": "tiny", "capacity_tokens": 32}])
    with serving(served, tmp_path) as target, running(EMULATOR, tmp_path) as engine:
        done = run_sample(folder, target, engine["base_url"])
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Refused: " in done.stderr


def test_examples_of_the_page(packed: Path, kind: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```ts\n(.*?)^```", (FOLDER / "README.md").read_text(), re.M | re.S)
    assert len(blocks) >= 4
    sources = []
    for number, block in enumerate(blocks):
        source = tmp_path / f"page{number}.ts"
        source.write_text(block)
        sources.append(source)
    folder = compiled(packed, kind, *sources)
    for block, source in zip(blocks, sources, strict=True):
        if "node:test" in block:
            run_node(["node", "--test", folder / f"{source.stem}.js"])


def test_types_find_a_wrong_field(packed: Path, kind: str, tmp_path: Path) -> None:
    source = tmp_path / "wrong.ts"
    source.write_text(
        "import { Scheduler } from 'schedsvc';\n"
        "void new Scheduler('a:1').admit({ input_tokens: [1], maxOutputTokens: 1 });\n"
    )
    with pytest.raises(AssertionError, match="Did you mean to write 'inputTokens'"):
        compiled(packed, kind, source)
