"""Tests the search for a draft, on traffic for which its levers have known effects."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from schedsvc.config import Config
from schedsvc_lab.advise.cli import Advice
from schedsvc_lab.advise.draft import apply, draft_of, draft_yaml
from schedsvc_lab.advise.goals import parse_goal
from schedsvc_lab.advise.measure import Table
from schedsvc_lab.advise.report import gains
from schedsvc_lab.engine import Profile, load_profile
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Scenario

PROMPT = 1_000
#: One request at a time: its input takes 1.2 s, and its only token a moment.
ENGINE = {
    "name": "slow-prefill",
    "source": "No machine: 1.2 ms for each token of the prompt.",
    "cost": {
        "step_ns": 0,
        "prefill_ns": 0,
        "prefill_token_ns": 1_200_000,
        "decode_kv_token_ns": 0,
        "decode_ns": [[0, 1_000_000]],
    },
    "engine": {
        "kv_tokens": 1_600,
        "block_size_tokens": 16,
        "sequences_max": 1,
        "step_tokens_max": 1_600,
        "context_tokens_max": 1_600,
    },
}


@pytest.mark.parametrize(("ageing", "least_ms"), [({}, 5_001), ({"ageing_ms": 700}, 701)])
def test_no_draft_evicts_before_a_class_has_aged(ageing: dict[str, int], least_ms: int) -> None:
    classes = [{"name": "low", "rank": 5, **ageing}]
    config = Config.model_validate({"listeners": [{"tcp": "127.0.0.1:0"}], "classes": classes})
    today = draft_of(config)
    assert apply(config, replace(today, queue_ttl_ms=least_ms - 1)) is None
    assert apply(config, replace(today, queue_ttl_ms=least_ms)) is not None


def test_ttl_leaves_time_for_the_input() -> None:
    """A request that has waited for all of its goal has missed it, and takes another's place."""
    arrivals = [(round(at * 1.0e9), 0, PROMPT, 1) for at in range(400)]
    goal = parse_goal("* p75 first token <= 2 s")
    config = Config.model_validate({"listeners": [{"tcp": "127.0.0.1:0"}]})
    scenario = Scenario(Profile.model_validate(ENGINE), config, 1)
    advice = Advice(scenario, Requests(["a"], arrivals), [goal])
    table = Table.of(advice._simulate(advice.config), advice.tenant_class)
    found = advice.find(1, 20, table)
    assert not found.today.is_met
    assert found.best.is_met, found.best
    assert found.best.draft.queue_ttl_ms < 2_000


def test_goal_of_throughput_proposes_a_price_of_the_cache_and_names_who_loses() -> None:
    rows = [(at * 10**9, 0, 1_000, 500) for at in range(120)]
    rows = sorted(rows + [(at * 10**9 // 20, 1, 60, 30) for at in range(2_400)])
    goal = parse_goal("* throughput >= 2000 tokens/s")
    config = Config.model_validate(
        {"listeners": [{"tcp": "127.0.0.1:0"}], "scheduler": {"early_refusal": False}}
    )
    scenario = Scenario(load_profile("a10g-llama2-7b"), config, 1)
    advice = Advice(scenario, Requests(["large", "small"], rows), [goal])
    report, drafted = advice.run(1)
    prices = {key.rpartition(".")[2] for key in _changed(report) if ".prices." in key}
    assert "kv" in prices
    assert report["goals"][0]["draft"]["figure"] > 1.5 * report["goals"][0]["today"]["figure"]
    text = draft_yaml({}, advice.config, drafted)
    assert (
        yaml.safe_load(text)["scheduler"]["prices"]["kv"] == drafted.scheduler.prices.kv_micro / 1e6
    )
    more, less = gains(report["tenants"])
    assert "small" in more
    assert "large" in less


def _changed(report: dict[str, Any]) -> list[str]:
    return [change["path"] for change in report["changes"]]
