"""Steers the headroom of a pool in the twin, as the controller of the core does."""

from dataclasses import dataclass

FRESH_NS = 5 * 10**9
ROUND_MAX_NS = 20 * 10**9
FORGET_NS = 600 * 10**9
STEP_MICRO = 250_000
EARLY_MIN_PPM = 40_000
ROUNDS_KEPT = 64
START_SPREAD_PPM = 10_000


def towards_0(value: int, divisor: int) -> int:
    return value // divisor if value >= 0 else -(-value // divisor)


def ln_milli(value: int) -> int:
    """Return 1,000 times the natural logarithm, in straight lines between powers of two."""
    twice = value.bit_length() - 1
    return 693 * ((twice << 10) + ((value << 10) >> twice) - (1 << 10)) >> 10


def spreads_for(served: int) -> int:
    one_in = 10**6 // (1_000 * max(1, served))
    return min(max((ln_milli(max(1, one_in)) - 577) * 7 // 8, 1_000), 6_000)


@dataclass
class Headroom:
    """Holds what is learned in rounds of requests."""

    ppm: int
    least_ppm: int
    most_ppm: int
    excess_ppm: int = 0
    spread_ppm: int = START_SPREAD_PPM
    rounds: int = 0
    spreads_milli: int = 2_750
    correction_micro: int = 0
    skip_ns: int = 60 * 10**9
    round_ns: int = 0
    pressed_ns: int = 0
    served: int = 0
    preempted: int = 0
    used_tokens: int = 0

    def __post_init__(self) -> None:
        self.round_ppm = self.before_ppm = self.ppm
        self.excess_ppm = self.ppm - 27_500

    def learned_ppm(self) -> int:
        spreads = self.spreads_milli * 1_000 + self.correction_micro
        return self.excess_ppm + spreads * self.spread_ppm // 10**6

    def put(self, ppm: int) -> None:
        self.ppm = min(max(ppm, self.least_ppm), self.most_ppm)

    def restarts(self) -> None:
        """Only what was learned outlives the process."""
        self.put(self.learned_ppm())
        self.round_ppm = self.before_ppm = self.ppm
        self.skip_ns = 1 if self.rounds else 60 * 10**9
        self.round_ns = self.pressed_ns = self.served = self.preempted = self.used_tokens = 0

    def hears(
        self, used_tokens: int, preempted: int, elapsed_ns: int, *, pressed: bool,
        capacity_tokens: int, live: int,
    ) -> None:  # fmt: skip
        """The engine reports."""
        elapsed_ns = min(elapsed_ns, FRESH_NS)
        preempted = min(preempted, 4 - self.preempted)
        self.preempted += preempted
        self.correction_micro = min(self.correction_micro + STEP_MICRO * preempted, 2_000_000)
        self.round_ns += elapsed_ns
        self.pressed_ns += elapsed_ns if pressed else 0
        self.used_tokens = max(self.used_tokens, used_tokens)
        if self.round_ns >= ROUND_MAX_NS or self.served >= max(8, live):
            least_ppm = self.ppm - 1_000 * self.round_ns // 10**9
            self._end(capacity_tokens)
            if self.rounds < ROUNDS_KEPT:
                least_ppm = max(least_ppm, min(self.ppm, EARLY_MIN_PPM))
            self.put(max(self.learned_ppm(), least_ppm))
        elif preempted:
            self.put(max(self.learned_ppm(), self.ppm))

    def _end(self, capacity_tokens: int) -> None:
        pressed = self.pressed_ns * 4 >= self.round_ns * 3
        if not pressed:
            self.skip_ns = max(self.skip_ns, 1)
        elif self.skip_ns:
            self.skip_ns = max(0, self.skip_ns - self.round_ns)
        else:
            earned = STEP_MICRO * self.served // 1_000
            self.correction_micro = max(self.correction_micro - earned, -1_000_000)
            self.spreads_milli = spreads_for(self.served)
            most = min(self.used_tokens, capacity_tokens)
            self._learn(most * 10**6 // capacity_tokens - 10**6 + self.before_ppm)
        self.correction_micro -= towards_0(self.correction_micro * self.round_ns, FORGET_NS)
        self.before_ppm, self.round_ppm = self.round_ppm, self.ppm
        self.round_ns = self.pressed_ns = self.served = self.preempted = self.used_tokens = 0

    def _learn(self, excess_ppm: int) -> None:
        off = excess_ppm - self.excess_ppm
        most = 4 * self.spread_ppm
        if self.preempted:
            off = most
        if self.rounds:
            off = min(max(off, -most), most)
            self.spread_ppm += towards_0(abs(off) - self.spread_ppm, ROUNDS_KEPT)
            self.spread_ppm = max(self.spread_ppm, 1_000)
        self.rounds = min(self.rounds + 1, ROUNDS_KEPT)
        self.excess_ppm += towards_0(off, max(self.rounds, 8) if off > 0 else self.rounds)
