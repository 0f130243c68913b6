"""Zipf's law over ranks 1 to n: the share of rank i is proportional to i^-exponent."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_EXPONENT_MAX = 20.0


def shares(ranks: int, exponent: float) -> NDArray[np.float64]:
    """Return the share of each rank, the largest first; exponent 0: all equal."""
    weights = np.arange(1, ranks + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum())


def exponent_of(counts: Sequence[int]) -> float | None:
    """Fit the exponent to counts by rank (largest first) by maximum likelihood, from 0 to 20.

    The likelihood is highest if the mean of log(rank) under the law is that of the counts (Clauset,
    Shalizi, Newman, SIAM Review 51, 2009, for a bounded support). None for fewer than 2 ranks.
    """
    if len(counts) < 2:
        return None
    logs = np.log(np.arange(1, len(counts) + 1, dtype=np.float64))
    weights = np.asarray(counts, dtype=np.float64)
    wanted = float(weights @ logs / weights.sum())
    low, high = 0.0, _EXPONENT_MAX
    while high - low > 1e-9:
        middle = (low + high) / 2
        if float(shares(len(counts), middle) @ logs) > wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2
