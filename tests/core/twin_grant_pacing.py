"""Grants of equal requests kept apart in time, in the twin."""

from .twin_estimate import WAIT_MAX_NS, averaged
from .twin_rejections import Refusals
from .twin_types import Request


class Stagger(Refusals):
    """How long a grant keeps the next of its kind away."""

    def note_run(self, r: Request, each: int) -> None:
        p = self.pools[r.pool]
        if r.is_void or not r.reports_progress or not each:
            return
        ran = min(self.now_ns - r.arrival_ns - r.waited_ns, WAIT_MAX_NS), each * 1000
        before = (p.run_ns, p.run_milli) if p.run_milli else ran
        p.run_ns, p.run_milli = (averaged(old, new) for old, new in zip(before, ran, strict=True))

    def apart_ns(self, pool: int, r: Request, blocks: int, above: bool, promise: int | None) -> int:
        p, f = self.pools[pool], self.flows[r.flow]
        capacity, promised = p.capacity_blocks, self.promised(pool)
        queued = len(self.queued(lambda q: q.flow == r.flow))
        if not self.limits["grant_pacing"] or self.form == "sum":
            return 0
        if not r.reports_progress or r.deadline_ns is not None:
            return 0
        if self.classes.is_exempt(r.flow) or (not above and len(self.recent_flows()) > 1):
            return 0
        alike = promise is not None and 10 * f.average_milli >= 9000 * promise
        if not alike or not p.run_milli:
            return 0
        if 10 * (self.predictor.median(self.asked(r)) or 0) < 9 * (promise or 0):
            return 0
        if promised * 2 < capacity or promised + queued * blocks <= capacity:
            return 0
        each = min(f.average_milli, r.output_max_tokens * 1000)
        run_ns = min(WAIT_MAX_NS, p.run_ns * each // p.run_milli)
        held = r.prompt_tokens * r.n + (each // 1000 + p.block_size) * r.sequences // 2
        return run_ns * held // (capacity * p.block_size)
