import json
from random import Random

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.engine import CostFields, Engine, EngineRequest, Profile, load_profile
from schedsvc_lab.sim.fit import FitError, Measured, fit, read_measured

TRUE = CostFields(
    step_ns=0,
    prefill_ns=3_500_000,
    prefill_token_ns=30_000,
    decode_kv_token_ns=40,
    decode_ns=[[0, 2_000_000], [8, 6_000_000], [32, 9_000_000], [64, 25_000_000]],
)
SIZES = ["--kv-tokens=20480", "--block-size=128", "--max-num-seqs=64"]
SIZES += ["--max-num-batched-tokens=2048", "--max-model-len=2048"]


def steps_of(cost, seed=1):
    """Return steps that an engine with this cost does under a changing load."""
    fields = {**load_profile("tiny-cpu").model_dump(), "cost": cost.model_dump()}
    profile = Profile.model_validate(fields)
    engine = Engine(profile.config(), profile.step_cost(64))
    draws = Random(seed)
    steps = []
    for number in range(300):
        engine.add(EngineRequest(number, draws.randint(10, 500), (draws.randint(2, 120),)))
        for _ in range(draws.choice([0, 0, 1, 5, 40])):
            step = engine.plan_step()
            if step is None:
                break
            engine.finish_step()
            steps.append(
                {
                    "duration_s": step.duration_ns / 1e9,
                    "prompt_tokens": step.prompt_tokens,
                    "running": step.decodes,
                    "kv_tokens": step.kv_tokens,
                }
            )
    assert len(steps) > 1_000
    return steps


def measured(steps):
    return [Measured(**step) for step in steps]


def table(cost, sequences):
    fields = {**load_profile("tiny-cpu").model_dump(), "cost": cost.model_dump()}
    return Profile.model_validate(fields).step_cost(sequences).decode_table_ns


def test_the_cost_behind_exact_steps_is_found():
    cost, quality = fit(measured(steps_of(TRUE)))
    assert cost.prefill_ns == pytest.approx(3_500_000, rel=1e-3)
    assert cost.prefill_token_ns == pytest.approx(30_000, rel=1e-3)
    assert cost.decode_kv_token_ns == pytest.approx(40, abs=1)
    found, true = table(cost, 60), table(TRUE, 60)
    for sequences in (0, 1, 4, 8, 16, 24, 32):
        assert found[sequences] == pytest.approx(true[sequences], rel=2e-3)
    assert quality.r2 == pytest.approx(1.0, abs=1e-6)
    assert quality.median_abs_error_ms < 0.01
    assert quality.total_ratio == pytest.approx(1.0, abs=1e-6)


def test_noise_leaves_the_sum_and_lowers_r2():
    draws = Random(3)
    steps = steps_of(TRUE)
    for step in steps:
        step["duration_s"] *= draws.uniform(0.5, 1.5)
    cost, quality = fit(measured(steps))
    assert quality.total_ratio == pytest.approx(1.0, abs=0.01)
    assert 0.5 < quality.r2 < 0.95
    assert table(cost, 60)[32] == pytest.approx(9_000_000, rel=0.15)


def test_a_cost_is_never_negative():
    draws = Random(4)
    rows = [
        Measured(draws.uniform(0.001, 0.002), draws.randint(0, 50), draws.randint(1, 9), 10)
        for _ in range(200)
    ]
    cost, _ = fit(rows)
    assert min(cost.prefill_token_ns, cost.decode_kv_token_ns, cost.prefill_ns) >= 0
    heights = [ns for _, ns in cost.decode_ns]
    assert heights == sorted(heights)


def test_samples_of_counters_give_the_same_cost(tmp_path):
    """Every interval holds five steps of one kind."""
    lines, at_s, totals = [], 0.0, [0, 0, 0]
    cost = table(TRUE, 64)
    draws = Random(5)
    for _ in range(400):
        running, prompt, kv = draws.randint(1, 60), draws.choice([0, 64, 256]), 5_000
        names = ("steps_total", "prompt_tokens_total", "generation_tokens_total")
        sums = dict(zip(names, totals, strict=True))
        lines.append({"at_s": at_s, **sums, "running": 9, "kv_tokens": kv})
        totals = [totals[0] + 5, totals[1] + 5 * prompt, totals[2] + 5 * running]
        at_s += 5 * (cost[running] + 30_000 * prompt + 40 * kv) / 1e9
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    found, quality = fit(read_measured(file))
    assert found.prefill_token_ns == pytest.approx(30_000, rel=0.01)
    assert quality.steps == 5 * 399
    # If the KV tokens never change, and some sequence always decodes, both are part of the rest.
    for running in (1, 8, 40):
        step_ns = table(found, 64)[running] + 5_000 * found.decode_kv_token_ns
        assert step_ns == pytest.approx(cost[running] + 5_000 * 40, rel=0.01)


