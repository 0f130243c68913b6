"""A flood leaves their parts to a newcomer, a better class, and a tenant below its share."""

import pytest
from click.testing import CliRunner

from .beside_floods import AGEING_S, CLASS_FLOODS, aged, classes, light, main, newcomer
from .floods import Size
from .size_mixes import PROFILES

A10G = "a10g-llama2-7b"
LARGE = (1_000, 500)
#: High and low class. The rest is slow.
QUICK_CLASSES = (LARGE, (60, 30))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(200, 100), (60, 30)])
@pytest.mark.parametrize("profile", PROFILES)
def test_newcomer_is_served_as_its_like_from_the_first_minute(profile: str, size: Size) -> None:
    ratios = newcomer(profile, LARGE, size)
    assert all(0.9 <= ratio <= 1.1 for ratio in ratios), ratios


def hold_classes(profile: str, high: Size, low: Size, surplus: float) -> None:
    it = classes(profile, high, low, surplus)
    assert it.kept >= (0.93 if surplus else 0.98), it
    # A head that ageing brought waits for room, at most until the last request that ran has ended.
    assert it.low_waited_s <= AGEING_S + it.longest_s, it
    assert it.low > 0, it


@pytest.mark.parametrize("surplus", [0.0, 0.1])
def test_high_class_keeps_its_service_beside_a_flood(surplus: float) -> None:
    hold_classes(A10G, *QUICK_CLASSES, surplus)


@pytest.mark.slow
@pytest.mark.parametrize("surplus", [0.0, 0.1])
@pytest.mark.parametrize("sizes", CLASS_FLOODS)
@pytest.mark.parametrize("profile", PROFILES)
def test_high_class_keeps_its_service_beside_any_flood(
    profile: str, sizes: tuple[Size, Size], surplus: float
) -> None:
    hold_classes(profile, *sizes, surplus)


def test_high_class_goes_on_beside_a_head_that_ageing_brought() -> None:
    p90, p99 = aged(A10G, {})
    assert p90 <= 0.2, p90
    assert p99 <= 1.0, p99
    # Without passing, each of the low class's aged requests delays the high class.
    p90, _ = aged(A10G, {"scheduler.expert.dispatch": "strict"})
    assert p90 > 2.0, p90


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flood", "most"), [("one length", 1.2), ("many lengths", 1.2), ("seven tenants", 1.4)]
)
@pytest.mark.parametrize("profile", PROFILES)
def test_light_tenant_waits_little_longer_than_in_strict_order(
    profile: str, flood: str, most: float
) -> None:
    count, p99 = light(profile, flood, {})
    _, strict = light(profile, flood, {"scheduler.expert.dispatch": "strict"})
    assert count >= 500
    assert p99 <= most * strict, (p99, strict)


def test_a_profile_whose_context_holds_no_aged_request_is_named() -> None:
    done = CliRunner().invoke(main, ["--only", "aged", "--profile", "tiny-cpu"])
    assert done.output == (
        "aged tiny-cpu         left out: its context holds no request of (2500, 500)\n"
    )
    assert done.exit_code == 0
