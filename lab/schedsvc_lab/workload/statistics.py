"""Describes a trace: rate, burstiness, lengths, tenants, sharing. One pass, in the order given.

Memory grows with the number of different seconds, lengths, tenants, conversations and blocks, not
with the number of requests.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from schedsvc_lab.workload import zipf
from schedsvc_lab.workload.record import Record

WINDOWS_S = (1, 10, 60)
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


class Lengths:
    """Counts tokens, kept as how often each count occurred."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.tokens = 0

    def add(self, tokens: int) -> None:
        """Count one length."""
        self.counts[tokens] += 1
        self.tokens += tokens

    def summary(self) -> dict[str, float] | None:
        """Return mean, extremes and quantiles: the least length that a share does not exceed."""
        total = self.counts.total()
        if total == 0:
            return None
        ordered = sorted(self.counts.items())
        result: dict[str, float] = {
            "mean": self.tokens / total,
            "min": ordered[0][0],
            "max": ordered[-1][0],
        }
        wanted = [(share, math.ceil(share * total)) for share in QUANTILES]
        seen = 0
        for length, count in ordered:
            seen += count
            while wanted and seen >= wanted[0][1]:
                result[f"p{wanted.pop(0)[0] * 100:g}"] = length
        return result


class Gaps:
    """Times between arrivals: mean and coefficient of variation by Welford's method."""

    def __init__(self) -> None:
        self.count = 0
        self._mean_s = 0.0
        self._squares = 0.0

    def add(self, gap_s: float) -> None:
        """Count one gap."""
        self.count += 1
        off = gap_s - self._mean_s
        self._mean_s += off / self.count
        self._squares += off * (gap_s - self._mean_s)

    @property
    def cv(self) -> float | None:
        """Return the standard deviation over mean; 1 for a Poisson process.

        None if it is undefined.
        """
        if self.count < 2 or self._mean_s <= 0:
            return None
        return math.sqrt(self._squares / (self.count - 1)) / self._mean_s


