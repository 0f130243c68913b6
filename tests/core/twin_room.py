"""Finds a pool's load, headroom and shares in the twin by reading everything."""

from collections import Counter

from .twin_prefix import Prefixes
from .twin_prices import price_of
from .twin_types import SUSPECT, Request

WINDOW_NS = 500_000_000
FRESH_NS = 5 * 10**9
LINGER_NS = 10 * 10**9
PREFILL_MAX_NS = 10**9


def blocks_then(each: int, more: int, size: int) -> int:
    """Return blocks of a sequence after more tokens; if they are large, at most one too many."""
    if size <= 128:
        return -(-(each + more) // size)
    of_part = -(-size // 128)
    begins = (each - 1) % size // of_part >= (size - more % size) // of_part
    return (each - 1) // size + 1 + more // size + begins


class Room(Prefixes):
    """Keeps the load in both forms, adaptive headroom, and what flows below their share need."""

    def work_of(self, r: Request) -> int:
        """Return the work that a pool's pace counts for a request, in tokens."""
        each = self.flows[r.flow].average_milli // 1000
        if each == 0 or each > r.output_max_tokens:
            each = r.output_max_tokens
        micro = price_of(self.limits, r, r.prompt_tokens, 0, each * r.sequences)
        return min(max(1, micro // 10**6), 1 << 30)

    def load(
        self,
        pool: int,
        extra: tuple[int, int, int] | None = None,
        blocks: int = 0,
        adapter: bytes = b"",
    ) -> int:
        """Return tokens at worst, with one more lease (left, each, width; width 0: throughout)."""
        p = self.pools[pool]
        size = p.block_size
        others = p.beyond_tokens + self.adapter_tokens(pool, adapter)
        promised = (self.promised(pool) + blocks) * size
        if self.form == "sum":
            return promised + others
        entries = [self.figures(pool, r) for r in self.leases_of(pool)]
        if extra is not None:
            entries.append(extra)
        at_worst = max(
            [
                sum(
                    width * blocks_then(each, moment, size)
                    for left, each, width in entries
                    if width and left >= moment
                )
                for moment, _, width in entries
                if width
            ],
            default=0,
        )
        fixed = sum(whole for _, whole, width in entries if not width)
        return min(promised, at_worst * size + fixed) + others

    def figures(
        self, pool: int, r: Request, blocks: int | None = None, output: int | None = None
    ) -> tuple[int, int, int]:
        whole = (r.reserved_blocks if blocks is None else blocks) * self.pools[pool].block_size
        if not r.reports_progress or r.state == SUSPECT:
            return 0, whole, 0
        output = r.predicted_output if output is None else output
        held = min(r.prompt_tokens * r.n + r.output_tokens, whole)
        left = max(0, output - -(-r.output_tokens // r.sequences))
        left = min(left, (whole - held) // r.sequences)
        return left, max(1, -(-held // r.sequences)), r.sequences

    def allowance(self, pool: int) -> int:
        p = self.pools[pool]
        return (p.capacity_blocks + max(0, -p.headroom_blocks)) * p.block_size

    def round_of(self, pool: int, now_ns: int | None = None) -> list[Request]:
        """Return leases whose input is still to be computed, by their reports."""
        since_ns = (self.now_ns if now_ns is None else now_ns) - PREFILL_MAX_NS
        return [
            r
            for r in self.leases_of(pool)
            if r.reports_progress
            and r.output_tokens == 0
            and (r.input_tokens or 0) < r.prompt_tokens
            and r.arrival_ns + r.waited_ns > since_ns
        ]

    def round_tokens(self, pool: int, now_ns: int | None = None) -> int:
        return sum(r.prompt_tokens for r in self.round_of(pool, now_ns))

    # Headroom.

    def telemetry(
        self,
        now_ns: int,
        pool: int,
        epoch: int,
        running: int,
        waiting: int,
        used_tokens: int,
        preemptions: int,
    ) -> None:
        self.enter(now_ns)
        p = self.pools[pool]
        if epoch != p.epoch:
            return
        known = p.told_at_ns is not None
        fresh = max(0, preemptions - p.preemptions) if known else 0
        elapsed_ns = now_ns - (p.told_at_ns or 0) if known else 0
        p.told_at_ns, p.preemptions = now_ns, preemptions
        ours = self.promised(pool) * p.block_size + self.adapter_tokens(pool)
        p.foreign_tokens = max(0, used_tokens - ours)
        ppm = p.headroom_ppm
        if fresh:
            p.probes = False
            ppm += 20_000 + 2_000 * min(fresh, 10)
        elif p.pressed and used_tokens * 100 < p.capacity_blocks * p.block_size * 95:
            pace = 5_000 if p.probes else 500
            earned = 10 * p.served
            fall = pace * min(elapsed_ns, FRESH_NS) // 10**9
            ppm -= fall if p.probes else min(fall, earned)
        p.pressed, p.served = False, 0
        start = self.limits["headroom_ppm"]
        least = min(start, self.limits["headroom_min_ppm"])
        most = max(start, self.limits["headroom_max_ppm"])
        p.headroom_ppm = min(max(ppm, least), most)

    # Shares.

    def has_shares(self) -> bool:
        return len(self.recent_flows()) > 1 and self.policy not in ("fcfs", "sif")

    def is_above_share(self, pool: int, flow: int, blocks: int) -> bool:
        recent = self.recent_flows()
        if not self.has_shares():
            return False
        weights = sum(self.flows[i].weight_milli for i in recent)
        size = max(self.pools[pool].capacity_blocks, self.promised(pool))
        held = sum(r.reserved_blocks for r in self.leases() if (r.flow, r.pool) == (flow, pool))
        return (held + blocks) * weights > size * self.flows[flow].weight_milli

    def recent_flows(self) -> list[int]:
        """Return flows that are active, or were less than ten seconds ago."""
        active = self.active()
        return [
            i
            for i, f in enumerate(self.flows)
            if i in active or (f.idle_at_ns is not None and self.now_ns < f.idle_at_ns + LINGER_NS)
        ]

    def kept_tokens(self, pool: int, now_ns: int | None = None) -> int:
        """Return the most taken in one window, a sixteenth less for each window since."""
        p = self.pools[pool]
        if not p.light:
            return 0
        start_ns = p.light[0][0]
        taken: Counter[int] = Counter()
        for at_ns, tokens in p.light:
            taken[(at_ns - start_ns) // WINDOW_NS] += tokens * 1000
        last = ((self.now_ns if now_ns is None else now_ns) - start_ns) // WINDOW_NS
        kept, windows = 0, sorted(taken)
        for window, after in zip(windows, [*windows[1:], last], strict=True):
            # A window without any is a fading one; 64 of them leave nothing.
            for faded in range(window, min(after, window + 64)):
                kept = max(kept - kept // 16, taken[faded])
            if after - window >= 64:
                kept = 0
        kept = max(kept, taken[last])
        return min(kept // 1000, p.capacity_blocks // 8 * p.block_size)

    def note_light(self, pool: int, blocks: int) -> None:
        p = self.pools[pool]
        if blocks <= p.capacity_blocks // 8:
            if p.light:
                start_ns, last_ns = p.light[0][0], p.light[-1][0]
                window_ns = last_ns - (last_ns - start_ns) % WINDOW_NS
                if self.now_ns - window_ns >= 64 * WINDOW_NS:
                    p.light = []  # the next window is the first
            p.light.append((self.now_ns, blocks * p.block_size))
