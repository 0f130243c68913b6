"""Tests that a newcomer with docs/use/litellm.md alone gets an answer, in ten commands at most."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from schedsvc_lab.demo.processes import DIES_WITH_PARENT

from .stand import ROOT, VENV, needs_litellm

pytestmark = pytest.mark.litellm

PAGE = ROOT / "docs/use/litellm.md"
#: The ports of the page; a test takes free ones.
PORTS = ("8001", "8002", "7600", "4000")
#: Stands for the packages that pip would fetch: those of the lane's environment.
_FETCHED = """\
for site in litellm-env/lib/python3*/site-packages; do
  ls -d {venv}/lib/python3*/site-packages > "$site/fetched.pth"
done
sed "1s|.*|#!$PWD/litellm-env/bin/python|" {venv}/bin/litellm > litellm-env/bin/litellm
chmod +x litellm-env/bin/litellm
"""


def commands() -> list[str]:
    """Return the commands of the page's first section, each on a line."""
    block = re.search(r"## Try it\n.*?```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block, "the page has no commands"
    return block[1].splitlines()


def with_free_ports(text: str) -> str:
    """Replace each port of the page; each has to occur."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    for port, probe in zip(PORTS, probes, strict=True):
        assert re.search(rf"\b{port}\b", text), port
        text = re.sub(rf"\b{port}\b", str(probe.getsockname()[1]), text)
        probe.close()
    return text


def test_a_newcomer_gets_an_answer(tmp_path: Path) -> None:
    needs_litellm()
    written = commands()
    assert len(written) <= 10
    sample = ROOT / "clients/litellm/sample"
    files = {path.name: path.read_text() for path in sample.iterdir() if path.is_file()}
    script = "\n".join([written[0], _FETCHED.format(venv=VENV), *written[1:]])
    marks = "\n#file\n"
    script, *texts = with_free_ports(marks.join([script, *files.values()])).split(marks)
    # A checkout, in which only the ports differ.
    for name in ("clients/python", "clients/litellm"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path / name)], check=True)
    for name, text in zip(files, texts, strict=True):
        (tmp_path / "clients/litellm/sample" / name).write_text(text)
    path = f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"
    ended = subprocess.run(
        [*DIES_WITH_PARENT, "bash", "-e", "-c", f"trap 'kill $(jobs -p) || true' EXIT\n{script}"],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        check=False,
    )
    told = ended.stdout + ended.stderr[-4_000:]
    assert ended.returncode == 0, told
    assert '"usage"' in ended.stdout, told
    assert "research/ann/quiet" in ended.stdout, told