def test_idle_samples_are_left_out(tmp_path):
    lines = [
        {"at_s": at, "steps_total": at * 9, "prompt_tokens_total": at, "running": at % 2,
         "generation_tokens_total": at * 9, "kv_tokens": 5}
        for at in range(9)
    ]  # fmt: skip
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    assert read_measured(file) == []


def test_the_command_writes_a_profile_that_the_simulator_runs(tmp_path):
    steps = tmp_path / "steps.csv"
    rows = steps_of(TRUE)
    steps.write_text(
        "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)])
    )
    out = tmp_path / "mine.yaml"
    args = ["sim", "fit", str(steps), *SIZES, "--name", "mine", "--out", str(out)]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    assert "R² 1.000" in result.output
    profile = load_profile(str(out))
    assert (profile.name, profile.kv_tokens) == ("mine", 20_480)
    assert profile.cost.prefill_token_ns == pytest.approx(30_000, rel=1e-3)
    assert "steps.csv" in profile.source
    as_json = json.loads(CliRunner().invoke(main, [*args, "--json"]).output)
    assert as_json["cost"] == profile.cost.model_dump()
    assert as_json["quality"]["steps"] == len(rows)


GOOD = '{"duration_s": 0.01, "prompt_tokens": 5, "running": 1, "kv_tokens": 9}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (GOOD, "1 busy steps or intervals are too few; give 30 or more"),
        (f"{GOOD}\n{{", "steps.jsonl:2: is not JSON"),
        (f"{GOOD}\n[1]", "steps.jsonl:2: must be a JSON object"),
        (f'{GOOD}\n{{"duration_s": 1}}', "steps.jsonl:2: prompt_tokens is missing"),
        (f"{GOOD}\n{GOOD.replace('0.01', '-1')}", "steps.jsonl:2: duration_s: must be a number"),
        (f"{GOOD}\n{GOOD.replace('9', 'NaN')}", "steps.jsonl:2: kv_tokens: must be a number"),
        (f"{GOOD}\n{GOOD.replace('5', 'null')}", "steps.jsonl:2: prompt_tokens: None is no number"),
        ("\n".join([GOOD] * 40), "all durations are equal"),
    ],
)
def test_wrong_measurements_are_named_by_file_and_line(tmp_path, text, message):
    file = tmp_path / "steps.jsonl"
    file.write_text(text)
    with pytest.raises(FitError, match=message):
        fit(read_measured(file))
    result = CliRunner().invoke(main, ["sim", "fit", str(file), *SIZES])
    assert result.exit_code == 1
    assert message in result.output


def test_counters_that_fall_are_refused(tmp_path):
    line = {"at_s": 1, "steps_total": 5, "prompt_tokens_total": 5, "generation_tokens_total": 5,
            "running": 1, "kv_tokens": 5}  # fmt: skip
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps(line) + "\n" + json.dumps({**line, "at_s": 2, "steps_total": 4}))
    with pytest.raises(FitError, match=r"samples.jsonl:2: steps_total: must grow"):
        read_measured(file)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "x.txt"], "--out: must end in .yaml"),
        (["--out", "/nowhere/at/all.yaml"], "--out: the folder /nowhere/at does not exist"),
        (["--max-model-len", "99999"], "these sizes do not go together: context_tokens_max"),
    ],
)
def test_wrong_options_say_what_to_do(tmp_path, args, message):
    file = tmp_path / "steps.jsonl"
    file.write_text("\n".join(json.dumps(step) for step in steps_of(TRUE)))
    result = CliRunner().invoke(main, ["sim", "fit", str(file), *SIZES, *args])
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.split())


def test_sizes_come_from_flags_or_from_another_profile(tmp_path):
    file, out = tmp_path / "steps.jsonl", tmp_path / "mine.yaml"
    file.write_text("\n".join(json.dumps(step) for step in steps_of(TRUE)))
    command = ["sim", "fit", str(file), "--out", str(out)]
    result = CliRunner().invoke(main, [*command, "--max-num-seqs", "8"])
    assert result.exit_code == 2
    assert "give --kv-tokens, --block-size, --max-num-batched-tokens" in result.output
    result = CliRunner().invoke(main, [*command, "--like", "h100"])
    assert "'h100' is unknown" in result.output
    result = CliRunner().invoke(main, [*command, "--like", "tiny-cpu", "--max-num-seqs", "8"])
    assert result.exit_code == 0, result.output
    expected = load_profile("tiny-cpu").engine.model_copy(update={"sequences_max": 8})
    assert load_profile(str(out)).engine == expected


def test_durations_beyond_any_engine_are_named() -> None:
    rows = [
        Measured(1e5 * (1 + k), prompt_tokens=0.0, running=1.0 + k % 7, kv_tokens=0.0, steps=1)
        for k in range(50)
    ]
    with pytest.raises(
        FitError, match="the durations fit no engine: prefill_ns: Input should be less"
    ):
        fit(rows)
