"""Counts the engines that goals need."""

import json

import pytest
import yaml
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.advise.engines import fewest, with_engines
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.scenario import Scenario, ScenarioError, engine_configs

from .test_advise_cli import config_file
from .test_advise_cli import trace_file as write_trace

A10G = load_profile("a10g-llama2-7b")
# Every tenant counts, so no weight helps: `batch` asks for three times what one engine serves.
GOALS = ["--goal", "* p99 first token <= 1 s", "--goal", "* refusals <= 0 %"]


def advise(*args):
    return CliRunner().invoke(main, ["advise", *map(str, args), "--jobs", "1"])


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 40, 63, 64])
def test_the_least_count_is_found_with_few_questions(needed):
    asked = []

    def meets(count):
        asked.append(count)
        return count >= needed

    assert fewest(meets) == needed
    assert max(asked) <= min(2 * needed, 64)
    assert len(asked) <= 13
    assert len(set(asked)) == len(asked)


def test_goals_that_no_count_meets_have_none():
    assert fewest(lambda count: False) is None
    assert fewest(lambda count: count > 3, most=3) is None


def test_engines_are_counted_as_those_of_the_configuration(tmp_path):
    from schedsvc.config import load

    def scenario(*pools):
        return Scenario(A10G, load(config_file(tmp_path, pools=list(pools))))

    pool = {"name": "x", "capacity_tokens": 8_192, "max_running": 4}
    counted = engine_configs(with_engines(scenario(pool), 3))
    assert list(counted) == ["engine-1", "engine-2", "engine-3"]
    assert {each.capacity_tokens for each in counted.values()} == {8_192}
    assert {each.sequences_max for each in counted.values()} == {4}
    other = {"name": "y", "capacity_tokens": 4_096}
    with pytest.raises(ScenarioError, match="engines of several sizes, which cannot be counted"):
        with_engines(scenario(pool, other), 3)
    assert with_engines(Scenario(A10G), 3).engines == 3


def test_one_engine_fewer_misses_the_goals(trace, tmp_path):
    args = ["--trace", trace, "--profile", "a10g-llama2-7b", *GOALS]
    result = advise(*args, "--fewest-engines", "--json", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    needed = report["engines_needed"]
    assert 1 < needed["draft"] <= needed["today"]
    assert all(goal["draft"]["met"] for goal in report["goals"])
    assert advise(*args, "--engines", needed["draft"]).exit_code == 0
    assert advise(*args, "--engines", needed["draft"] - 1).exit_code == 1
    today = json.loads(advise(*args, "--engines", needed["today"], "--json").stdout)
    assert all(goal["today"]["met"] for goal in today["goals"])
    drafted = yaml.safe_load((tmp_path / "draft.yaml").read_text())
    assert "pools" not in drafted


def test_a_draft_may_save_engines(trace):
    """A weight serves `production` on one engine; without it both tenants need more."""
    args = ["--trace", trace, "--profile", "a10g-llama2-7b", "--fewest-engines"]
    result = advise(*args, "--goal", "production p99 first token <= 600 ms")
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if line.startswith("engines that"))
    assert line == "engines that the goals need: 2 with the settings of today, 1 with the draft"


def test_a_goal_that_64_engines_miss_is_said(trace):
    result = advise("--trace", trace, "--profile", "a10g-llama2-7b", "--fewest-engines",
                    "--goal", "* p99 first token <= 1 ms")  # fmt: skip
    assert result.exit_code == 1
    assert "more than 64 with the settings of today, more than 64 with the draft" in result.stdout


def test_a_count_excludes_a_number_of_engines(trace):
    result = advise("--trace", trace, "--profile", "fast", *GOALS, "--fewest-engines",
                    "--engines", 2)  # fmt: skip
    assert result.exit_code == 2
    assert "--fewest-engines counts engines itself" in result.output
