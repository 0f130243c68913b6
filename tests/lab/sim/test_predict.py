"""Tests `schedsvc predict`: the predictor's promises on real and made traces."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from schedsvc.cli import main
from schedsvc_lab.sim.predict.measure import (
    coverage_by_part,
    pinball,
    report,
    static_quantile,
    token_seconds,
)
from schedsvc_lab.sim.predict.play import Columns, Played, columns, play
from schedsvc_lab.workload import TraceRequest, read_trace

TRACES = Path(__file__).parents[4] / "shared" / "data" / "traces"
AZURE = "AzureLLMInferenceTrace_conv.csv"
MOONCAKE = "mooncake_conversation_trace.jsonl"
LMSYS = "lmsys_arena_vtc.csv"


def predict(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["predict", *map(str, arguments)])


def trace(name: str) -> Columns:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{path.name} is not here; the data lies in ../shared/data")
    return columns(read_trace(path))


def figures(requests: Columns, quantile: float, **more: Any) -> tuple[dict[str, Any], Played]:
    settings: dict[str, Any] = {
        "quantile_ppm": round(quantile * 1e6),
        "output_tokens_max": max(1_024, int(requests.output_tokens.max())),
    } | more
    played = play(requests, **settings)
    shared = play(requests, one_flow=True, **settings)
    return report(requests, played, shared, quantile, 30.0), played


def made(
    output: np.ndarray[Any, Any], seed: int, tenant: np.ndarray[Any, Any] | None = None
) -> Columns:
    """Make a Poisson stream of such outputs, 5.5 a second."""
    rnd = np.random.default_rng(seed)
    arrival = np.cumsum(rnd.exponential(1 / 5.5, len(output)))
    whose = np.zeros(len(output), dtype=np.int64) if tenant is None else tenant
    return Columns(
        (arrival * 1e9).astype(np.int64),
        np.asarray(output, dtype=np.int64),
        whose,
        np.full(len(output), -1),
        tuple(f"tenant {i}" for i in range(whose.max() + 1)),
        (),
    )


# The bars: every promise on real traffic, outcomes known only when a request has ended.


@pytest.mark.parametrize("name", [AZURE, MOONCAKE])
@pytest.mark.parametrize(("quantile", "low", "high"), [(0.9, 0.88, 0.92), (0.95, 0.93, 0.97)])
def test_coverage_holds_in_every_tenth(name: str, quantile: float, low: float, high: float) -> None:
    requests = trace(name)
    told, played = figures(requests, quantile)
    tenths = told["coverage_by_tenth"]
    assert low <= min(tenths), tenths
    assert max(tenths) <= high, tenths
    # Also if fully reserved outputs count as covered.
    held = requests.output_tokens <= played.promised
    for part in np.array_split(held, 10):
        assert low <= part.mean() <= high
    assert told["pinball"]["predictor_to_best_static"] <= 1.05
    assert told["predicted"] >= 0.98 * len(requests)
    if quantile == 0.9:
        assert told["output_token_seconds_ratio_to_1024"] <= 0.65


@pytest.mark.parametrize(("quantile", "low"), [(0.9, 0.88), (0.95, 0.93)])
def test_a_short_trace_of_many_tenants(quantile: float, low: float) -> None:
    told, _ = figures(trace(LMSYS), quantile)
    assert low <= told["coverage"] <= 0.98
    assert told["coverage_of_all"] >= low
    assert told["pinball"]["predictor_to_best_static"] <= 1.05
    if quantile == 0.9:
        assert told["output_token_seconds_ratio_to_1024"] <= 0.65


@pytest.mark.parametrize("name", [AZURE, MOONCAKE])
@pytest.mark.parametrize("seed", range(3))
def test_coverage_is_back_500_requests_after_the_lengths_double(name: str, seed: int) -> None:
    lengths = trace(name).output_tokens
    drawn = np.random.default_rng(seed).choice(lengths, 5_000)
    drawn[2_500:] *= 2
    requests = made(drawn, seed)
    for quantile, low, high in ((0.9, 0.88, 0.92), (0.95, 0.93, 0.97)):
        played = play(requests, quantile_ppm=round(quantile * 1e6), output_tokens_max=4_096)
        held = (drawn <= played.promised)[3_000:4_000]
        assert low <= held.mean() <= high, (quantile, held.mean())


@pytest.mark.parametrize("quantile", [0.9, 0.95])
def test_each_of_20_tenants_is_covered(quantile: float) -> None:
    rnd = np.random.default_rng(11)
    whose = rnd.integers(0, 20, 12_000)
    middle = 60 * 10 ** (whose / 19)
    output = np.clip(rnd.lognormal(np.log(middle), 0.6), 1, 4_000).astype(np.int64)
    told, _ = figures(made(output, 12, whose), quantile)
    for name, row in told["tenants"].items():
        assert abs(row["coverage"] - quantile) <= 0.05, (name, row)
        assert row["predicted"] >= 0.9 * row["requests"]
    assert told["pinball"]["predictor_to_one_global_quantile"] <= 0.8
    assert told["pinball"]["predictor_to_best_static"] <= 0.8


def test_the_core_counts_the_same_coverage() -> None:
    requests = trace(LMSYS)
    played = play(requests, quantile_ppm=900_000, output_tokens_max=1_024)
    held = (requests.output_tokens <= played.promised)[played.predicted]
    assert played.totals["predictor_judged"] == len(held)
    assert played.totals["predictor_coverage_ppm"] == int(held.sum()) * 1_000_000 // len(held)
    assert played.totals["completed"] == len(requests)


# The measures, by hand.


def test_pinball_loss() -> None:
    output = np.array([10, 20])
    assert pinball(10, output, 0.9) == pytest.approx((0 + 9) / 2)
    assert pinball(20, output, 0.9) == pytest.approx((1 + 0) / 2)
    assert pinball(output, output, 0.9) == 0
    assert pinball(5, output[:0], 0.9) == 0


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95])
def test_no_constant_beats_the_static_quantile(quantile: float) -> None:
    output = np.random.default_rng(4).lognormal(5, 1, 999).astype(np.int64)
    best = pinball(static_quantile(output, quantile), output, quantile)
    assert all(best <= pinball(q, output, quantile) + 1e-9 for q in range(1, 3_000, 7))


def test_token_seconds_grow_with_what_outgrows_its_promise() -> None:
    output = np.array([100, 100, 100])
    seconds = token_seconds(np.array([100, 300, 40]), output, 10.0)
    # 40 tokens for 4 s, then a ramp from 40 to 100 within 6 s.
    assert seconds == pytest.approx([100 * 10, 300 * 10, 40 * 4 + 70 * 6])


def test_coverage_of_parts_without_predictions_is_unknown() -> None:
    requests = made(np.array([5, 50, 5, 5]), 0)
    promised = np.array([99, 99, 10, 1])
    played = Played(promised, promised < 99, 99, {})
    assert coverage_by_part(played, requests, 4) == [None, None, 1.0, 0.0]
    assert coverage_by_part(played, requests, 2) == [None, 0.5]


def test_adapters_of_a_trace_are_predicted_apart(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "arrival_s": i * 2.0,
            "tenant": "a",
            "input_tokens": 5,
            "output_tokens": 20 if i % 2 else 400,
            "adapter": f"adapter {i % 2}",
        }
        for i in range(120)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    requests = columns(read_trace(path, keep_records=True))
    promised = play(requests, quantile_ppm=900_000, output_tokens_max=1_024).promised[-2:]
    assert promised.tolist() == [pytest.approx(400, rel=0.01), 20]
    shared = play(requests, quantile_ppm=900_000, output_tokens_max=1_024, one_flow=True)
    assert len(set(shared.promised[-2:].tolist())) == 1


def test_all_that_is_known_early_is_short() -> None:
    """The stream begins from nothing: early ends are short, and do not stand for all."""
    output = np.random.default_rng(5).lognormal(5.2, 0.9, 600).astype(np.int64)
    requests = made(np.clip(output, 1, 4_000), 6)
    played = play(requests, quantile_ppm=900_000, output_tokens_max=4_096)
    early = (requests.output_tokens <= played.promised)[:200]
    assert early.mean() >= 0.88


# The command.


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{n / 5:.1f},{'ab'[n % 3 == 0]},20,{30 + n * 37 % 400}" for n in range(900)]
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


def test_the_report_as_json_and_files(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = predict("--trace", small, "--quantile", 0.9, "--json", "--out", out)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["requests"] == 900
    assert len(told["coverage_by_tenth"]) == 10
    assert 0.85 <= told["coverage"] <= 0.95
    assert 0 < told["output_token_seconds_ratio_to_1024"] < 1
    losses = told["pinball"]
    assert losses["oracle"] == 0 < losses["best_static_by_tenant"] <= losses["best_static"]
    assert losses["predictor"] < losses["max_tokens"]
    assert set(told["tenants"]) == {"a", "b"}
    assert json.loads((out / "report.json").read_text()) == told
    assert (out / "predict.png").stat().st_size > 10_000
    assert predict("--trace", small, "--quantile", 0.9, "--json").stdout == result.stdout


def test_the_report_as_text(small: Path) -> None:
    result = predict("--trace", small, "--quantile", 0.95)
    assert result.exit_code == 0, result.output
    for part in ("900 requests", "P95", "by tenth", "pinball", "oracle", "tenant"):
        assert part in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--quantile", "1.5"), "--quantile"),
        (("--quantile", "high"), "--quantile"),
        (("--max-output-tokens", "100"), "--max-output-tokens"),
        (("--tokens-per-s", "0"), "--tokens-per-s"),
        (("--samples-min", "0"), "--samples-min"),
    ],
)
def test_a_wrong_option_is_named(small: Path, arguments: tuple[str, ...], named: str) -> None:
    result = predict("--trace", small, *arguments)
    assert result.exit_code != 0
    assert named in result.output


def test_a_wrong_trace_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n0,a,5,five\n")
    result = predict("--trace", path)
    assert result.exit_code != 0
    assert f"{path}:2:output_tokens" in result.output
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n")
    assert predict("--trace", path).exit_code != 0
    assert predict("--trace", tmp_path / "none").exit_code != 0


def test_requests_without_adapters() -> None:
    requests = columns([TraceRequest(0.5, "a", 3, 4), TraceRequest(1.5, "b", 3, 5)])
    assert requests.tenants == ("a", "b")
    assert requests.adapter.tolist() == [-1, -1]
    played = play(requests, quantile_ppm=900_000, output_tokens_max=64)
    assert played.promised.tolist() == [64, 64]
    assert not played.predicted.any()
    told = report(requests, played, played, 0.9, 30.0)
    assert told["coverage"] is None
    assert math.isclose(told["coverage_of_all"], 1.0)
