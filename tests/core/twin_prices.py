"""Computes in the twin what a request costs."""

from collections.abc import Mapping

from .twin_types import Request

PRICED_MAX = ((1 << 63) - 1) // 1_000
CHARGE_MAX = 3 << 60


def kv_steps(r: Request, inputs: int, outputs: int) -> int:
    """Return the token-steps for which a request has held the KV cache."""
    return min(outputs * (2 * inputs * r.n + outputs) // (2 * r.sequences), 1 << 62)


def price_of(limits: Mapping[str, int], r: Request, inputs: int, cached: int, outputs: int) -> int:
    """Return what a request costs with these totals, at weight 1."""
    price = limits["input_price_micro"]
    micro = (
        (inputs - cached) * price
        + cached * (price * limits["cached_price_ppm"] // 1_000_000)
        + outputs * limits["output_price_micro"]
        + kv_steps(r, inputs, outputs) * limits["kv_price_micro"]
    )
    return min(micro, PRICED_MAX)


def weighted_by(micro: int, weight_milli: int) -> int:
    """Return a cost over a weight."""
    return min(micro * 1000 // weight_milli, CHARGE_MAX)
