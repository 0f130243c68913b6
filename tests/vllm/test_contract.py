"""The internals of vLLM that the gate uses are there, and the gate uses them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from . import programs
from .stack import Stack


def test_vllm_is_inside_as_the_gate_expects() -> None:
    looked = subprocess.run(
        [programs.ENVIRONMENT / "bin" / "python", Path(__file__).with_name("contract.py")],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert looked.returncode == 0, looked.stdout + looked.stderr[-2_000:]


def test_the_gate_counts_inside_the_engines_client(stack: Stack) -> None:
    """Else it would fall back to reading answers, and only its cost would show that."""
    log = stack.log.read_text()
    assert "Application startup complete" in log
    assert "usage is read from answers" not in log
