"""Many decode steps at once, between two events, with the same result to the token."""

from schedsvc_lab.engine.block_accounting import BlockAccounting
from schedsvc_lab.engine.cost import StepCost
from schedsvc_lab.engine.planner import Planner
from schedsvc_lab.engine.sequence import Sequence
from schedsvc_lab.engine.step import DecodeRun


class Runs:
    """Foresees and applies runs of steps in which all that runs decodes and nothing else happens.

    While a run lasts, free blocks only become fewer and seats stay taken, so a unit that could not
    be admitted or brought back at its beginning cannot be within it. The delay factor is the
    exception: a run ends at its end.
    """

    def __init__(self, accounting: BlockAccounting, planner: Planner, cost: StepCost) -> None:
        self._accounting = accounting
        self._planner = planner
        self._cost = cost
        self._sequences_max = accounting.config.sequences_max
        self._step_tokens_max = accounting.config.step_tokens_max
        self._separate = accounting.config.prefill == "separate"

    def plan(self, steps_max: int, duration_max_ns: int | None, now_ns: int) -> DecodeRun | None:
        """Foresee a run, and decide nothing. O(log n) and `BlockAccounting.gather()`."""
        lockstep, count = self._accounting.lockstep, len(self._accounting.running)
        if not count or self._accounting.gather() < count or not self._only_decodes(now_ns):
            return None
        steps = min(steps_max, lockstep.steps_left())
        kv_tokens = lockstep.kv_tokens()
        held_ns = self._planner.delay_left_ns(now_ns)
        if held_ns:
            within_ns = held_ns if duration_max_ns is None else duration_max_ns
            duration_max_ns = min(held_ns, within_ns)
        if duration_max_ns is not None:
            steps = min(steps, self._cost.decode_steps_until(duration_max_ns, count, kv_tokens))
        steps = lockstep.steps_within(steps, self._free())
        if steps < 1:
            return None
        duration_ns = self._cost.decode_run_ns(steps, count, kv_tokens)
        return DecodeRun(steps, duration_ns, count, kv_tokens)

    def apply(self, steps: int) -> list[Sequence]:
        """Do the first steps of a run. Returns what is complete. O(blocks + log n)."""
        lockstep = self._accounting.lockstep
        lockstep.take(steps)
        return lockstep.advance(steps)

    def _only_decodes(self, now_ns: int) -> bool:
        """Return whether none can join those that decode in the next step, or until one ends."""
        accounting = self._accounting
        count = len(accounting.running)
        if accounting.swapped:
            return self._planner.next_return(self._step_tokens_max - count) is None
        if count == self._sequences_max:
            return True
        budget = self._step_tokens_max - (0 if self._separate else count)
        return not budget or self._planner.next_admission(budget, now_ns) is None

    def _free(self) -> int:
        """Count the blocks that a run may take."""
        accounting = self._accounting
        if accounting.cache is not None:
            # When the cache evicts contents, a waiting sequence may find less of its prompt there.
            # It may then fit into a step's budget with fewer blocks than before, so each step has
            # to check that.
            first = accounting.waiting.peek()
            if first is not None and first.prefix_keys:
                return accounting.pool.unused
        return accounting.pool.count_free()
