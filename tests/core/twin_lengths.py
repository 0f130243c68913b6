"""The twin's predictor: bucket counts in a dict, every quantile by a scan over all buckets.

The decay is by halving counts, so sorted samples would not give the same answer: buckets are part
of what is specified (below 128 a bucket for each length, above 64 buckets an octave).
"""

LENGTH_MAX = (1 << 17) - 1
WINDOW = 512
NEWCOMER_LEASES = 4


def bucket(length: int) -> tuple[int, int]:
    """(low, width) of the bucket that holds a length."""
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
    """Counts of one flow, or of all."""

    def __init__(self) -> None:
        self.samples = 0
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
        """The least bucket's middle with at least so much of the mass longer than `beyond`."""
        after = bucket(beyond) if beyond >= 0 else (-1, 0)
        kept = sorted((where, n) for where, n in self.counts.items() if where > after)
        mass = sum(n for _, n in kept)
        seen = 0
        for where, n in kept:
            seen += n
            if seen * 1_000_000 >= ppm * mass:
                return middle(where)
        return None


class Predictor:
    """The flow's own lengths, else those of all flows, else nothing."""

    def __init__(self, quantile_ppm: int, samples_min: int) -> None:
        self.ppm, self.samples_min = quantile_ppm, samples_min
        self.forget()

    def forget(self) -> None:
        self.overall = Lengths()
        self.flows: dict[int, Lengths] = {}
        self.judged = self.covered = self.reserved = self.used = 0

    def learn(self, flow: int, length: int) -> None:
        self.flows.setdefault(flow, Lengths()).learn(length)
        self.overall.learn(length)

    def evidence(self, flow: int) -> Lengths | None:
        for lengths in (self.flows.get(flow), self.overall):
            if lengths is not None and lengths.samples >= self.samples_min:
                return lengths
        return None

    def quantile(self, flow: int) -> int | None:
        """What the ledger reserves for each sequence of this flow."""
        return self._at_least_one(flow, self.ppm)

    def promise(self, flow: int, live: int) -> int | None:
        """On the evidence of other flows only a few leases of a newcomer may run at once."""
        own = self.flows.get(flow)
        if live >= NEWCOMER_LEASES and (own is None or own.samples < self.samples_min):
            return None
        return self.quantile(flow)

    def median(self, flow: int) -> int | None:
        return self._at_least_one(flow, 500_000)

    def _at_least_one(self, flow: int, ppm: int) -> int | None:
        lengths = self.evidence(flow)
        if lengths is None:
            return None
        found = lengths.quantile(ppm)
        assert found is not None
        return max(1, found)

    def beyond(self, flow: int, produced: int) -> int:
        """The conditional quantile, but at least a quarter more than was produced."""
        lengths = self.evidence(flow)
        found = lengths.quantile(self.ppm, produced) if lengths else None
        return max(found or 0, produced + max(16, produced // 4))

    def judge(self, promised: int, used: int, by_lengths: bool) -> None:
        self.reserved += promised
        self.used += used
        if by_lengths:
            self.judged += 1
            self.covered += used <= promised
