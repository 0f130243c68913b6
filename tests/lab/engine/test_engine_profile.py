import pytest

from schedsvc_lab.engine import ProfileError, load_profile, profile_names

GOOD = """
name: mine
source: measured at home
cost:
  step_ns: 10
  prefill_ns: 100
  prefill_token_ns: 2
  decode_kv_token_ns: 1
  decode_ns: [[0, 50], [10, 150], [20, 200]]
engine:
  kv_tokens: 1000
  block_size_tokens: 16
  sequences_max: 30
  step_tokens_max: 256
  context_tokens_max: 512
"""


def load_text(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return load_profile(str(file))


@pytest.mark.parametrize("name", profile_names())
def test_every_bundled_profile_makes_an_engine(name):
    profile = load_profile(name)
    assert profile.name == name
    config = profile.config()
    assert config.capacity_tokens <= profile.kv_tokens
    assert len(profile.step_cost(config.sequences_max).decode_table_ns) == config.sequences_max + 1


def test_a10g_costs_are_the_published_ones():
    cost = load_profile("a10g-llama2-7b").step_cost(256)
    assert cost.duration_ns(256, 0, 0) == 3_000_000 + 35_800_000 + 213_100 * 256
    assert cost.duration_ns(0, 30, 9000) == 3_000_000 + 25_080_000 + 194_200 * 30 + 1_046 * 9000


def test_tiny_cpu_has_the_measured_throughput():
    cost = load_profile("tiny-cpu").step_cost(64)
    for sequences, tokens_per_s in ((1, 365), (32, 2_800), (64, 4_400)):
        measured = sequences * 1e9 / cost.duration_ns(0, sequences, 100)
        assert measured == pytest.approx(tokens_per_s, rel=0.01)


def test_a_mixed_step_pays_the_fixed_part_once(tmp_path):
    cost = load_text(tmp_path, GOOD).step_cost(30)
    prefill = cost.duration_ns(40, 0, 0)
    decode = cost.duration_ns(0, 10, 300)
    assert (prefill, decode) == (190, 460)
    # The step's own cost and the smaller fixed part, decode's 50, are shared.
    assert cost.duration_ns(40, 10, 300) == prefill + decode - 10 - 50


def test_decode_cost_is_piecewise_linear_and_goes_on_with_the_last_slope(tmp_path):
    table = load_text(tmp_path, GOOD).step_cost(30).decode_table_ns
    assert [table[n] for n in (0, 5, 10, 15, 20, 30)] == [50, 100, 150, 175, 200, 250]


def test_a_run_of_decodes_costs_the_sum_of_its_steps():
    cost = load_profile("a10g-llama2-7b").step_cost(256)
    steps = [cost.duration_ns(0, 7, 900 + 7 * i) for i in range(25)]
    assert cost.decode_run_ns(25, 7, 900) == sum(steps)


def test_an_unknown_profile_lists_the_known_ones():
    with pytest.raises(ProfileError, match=r"'a100' is unknown; known are a10g-llama2-7b, "):
        load_profile("a100")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("step_ns: 10", "step_ns: ten", r"mine.yaml: cost.step_ns: Input should be a valid int"),
        ("step_ns: 10", "step_ns: -1", r"cost.step_ns: Input should be greater than"),
        ("  step_ns: 10\n", "", r"cost.step_ns: Field required"),
        ("step_ns: 10", "step_ns: 10\n  gpu: 1", r"cost.gpu: Extra inputs"),
        ("[[0, 50]", "[[1, 50]", r"first point must be at 0"),
        ("[20, 200]", "[20, 100]", r"ns must not shrink"),
        ("[20, 200]", "[20]", r"each point must be"),
        ("name: mine", "name: [", r"is not YAML"),
        ("name: mine", "name: " + "[" * 5_000, r"is not YAML"),
        (GOOD, "- 1", r"the file: Input should be"),
    ],
)
def test_a_wrong_profile_names_file_and_field(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(ProfileError, match=message):
        load_text(tmp_path, GOOD.replace(old, new))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"nothing\.yaml: cannot be read"):
        load_profile(str(tmp_path / "nothing.yaml"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kv_tokens": 100}, r"context_tokens_max: 512 does not fit into the KV cache of 96"),
        ({"kv_tokens": 3}, r"blocks: must be an integer of at least 1, not 0"),
        ({"block_size_tokens": 0}, r"block_size_tokens: must be"),
        ({"sequences_max": 0}, r"sequences_max: must be"),
        ({"prefill": "whole"}, r"step_tokens_max: must be at least context_tokens_max \(512\)"),
        ({"policy": "fair"}, r"policy: must be fcfs or priority, not 'fair'"),
        ({"prefill": "none"}, r"prefill: must be chunked"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        load_text(tmp_path, GOOD).config(**overrides)
