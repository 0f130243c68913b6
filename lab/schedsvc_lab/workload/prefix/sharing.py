"""Measures an unlimited cache: sharing of requests, hits and reuse gaps of blocks."""

from array import array
from typing import Any, NamedTuple

import numpy as np

QUANTILES = (0.1, 0.5, 0.9, 0.99)


class Served(NamedTuple):
    """Says how much of one request was there already: blocks, tokens, share of its prompt."""

    shared_blocks: int
    shared_tokens: int
    sharing_fraction: float


class BlockUse(NamedTuple):
    """Counts one block's uses by requests, when, and the times between; None without times."""

    block: int
    hits: int
    first_s: float | None
    last_s: float | None
    gap_mean_s: float | None
    gap_min_s: float | None
    gap_max_s: float | None


class Uses:
    """Holds all uses of blocks by request, as finite caches need them. 4 bytes a use."""

    def __init__(self) -> None:
        self.blocks = array("i")
        self.ends = array("q")
        self.tokens = array("q")

    def add(self, blocks: list[int], input_tokens: int) -> None:
        """Add a request."""
        self.blocks.extend(blocks)
        self.ends.append(len(self.blocks))
        self.tokens.append(input_tokens)


class Sharing:
    """Counts requests in the order of arrival. Blocks are numbered from 0 by first use.

    A block is shared if an earlier request had it. It stands for all before it, so the shared
    blocks of a request are its first ones. Memory: 40 bytes a block, 12 a use.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.uses = Uses()
        self.fractions = array("d")
        #: Seconds between uses of a block that follow each other.
        self.gaps_s = array("d")
        self.hits = array("q")
        self.shared_blocks = 0
        self.shared_tokens = 0
        self._first_s = array("d")
        self._last_s = array("d")
        self._gap_min_s = array("d")
        self._gap_max_s = array("d")
        self._timed = True

    def add(self, blocks: list[int], input_tokens: int, arrival_s: float | None) -> Served:
        """Count a request. O(its blocks)."""
        self._timed = self._timed and arrival_s is not None
        known = len(self.hits)
        shared = 0
        now_s = arrival_s or 0.0
        for block in blocks:
            if block < known:
                shared += 1
                self.hits[block] += 1
                self._gap(block, now_s)
            else:
                self.hits.append(1)
                self._first_s.append(now_s)
                self._last_s.append(now_s)
                self._gap_min_s.append(float("inf"))
                self._gap_max_s.append(0.0)
        tokens = min(shared * self.block_tokens, input_tokens)
        fraction = tokens / input_tokens if input_tokens else 0.0
        self.uses.add(blocks, input_tokens)
        self.fractions.append(fraction)
        self.shared_blocks += shared
        self.shared_tokens += tokens
        return Served(shared, tokens, fraction)

    def _gap(self, block: int, now_s: float) -> None:
        gap_s = now_s - self._last_s[block]
        self._last_s[block] = now_s
        self.gaps_s.append(gap_s)
        self._gap_min_s[block] = min(self._gap_min_s[block], gap_s)
        self._gap_max_s[block] = max(self._gap_max_s[block], gap_s)

    @property
    def timed(self) -> bool:
        """Return whether all requests have an arrival time."""
        return self._timed

    def block_use(self, block: int) -> BlockUse:
        """Return one block's uses."""
        hits = self.hits[block]
        if not self._timed:
            return BlockUse(block, hits, None, None, None, None, None)
        first_s, last_s = self._first_s[block], self._last_s[block]
        if hits == 1:
            return BlockUse(block, 1, first_s, last_s, None, None, None)
        mean_s = (last_s - first_s) / (hits - 1)
        gaps = self._gap_min_s[block], self._gap_max_s[block]
        return BlockUse(block, hits, first_s, last_s, mean_s, *gaps)

    def summary(self) -> dict[str, Any]:
        """Return counts, shares and distributions."""
        uses, tokens = len(self.uses.blocks), sum(self.uses.tokens)
        different = len(self.hits)
        hits = np.frombuffer(self.hits, np.int64) if different else np.zeros(0, np.int64)
        return {
            "block_tokens": self.block_tokens,
            "requests": len(self.fractions),
            "input_tokens": tokens,
            "blocks": uses,
            "different_blocks": different,
            "shared_blocks": self.shared_blocks,
            "shared_blocks_share": self.shared_blocks / uses if uses else 0.0,
            "shared_tokens": self.shared_tokens,
            "shared_tokens_share": self.shared_tokens / tokens if tokens else 0.0,
            "sharing_fraction": distribution(self.fractions),
            "block_reuse_rate": float((hits > 1).mean()) if different else 0.0,
            "block_hits": distribution(hits),
            "reuse_gap_s": distribution(self.gaps_s) if self._timed else None,
        }


def distribution(values: "array[float] | np.ndarray[Any, Any]") -> dict[str, float] | None:
    """Return mean, extremes and quantiles (interpolated); None if there are no values."""
    if not len(values):
        return None
    found = np.asarray(values, np.float64)
    result = {"mean": found.mean(), "min": found.min(), "max": found.max()}
    for share, value in zip(QUANTILES, np.quantile(found, QUANTILES), strict=True):
        result[f"p{share * 100:g}"] = value
    return {name: float(value) for name, value in result.items()}
