"""Draws prices at which the KV cache is a part of the charge."""

from random import Random

#: From a part of the charge to nearly all of it.
_PRICES = (
    {"kv_price_micro": 10_000},
    {"kv_price_micro": 10_000, "input_price_micro": 1_000, "output_price_micro": 2_000},
)

FIRST = 1 << 47
"""Seeds from here on draw it."""


def draw_cache_price(seed: int, *, fair: bool) -> dict[str, int]:
    """Return settings that charge for the KV cache, in a quarter of the runs that measure fairness.

    The draw has random numbers of its own, so that other runs stay as they are.
    """
    rnd = Random(seed ^ 0xCAC4E)  # noqa: S311 - no secret: one seed is one run
    if seed < FIRST or not fair or rnd.random() >= 0.25:
        return {}
    return dict(rnd.choice(_PRICES))
