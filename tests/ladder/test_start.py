"""Tests the measure of a start: it ends when the scheduler is ready, and not before."""

import sys
from pathlib import Path

import pytest

from bench import start


def test_each_start_is_measured() -> None:
    found = start.measured(1)
    assert found.keys() == {"python", "grpc", "serve", "serve_metrics"}
    assert all(figures["cpu_s"] > 0 for figures in found.values())


def test_a_scheduler_that_never_is_ready_is_not_measured(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("listeners: []\n")
    with pytest.raises(RuntimeError, match=r"is not ready: .* must not be empty"):
        start._start([sys.executable, "-m", "schedsvc", "serve", "--config", str(file)])
