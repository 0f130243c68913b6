"""Compares two things on a machine that is not quiet: interleaved slices, ratios, an interval."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Comparison", "Slice", "abba", "compare"]

#: Runs one slice and returns its measurements, one or more figures.
Slice = Callable[[], Sequence[float]]
Floats = NDArray[np.float64]

_RESAMPLES = 4_000


@dataclass(frozen=True)
class Comparison:
    """Holds the median of the ratios a/b over all rounds, with a 95 % bootstrap interval."""

    ratio: float
    low: float
    high: float
    a: float  # medians over the rounds
    b: float

    @property
    def contains_one(self) -> bool:
        """Return whether the two may be the same, as two slices of one thing have to be."""
        return self.low <= 1.0 <= self.high


def abba(a: Slice, b: Slice, rounds: int) -> Floats:
    """Run A B B A `rounds` times, after one round that does not count.

    A drift of the machine within a round affects both alike. Returns an array of shape (rounds, 2,
    figures): the mean of the two slices of each.
    """
    rows = []
    for _ in range(rounds + 1):
        slices = [a(), b(), b(), a()]
        rows.append([np.mean([slices[0], slices[3]], axis=0), np.mean(slices[1:3], axis=0)])
    return np.asarray(rows[1:], dtype=np.float64)


def compare(pairs: Floats) -> Comparison:
    """Compare the columns of an array of shape (rounds, 2)."""
    ratios = pairs[:, 0] / pairs[:, 1]
    # The seed makes the interval a function of the measurements.
    draws = np.random.default_rng(0).integers(len(ratios), size=(_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[draws], axis=1), [0.025, 0.975])
    return Comparison(
        ratio=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        a=float(np.median(pairs[:, 0])),
        b=float(np.median(pairs[:, 1])),
    )
