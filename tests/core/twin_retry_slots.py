"""Keeps Retry-After of the twin's refusals, and the places that it keeps for retries."""

from schedsvc import _core as core

from .twin_estimate import SECOND, Estimate, Turn, time_for
from .twin_quota import TICK_NS
from .twin_types import Due, Flow, Request

RETRY_MAX_NS = 109 * SECOND


def kept_of(most: int) -> int:
    """Return the number of places that a queue keeps for retries."""
    return most // 5


class Return(Estimate):
    """Computes Retry-After."""

    def turn_ns(self, flow: int, target: int, work: int) -> int:
        """Return how long so much work of a flow takes."""
        pace = self.pace_of(target)
        if pace == 0:
            return min(self.flows[flow].interval_ns or SECOND, RETRY_MAX_NS)
        return time_for(work, self.own_pace(flow, target))

    def _in_turn(self, teller: "Return | Flow", wait_ns: int, step_ns: int) -> int:
        due_ns = self.now_ns + wait_ns
        if teller.told_ns is not None:
            due_ns = max(due_ns, teller.told_ns + step_ns)
        teller.told_ns = min(due_ns, self.now_ns + RETRY_MAX_NS)
        return teller.told_ns - self.now_ns

    def foretold_in_turn(self, teller: "Return | Flow", wait_ns: int, step_ns: int) -> int:
        """With something added, since it may be wrong."""
        return self._in_turn(teller, wait_ns * 11 // 8 + step_ns // 2, step_ns * 11 // 8)

    def places_for(self, due: Due, most: int) -> int:
        """Return how many may be queued when one more arrives."""
        return most if due.comes(self.now_ns) else most - kept_of(most)

    def place_in_ns(self, r: Request, outcome: int) -> int:
        """Return when a request that a full queue refuses will find a place."""
        own = outcome == core.REJECTED_FLOW_QUEUE_FULL
        queue = self.queued(lambda q: q.flow == r.flow or not own)
        most = self.limits["flow_queue_tokens_max" if own else "queue_tokens_max"]
        work, tokens = sum(q.work for q in queue), sum(q.prompt_tokens for q in queue)
        over = max(0, tokens + r.prompt_tokens - most) if most else 0
        each = work // max(1, len(queue)) + 1
        need = max(each, work * over // max(1, tokens))
        pace = self.pace_of(r.target)
        if own or pace == 0:
            teller: Return | Flow = self.flows[r.flow]
            step_ns = self.turn_ns(r.flow, r.target, each)
            wait_ns = self.turn_ns(r.flow, r.target, need)
        else:
            teller, step_ns, wait_ns = self, time_for(each, pace), time_for(need, pace)
        if over or kept_of(self.limits["flow_queue_max" if own else "queue_max"]) == 0:
            return self.foretold_in_turn(teller, wait_ns, step_ns)
        wait_ns = self._in_turn(teller, wait_ns * 13 // 12, step_ns * 13 // 12)
        due = self.flows[r.flow].due if own else self.due
        due.tell(self.now_ns, self.now_ns + wait_ns)
        return wait_ns

    def refill_in_ns(self, r: Request) -> int:
        """Return when a request that its quotas refuse will find enough in them."""
        chain, needs = self.quotas.chain_of(r.flow), self.quotas.needs(r)
        ticks = [
            needs[which] // bucket.rate
            for node in chain
            for which, bucket in self.quotas.nodes[node].buckets.items()
        ]
        wait_ns = self.quotas.refused_ns(r)
        return self._in_turn(self.flows[r.flow], wait_ns, max(ticks, default=0) * TICK_NS)

    def turn_again_ns(self, r: Request) -> int:
        """Return when one that waited for its whole TTL would have its turn in time.

        With a deadline after those that wait, else after the retries of earlier refusals."""
        flow = self.flows[r.flow]
        patience_ns = r.due_ns - r.arrival_ns
        step_ns = self.turn_ns(r.flow, r.target, r.work)
        if r.stated_ns is None:
            wait_ns = self._in_turn(flow, step_ns, step_ns)
            return max(wait_ns // 2, wait_ns - patience_ns // 2)
        wait_ns = self.wait_of_new(Turn(r.flow, r.target, r.work, self.now_ns + patience_ns))
        longest_ns = self.limits["queue_ttl_ns"]
        wait_ns = step_ns if wait_ns < 0 else min(wait_ns - patience_ns, longest_ns)
        return self.foretold_in_turn(flow, max(0, wait_ns), step_ns)

    def later_ms(self, wait_ns: int) -> int:
        return -(-min(max(wait_ns, SECOND), RETRY_MAX_NS) // 10**6)
