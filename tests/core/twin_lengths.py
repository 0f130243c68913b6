"""Predicts for the twin: bucket counts in a dict, every quantile by a scan over all buckets.

The decay is by halving counts, so sorted samples would not give the same answer: buckets are part
of the specification (below 128 a bucket for each length, above 64 buckets an octave).
"""

from typing import NamedTuple

LENGTH_MAX = (1 << 17) - 1
WINDOW = 512
NEWCOMER_LEASES = 4
PAIRS_MAX = 16
WARM = 3
STEP_PPM = 4_000
NOTHING, ALL, FLOW, PAIR = range(4)


def bucket(length: int) -> tuple[int, int]:
    """Return (low, width) of the bucket that holds a length."""
    length = min(length, LENGTH_MAX)
    width = max(1, 1 << max(0, length.bit_length() - 7))
    return length // width * width, width


def _all_buckets() -> list[tuple[int, int]]:
    found, length = [], 0
    while length <= LENGTH_MAX:
        found.append(bucket(length))
        length = found[-1][0] + found[-1][1]
    return found


BUCKETS = _all_buckets()


def middle(low_width: tuple[int, int]) -> int:
    return low_width[0] + low_width[1] // 2


class Lengths:
    """Counts one kind of request; `level` is the quantile in use."""

    def __init__(self, level: int = 900_000) -> None:
        self.samples = 0
        self.level = level
        self.counts: dict[tuple[int, int], int] = {}

    def learn(self, length: int) -> None:
        self.samples += 1
        where = bucket(length)
        self.counts[where] = self.counts.get(where, 0) + 1
        if sum(self.counts.values()) >= WINDOW:
            self._halve()

    def _halve(self) -> None:
        halved, carry = {}, 0
        for where in BUCKETS:
            carry += self.counts.get(where, 0)
            if carry // 2:
                halved[where] = carry // 2
            carry %= 2
        self.counts = halved

    def quantile(self, ppm: int, beyond: int = -1) -> int | None:
        """Return the middle of the first bucket up to which there is `ppm` of mass and one length,
        among lengths above `beyond`; the last bucket if that is more than there is."""
        after = bucket(beyond) if beyond >= 0 else (-1, 0)
        kept = sorted((where, n) for where, n in self.counts.items() if where > after)
        mass = sum(n for _, n in kept)
        seen = 0
        for where, n in kept:
            seen += n
            if seen * 1_000_000 >= ppm * (mass + 1):
                return middle(where)
        return middle(kept[-1][0]) if kept else None


class Asked(NamedTuple):
    """Says whose output is to be predicted, and how many leases run."""

    flow: int
    adapter: bytes
    live: int  # of the flow
    live_of_all: int


class Promise(NamedTuple):
    """Holds output tokens (None: unknown) and what they were predicted from."""

    tokens: int | None
    by: int


class Predictor:
    """Predicts by lengths of flow and adapter, else of the flow, else of all, else nothing."""

    def __init__(self, quantile_ppm: int, samples_min: int) -> None:
        self.ppm = quantile_ppm
        # Enough that the quantile is not beyond the largest of them, but at most half a window.
        least = next(
            (n for n in range(1, WINDOW // 2) if ppm_rank(quantile_ppm, n) <= n), WINDOW // 2
        )
        self.enough = max(samples_min, least)
        self.forget()

    def forget(self) -> None:
        self.overall = Lengths(self.ppm)
        self.flows: dict[int, Lengths] = {}
        self.pairs: dict[int, dict[bytes, Lengths]] = {}  # the one learned last comes last

    def knows_little(self, flow: int) -> bool:
        """Return whether the lengths of all flows predict its outputs."""
        known = [self.flows.get(flow), *self.pairs.get(flow, {}).values()]
        return not any(lengths and lengths.samples >= self.enough for lengths in known)

    def forget_flow(self, flow: int) -> None:
        self.flows.pop(flow, None)
        self.pairs.pop(flow, None)

    def learn(self, flow: int, adapter: bytes, length: int) -> None:
        self.flows.setdefault(flow, Lengths(self.ppm)).learn(length)
        self.overall.learn(length)
        if adapter:
            pairs = self.pairs.setdefault(flow, {})
            lengths = pairs.pop(adapter, None) or Lengths(self.ppm)
            if len(pairs) == PAIRS_MAX:
                del pairs[next(iter(pairs))]
            pairs[adapter] = lengths
            lengths.learn(length)

    def _kinds(self, flow: int, adapter: bytes) -> dict[int, Lengths | None]:
        return {
            PAIR: self.pairs.get(flow, {}).get(adapter),
            FLOW: self.flows.get(flow),
            ALL: self.overall,
        }

    def evidence(self, asked: Asked) -> tuple[Lengths | None, int]:
        for by, lengths in self._kinds(asked.flow, asked.adapter).items():
            live = asked.live_of_all if by == ALL else asked.live
            if lengths and lengths.samples >= max(self.enough, WARM * live):
                return lengths, by
        return None, NOTHING

    def promise(self, asked: Asked) -> Promise:
        """Return tokens that the ledger reserves for each sequence of the next request."""
        lengths, by = self.evidence(asked)
        own = self.flows.get(asked.flow)
        ended = own.samples if own else 0
        if lengths is None or (by == ALL and asked.live >= NEWCOMER_LEASES * (1 + ended)):
            return Promise(None, NOTHING)
        return Promise(_at_least_one(lengths.quantile(lengths.level)), by)

    def quantile(self, asked: Asked) -> int | None:
        lengths, _ = self.evidence(asked)
        return _at_least_one(lengths.quantile(lengths.level)) if lengths else None

    def median(self, asked: Asked) -> int | None:
        lengths, _ = self.evidence(asked)
        return _at_least_one(lengths.quantile(500_000)) if lengths else None

    def beyond(self, asked: Asked, produced: int) -> int:
        """The conditional quantile, but at least a quarter more than was produced."""
        lengths, _ = self.evidence(asked)
        found = lengths.quantile(lengths.level, produced) if lengths else None
        return max(found or 0, produced + max(16, produced // 4))

    def judge(self, flow: int, adapter: bytes, by: int, covered: bool) -> None:
        if by == NOTHING:
            return
        lengths = self._kinds(flow, adapter)[by]
        # Forgotten since, it may have begun again.
        if lengths and lengths.samples >= self.enough:
            missed = 1_000_000 - self.ppm
            step = -(STEP_PPM * missed // 10**6) if covered else STEP_PPM * self.ppm // 10**6
            lengths.level = max(lengths.level + step, 1_000_000 - 3 * missed, 1)
            lengths.level = min(lengths.level, 1_000_000)


def ppm_rank(ppm: int, samples: int) -> int:
    """Return which of `samples` lengths, in order, covers the next one with this probability."""
    return -(-ppm * (samples + 1) // 1_000_000)


def _at_least_one(tokens: int | None) -> int:
    assert tokens is not None
    return max(1, tokens)
