"""Tests the search for a draft, on traffic for which its levers have known effects."""

from schedsvc.config import Config
from schedsvc_lab.advise.cli import Advice
from schedsvc_lab.advise.goals import parse_goal
from schedsvc_lab.advise.measure import Table
from schedsvc_lab.engine import Profile
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
