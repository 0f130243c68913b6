"""Tests what a price of the KV cache gives tenants whose requests differ in size."""

import pytest

from .kv_mixes import CACHE, SECONDS, TOKENS, play
from .size_mixes import MIXES

MIX = next(mix for mix in MIXES if mix.name == "17:1")


@pytest.mark.parametrize(("prices", "held"), [(CACHE, "token_steps"), (SECONDS, "token_seconds")])
def test_priced_cache_is_held_alike_and_serves_far_more_in_all(
    prices: tuple[float, ...], held: str
) -> None:
    equal, priced = (play("a10g-llama2-7b", MIX, each, large=100) for each in (TOKENS, prices))
    large, small = getattr(priced, held)
    assert abs(small / large - 1) <= 0.05, priced
    assert priced.total >= 2.4 * equal.total, (equal, priced)
    assert priced.gap_of_bound <= 1, priced
    # Equal tokens are another currency.
    large, small = getattr(equal, held)
    assert small / large < 0.1
