"""Tests settings by name, in the profile and in the configuration."""

import pytest

from schedsvc.config import Config
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.overrides import OverrideError, override, parse

FAST = load_profile("fast")
CONFIG = Config.model_validate(
    {
        "listeners": [{"tcp": "127.0.0.1:0"}],
        "scheduler": {"expert": {"quantile": 0.8}},
        "tenants": [{"name": "a", "weight": 2}, {"name": "b.c"}],
    }
)


def changed(*texts, config=CONFIG):
    return override(FAST, config, dict(parse(text) for text in texts))


def test_each_setting_changes_its_own_field_and_no_other():
    profile, config = changed(
        "engine.block_size_tokens=32", "scheduler.headroom=0.05", "scheduler.prices.output=3.5",
        "weight.b.c=0.5", "cost.swap_token_ns=40000",
    )  # fmt: skip
    assert profile.cost == FAST.cost.model_copy(update={"swap_token_ns": 40_000})
    assert profile.engine == FAST.engine.model_copy(update={"block_size_tokens": 32})
    options, before = config.core_options(), CONFIG.core_options()
    differing = {name for name in options if options[name] != before[name]}
    assert differing == {"headroom_ppm", "output_price_micro"}
    assert options["headroom_ppm"] == 50_000
    assert options["output_price_micro"] == 3_500_000
    assert [(each.name, each.weight_milli) for each in config.tenants] == [
        ("a", 2_000),
        ("b.c", 500),
    ]
    assert CONFIG.tenants[1].weight_milli == 1_000


def test_sizes_of_the_engine_are_those_of_the_configured_pools_too():
    pools = [{"name": "p", "capacity_tokens": 4_096}]
    config = Config.model_validate({"listeners": [{"tcp": "127.0.0.1:0"}], "pools": pools})
    _, config = changed("engine.kv_tokens=8192", "engine.block_size_tokens=8", config=config)
    assert (config.pools[0].capacity_tokens, config.pools[0].block_size_tokens) == (8_192, 8)


def test_keys_of_tenants_reach_quotas_and_guarantees():
    _, config = changed(
        "tenants.a.weight=3",
        "tenants.a.quota.tokens_per_minute=900",
        "tenants.a.quota.over=refuse",
        "tenants.b.c.share={tokens_per_minute: 500, lends: 100}",
        "tenants.b.c.share.borrows=7",
    )
    first, second = config.tenants
    assert (first.weight_milli, first.quota.tokens_per_minute, first.quota.over) == (
        3_000,
        900,
        "refuse",
    )
    assert second.share.core_share() == {"share": 500, "lends": 100, "borrows": 7}
    assert CONFIG.tenants[0].quota is None
    _, config = changed("tenants.a.quota.over=null", "tenants.b.c.share=null", config=config)
    assert config.tenants[0].quota.over == "wait"
    assert config.tenants[1] == CONFIG.tenants[1]


def test_keys_of_groups_are_held_to_the_rules_of_the_file():
    group = {"name": "g", "share": {"tokens_per_minute": 100}}
    tenants = [{"name": "a", "group": "g", "share": {"tokens_per_minute": 60}}]
    config = Config.model_validate(
        {"listeners": [{"tcp": "127.0.0.1:0"}], "groups": [group], "tenants": tenants}
    )
    _, more = changed("groups.g.share.tokens_per_minute=60", config=config)
    assert more.groups[0].share.tokens_per_minute == 60
    with pytest.raises(OverrideError, match="is 50, but its members are promised 60"):
        changed("groups.g.share.tokens_per_minute=50", config=config)
    with pytest.raises(OverrideError, match="lends is 70, more than its tokens_per_minute, 60"):
        changed("tenants.a.share.lends=70", config=config)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("engine.prefill", "give NAME=VALUE"),
        ("engine.prefill=sideways", "engine.prefill: input should be"),
        ("engine.speed=3", "no such field"),
        ("cost.step_ns=-3", "greater than or equal to 0, not -3"),
        ("cost.decode_ns=[[1, 2]]", "the first point must be at 0 sequences"),
        ("engine.kv_tokens=0", "greater than or equal to 1"),
        ("scheduler.headroom=0.95", "between 0 and 0.9, not 0.95"),
        ("scheduler.headrom=0.1", "unknown setting"),
        ("scheduler.prices=1", "one of its parts: input, output, cached"),
        ("scheduler.policy=dlpm", "scheduler.policy: a run has its policy from --policy"),
        ("scheduler.policy.x=1", "has no parts"),
        ("weight.missing=1", "no tenant of that name; there are a, b.c"),
        ("weight.a=heavy", "weight.a: weight has to be a number"),
        ("tenants.missing.weight=1", "no tenant of that name; there are a, b.c"),
        ("tenants.a=1", "tenants.a: names no key of the tenant; known are group, quota, share"),
        ("tenants.a.quotas.concurrency=1", "'quotas' is no key of a tenant; known are group"),
        ("tenants.a.name=c", "'name' is no key of a tenant"),
        ("tenants.a.weight.x=1", "weight has no parts"),
        ("tenants.a.quota.tokens=1", "tenants.a.quota.tokens: quota.tokens .*tokens_per_minute"),
        ("tenants.a.quota.concurrency=0", "quota.concurrency is 0; it has to be at least 1"),
        ("tenants.a.share.lends=5", "share the key 'tokens_per_minute' is missing"),
        ("tenants.a.group=g", "'g' is no group"),
        ("groups.g.weight=1", "no group of that name; there are none"),
        ("pools=1", "unknown setting"),
        ("scheduler.headroom=[1", "is no value"),
        ("scheduler.headroom=" + "[" * 5_000, "is no value"),
    ],
)
def test_a_wrong_setting_is_named(text, complaint):
    with pytest.raises(OverrideError, match=complaint.replace("[", r"\[")):
        changed(text)