@dataclass
class Share:
    """Holds the totals of one tenant's requests."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass
class Sharing:
    """Counts the hits of an unlimited cache: leading blocks that an earlier request had."""

    block_tokens: int = 0
    blocks: int = 0
    shared_blocks: int = 0
    tokens: int = 0
    shared_tokens: int = 0
    seen: set[int] = field(default_factory=set, repr=False)
    #: Requests by the percentage of their prompt that was shared, rounded down.
    percents: Counter[int] = field(default_factory=Counter, repr=False)

    def add(self, blocks: tuple[int, ...], input_tokens: int) -> None:
        """Count a request. O(its blocks)."""
        shared = 0
        for block in blocks:
            if block not in self.seen:
                break
            shared += 1
        self.seen.update(blocks[shared:])
        self.blocks += len(blocks)
        self.shared_blocks += shared
        self.tokens += input_tokens
        served = min(shared * self.block_tokens, input_tokens)
        self.shared_tokens += served
        self.percents[100 * served // input_tokens] += 1

    def summary(self) -> dict[str, float]:
        """Return counts and shares."""
        return {
            "block_tokens": self.block_tokens,
            "blocks": self.blocks,
            "different_blocks": len(self.seen),
            "shared_blocks": self.shared_blocks,
            "shared_blocks_share": self.shared_blocks / self.blocks,
            "shared_tokens": self.shared_tokens,
            "shared_tokens_share": self.shared_tokens / self.tokens,
        }


class Description:
    """Gathers a trace's statistics record by record, in the order of arrival if there is one."""

    def __init__(self, default_tenant: str = "default") -> None:
        self.requests = 0
        self.lengths = {"input": Lengths(), "output": Lengths()}
        self.tenants: dict[str, Share] = {}
        self.per_second: Counter[int] = Counter()
        self.gaps = Gaps()
        self.sharing: dict[int, Sharing] = {}
        self.conversations: set[str] = set()
        self.classes: Counter[str] = Counter()
        self._default_tenant = default_tenant
        self._first_s: float | None = None
        self._last_s = 0.0

    def add(self, record: Record) -> None:
        """Count one request."""
        self.requests += 1
        share = self.tenants.setdefault(record.tenant or self._default_tenant, Share())
        share.requests += 1
        if record.input_tokens is not None:
            share.input_tokens += record.input_tokens
            self.lengths["input"].add(record.input_tokens)
        if record.output_tokens is not None:
            share.output_tokens += record.output_tokens
            self.lengths["output"].add(record.output_tokens)
        if record.arrival_s is not None:
            self._arrive(record.arrival_s)
        if record.conversation is not None:
            self.conversations.add(record.conversation)
        if record.request_class is not None:
            self.classes[record.request_class] += 1
        if record.blocks and record.block_tokens and record.input_tokens:
            sharing = self.sharing.setdefault(
                record.block_tokens, Sharing(block_tokens=record.block_tokens)
            )
            sharing.add(record.blocks, record.input_tokens)

    def _arrive(self, arrival_s: float) -> None:
        if self._first_s is None:
            self._first_s = arrival_s
        else:
            self.gaps.add(arrival_s - self._last_s)
        self._last_s = arrival_s
        self.per_second[int(arrival_s - self._first_s)] += 1

    @property
    def duration_s(self) -> float:
        """Return from the first arrival to the last."""
        return 0.0 if self._first_s is None else self._last_s - self._first_s

    @property
    def rate_per_s(self) -> float | None:
        """Return the mean requests per second; None for fewer than two different times."""
        return self.gaps.count / self.duration_s if self.duration_s else None

    def dispersion(self, window_s: int) -> float | None:
        """Return the dispersion: variance over mean of the counts in whole windows; Poisson: 1."""
        windows = int(self.duration_s) // window_s
        if windows < 2:
            return None
        counts: Counter[int] = Counter()
        for second, count in self.per_second.items():
            counts[second // window_s] += count
        inside = [count for window, count in counts.items() if window < windows]
        mean = sum(inside) / windows
        if mean == 0:
            return None
        squares = sum((count - mean) ** 2 for count in inside)
        squares += (windows - len(inside)) * mean**2
        return squares / (windows - 1) / mean

    def rate(self, points_max: int = 240) -> tuple[int, list[float]]:
        """Return requests per second over time: the window's seconds, and the rate in each."""
        window_s = max(1, math.ceil((self.duration_s + 1) / points_max))
        counts = [0] * (int(self.duration_s) // window_s + 1)
        for second, count in self.per_second.items():
            counts[second // window_s] += count
        return window_s, [count / window_s for count in counts]

    def shares(self) -> list[tuple[str, Share]]:
        """Return tenants, the one with the most requests first."""
        return sorted(self.tenants.items(), key=lambda item: (-item[1].requests, item[0]))

    def summary(self, tenants_max: int = 100) -> dict[str, Any]:
        """Return everything as plain data for JSON; of the tenants, the `tenants_max` largest."""
        timed = self._first_s is not None
        window_s, rate = self.rate()
        return {
            "requests": self.requests,
            "tenants": len(self.tenants),
            "duration_s": self.duration_s,
            "input_tokens": self.lengths["input"].tokens,
            "output_tokens": self.lengths["output"].tokens,
            "conversations": len(self.conversations),
            "requests_without_input_tokens": self.requests - self.lengths["input"].counts.total(),
            "requests_without_output_tokens": self.requests - self.lengths["output"].counts.total(),
            "rate_per_s": self.rate_per_s,
            "gap_cv": self.gaps.cv,
            "dispersion": {str(window): self.dispersion(window) for window in WINDOWS_S},
            "rate_over_time": {"window_s": window_s, "requests_per_s": rate} if timed else None,
            "lengths": {name: lengths.summary() for name, lengths in self.lengths.items()},
            "classes": dict(self.classes),
            "shares": [
                {
                    "tenant": name,
                    "requests": share.requests,
                    "share": share.requests / self.requests,
                    "input_tokens": share.input_tokens,
                    "output_tokens": share.output_tokens,
                }
                for name, share in self.shares()[:tenants_max]
            ],
            "zipf_exponent": zipf.exponent_of([share.requests for _, share in self.shares()]),
            "sharing": [sharing.summary() for sharing in self.sharing.values()],
        }
