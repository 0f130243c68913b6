"""Tests the demo of four schedulers whose store is killed: report, bars, command."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.demo.cluster import Answer, Run, Shard, Times, judge, report_of
from schedsvc_lab.demo.cluster_plot import draw

TIMES = Times()


def shard(name: str, back_s: float) -> Shard:
    """Make one that has an exchange each second, except without the store until `back_s`."""
    seen = [(float(at_s), 0.25) for at_s in range(int(TIMES.killed_s))]
    seen += [(back_s + 0.1, back_s - TIMES.killed_s), (back_s + 0.4, 0.3)]
    return Shard(name, Path(f"{name}.yaml"), "unix:/none", seen)


def run() -> Run:
    """Four answers of gold for each of free, and three while the store is away."""
    answers = []
    for at in range(int(TIMES.end_s * 10)):
        at_s = at / 10
        is_away = TIMES.killed_s <= at_s < TIMES.back_s
        tenant = "free" if at % (4 if is_away else 5) == 0 else "gold"
        answers.append(Answer(tenant, "north", at_s))
    shards = [shard(name, TIMES.back_s) for name in ("north", "east", "south", "west")]
    return Run(TIMES, shards, answers, TIMES.killed_s, TIMES.back_s)


def failing(report: dict[str, Any], *, quick: bool = False) -> list[str]:
    return [bar.name for bar in judge(report, quick=quick) if not bar.holds]


def test_report_has_the_share_of_each_part() -> None:
    report = report_of(run())
    shares = {name: part["share"] for name, part in report["windows"].items()}
    assert shares == pytest.approx({"before": 0.8, "away": 0.75, "back": 0.8, "after": 0.8})
    assert report["synced_after_s"]["west"] == pytest.approx(0.1)
    assert failing(report) == []


def test_each_share_has_its_bar() -> None:
    for name in ("before", "after"):
        report = report_of(run())
        report["windows"][name]["share"] = 0.77
        assert len(failing(report)) == 1
        assert failing(report, quick=True) == []
        report["windows"][name]["share"] = None
        assert len(failing(report)) == 1


def test_a_failed_request_fails_a_bar() -> None:
    seen = run()
    seen.answers.append(Answer("gold", "east", 7.0, "503: the scheduler is away"))
    report = report_of(seen)
    assert failing(report, quick=True) == ["no request failed"]
    assert report["windows"]["before"]["share"] == pytest.approx(0.8)


def test_a_member_that_stays_alone_fails_a_bar() -> None:
    late, never = shard("west", TIMES.back_s + 3), shard("west", TIMES.back_s)
    del never.seen[-2:]
    for west in (late, never):
        seen = run()
        seen.shards[3] = west
        assert failing(report_of(seen), quick=True) == [
            "all exchange again within 2 s of the store's return"
        ]


def test_picture_is_drawn(tmp_path: Path) -> None:
    seen = run()
    report = report_of(seen)
    draw(seen.answers, {s.name: s.seen for s in seen.shards}, report, tmp_path / "cluster.png")
    assert (tmp_path / "cluster.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", [["--failover"], ["--seed", "3"]])
def test_options_that_exclude_each_other_are_named(option: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--cluster", *option, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert option[0] in result.output


@pytest.mark.slow
def test_command_kills_a_real_store(tmp_path: Path) -> None:
    arguments = ["demo", "--cluster", "--quick", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["answered"] > 50
    assert report["windows"]["away"]["gold"] > 0
    assert {"cluster.png", "report.json"} <= {p.name for p in tmp_path.iterdir()}
