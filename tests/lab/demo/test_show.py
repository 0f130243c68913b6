import copy
import io
from pathlib import Path
from typing import Any

from rich.console import Console

from schedsvc_lab.demo.harness import conclude
from schedsvc_lab.demo.phases import Measured, Phase
from schedsvc_lab.demo.plot import draw
from schedsvc_lab.demo.run import details_of, report_of
from schedsvc_lab.demo.show import show
from schedsvc_lab.demo.verdict import judge

from .synthetic import good, result


def measured() -> Measured:
    waits = {"alone": 0.0, "without": 8.0, "with": 0.5, "with_again": 0.5}
    phases = {name: Phase(name, result(wait), int(wait)) for name, wait in waits.items()}
    return Measured(phases, {"promised_tokens": 0, "live_leases": 0, "queued": 0})


def print_all(report: dict[str, Any], details: dict[str, Any], console: Console) -> None:
    show(report, details, console)
    conclude(report, judge(report), [], console, as_json=False)


def test_the_report_has_exactly_the_form() -> None:
    report, details = report_of(measured()), details_of(measured())
    assert list(report) == ["alone", "without", "with", "with_again", "after"]
    assert set(report["after"]) == {"promised_tokens", "live_leases", "queued"}
    for name in ("alone", "without", "with", "with_again"):
        run = report[name]
        assert set(run) == {
            "tenants",
            "output_tokens_per_s",
            "preemptions",
            "wall_s",
            "client_lag_ms_p99",
        }
        for tenant in run["tenants"].values():
            assert set(tenant) == {
                "sent",
                "completed",
                "refused",
                "errors",
                "ttft_ms",
                "e2e_ms",
                "output_tokens",
            }
            assert set(tenant["ttft_ms"]) == set(tenant["e2e_ms"]) == {"p50", "p99"}
    assert report["without"]["preemptions"] == 8
    assert details["with"]["tenants"]["hog"]["refusals"]["by_reason"] == {"429 slow_down": 10}


def test_the_comparison_prints_figures_and_verdict() -> None:
    report = good()
    report["with"]["preemptions"] = 30
    details = details_of(measured())
    console = Console(file=io.StringIO(), width=140)
    with console.capture() as captured:
        print_all(report, details, console)
    text = captured.get()
    quiet = next(row for row in text.splitlines() if "quiet" in row)
    assert [cell.strip() for cell in quiet.split("│")[2:5]] == ["50 ms", "4.0 s", "100 ms"]
    assert "PASS  quiet's TTFT p50" in text
    assert "FAIL  preemptions at most 5% of without  30 of 60" in text


def test_the_picture(tmp_path: Path) -> None:
    report = report_of(measured())
    runs = {name: phase.result for name, phase in measured().phases.items()}
    path = tmp_path / "demo.png"
    draw(report, runs, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000


def test_the_picture_of_nothing(tmp_path: Path) -> None:
    """A run without a token still has a picture."""
    report = report_of(measured())
    empty = copy.deepcopy(report)
    for run in ("alone", "without", "with"):
        for tenant in empty[run]["tenants"].values():
            tenant["ttft_ms"] = {"p50": None, "p99": None}
        empty[run]["output_tokens_per_s"] = 0.0
    runs = {name: phase.result for name, phase in measured().phases.items()}
    draw(empty, runs, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").exists()


def test_report_fits_eighty_columns() -> None:
    details = details_of(measured())
    late = good()
    late["without"] |= {"client_lag_ms_p99": 80.0, "preemptions": 0}
    for report in (good(), late):
        console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
        with console.capture() as captured:
            print_all(report, details, console)
        text = captured.get()
        assert max(map(len, text.splitlines())) <= 80
        assert ("run it again" in text) == (report is late)
