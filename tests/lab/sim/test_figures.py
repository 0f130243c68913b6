"""Tests that pictures of a simulation say where they have nothing to show."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from .test_sim_cli import sim


def test_pictures_of_one_request_say_that_they_show_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, said = tmp_path / "trace.csv", {}
    trace.write_text("arrival_s,client,prompt_tokens,output_tokens\n0.5,a,200,100\n")
    save = Figure.savefig

    def savefig(self: Figure, path: Path, **options: Any) -> None:
        said[path.stem] = [text.get_text() for axes in self.axes for text in axes.texts]
        save(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    result = sim("--trace", trace, "--policy", "vtc", "--out", tmp_path / "out", "--figures")
    assert result.exit_code == 0, result.output
    assert said == {
        "accumulated_service": ["no service by 0.475 s"],
        "first_token": [],
        "kv_occupancy": [],
        "refusals": ["no request was refused"],
        "response_time": [],
        "service": [],
        "service_difference": ["no difference", "no difference"],
        "throughput": [],
    }
