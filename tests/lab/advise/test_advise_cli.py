"""Runs `schedsvc advise` as an operator does: from a trace or a recording to a draft."""

import json
from random import Random

import pytest
import yaml
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc.config import load
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.requests import Requests

from .virtual_server import record_run

GOAL = "production p99 first token <= 1 s"


def advise(*args):
    words = [str(arg) for arg in args]
    return CliRunner().invoke(main, ["advise", *words, "--jobs", "1"])


def flood(seed=1):
    """Forty seconds in which `batch` asks for three times an A10G's capacity."""
    draws = Random(seed)
    rows = [(draws.uniform(0, 40), 0, 200, draws.randint(100, 300)) for _ in range(120)]
    rows += [(draws.uniform(0, 40), 1, 60, draws.randint(20, 60)) for _ in range(40)]
    return [(round(at_s * 1e9), *rest) for at_s, *rest in sorted(rows)]


def trace_file(folder):
    path = folder / "trace.csv"
    lines = ["arrival_s,client,prompt_tokens,output_tokens"]
    names = ("batch", "production")
    lines += [f"{at / 1e9},{names[who]},{p},{out}" for at, who, p, out in flood()]
    path.write_text("\n".join(lines) + "\n")
    return path


def config_file(tmp_path, **more):
    """Write today's file: everything that an advice does not draft has to stay."""
    path = tmp_path / "schedsvc.yaml"
    data = {
        "listeners": [{"tcp": "127.0.0.1:7600"}],
        "scheduler": {"queue_ttl_ms": 60_000, "leases_max": 1_000},
        "tenants": [{"name": "batch", "weight": 1_000, "api_keys_sha256": ["ab" * 32]}],
        **more,
    }
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture(scope="module")
def advice(tmp_path_factory):
    """Return one advice: the folder of all files, its arguments, and what it printed."""
    folder = tmp_path_factory.mktemp("advice")
    args = ["--trace", trace_file(folder), "--profile", "a10g-llama2-7b", "--goal", GOAL, "--json"]
    args += ["--config", config_file(folder, mode="dry_run")]
    result = advise(*args, "--out", folder / "out")
    assert result.exit_code == 0, result.output
    return folder, args, result.stdout


@pytest.fixture
def trace(tmp_path):
    return trace_file(tmp_path)


def test_a_draft_for_a_trace_meets_the_goal_and_passes_check(advice):
    folder, _, printed = advice
    report, out = json.loads(printed), folder / "out"
    assert report == json.loads((out / "advice.json").read_text())
    [goal] = report["goals"]
    assert not goal["today"]["met"]
    assert goal["draft"]["met"]
    assert goal["draft"]["figure"] <= 1.0
    assert (out / "advice.png").read_bytes().startswith(b"\x89PNG")
    checked = CliRunner().invoke(main, ["check", str(out / "draft.yaml")])
    assert checked.exit_code == 0, checked.output


def test_a_draft_changes_only_the_keys_of_the_report(advice):
    folder, _, printed = advice
    before, drafted = load(folder / "schedsvc.yaml"), load(folder / "out" / "draft.yaml")
    assert drafted.mode == "dry_run"
    assert drafted.scheduler.leases_max == 1_000
    batch, production = drafted.tenants
    assert batch.api_keys_sha256 == before.tenants[0].api_keys_sha256
    changed = {
        change["path"]: (change["today"], change["draft"])
        for change in json.loads(printed)["changes"]
    }
    expected = {}
    for name, today, now in (("batch", 1_000.0, batch), ("production", 1.0, production)):
        if now.weight_milli != today * 1_000:
            expected[f"tenants.{name}.weight"] = (today, now.weight_milli / 1_000)
        for key in ("quota", "share"):
            if (limits := getattr(now, key)) is not None:
                path = f"tenants.{name}.{key}.tokens_per_minute"
                expected[path] = (None, limits.tokens_per_minute)
    for key in ("queue_ttl_ms", "headroom_ppm"):
        pair = (getattr(before.scheduler, key), getattr(drafted.scheduler, key))
        if pair[0] != pair[1]:
            path, unit = ("headroom", 1e6) if key == "headroom_ppm" else (key, 1)
            expected[f"scheduler.{path}"] = (pair[0] / unit, pair[1] / unit)
    assert changed == expected != {}


def test_the_same_arguments_give_the_same_draft(advice):
    _, args, printed = advice
    assert advise(*args, "--jobs", "2").stdout == printed


