"""Drawn workloads have the asked statistics; labels and other times change nothing else."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from schedsvc.cli import main
from schedsvc_lab.workload import Record, TraceReader, zipf
from schedsvc_lab.workload.arrivals import Arrivals, draw_arrivals, gap_error
from schedsvc_lab.workload.lengths import Lengths
from schedsvc_lab.workload.make import (
    LABEL_RULES,
    Synthesis,
    labeller,
    long_threshold,
    scale,
    synthesize,
)

from .test_forms import SHAREGPT, lines

SAMPLES = 100_000


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_rate_within_1_and_cv_within_3_percent(cv: float, seed: int) -> None:
    arrivals = Arrivals(rate_per_s=7.0, cv=cv)
    times_s = draw_arrivals(arrivals, rng(seed), requests=SAMPLES)
    gaps_s = np.diff(times_s)
    assert len(times_s) == SAMPLES
    assert 1 / gaps_s.mean() == pytest.approx(7.0, rel=0.001)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.03, abs=1e-9)
    assert gaps_s.min() >= 0


@pytest.mark.parametrize("cv", [0.0, 1.0, 2.0])
def test_a_duration_without_a_number(cv: float) -> None:
    times_s = draw_arrivals(Arrivals(rate_per_s=50, cv=cv), rng(), duration_s=2_000.0)
    assert len(times_s) == pytest.approx(SAMPLES, rel=0.02)
    assert 1_999 < times_s[-1] < 2_000


def test_on_off_is_silent_when_off_and_keeps_the_mean() -> None:
    arrivals = Arrivals(rate_per_s=10, shape="on-off", on_s=5, off_s=15)
    times_s = draw_arrivals(arrivals, rng(), duration_s=10_000.0)
    assert (times_s % 20 < 5).all()
    assert len(times_s) == pytest.approx(100_000, rel=0.01)
    within, _ = np.histogram(times_s % 20, 5, (0, 5))
    assert within == pytest.approx(np.full(5, len(times_s) / 5), rel=0.03)


@pytest.mark.parametrize("end", [30.0, 10.0, 1.0])
def test_a_ramp_is_linear(end: float) -> None:
    arrivals = Arrivals(rate_per_s=10, shape="ramp", end_rate_per_s=end, ramp_s=4_000)
    times_s = draw_arrivals(arrivals, rng(1), duration_s=5_000.0)
    counts, _ = np.histogram(times_s, 5, (0, 5_000))
    rates = [10 + (end - 10) * share for share in (0.125, 0.375, 0.625, 0.875, 1.0)]
    assert counts / 1_000 == pytest.approx(rates, rel=0.08)
    assert gap_error(arrivals, times_s) == ""


@pytest.mark.parametrize(
    "arrivals",
    [
        Arrivals(rate_per_s=3),
        Arrivals(rate_per_s=3, shape="on-off", on_s=2, off_s=5),
        Arrivals(rate_per_s=3, shape="ramp", end_rate_per_s=9, ramp_s=50),
        Arrivals(rate_per_s=3, shape="ramp", end_rate_per_s=0.5, ramp_s=50),
    ],
)
def test_times_invert_expected(arrivals: Arrivals) -> None:
    steps = np.linspace(0.01, 400, 999)
    again = [arrivals.expected(float(at)) for at in arrivals.times(steps)]
    assert again == pytest.approx(steps)


def test_the_generator_notices_that_it_missed() -> None:
    arrivals = Arrivals(rate_per_s=7.0, cv=2.0)
    times_s = draw_arrivals(arrivals, rng(), requests=10_000)
    assert gap_error(arrivals, times_s) == ""
    assert gap_error(arrivals, times_s * 1.5).startswith("the mean rate is 4.667, not 7")
    assert gap_error(replace(arrivals, cv=1.0), times_s) == "the cv of the gaps is 1.994, not 1"


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.5])
def test_zipf_exponent_recovered_within_005(exponent: float) -> None:
    wanted = Synthesis(
        arrivals=Arrivals(rate_per_s=1),
        inputs=Lengths.parse("fixed:1"),
        outputs=Lengths.parse("fixed:1"),
        tenants=50,
        zipf_exponent=exponent,
        requests=SAMPLES,
        seed=3,
    )
    counts = Counter(record.tenant for record in synthesize(wanted))
    found = zipf.exponent_of([count for _, count in counts.most_common()])
    assert found == pytest.approx(exponent, abs=0.05)
    assert max(counts, key=lambda name: counts[name]) == "tenant-01" or exponent == 0


def test_zipf_shares_and_fit_are_inverse() -> None:
    exact = [int(share * 10**12) for share in zipf.shares(1_000, 1.3)]
    assert zipf.exponent_of(exact) == pytest.approx(1.3, abs=1e-6)
    assert zipf.exponent_of([5]) is None


def lognormal(share: float) -> float:
    return min(700 * math.exp(0.9 * NormalDist().inv_cdf(share)), 4_096)


@pytest.mark.parametrize(
    ("text", "quantile"),
    [
        ("uniform:256:1024", lambda share: 256 + share * 768),
        ("power:100:10000:1", lambda share: 100 * 100**share),
        ("power:100:10000:2", lambda share: 1 / (0.01 - share * 0.0099)),
        ("lognormal:700:0.9:4096", lognormal),
        ("fixed:77", lambda share: 77),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_length_quantiles_within_2_percent(text: str, quantile: Any, seed: int) -> None:
    tokens = Lengths.parse(text).draw(rng(seed), SAMPLES)
    for share in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
        assert np.quantile(tokens, share) == pytest.approx(quantile(share), rel=0.02)


def test_neighbouring_lengths_are_independent() -> None:
    tokens = Lengths.parse("uniform:1:1000").draw(rng(), SAMPLES)
    assert abs(np.corrcoef(tokens[:-1], tokens[1:])[0, 1]) < 0.02
    assert set(Lengths.parse("uniform:1:3").draw(rng(), 1_000).tolist()) == {1, 2, 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("normal:1:2", "is none of fixed:TOKENS, uniform:MIN:MAX"),
        ("uniform:1", "is none of"),
        ("uniform:a:2", "not a number"),
        ("uniform:0:2", "MIN must be from 1 to 2147483647"),
        ("uniform:nan:2", "MIN must be from 1"),
        ("uniform:3:2", "MIN is more than MAX"),
        ("lognormal:5:101:9", "SIGMA must be from 0 to 100"),
    ],
)
def test_wrong_lengths(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lengths.parse(text)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["workload", *(str(argument) for argument in arguments)])


def synth(out: Path, *options: object) -> Result:
    return run("synth", "--out", out, "--requests", 500, "--rate", 5, "--tenants", 9, *options)


def test_tenants_prompts_begin_with_blocks_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "shared.jsonl"
    options = ("--requests", "200", "--rate", "5", "--tenants", "3", "--input", "uniform:10:60")
    done = CliRunner().invoke(
        main,
        [
            "workload",
            "synth",
            *options,
            "--prefix-tokens",
            "100",
            "--block-tokens",
            "8",
            "--out",
            str(out),
        ],
    )
    assert done.exit_code == 0, done.output
    records = list(TraceReader(out))
    begun: dict[str, set[tuple[int, ...]]] = {}
    own: Counter[int] = Counter()
    for record in records:
        assert record.input_tokens is not None
        assert record.tenant is not None
        assert 110 <= record.input_tokens <= 160
        assert (record.block_tokens, len(record.blocks)) == (8, record.input_tokens // 8)
        begun.setdefault(record.tenant, set()).add(record.blocks[:12])
        own.update(record.blocks[12:])
    assert all(len(first) == 1 for first in begun.values())
    shared = [number for first in begun.values() for blocks in first for number in blocks]
    assert len(set(shared)) == 3 * 12
    assert max(own.values()) == 1
    assert not own.keys() & set(shared)


def test_a_prefix_changes_nothing_else_that_is_drawn(tmp_path: Path) -> None:
    plain = Synthesis(
        arrivals=Arrivals(rate_per_s=5), inputs=Lengths.parse("uniform:10:60"),
        outputs=Lengths.parse("fixed:5"), tenants=3, requests=50,
    )  # fmt: skip
    longer = [r.input_tokens for r in synthesize(replace(plain, prefix_tokens=32))]
    for record, tokens in zip(synthesize(plain), longer, strict=True):
        assert not record.blocks
        assert record.block_tokens is None
        assert tokens == (record.input_tokens or 0) + 32


def test_synth_writes_what_it_says(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    result = synth(out, "--json", "--arrivals", "gamma", "--cv", 2, "--input", "uniform:5:6")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    described = json.loads(run("describe", "--trace", out, "--json").stdout)
    assert {key: described[key] for key in told if key != "out"} == {
        key: told[key] for key in told if key != "out"
    }
    assert (told["requests"], told["tenants"]) == (500, 9)
    assert told["duration_s"] == pytest.approx(100, rel=0.05)
    assert {record.input_tokens for record in TraceReader(out)} == {5, 6}


def test_the_seed_is_all_that_matters(tmp_path: Path) -> None:
    texts = []
    for name, options in (("a", ()), ("b", ()), ("c", ("--seed", 1)), ("d", ("--zipf", 2))):
        assert synth(tmp_path / name, *options).exit_code == 0
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1] != texts[2]
    # Other tenants change no arrival and no length.
    first, other = (
        [replace(record, tenant=None) for record in TraceReader(tmp_path / name)] for name in "ad"
    )
    assert texts[3] != texts[0]
    assert first == other


def test_lengths_of_a_trace_keep_their_dependence(tmp_path: Path) -> None:
    trace, out = tmp_path / "in", tmp_path / "out"
    trace.write_text(
        lines(*({"arrival_s": 0, "input_tokens": n, "output_tokens": 2 * n} for n in (1, 5, 5, 9)))
        + lines({"arrival_s": 0, "input_tokens": 7})
    )
    result = synth(out, "--lengths-from", trace)
    assert result.exit_code == 0, result.output
    drawn = Counter((record.input_tokens, record.output_tokens) for record in TraceReader(out))
    assert drawn.keys() == {(1, 2), (5, 10), (9, 18)}
    assert 200 < drawn[5, 10] < 300
    result = synth(out, "--lengths-from", trace, "--input", "fixed:1")
    assert "give --lengths-from, or --input and --output" in result.output
    trace.write_text(json.dumps(SHAREGPT))
    assert "has no lengths" in synth(out, "--lengths-from", trace).output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rate", 1), "give --requests, --duration or both"),
        (("--rate", 1, "--requests", 5, "--cv", 2), "cv is for arrivals of kind gamma, on-off"),
        (("--rate", 1, "--requests", 5, "--on", 2), "on_s is for arrivals of kind on-off"),
        (("--rate", 1, "--requests", 5, "--arrivals", "ramp"), "kind ramp need end_rate"),
        (
            ("--rate", 1, "--requests", 5, "--arrivals", "ramp", "--end-rate", 2),
            "--arrivals ramp needs --duration",
        ),
        (("--rate", 1, "--requests", 5, "--input", "x"), "is none of fixed:TOKENS"),
        (("--rate", 1e9, "--duration", 1e9), "at most 50,000,000 requests"),
        (("--rate", 1e-9, "--duration", 1), "no request arrives within --duration"),
        (("--requests", 5), "give --rate or --profiles"),
    ],
)
def test_wrong_options(tmp_path: Path, options: tuple[object, ...], message: str) -> None:
    result = run("synth", "--out", tmp_path / "out", *options)
    assert result.exit_code != 0
    assert message in result.output


def test_scaling_by_100_changes_times_and_nothing_else(tmp_path: Path) -> None:
    trace, out = tmp_path / "in", tmp_path / "out"
    synth(trace)
    assert run("scale", "--trace", trace, "--speed", 100, "--out", out).exit_code == 0
    before, after = list(TraceReader(trace)), list(TraceReader(out))
    assert [replace(record, arrival_s=None) for record in after] == [
        replace(record, arrival_s=None) for record in before
    ]
    for one, other in zip(before, after, strict=True):
        assert one.arrival_s is not None
        assert other.arrival_s == one.arrival_s / 100
    result = run("scale", "--trace", trace, "--rate", 2.5, "--out", out, "--json")
    assert json.loads(result.stdout)["rate_per_s"] == pytest.approx(2.5)
    assert "give one of --speed and --rate" in run("scale", "--trace", trace, "--out", out).output


def test_scaling_leaves_what_has_no_time() -> None:
    assert list(scale([Record(text="x"), Record(arrival_s=3.0)], 2)) == [
        Record(text="x"),
        Record(arrival_s=1.5),
    ]


def test_trace_with_one_time_has_no_rate(tmp_path: Path) -> None:
    trace = tmp_path / "in"
    trace.write_text(lines({"arrival_s": 1, "input_tokens": 1}))
    result = run("scale", "--trace", trace, "--rate", 1, "--out", tmp_path / "out")
    assert "at least two different times" in result.output


def labels(rule: str, records: list[Record], **options: Any) -> Counter[str]:
    named = labeller(rule, 10, options.pop("exponent", 1.2), 5, **options)
    return Counter(named(record) for record in records)


def test_label_rules() -> None:
    trace = [Record(input_tokens=at % 100 + 1, output_tokens=1) for at in range(20_000)]
    assert set(LABEL_RULES) == {"random", "zipf", "sticky", "adversarial"}
    alike = labels("random", trace)
    assert min(alike.values()) > 1_800
    assert len(alike) == 10
    for rule in ("zipf", "sticky"):
        counts = [count for _, count in labels(rule, trace).most_common()]
        assert zipf.exponent_of(counts) == pytest.approx(1.2, abs=0.05)
    long_tokens = long_threshold(Counter(at % 100 + 2 for at in range(20_000)))
    hog = labels("adversarial", trace, long_tokens=long_tokens)
    assert len(hog) == 10
    held = sum(record.input_tokens or 0 for record in trace if (record.input_tokens or 0) + 1
               >= long_tokens)  # fmt: skip
    assert held >= sum(record.input_tokens or 0 for record in trace) / 2
    assert hog["tenant-01"] == 200 * (102 - long_tokens) < 6_500


def test_only_sticky_looks_at_conversations() -> None:
    trace = [Record(conversation="c")] * 500
    assert len(labels("sticky", trace)) == 1
    assert len(labels("zipf", trace)) == len(labels("random", trace)) == 10


def test_inputs_outputs_and_gaps_are_independent() -> None:
    wanted = Synthesis(
        arrivals=Arrivals(rate_per_s=1),
        inputs=Lengths.parse("uniform:1:1000"),
        outputs=Lengths.parse("uniform:1:1000"),
        requests=20_000,
    )
    records = list(synthesize(wanted))
    gaps_s = np.diff([record.arrival_s or 0.0 for record in records], prepend=0.0)
    inputs = [record.input_tokens or 0 for record in records]
    outputs = [record.output_tokens or 0 for record in records]
    found = np.corrcoef([gaps_s, inputs, outputs])
    assert np.abs(found - np.eye(3)).max() < 0.03


def test_sticky_conversations_stay_and_spread() -> None:
    named = labeller("sticky", 50, 0.0, 1)
    trace = [Record(conversation=f"c{at % 500}") for at in range(5_000)]
    tenants: dict[str | None, set[str]] = {}
    for record in trace:
        tenants.setdefault(record.conversation, set()).add(named(record))
    assert {len(found) for found in tenants.values()} == {1}
    assert len(set().union(*tenants.values())) == 50


def test_label_changes_tenants_alone(tmp_path: Path) -> None:
    trace, out = tmp_path / "in", tmp_path / "out"
    synth(trace)
    result = run(
        "label", "--trace", trace, "--tenants", 3, "--rule", "adversarial", "--out", out, "--json"
    )
    assert json.loads(result.stdout)["tenants"] == 3
    first, other = (
        [replace(record, tenant=None) for record in TraceReader(path)] for path in (trace, out)
    )
    assert first == other
    trace.write_text(json.dumps(SHAREGPT))
    result = run("label", "--trace", trace, "--tenants", 3, "--rule", "adversarial", "--out", out)
    assert "needs a trace with token counts" in result.output
    assert (
        run("label", "--trace", trace, "--tenants", 3, "--rule", "sticky", "--out", out).exit_code
        == 0
    )
    assert all(record.tenant for record in TraceReader(out))


PROFILES = """\
profiles:
  chat: {rate: 20, tenants: 12, zipf: 1.1, arrivals: gamma, cv: 2, request_class: interactive}
  batch:
    rate: 2
    arrivals: on-off
    on_s: 5
    off_s: 15
    input: uniform:4000:5000
    output: fixed:10
    adapter: summary
    deadline_ms: 60000
