"""Whom the twin sends away because a deadline cannot be met, and how far that is believed."""

from schedsvc import _core as core

from .twin_estimate import Turn, time_for
from .twin_retry_slots import Return
from .twin_types import Doubts, Pool, Request

PROBE_EVERY = {"wait": 32, "prefill": 8}


class Early(Return):
    """Early refusal."""

    def _counts(self, r: Request) -> bool:
        bound = r.flow not in self.audit.flows and not self.classes.is_exempt(r.flow)
        return r.doubt not in ("wait", "prefill") and bound

    def _books(self, r: Request) -> tuple[Doubts, Doubts]:
        return self.flows[r.flow].doubts, self.doubts

    def _sends_away(self, r: Request, kind: str, wait_ns: int, left_ns: int) -> bool:
        books = self._books(r)
        if wait_ns < left_ns:
            return False
        if wait_ns * self.doubts.part_ppm(kind) // 10**6 < left_ns:
            r.doubt = f"unsure of {kind}"
            return False
        enough = self.limits["refusal_samples_min"] if kind == "prefill" else 0
        tried = all(b.score >= enough or kind == "wait" for b in books)
        probes = any(b.since[kind] + 1 >= PROBE_EVERY[kind] for b in books)
        if self.limits["early_refusal"] and tried and not probes:
            for b in books:
                b.since[kind] += 1
            return True
        for b in books:
            b.since[kind] = 0
        r.doubt = kind
        return False

    def note_granted(self, r: Request) -> None:
        """Take the grant of one without a deadline."""
        if r.doubt and r.deadline_ns is None:
            self._judge_doubt(r, missed=False)

    def note_in_time(self, r: Request) -> None:
        """Take a report of its first output, which came since the last one."""
        told_ns = r.due_ns - self.limits["lease_ttl_ns"]
        if r.doubt and r.deadline_ns is not None:
            self._judge_doubt(r, missed=told_ns >= r.deadline_ns)

    def _judge_doubt(self, r: Request, *, missed: bool) -> None:
        """Learn from one that was let in although it was expected to be too late."""
        kind = r.doubt.removeprefix("unsure of ")
        part = self.doubts.part_ppm(kind)
        gave_up_ns = self.flows[r.flow].gave_up_ns
        if kind == "wait" and gave_up_ns is not None and gave_up_ns >= r.arrival_ns:
            missed = True
        if kind != r.doubt:
            part += part // (128 if kind == "wait" else 2048) if missed else 0
        else:
            part += part // 256 if missed else -(part // 8)
            for b in self._books(r):
                b.judged += 1
                b.missed += missed
                score = b.score + (1 if missed else -9)
                if kind == "prefill":
                    b.score = max(0, min(score, self.limits["refusal_samples_min"] + 8))
        self.doubts.parts_ppm[kind] = min(max(part, 62_500), 10**6)
        r.doubt = ""

    def settle_doubt(self, r: Request) -> None:
        """Take its end; it is unknown when its first token came, if any."""
        ends_ns = r.due_ns if r.deadline_ns is None else r.deadline_ns
        late = self.now_ns >= ends_ns
        if r.doubt and late and not r.output_tokens:
            self._judge_doubt(r, missed=True)
        elif r.doubt and not late and r.output_tokens:
            self._judge_doubt(r, missed=False)
        r.doubt = ""

    def note_gave_up(self, r: Request, outcome: int) -> None:
        """Take one that leaves its queue without a grant."""
        hopeless = r.doubt == "wait"
        self.settle_doubt(r)
        if outcome in (core.EVICTED_TTL, core.EVICTED_DEADLINE) and not hopeless:
            self.flows[r.flow].gave_up_ns = self.now_ns

    def prefill_expected_ns(self, p: Pool, r: Request) -> int:
        if p.prefills_judged < self.limits["refusal_samples_min"]:
            return 0
        return max(0, self.prefill_ns(p, self.fresh(r)) - p.prefill_error_ns)

    def _prefill_ns(self, r: Request) -> int:
        pools = [self.pools[p] for p in self.serving(r.target)]
        return min((self.prefill_expected_ns(p, r) for p in pools), default=0)

    def _wait_ns(self, r: Request) -> int:
        """The wait of one that comes now, as far as it may refuse it; -1: it may not."""
        f = self.flows[r.flow]
        if not self.queued(lambda q: q.flow == r.flow) or not self.has_to_wait(r.target):
            return -1
        if f.waits_judged < self.limits["refusal_samples_min"] or not self._may_be_late(r):
            return -1
        wait_ns = self.wait_of_new(Turn(r.flow, r.target, r.work, r.stated_ns))
        return max(0, wait_ns - f.wait_error_ns) if wait_ns >= 0 else -1

    def _may_be_late(self, r: Request) -> bool:
        """Whether it may be late if all that is queued is before it."""
        pace, queued = self.pace_of(r.target), sum(q.work for q in self.queued())
        if pace == 0:
            return False
        most_ns = time_for(self.backlog(r.flow), self.own_pace(r.flow, r.target))
        return most_ns + time_for(queued + r.work, pace) >= self._left_ns(r)

    def _left_ns(self, r: Request) -> int:
        """How long it may wait."""
        left_ns = r.due_ns - self.now_ns
        if r.deadline_ns is None:
            return left_ns
        return min(left_ns, r.deadline_ns - self.now_ns - self._prefill_ns(r))

    def refused_early(self, r: Request) -> int:
        """The outcome that refuses it at its arrival, or 0."""
        if not self._counts(r):
            return 0
        wait_ns = self._wait_ns(r)
        if wait_ns >= 0 and self._sends_away(r, "wait", wait_ns, self._left_ns(r)):
            return core.REJECTED_DEADLINE
        if r.doubt == "wait":
            r.work = 1  # requests behind it do not expect that it is served
        if r.doubt or r.deadline_ns is None or not self.limits["early_refusal"]:
            return 0
        left_ns = r.deadline_ns - self.now_ns
        late = self._sends_away(r, "prefill", self._prefill_ns(r), left_ns)
        return core.REJECTED_DEADLINE if late else 0

    def note_early(self, r: Request) -> None:
        """The Retry-After of a request that was refused so."""
        f, wait_ns = self.flows[r.flow], self._wait_ns(r)
        step_ns = self.turn_ns(r.flow, r.target, r.work)
        if wait_ns < 0:
            self.foretold_in_turn(f, 0, step_ns)
        else:
            self._in_turn(f, wait_ns + f.wait_error_ns, step_ns)

    def is_hopeless(self, r: Request, pool: int) -> bool:
        """Whether a request whose turn has come is evicted for its deadline."""
        if r.deadline_ns is None or not self.limits["early_refusal"] or not self._counts(r):
            return False
        first_ns = self.prefill_expected_ns(self.pools[pool], r)
        return self._sends_away(r, "prefill", first_ns, r.deadline_ns - self.now_ns)

    def work_done(self, r: Request) -> int:
        return self.work_of(r) if r.doubt == "wait" else r.work
