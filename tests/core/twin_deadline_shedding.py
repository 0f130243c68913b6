"""Refuses for the twin what cannot meet its deadline, and keeps how far that is believed."""

from schedsvc import _core as core

from .twin_estimate import Turn
from .twin_retry_slots import Return
from .twin_types import Doubts, Pool, Request

PROBE_EVERY = 8


class Early(Return):
    """Refuses early."""

    def _counts(self, r: Request) -> bool:
        bound = r.flow not in self.audit.flows and not self.classes.is_exempt(r.flow)
        told = r.deadline_ns is not None and r.doubt not in ("wait", "prefill")
        return bool(self.limits["early_refusal"]) and told and bound

    def _books(self, r: Request) -> tuple[Doubts, Doubts]:
        return self.flows[r.flow].doubts, self.doubts

    def _sends_away(self, r: Request, kind: str, first_ns: int | None) -> bool:
        assert r.deadline_ns is not None
        left_ns, books = r.deadline_ns - self.now_ns, self._books(r)
        if first_ns is None or first_ns < left_ns:
            return False
        if first_ns * self.doubts.part_ppm(kind) // 10**6 < left_ns:
            r.doubt = f"unsure of {kind}"
            return False
        enough = self.limits["refusal_samples_min"]
        if all(b.score[kind] >= enough and b.since[kind] + 1 < PROBE_EVERY for b in books):
            for b in books:
                b.since[kind] += 1
            return True
        for b in books:
            b.since[kind] = 0
        r.doubt = kind
        return False

    def note_in_time(self, r: Request) -> None:
        """Take a report of its first output, which came since the last one."""
        told_ns = r.due_ns - self.limits["lease_ttl_ns"]
        if r.doubt and r.deadline_ns is not None:
            self._judge_doubt(r, told_ns >= r.deadline_ns)

    def _judge_doubt(self, r: Request, missed: bool) -> None:
        """Learn from a request that was let in although it was expected to miss its deadline."""
        kind = r.doubt.removeprefix("unsure of ")
        part = self.doubts.part_ppm(kind)
        if kind != r.doubt:
            part += part // 2048 if missed else 0
        else:
            part += part // 256 if missed else -(part // 8)
            for b in self._books(r):
                b.judged += 1
                b.missed += missed
                score = b.score[kind] + (1 if missed else -9)
                b.score[kind] = max(0, min(score, self.limits["refusal_samples_min"] + 8))
        self.doubts.parts_ppm[kind] = min(max(part, 62_500), 10**6)
        r.doubt = ""

    def settle_doubt(self, r: Request) -> None:
        """Take its end; the time of its first token, if any, is unknown."""
        late = r.deadline_ns is not None and self.now_ns >= r.deadline_ns
        if r.doubt and late and not r.output_tokens:
            self._judge_doubt(r, True)
        elif r.doubt and not late and r.output_tokens:
            self._judge_doubt(r, False)
        r.doubt = ""

    def prefill_expected_ns(self, p: Pool, r: Request) -> int:
        if p.prefills_judged < self.limits["refusal_samples_min"]:
            return 0
        return max(0, self.prefill_ns(p, self.fresh(r)) - p.prefill_error_ns)

    def first_expected_ns(self, r: Request) -> int | None:
        """Return how long a request that comes now is expected to wait for its first token."""
        f, enough, wait_ns = self.flows[r.flow], self.limits["refusal_samples_min"], 0
        if self.has_to_wait(r.target):
            wait_ns = self.wait_of_new(Turn(r.flow, r.target, r.work, r.stated_ns))
            if wait_ns < 0 or f.waits_judged < enough:
                return None
            wait_ns = max(0, wait_ns - f.wait_error_ns)
        pools = [self.pools[p] for p in self.serving(r.target)]
        return wait_ns + min((self.prefill_expected_ns(p, r) for p in pools), default=0)

    def refused_early(self, r: Request) -> int:
        """Return the outcome that refuses it at its arrival, or 0."""
        if not self._counts(r):
            return 0
        if self._sends_away(r, "wait", self.first_expected_ns(r)):
            return core.REJECTED_DEADLINE
        if r.doubt == "wait":
            r.work = 1  # requests behind it do not expect it to be served
        return 0

    def note_early(self, r: Request) -> None:
        """Return the Retry-After of a request that was refused so."""
        first_ns = self.first_expected_ns(r)
        assert first_ns is not None
        assert r.deadline_ns is not None
        late_ns = first_ns - (r.deadline_ns - self.now_ns)
        step_ns = self.turn_ns(r.flow, r.target, r.work)
        self.foretold_in_turn(self.flows[r.flow], max(0, late_ns), step_ns)

    def is_hopeless(self, r: Request, pool: int) -> bool:
        """Return whether a request whose turn has come is evicted for its deadline."""
        first_ns = self.prefill_expected_ns(self.pools[pool], r)
        return self._counts(r) and self._sends_away(r, "prefill", first_ns)

    def work_done(self, r: Request) -> int:
        return self.work_of(r) if r.doubt == "wait" else r.work
