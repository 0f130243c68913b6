"""Tests statistics of traces, by hand and against numpy."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from schedsvc.cli import main
from schedsvc_lab.workload import Record
from schedsvc_lab.workload.statistics import QUANTILES, Description

from .test_forms import DATA, SHAREGPT


def described(records: list[Record]) -> Description:
    result = Description()
    for record in records:
        result.add(record)
    return result


def describe(path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["workload", "describe", "--trace", str(path), *options])


def test_against_numpy() -> None:
    source = np.random.default_rng(7)
    times_s = np.cumsum(source.gamma(0.5, 0.8, 4_999))
    tokens = source.lognormal(5, 1, 4_999).astype(int) + 1
    summary = described(
        [
            Record(arrival_s=float(at), input_tokens=int(count), output_tokens=3, tenant="t")
            for at, count in zip(times_s, tokens, strict=True)
        ]
    ).summary()
    gaps_s = np.diff(times_s)
    assert summary["gap_cv"] == pytest.approx(gaps_s.std(ddof=1) / gaps_s.mean())
    assert summary["rate_per_s"] == pytest.approx(1 / gaps_s.mean())
    for window_s in (1, 10, 60):
        whole = int((times_s[-1] - times_s[0]) // window_s)
        edges = times_s[0] + np.arange(whole + 1) * window_s
        counts = np.histogram(times_s[times_s < edges[-1]], edges)[0]
        wanted = counts.var(ddof=1) / counts.mean()
        assert summary["dispersion"][str(window_s)] == pytest.approx(wanted)
    for share in QUANTILES:
        wanted = np.quantile(tokens, share, method="inverted_cdf")
        assert summary["lengths"]["input"][f"p{share * 100:g}"] == wanted
    assert summary["lengths"]["input"]["mean"] == pytest.approx(tokens.mean())
    rate = summary["rate_over_time"]
    assert sum(rate["requests_per_s"]) * rate["window_s"] == pytest.approx(4_999)


def test_tenants_and_sums() -> None:
    summary = described(
        [
            Record(arrival_s=1.0, tenant="b", input_tokens=5, output_tokens=1),
            Record(arrival_s=3.0, tenant="a", input_tokens=7, request_class="x"),
            Record(arrival_s=3.5, tenant="b", output_tokens=4, conversation="c"),
            Record(arrival_s=4.0),
        ]
    ).summary()
    keys = ("requests", "tenants", "duration_s", "input_tokens", "output_tokens")
    assert [summary[key] for key in keys] == [4, 3, 3.0, 12, 5]
    assert [share["tenant"] for share in summary["shares"]] == ["b", "a", "default"]
    assert summary["shares"][0] == {
        "tenant": "b",
        "requests": 2,
        "share": 0.5,
        "input_tokens": 5,
        "output_tokens": 5,
    }
    assert (summary["conversations"], summary["classes"]) == (1, {"x": 1})
    assert summary["requests_without_input_tokens"] == 2
    assert summary["requests_without_output_tokens"] == 2


def test_sharing_by_hand() -> None:
    # Blocks of 4. The second shares one whole block and not the block after a miss; the third
    # shares all, its last block being partial.
    summary = described(
        [
            Record(input_tokens=12, blocks=(1, 2, 3), block_tokens=4),
            Record(input_tokens=12, blocks=(1, 9, 3), block_tokens=4),
            Record(input_tokens=6, blocks=(1, 2), block_tokens=4),
        ]
    ).summary()
    assert summary["sharing"] == [
        {
            "block_tokens": 4,
            "blocks": 8,
            "different_blocks": 4,
            "shared_blocks": 3,
            "shared_blocks_share": 3 / 8,
            "shared_tokens": 10,
            "shared_tokens_share": 1 / 3,
        }
    ]


def test_one_request_and_one_moment() -> None:
    alone = described([Record(arrival_s=2.0)]).summary()
    assert (alone["gap_cv"], alone["rate_per_s"], alone["duration_s"]) == (None, None, 0.0)
    assert alone["dispersion"] == {"1": None, "10": None, "60": None}
    at_once = described([Record(arrival_s=2.0)] * 5).summary()
    assert (at_once["gap_cv"], at_once["rate_per_s"]) == (None, None)
    assert at_once["rate_over_time"] == {"window_s": 1, "requests_per_s": [5.0]}


def test_the_mooncake_trace_shares_what_is_known_of_it(tmp_path: Path) -> None:
    path = DATA / "traces/mooncake_conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"the published traces are not on this machine: {path}")
    result = describe(path, "--json", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    (sharing,) = summary["sharing"]
    assert round(100 * sharing["shared_blocks_share"], 1) == 36.6
    assert round(100 * sharing["shared_tokens_share"], 1) == 37.4
    assert (summary["requests"], sharing["different_blocks"]) == (12_031, 182_790)
    assert json.loads((tmp_path / "out/description.json").read_text()) == summary
    assert (tmp_path / "out/description.png").read_bytes().startswith(b"\x89PNG")


def test_for_a_person(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"{at / 2},client-{at % 12},10,{at + 1}" for at in range(60)]
    path.write_text("\n".join(["arrival_s,client,prompt_tokens,output_tokens", *rows]))
    out = tmp_path / "out"
    result = describe(path, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "60 requests, tenants: 12, form lmsys; 600 input and 1,830 output" in result.output
    assert "29.5 s, 2.000 requests/s" in result.output
    assert "client-11" in result.output
    assert "and 2 more" in result.output
    assert (out / "description.png").exists()


def test_text_without_times_or_tokens(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(SHAREGPT))
    result = describe(path, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "2 conversations" in result.output
    assert "3 requests have no input token count" in result.output
    assert "1 records left out: value: not text" in result.output
    assert (tmp_path / "out/description.png").exists()


def test_a_wrong_file_fails(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n0,a,1,1\nx,b,2,2\n")
    result = describe(path, "--json")
    assert result.exit_code == 1
    assert "trace.csv:3:arrival_s: not a number of seconds" in result.output
    assert describe(tmp_path / "absent").exit_code == 2
