"""How fast the twin drains, and how long a request will wait."""

from collections import Counter
from dataclasses import dataclass

from schedsvc import _core as core

from .twin_room import Room
from .twin_types import Pool, Rate, Request

SECOND = 10**9
WAIT_MAX_NS = 1 << 52
US_MAX = (1 << 31) - 1


def averaged(old: int, new: int) -> int:
    return (4 * old + new) // 5


def time_for(work: int, pace: int) -> int:
    return min(WAIT_MAX_NS, work * 10**12 // pace)


@dataclass
class Turn:
    """Whose wait is asked for."""

    flow: int
    target: int
    work: int
    deadline_ns: int | None = None


class Estimate(Room):
    """Waits, found by looking at all flows and all that is queued."""

    def work_of(self, r: Request) -> int:
        each = self.flows[r.flow].average_milli // 1000
        if each == 0 or each > r.output_max_tokens:
            each = r.output_max_tokens
        prices = self.limits["input_price_micro"], self.limits["output_price_micro"]
        micro = r.prompt_tokens * prices[0] + each * r.sequences * prices[1]
        return min(max(1, micro // 10**6), 1 << 30)

    def backlog(self, flow: int) -> int:
        return sum(r.work for r in self.queued(lambda r: r.flow == flow))

    def pace_of(self, target: int, *, deep: bool = False) -> int:
        return sum(self.pools[p].drain.pace(deep=deep) for p in self.serving(target))

    def has_to_wait(self, target: int) -> bool:
        pools = self.serving(target)
        return bool(pools) and all(self.pools[p].reason != "NONE" for p in pools)

    def own_pace(self, flow: int, target: int) -> int:
        f = self.flows[flow]
        queued = Counter(r.flow for r in self.queued())
        alike = {i for i, other in enumerate(self.flows) if other.cls == f.cls}
        deep = {i for i in alike if queued[i] > 1}
        pace = self.pace_of(target, deep=True)
        if deep and pace:
            sharing = deep | {flow}
        else:
            pace = self.pace_of(target)
            sharing = {i for i in alike if queued[i]} | {flow}
        weight = sum(self.flows[i].weight_milli for i in sharing)
        part = max(1, pace * f.weight_milli // weight)
        return min(f.served.pace() or part, part)

    def work_before(self, flow: int, target: int) -> int:
        f, before = self.flows[flow], 0
        counter = self.positions.counter_at(flow, target)
        place = self.classes.order()
        for i, other in enumerate(self.flows):
            if place.index(other.cls) < place.index(f.cls):
                before += self.backlog(i)
        for line in {-1, target} if self.policy not in ("fcfs", "sif") else ():
            for head in self.heads(line):
                other = self.flows[head.flow]
                key = self.rank(head, target)[0] * self.grain
                if head.flow == flow or other.cls != f.cls or key >= counter:
                    continue
                their = (counter - key) * other.weight_milli // 10**9
                before += min(their, self.order.work_ahead(head.flow, line))
        return before

    def wait_from(self, turn: Turn, ahead: int) -> int:
        """How long it will wait with so much of its own queue before it; -1: unknown."""
        pace = self.pace_of(turn.target)
        if pace == 0:
            return -1
        before = self.work_before(turn.flow, turn.target)
        if self.policy in ("fcfs", "sif"):
            cls = self.flows[turn.flow].cls
            alike = sum(self.backlog(i) for i, f in enumerate(self.flows) if f.cls == cls)
            return time_for(max(ahead, alike) + turn.work + before, pace)
        wait_ns = time_for(ahead, self.own_pace(turn.flow, turn.target))
        wait_ns += time_for(turn.work + before, pace)
        if turn.target < 0:
            wait_ns += self._named_before_ns(turn.flow, before)
        return min(WAIT_MAX_NS, wait_ns)

    def _named_before_ns(self, flow: int, before: int) -> int:
        """How much longer what names the best pool keeps one that names none."""
        waits = []
        for p in self.serving(-1):
            if not self.heads(p):
                return 0
            pace = self.pace_of(p)
            if pace:
                waits.append(time_for(max(0, self.work_before(flow, p) - before), pace))
        return min(waits, default=0)

    def wait_of_next(self, flow: int, work: int) -> int:
        """The wait of one more request for the best pool that its queued ones name, or of all."""
        named = {r.target for r in self.queued(lambda r: r.flow == flow)}
        targets = [t for t in named if t < 0 or t in self.serving(t)] if named else self.serving(-1)
        waits = [
            self.wait_of_new(Turn(flow, t, work)) if self.has_to_wait(t) else 0 for t in targets
        ]
        return min((wait for wait in waits if wait >= 0), default=-1)

    def wait_of_new(self, turn: Turn) -> int:
        ahead = self.order.work_ahead(turn.flow, turn.target, turn.deadline_ns)
        return self.wait_from(turn, ahead)

    def foretell(self, r: Request) -> None:
        """The forecast of a request that is about to be queued."""
        if not self.has_to_wait(r.target):
            return
        wait_ns = self.wait_of_new(Turn(r.flow, r.target, r.work, r.stated_ns))
        if wait_ns >= 0:
            r.foretold_wait_us = min(wait_ns // 1000, US_MAX)
            pools = [self.pools[p] for p in self.serving(r.target)]
            prefill = min(self.prefill_ns(p, self.fresh(r)) for p in pools)
            r.foretold_first_us = min((wait_ns + prefill) // 1000, US_MAX)

    def note_queued(self, r: Request) -> None:
        """It stands in its queue."""
        r.ordinal = self.arrivals[r.flow, r.target]
        self.arrivals[r.flow, r.target] += 1
        r.mark = self.work_in[r.flow, r.target]
        self.work_in[r.flow, r.target] += r.work
        self._note_backlog(r.flow, 1)

    def note_left(self, r: Request, outcome: int) -> None:
        """It has left its queue, for that reason."""
        f = self.flows[r.flow]
        error_ns = self.now_ns - r.arrival_ns - r.foretold_wait_us * 1000
        in_turn = outcome in (core.GRANTED, core.EVICTED_DEADLINE)
        told = r.foretold_wait_us >= 0 and (in_turn or outcome == core.EVICTED_TTL)
        if told and r.foretold_wait_us * 1000 > r.due_ns - r.arrival_ns:
            f.wait_error_ns -= 0 if in_turn else f.wait_error_ns // 8
            f.waits_judged += not in_turn
        elif told and (in_turn or error_ns >= 0):
            error_ns = abs(error_ns)
            f.wait_error_ns = averaged(f.wait_error_ns, error_ns) if f.waits_judged else error_ns
            f.waits_judged += 1
        self._note_backlog(r.flow, -1)

    def _note_backlog(self, flow: int, more: int) -> None:
        f, queued = self.flows[flow], len(self.queued(lambda r: r.flow == flow))
        if queued == 0 or (queued == 1 and more > 0):
            f.served = Rate()
        elif queued == 2:
            f.served.run(self.now_ns, runs=True)

    # From the grant to the first token.

    def fresh(self, r: Request) -> int:
        """Input that has to be computed, by the part of the flow's that was cached."""
        f = self.flows[r.flow]
        inputs = f.input_tokens - f.forgotten[0]
        cached = max(0, min(f.cached_input_tokens - f.forgotten[1], inputs))
        return max(1, r.prompt_tokens - (r.prompt_tokens * cached // inputs if cached else 0))

    def prefilling(self, p: Pool) -> int:
        return sum(r.fresh_tokens for r in self.leases(lambda r: self.pools[r.pool] is p))

    def prefill_ns(self, p: Pool, tokens: int) -> int:
        if p.prefill_tokens == 0:
            return 0
        return (self.prefilling(p) + tokens) * p.prefill_ns // p.prefill_tokens

    def enter_prefill(self, r: Request) -> None:
        p, fresh = self.pools[r.pool], self.fresh(r)
        r.prefill_us = min(self.prefill_ns(p, fresh) // 1000, US_MAX)
        r.prefill_line = min(self.prefilling(p) + fresh, 1 << 30)
        r.fresh_tokens = fresh

    def first_after_ns(self, r: Request) -> int:
        """Time from the grant to the first token, as reported or as forecast."""
        return max(0, r.first_us * 1000 - r.waited_ns) if r.first_us else r.prefill_us * 1000

    def note_decode(self, r: Request, each: int) -> None:
        p = self.pools[r.pool]
        ran_ns = min(self.now_ns - r.arrival_ns - r.waited_ns, WAIT_MAX_NS)
        new = max(1, ran_ns - self.first_after_ns(r)), (each - 1) * 1000
        if not r.is_void and r.reports_progress and each > 1:
            old = p.decode if p.decode[1] else new
            p.decode = averaged(old[0], new[0]), averaged(old[1], new[1])

    def output_by_now(self, r: Request) -> int:
        """Output that an answer in one piece may have had when it was given up."""
        ran_ns = self.now_ns - r.arrival_ns - r.waited_ns - self.first_after_ns(r)
        if not r.whole_answer or r.payload is None or ran_ns <= 0:
            return 0
        decode_ns, milli = self.pools[r.pool].decode
        each = ran_ns * milli // (decode_ns * 1000) + 1 if milli else r.promised_output
        return min(each, r.output_max_tokens) * r.sequences

    def input_by_now(self, r: Request) -> int:
        """Input that may have been computed since the grant of a lease that reported none."""
        rates = self.pools[r.pool].prefill_rates
        if not rates or r.payload is None:
            return r.prompt_tokens
        ran_ns = self.now_ns - r.arrival_ns - r.waited_ns
        return min(r.prompt_tokens, ran_ns * max(rates) // 10**12 + 1)

    def note_first(self, r: Request) -> None:
        """Take a report of its first output."""
        p, f = self.pools[r.pool], self.flows[r.flow]
        r.first_us = min((self.now_ns - r.arrival_ns) // 1000 + 1, US_MAX)
        if r.fresh_tokens:
            r.fresh_tokens = 0
            took_ns = self.now_ns - r.arrival_ns - r.waited_ns
            error_ns = abs(took_ns - r.prefill_us * 1000)
            if p.prefill_tokens == 0:
                p.prefill_ns, p.prefill_tokens = took_ns, r.prefill_line
                p.prefill_error_ns = error_ns
            else:
                p.prefill_ns = averaged(p.prefill_ns, took_ns)
                p.prefill_tokens = max(1, averaged(p.prefill_tokens, r.prefill_line))
                p.prefill_error_ns = averaged(p.prefill_error_ns, error_ns)
            p.prefills_judged += 1
            tokens = max(1, r.prompt_tokens - r.cached_tokens)
            rate = min(tokens * 10**12 // max(1, took_ns) + 1, 1 << 60)
            p.prefill_rates = [*p.prefill_rates, rate][-64:]
        if r.foretold_wait_us >= 0:
            first = f.first_judged == 0
            f.first_us = r.first_us if first else averaged(f.first_us, r.first_us)
            told = r.foretold_first_us
            f.foretold_first_us = told if first else averaged(f.foretold_first_us, told)
            f.first_judged += 1
