"""Tests the demo of a failover: its report, its bars, and the command on real processes."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.demo.failover import Failed, judge, report_of
from schedsvc_lab.demo.failover_plot import draw
from schedsvc_lab.demo.members import Member, Seen, store_server
from schedsvc_lab.demo.processes import DemoError
from schedsvc_lab.load.generator import RunResult
from schedsvc_lab.load.samples import Fate, Recorder, Sample


def stream(sent_s: float, first_s: float, *, gap_s: float = 0.1, events: int = 4) -> Sample:
    sample = Sample("chat", sent_s, sent_s=sent_s, fate=Fate.COMPLETED, events=events)
    sample.first_s, sample.output_tokens = first_s, events
    sample.itls_s.extend([gap_s] * (events - 1))
    sample.last_s = sample.end_s = first_s + gap_s * (events - 1)
    return sample


def member(name: str, *seen: Seen) -> Member:
    return Member(name, Path(f"{name}.yaml"), "127.0.0.1:1", "token", list(seen))


def failed() -> Failed:
    """Return a leader that is killed after 2 s, and a standby that grants at 4 s."""
    recorder = Recorder()
    recorder.samples = [stream(0.5, 0.6), stream(1.9, 1.95, gap_s=0.4), stream(2.5, 4.1),
                        stream(5.0, 5.1)]  # fmt: skip
    result = RunResult(recorder, [], 0.0, 5.0, 6.0)
    first = member("first", Seen(0.1, 0, 0, 0, 0, True, 3), Seen(1.9, 2, 1, 0, 64, True, 3))
    second = member(
        "second", Seen(0.1, 0, 0, 0, 0, False, 3), Seen(4.0, 1, 2, 0, 64, True, 4),
        Seen(5.9, 2, 0, 0, 0, True, 4),
    )  # fmt: skip
    return Failed(result, [first, second], 2.0)


def test_report_splits_requests_at_kill_and_takeover() -> None:
    report = report_of(failed())
    assert [report[part]["sent"] for part in ("before", "during", "after")] == [2, 1, 1]
    assert report["takeover_s"] == pytest.approx(2.0)
    assert report["terms"] == [3, 4]
    assert report["running_at_kill"] == 1
    assert report["longest_gap_in_stream_ms"] == pytest.approx(400)
    assert [bar.name for bar in judge(report) if not bar.holds] == []


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        ("during.completed", 0, "every request was answered in full"),
        ("takeover_s", None, "the standby grants within 3 s of the kill"),
        ("takeover_s", 3.1, "the standby grants within 3 s of the kill"),
        ("terms", [3, 3], "it leads under a higher term"),
        ("left.queued", 1, "at the end it holds no lease"),
    ],
)
def test_each_bar_fails_alone(path: str, value: Any, name: str) -> None:
    report: dict[str, Any] = report_of(failed())
    *parents, last = path.split(".")
    part = report
    for key in parents:
        part = part[key]
    assert last in part
    part[last] = value
    assert [bar.name for bar in judge(report) if not bar.holds] == [name]


def test_picture_is_drawn_without_a_takeover(tmp_path: Path) -> None:
    run = failed()
    draw(run.result, run.members, run.kill_s, None, tmp_path / "failover.png")
    assert (tmp_path / "failover.png").read_bytes().startswith(b"\x89PNG")


def test_missing_store_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match="apt-get install valkey-server"):
        store_server()


@pytest.mark.slow
def test_command_kills_a_real_leader(tmp_path: Path) -> None:
    arguments = ["demo", "--failover", "--quick", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["takeover_s"] <= 3.0
    assert report["during"]["sent"] > 0
    assert {"failover.png", "requests.csv", "report.json"} <= {p.name for p in tmp_path.iterdir()}