def test_a_draft_in_the_simulator_has_the_figures_of_the_report(advice, tmp_path):
    folder, _, printed = advice
    enforced = tmp_path / "enforced.yaml"
    text = (folder / "out" / "draft.yaml").read_text()
    enforced.write_text(text.replace("mode: dry_run", "mode: enforce"))
    again = CliRunner().invoke(
        main,
        ["sim", "--trace", str(folder / "trace.csv"), "--policy", "vtc",
         "--config", str(enforced), "--json"],
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    [run] = json.loads(again.stdout)["policies"]["vtc"]
    tenants = json.loads(printed)["tenants"]
    refused = sum(row["draft"]["refused"] * row["draft"]["requests"] for row in tenants.values())
    assert run["refused"] == pytest.approx(refused)


def test_goals_that_are_met_well_today_change_nothing(trace):
    result = advise("--trace", trace, "--profile", "a10g-llama2-7b",
                    "--goal", "production p50 wait <= 30 s")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "no setting changes" in result.stdout


def test_a_goal_that_no_draft_meets_ends_with_status_1(trace):
    result = advise("--trace", trace, "--profile", "a10g-llama2-7b",
                    "--goal", "* p99 first token <= 10 ms")  # fmt: skip
    assert result.exit_code == 1
    assert "missed" in result.stdout


def test_a_recording_needs_no_profile(tmp_path):
    path = tmp_path / "recording"
    requests = Requests(("batch", "production"), flood())
    record_run(load_profile("a10g-llama2-7b"), requests, path)
    result = advise("--recording", path, "--goal", GOAL, "--json",
                    "--config", config_file(tmp_path))  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "engine fitted to" in result.stderr
    report = json.loads(result.stdout)
    assert [goal["draft"]["met"] for goal in report["goals"]] == [True]
    assert report["tenants"]["production"]["today"]["requests"] == 40.0


def with_strangers(folder):
    """Write a trace of which some requests came with a wrong key, and some of a reserved name."""
    path = trace_file(folder)
    rows = "".join(f"{41 + at},{name},60,30\n" for at in range(8) for name in ("unknown", "other"))
    path.write_text(path.read_text() + rows)
    return path


@pytest.mark.parametrize("unknown_tenants", ["own", "share"])
def test_tenants_that_no_file_can_list_are_served_with_the_unknown(tmp_path, unknown_tenants):
    file = config_file(tmp_path, unknown_tenants=unknown_tenants)
    args = ["--trace", with_strangers(tmp_path), "--profile", "a10g-llama2-7b", "--config", file]
    for goal in (GOAL, "unknown p50 wait <= 60 s", "other share >= 0.1 %"):
        args += ["--goal", goal]
    result = advise(*args, "--json", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    [note] = json.loads(result.stdout)["notes"]
    assert note.startswith("16 requests of 'other', 'unknown': served with the unknown tenants")
    assert note in result.stderr
    names = [tenant.name for tenant in load(tmp_path / "out" / "draft.yaml").tenants]
    assert names == ["batch", "production"]


def test_requests_that_the_configuration_refuses_are_left_out(tmp_path):
    """The draft lists no stranger, and no goal counts the requests that it refuses."""
    tenants = [{"name": "batch"}, {"name": "production"}]
    file = config_file(tmp_path, unknown_tenants="refuse", tenants=tenants)
    args = ["--trace", with_strangers(tmp_path), "--profile", "a10g-llama2-7b", "--config", file]
    result = advise(*args, "--goal", "* refusals <= 0 %", "--json", "--out", tmp_path / "out")
    report = json.loads(result.stdout)
    [note] = report["notes"]
    assert note.startswith("16 requests of 'other', 'unknown': refused and left out of the goals")
    assert report["tenants"]["unknown"]["today"]["requests"] == 0.0
    drafted = load(tmp_path / "out" / "draft.yaml")
    assert [tenant.name for tenant in drafted.tenants] == ["batch", "production"]
    result = advise(*args, "--goal", "unknown p50 wait <= 1 s")
    assert result.exit_code == 2
    assert "the configuration refuses 'unknown', a tenant that it does not list" in result.output


def test_a_trace_of_which_nothing_is_served_says_so(tmp_path):
    file = config_file(tmp_path, unknown_tenants="refuse", tenants=[])
    result = advise("--trace", trace_file(tmp_path), "--profile", "a10g-llama2-7b",
                    "--config", file, "--goal", "* p50 wait <= 1 s")  # fmt: skip
    assert result.exit_code == 1
    assert "no configuration can serve any of the requests: 160 requests of" in result.output


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "give either --recording FILE or --trace FILE"),
        (["--trace", "T"], "a trace has no times of an engine; give --profile NAME|FILE.yaml"),
        (["--trace", "T", "--profile", "x"], "profile 'x' is unknown"),
        (["--trace", "T", "--profile", "fast", "--goal", "a p9"], "'a p9': has no bound"),
        (
            ["--trace", "T", "--profile", "fast", "--goal", "c refusals <= 5 %"],
            "'c' sends no request; tenants: batch, production; classes: default",
        ),
    ],
)
def test_wrong_arguments_are_named(trace, args, complaint):
    result = advise(*[trace if arg == "T" else arg for arg in args], "--goal", GOAL)
    assert result.exit_code == 2
    assert complaint in result.output


def test_a_draft_whose_relative_files_are_missing_names_the_folder(trace, tmp_path):
    (tmp_path / "token").write_text("s3cret-token-of-16-letters\n")
    auth = {"principals": [{"name": "gate", "token_file": "token", "pools": ["*"]}]}
    file = config_file(tmp_path, auth=auth)
    args = ["--trace", trace, "--profile", "a10g-llama2-7b", "--config", file, "--goal", GOAL]
    result = advise(*args, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert f"give --out {tmp_path}" in result.output
    easy = ["--goal", "production p50 wait <= 600 s"]
    assert advise(*args[:-2], *easy, "--out", tmp_path).exit_code == 0
