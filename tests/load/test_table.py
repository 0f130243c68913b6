import io

from rich.console import Console

from schedsvc.load.generator import LoadRun, Pace
from schedsvc.load.samples import Fate, Sample
from schedsvc.load.table import View, duration, line, table
from schedsvc.load.target import Target


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
    cells = [cell.strip() for cell in quiet.split("│")]
    assert cells[1:-1] == ["quiet", "1", "0", "0", "1", "0", "0", "250 ms", "250 ms", "16"]


def test_the_line_says_the_same() -> None:
    text = line(watched(), View("phase one"))
    assert text.startswith("phase one 0 s | hog: sent 1 done 0 refused 1")
    assert "quiet: sent 1 done 1 refused 0 waiting 0 ttft 250 ms/250 ms 16 tok/s" in text


def test_durations() -> None:
    assert [duration(value) for value in (None, 3.4, 1234.0)] == ["-", "3 ms", "1.2 s"]
