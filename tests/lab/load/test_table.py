import io
import re

import pytest
from rich.console import Console

from schedsvc_lab.load.generator import LoadRun, Pace
from schedsvc_lab.load.samples import Fate, Sample
from schedsvc_lab.load.table import View, duration, head, line, table
from schedsvc_lab.load.target import Target
from schedsvc_lab.workload import TraceRequest


def watched() -> LoadRun:
    run = LoadRun(Target("http://127.0.0.1:9"), [], Pace())
    for tenant, fate in (("hog", Fate.REFUSED), ("quiet", Fate.COMPLETED)):
        now_s = run.now_s()
        sample = Sample(tenant, now_s - 0.25)
        run.recorder.sent(sample, now_s)
        if fate is Fate.COMPLETED:
            run.recorder.output(sample, 4, now_s)
        run.recorder.ended(sample, fate, now_s)
    return run


def test_the_table_shows_every_tenant() -> None:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as captured:
        console.print(table(watched(), View("phase one", lambda: ["engine: 7 running"])))
    text = captured.get()
    assert "phase one" in text
    assert "engine: 7 running" in text
    quiet = next(row for row in text.splitlines() if "quiet" in row)
    cells = re.split(r"  +", quiet.strip())
    assert cells == ["quiet", "1", "0", "0", "1", "0", "0", "250 ms", "250 ms", "16"]


def test_the_head_says_how_far_it_is() -> None:
    trace = [TraceRequest(0.0, "a", 1, 1)] * 4
    run = LoadRun(Target("http://127.0.0.1:9"), trace, Pace())
    now_s = run.now_s()
    sample = Sample("a", now_s)
    run.recorder.sent(sample, now_s)
    run.recorder.ended(sample, Fate.COMPLETED, now_s)
    text = head(run, View("trace"))
    assert "1 of 4" in text
    assert text.count("━") == 6
    assert text.count("╌") == 18
    assert "completed" in head(watched(), View("trace"))


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal_and_shortens_names_alone(width: int) -> None:
    trace = [TraceRequest(0.0, "a", 1, 1)] * 400
    run = LoadRun(Target("http://127.0.0.1:9"), trace, Pace())
    names = ("tenant-00000001", "t" * 150)
    for number in range(300):
        now_s = run.now_s()
        sample = Sample(names[number % 2], now_s - 0.25 * (number % 2))
        run.recorder.sent(sample, now_s)
        run.recorder.output(sample, 4, now_s)
        run.recorder.ended(sample, Fate.COMPLETED, now_s)
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(table(run, View("4/4 the same again, same processes"), width))
    title, progress, *rows = captured.get().splitlines()
    assert title.startswith("4/4 the same again, same processes")
    assert progress.endswith("/s")
    assert max(len(row.rstrip()) for row in (title, progress, *rows)) <= width
    for word in ("streaming", "refused", "p99", "tenant-00000001", "250 ms", "150"):
        assert any(word in row for row in rows), word
    assert sum("…" in row for row in rows) == 1


def test_busiest_of_many_tenants_are_shown() -> None:
    run = LoadRun(Target("http://127.0.0.1:9"), [], Pace())
    for number in range(30):
        for _ in range(number + 1):
            run.recorder.sent(Sample(f"t{number:02}", 0.0), 0.0)
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as captured:
        console.print(table(run, View("x")))
    text = captured.get()
    assert "the 20 busiest of 30 tenants" in text
    assert "t29" in text
    assert "t09" not in text
    assert "and 25 more tenants" in line(run, View("x"))


def test_the_line_says_the_same() -> None:
    text = line(watched(), View("phase one"))
    assert text.startswith("phase one 0 s | hog: sent 1 done 0 refused 1")
    assert "quiet: sent 1 done 1 refused 0 waiting 0 ttft 250 ms/250 ms 16 tok/s" in text


def test_durations() -> None:
    assert [duration(value) for value in (None, 3.4, 1234.0)] == ["-", "3 ms", "1.2 s"]
