"""Draws lengths in tokens: distributions by the text that names them."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from schedsvc_lab.workload.record import TOKENS_MAX

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class _Kind:
    """Describes a family of distributions: its parameters in order, and the quantile of shares."""

    parameters: tuple[str, ...]
    quantile: Callable[..., NDArray[np.float64]]


def _uniform(shares: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    # Whole numbers are equally likely, the ends included.
    return np.floor(low + shares * (high - low + 1))


def _power(
    shares: NDArray[np.float64], low: float, high: float, exponent: float
) -> NDArray[np.float64]:
    """Return the density proportional to x^-exponent between the ends."""
    if exponent == 1:
        return np.asarray(low * (high / low) ** shares)
    power = 1 - exponent
    return np.asarray((low**power + shares * (high**power - low**power)) ** (1 / power))


def _lognormal(
    shares: NDArray[np.float64], median: float, sigma: float, most: float
) -> NDArray[np.float64]:
    normal = NormalDist().inv_cdf
    scores = np.fromiter((normal(share) for share in shares), np.float64, len(shares))
    return np.asarray(np.minimum(median * np.exp(sigma * scores), most))


def _fixed(shares: NDArray[np.float64], tokens: float) -> NDArray[np.float64]:
    return np.full(len(shares), tokens)


_KINDS = {
    "fixed": _Kind(("TOKENS",), _fixed),
    "uniform": _Kind(("MIN", "MAX"), _uniform),
    "power": _Kind(("MIN", "MAX", "EXPONENT"), _power),
    "lognormal": _Kind(("MEDIAN", "SIGMA", "MAX"), _lognormal),
}
KNOWN = ", ".join(":".join((name, *kind.parameters)) for name, kind in _KINDS.items())


@dataclass(frozen=True)
class Lengths:
    """Holds a distribution of lengths; `parse` makes it from text such as `uniform:256:512`."""

    kind: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read `KIND:VALUE:...`. Raises ValueError, which names the known kinds."""
        name, *rest = text.split(":")
        kind = _KINDS.get(name)
        if kind is None or len(rest) != len(kind.parameters):
            raise ValueError(f"{text!r} is none of {KNOWN}")
        try:
            values = tuple(float(value) for value in rest)
        except ValueError:
            raise ValueError(f"{text!r}: not a number; known: {KNOWN}") from None
        given = dict(zip(kind.parameters, values, strict=True))
        for parameter, value in given.items():
            tokens = parameter not in {"SIGMA", "EXPONENT"}
            least, most = (1, TOKENS_MAX) if tokens else (0, 100)
            if not least <= value <= most:
                raise ValueError(f"{text!r}: {parameter} must be from {least} to {most}")
        if given.get("MIN", 0) > given.get("MAX", TOKENS_MAX):
            raise ValueError(f"{text!r}: MIN is more than MAX")
        return cls(name, values)

    def draw(self, rng: np.random.Generator, count: int) -> Counts:
        """Draw `count` lengths, 1 token or more.

        One from each of `count` equal shares of the distribution, in random order (Latin
        hypercube), so that even a short workload has the asked quantiles.
        """
        shares = (rng.permutation(count) + rng.uniform(size=count)) / max(count, 1)
        shares = np.clip(shares, 1e-12, 1 - 1e-12)
        tokens = np.rint(_KINDS[self.kind].quantile(shares, *self.values))
        return np.clip(tokens, 1, TOKENS_MAX).astype(np.int64)
