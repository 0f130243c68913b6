"""Tests ServeGen's client pools: their files, and the statistics of draws from them."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.workload import TraceError, read_trace
from schedsvc_lab.workload.servegen import draw, read_pool

LENGTHS = {
    "0": {"input_tokens": "{10: 0.5, 30: 0.5}", "output_tokens": "{7: 1.0}"},
    "600": {"input_tokens": "{500: 1.0}", "output_tokens": "{0: 0.25, 9: 0.75}"},
    "1200": {"input_tokens": "{}", "output_tokens": "{}"},
}
ROWS = (
    "0,20.0,1.0,Gamma,1.0,0.05\n600,5.0,2.0,Gamma,0.25,0.8\n1200,0,0,,0,0\n1800,8,1,Weibull,2,1\n"
)


def pool(folder: Path, rows: str = ROWS, lengths: object = LENGTHS, number: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"chunk-{number}-trace.csv").write_text(rows)
    text = lengths if isinstance(lengths, str) else json.dumps(lengths)
    (folder / f"chunk-{number}-dataset.json").write_text(text)
    return folder


def drawn(folder: Path, **options: float):
    wanted = {"from_s": 0.0, "duration_s": 2_400.0, "rate_scale": 1.0, "seed": 1} | options
    return list(draw(read_pool(folder), **wanted))


def test_rates_lengths_and_times(tmp_path: Path) -> None:
    pool(tmp_path, number=3)
    pool(tmp_path, rows="0,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n", number=11)
    records = drawn(tmp_path)
    times = [record.arrival_s for record in records]
    assert times == sorted(times)
    assert {record.tenant for record in records} == {"client-3", "client-11"}
    own = [record for record in records if record.tenant == "client-3"]
    count = [sum(low <= r.arrival_s < low + 600 for r in own) for low in (0, 600, 1200, 1800)]
    # Renewal counts: three standard deviations, cv * sqrt(mean).
    assert count[0] == pytest.approx(12_000, abs=3 * 110)
    assert count[1] == pytest.approx(3_000, abs=3 * 110)
    assert count[2] == 0
    assert count[3] == pytest.approx(4_800, abs=3 * 40)
    early = [r.input_tokens for r in own if r.arrival_s < 600]
    assert set(early) == {10, 30}
    assert np.mean(early) == pytest.approx(20, abs=0.4)
    later = [r for r in own if 600 <= r.arrival_s < 1200]
    assert {r.input_tokens for r in later} == {500}
    # No output has 0 tokens, and an empty distribution keeps the one before it.
    assert {r.output_tokens for r in later} == {1, 9}
    assert {r.input_tokens for r in own if r.arrival_s >= 1800} == {500}


@pytest.mark.parametrize(
    ("row", "cv"), [("Gamma,0.25,1", 2.0), ("Gamma,4,1", 0.5), ("Weibull,0.5,1", 5**0.5)]
)
def test_gaps_have_the_shape_of_the_pattern(tmp_path: Path, row: str, cv: float) -> None:
    windows = "".join(f"{start},10,{cv},{row}\n" for start in range(0, 12_000, 600))
    pool(tmp_path, rows=windows, lengths={"0": LENGTHS["0"]})
    times = np.array([r.arrival_s for r in drawn(tmp_path, duration_s=12_000.0)])
    gaps = np.diff(times)
    assert len(times) == pytest.approx(120_000, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_a_part_of_it_scaled(tmp_path: Path) -> None:
    pool(tmp_path)
    part = drawn(tmp_path, from_s=300.0, duration_s=600.0, rate_scale=0.5)
    assert all(0 <= record.arrival_s < 600 for record in part)
    assert len(part) == pytest.approx(300 * 10 + 300 * 2.5, rel=0.1)
    assert drawn(tmp_path, seed=1) == drawn(tmp_path, seed=1) != drawn(tmp_path, seed=2)


@pytest.mark.parametrize(
    ("rows", "lengths", "message"),
    [
        ("0,1,1,Gamma,1\n", LENGTHS, r"chunk-3-trace\.csv:1:row: has 5 of 6 columns"),
        ("0,x,1,Gamma,1,1\n", LENGTHS, r":1:rate: must be a number, 0 or more, is 'x'"),
        ("0,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", LENGTHS, ":2:timestamp: is not after"),
        ("0,1,1,Pareto,1,1\n", LENGTHS, ":1:pattern: 'Pareto' is not Gamma or Weibull"),
        ("0,1,1,Gamma,0,1\n", LENGTHS, ":1:shape: must be above 0"),
        (ROWS, "{", r"chunk-3-dataset\.json:1:2"),
        (ROWS, "[]", "must be an object of times"),
        (ROWS, {"x": {}}, ":1:x: must map a time"),
        (ROWS, {"0": {"input_tokens": "{1: 1}"}}, ":1:0.output_tokens: is not a text"),
        (ROWS, {"0": {"input_tokens": "print(1)", "output_tokens": "{}"}}, "is not a text"),
        (ROWS, {"0": {"input_tokens": "{1: -1}", "output_tokens": "{1: 1}"}}, "below 0"),
        ("0,0,0,,0,0\n", LENGTHS, "no client in this folder asks anything"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, rows: str, lengths: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_pool(pool(tmp_path / "pool", rows, lengths))


def test_the_command(tmp_path: Path) -> None:
    folder, out = pool(tmp_path / "pool"), tmp_path / "out.jsonl"

    def run(*options: str) -> tuple[int, str]:
        command = ["workload", "servegen", str(folder), "--out", str(out), *options]
        result = CliRunner().invoke(main, command)
        return result.exit_code, result.output

    status, output = run("--duration", "60", "--json")
    assert status == 0, output
    assert json.loads(output)["requests"] == len(list(read_trace(out)))
    assert run("--duration", "10", "--start", "1300") == (
        1,
        f"0 requests of at most 1 clients written to {out}\n"
        "Error: no request falls into this time; choose another --start\n",
    )
    assert "--duration" in run()[1]
    (folder / "chunk-3-trace.csv").unlink()
    assert "no chunk-N-trace.csv" in run("--duration", "1")[1]
