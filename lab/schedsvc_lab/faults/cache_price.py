"""Draws the price of the KV cache of a run."""

from random import Random

FIRST = 1 << 47
"""Seeds from here on draw it."""


def draw_cache_price(seed: int, *, fair: bool) -> dict[str, int]:
    """Return settings that charge for the KV cache, in a quarter of the runs that measure fairness.

    The draw has random numbers of its own, so that other runs stay as they are.
    """
    rnd = Random(seed ^ 0xCAC4E)  # noqa: S311 - no secret: one seed is one run
    if seed < FIRST or not fair or rnd.random() >= 0.25:
        return {}
    return {"kv_price_micro": rnd.choice((1_000, 10_000))}
