"""A leader that ends in any way is followed by the standby, as a client under load sees it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from .cut_network import missing
from .failover_load import Failover
from .failover_runs import Asked, main, table, too_slow
from .failovers import KINDS, one


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_the_standby_grants_without_a_violation(tmp_path: Path, kind: str) -> None:
    if kind == "cut" and missing():
        pytest.skip(missing())
    seen = await one(kind, tmp_path)
    assert seen.wrong == []
    # How long it took is the machine's affair: `make failovers` holds the targets.
    assert seen.gap_s is not None


def row(number: int, **found: object) -> dict[str, object]:
    return asdict(Failover(number=number, granted=500)) | found


def test_the_table_names_gaps_and_violations() -> None:
    rows = [row(n, gap_s=gap_s) for n, gap_s in enumerate((1.0, 3.25, 2.0))]
    rows[1]["over_grants"] = ["7000 of 6400 tokens are reserved"]
    lines = table(rows).splitlines()
    cells = "kill | 3 | 1500 | 0 | 1 | 0 | 2.00 s | 3.25 s | 3.25 s | 3 s | 2 of 3"
    assert lines[2:] == [f"| {cells} |", "kill 1: 7000 of 6400 tokens are reserved"]


def test_a_failover_without_a_gap_is_not_within() -> None:
    lost = row(1, violations=["AssertionError: not within 30 s: b grants"])
    first = table([row(0, gap_s=1.0), lost]).splitlines()[2]
    assert first == "| kill | 2 | 1000 | 0 | 0 | 1 | 1.00 s | 1.00 s | 1.00 s | 3 s | 1 of 2 |"
    alone = table([lost]).splitlines()[2]
    assert alone == "| kill | 1 | 500 | 0 | 0 | 1 | none | none | none | 3 s | 0 of 1 |"


def test_a_median_gap_beyond_its_target_is_named() -> None:
    quick, late = row(0, gap_s=1.0), row(1, gap_s=3.5)
    assert too_slow([quick, quick, late, row(2)]) == []
    (text,) = too_slow([quick, late, late])
    assert text == "kill: the median gap is 3.50 s, beyond its target of 3 s"


def test_a_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    asked = Asked(("kill", "term"), 2, tmp_path)
    assert asked.missing() == [(0, "kill"), (0, "term"), (1, "kill"), (1, "term")]
    for number, kind in ((0, "kill"), (1, "term"), (2, "kill")):
        asked.add(row(number, kind=kind))
    with asked.file.open("a") as out:
        out.write('{"kind": "term", "numb')  # the rest of a killed run
    assert asked.missing() == [(0, "term"), (1, "kill")]
    assert [each["number"] for each in asked.rows()] == [0, 1]


def test_the_command_fails_if_one_was_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--each", "1", "--kind", "kill", "--out", str(tmp_path), "--json"]
    asked = Asked(("kill",), 1, tmp_path)
    asked.add(row(0))
    assert main(words) == 0
    asked.file.unlink()
    asked.add(row(0, broken_streams=["the engine aborts a request: VOID"]))
    assert main(words) == 1
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown[0]["broken_streams"] == ["the engine aborts a request: VOID"]


@pytest.mark.parametrize("words", [["--each", "0"], ["--jobs", "0"], ["--minutes", "0"]])
def test_the_command_names_a_wrong_option(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"{words[0]} must be" in capsys.readouterr().err