"""


def profiled(tmp_path: Path, text: str, *options: object) -> tuple[Result, list[Record]]:
    path, out = tmp_path / "profiles.yaml", tmp_path / "out"
    path.write_text(text)
    result = run("synth", "--profiles", path, "--duration", 400, "--out", out, *options)
    return result, list(TraceReader(out)) if result.exit_code == 0 else []


def test_each_profile_has_its_own_arrivals_lengths_and_class(tmp_path: Path) -> None:
    result, records = profiled(tmp_path, PROFILES)
    assert result.exit_code == 0, result.output
    batch = [record for record in records if record.tenant == "batch"]
    chat = [record for record in records if record.tenant != "batch"]
    assert len(batch) == pytest.approx(800, rel=0.15)
    assert len(chat) == pytest.approx(8_000, rel=0.1)
    assert {(record.adapter, record.deadline_ms, record.output_tokens) for record in batch} == {
        ("summary", 60_000, 10)
    }
    assert all((record.arrival_s or 0) % 20 < 5.001 for record in batch)
    assert {record.request_class for record in chat} == {"interactive"}
    assert {record.tenant for record in chat} == {f"chat-{rank:02}" for rank in range(1, 13)}
    # Without the one profile the other is unchanged.
    alone, _, _ = PROFILES.partition("  batch:")
    assert profiled(tmp_path, alone)[1] == chat
    assert profiled(tmp_path, PROFILES, "--seed", 1)[1] != records


def test_like_profiles_are_drawn_apart(tmp_path: Path) -> None:
    _, records = profiled(tmp_path, "profiles: {a: {rate: 1}, b: {rate: 1}}")
    first, other = ({r.arrival_s for r in records if r.tenant == name} for name in "ab")
    assert first
    assert other
    assert len(first & other) < 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profiles: {a: {}}", "profiles.yaml: profiles.a.rate: Field required"),
        ("profiles: {a: {rate: 0}}", "profiles.a.rate: Input should be greater than 0"),
        ("profiles: {a: {rate: 1, input: x}}", "profiles.a.input: 'x' is none of fixed:TOKENS"),
        ("profiles: {a: {rate: 1, cv: 2}}", "profiles.a: cv is for arrivals of kind gamma"),
        ("profiles: {a: {rate: 1, weight: 2}}", "profiles.a.weight: Extra inputs"),
        ("profiles: {}", "profiles.yaml: profiles: Dictionary should have at least 1 item"),
        ("profiles: {", "profiles.yaml: not YAML"),
        ("", "profiles.yaml: file: Input should be"),
    ],
)
def test_wrong_profiles(tmp_path: Path, text: str, message: str) -> None:
    result, _ = profiled(tmp_path, text)
    assert result.exit_code == 1
    assert message in result.output


def test_profiles_go_alone(tmp_path: Path) -> None:
    result, _ = profiled(tmp_path, PROFILES, "--rate", 3)
    assert "--profiles goes with --duration, --seed and --out alone" in result.output
