"""The whole ladder at its smallest sizes, as `make bench` runs it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.report import LEVELS
from bench.targets import judge_growth

# pytest-benchmark is off below a worker of xdist.
pytestmark = [pytest.mark.alone, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "name",
    "sizes",
    "median_ns",
    "events_per_s",
    "p99_ns",
    "reference",
    "ratio",
    "ratio_ci95",
    "target",
    "meets_target",
}


def measure(out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench", "--smoke", "--json", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert json.loads((out / "report.json").read_text()) == report
    return report


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench") / "out"


@pytest.fixture(scope="module")
def report(out: Path) -> dict[str, Any]:
    # All but the loops in C, which have to be compiled first: see test_inside.py.
    levels = [level for level in LEVELS if level != "inside"]
    return measure(out, *(f"--only={level}" for level in levels))


def test_every_rung_is_there(report: dict[str, Any]) -> None:
    names = [rung["name"] for rung in report["rungs"]]
    assert set(names) == {
        "core.admit",
        "core.admit_by_flows",
        "core.complete",
        "core.pair",
        "core.progress",
        "core.pick",
        "wire.admit",
        "wire.session",
        "stream",
        "stream.wall",
        "stream.messages",
        "unary.unix",
        "unary.unix.cpu",
        "unary.tcp",
        "unary.tcp.cpu",
    }
    for name in ("wire.session", "stream"):
        rungs = [rung for rung in report["rungs"] if rung["name"] == name]
        assert [rung["sizes"]["events_per_message"] for rung in rungs] == [1, 16, 128]
    levels = [rung["level"] for rung in report["rungs"]]
    assert sorted(set(levels), key=levels.index) == ["core", "wire", "stream", "unary"]


def test_rungs_have_their_figures(report: dict[str, Any]) -> None:
    for rung in report["rungs"]:
        assert rung.keys() >= KEYS
        assert rung["median_ns"] > 0, rung
        assert rung["events_per_s"] == pytest.approx(1e9 / rung["median_ns"])
        if rung["p99_ns"] is not None:
            assert rung["p99_ns"] >= rung["median_ns"], rung
        if rung["reference"] is not None:
            low, high = rung["ratio_ci95"]
            assert 0 < low <= rung["ratio"] <= high, rung
            assert rung["reference_ns"] > 0
        assert (rung["digest"] is not None) == (rung["level"] in ("core", "wire"))


def test_every_feature_is_beside_the_default_policies(report: dict[str, Any], out: Path) -> None:
    features = {feature["name"]: feature for feature in report["features"]}
    names = "weights classes quotas levels shares peak prediction pools adapters deadlines"
    assert list(features) == ["default", *names.split(), "refusal", "dlpm", "audit", "all"]
    for feature in features.values():
        assert feature["beside_default"].keys() == {"admit", "pair", "pick"}
        for found in (*feature["beside_default"].values(), *feature["growth"].values()):
            low, high = found["ratio_ci95"]
            assert 0 < low <= found["ratio"] <= high, feature
            assert found["ns"] > 0
        for found in feature["growth"].values():
            less, more = found["sizes"]
            assert less < more
            assert found["holds"] == (found["ratio"] <= found["most"])
    # They are on: quotas, shares, adapters and early refusal alone bind no request here.
    usual = features["default"]["digest"]
    others = ("weights", "classes", "pools", "prediction", "deadlines", "dlpm", "audit", "all")
    for name in others:
        assert features[name]["digest"] != usual, name
    assert (out / "features.png").read_bytes().startswith(b"\x89PNG")


def test_a_growth_is_judged_by_what_may_grow() -> None:
    def growth(name: str, ratio: float) -> dict[str, Any]:
        return judge_growth({name: {"sizes": [256, 2_048], "ratio": ratio}})[name]

    assert growth("queued_admit", 2.9)["holds"]
    assert not growth("queued_admit", 8.0)["holds"]
    assert growth("running_pick", 8.0)["holds"]  # as many times more run
    assert not growth("running_pick", 64.0)["holds"]


def test_measured_figures_are_printed(report: dict[str, Any], out: Path) -> None:
    assert report["machine"]["cores"] >= 1
    assert report["sizes"] == "smoke"
    assert {"core: Admit beside itself", "unary, TCP: the echo beside itself"} <= {
        control["name"] for control in report["controls"]
    }
    assert (out / "ladder.png").read_bytes().startswith(b"\x89PNG")
    # Targets are for their own sizes.
    judged = {rung["name"] for rung in report["rungs"] if rung["target"]}
    assert "core.admit_by_flows" not in judged
    assert {"unary.unix", "stream"} <= judged


def test_the_core_decides_the_same_each_time(report: dict[str, Any], tmp_path: Path) -> None:
    def digests(report: dict[str, Any]) -> list[tuple[str, str]]:
        return [(rung["name"], rung["digest"]) for rung in report["rungs"] if rung["digest"]]

    again = measure(tmp_path / "out", "--only", "core", "--only", "wire")
    assert {rung["level"] for rung in again["rungs"]} == {"core", "wire"}
    assert digests(again) == digests(report)
    assert len({digest for _, digest in digests(report)}) > 5
