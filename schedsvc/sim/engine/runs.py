"""Many decode steps at once, between two events, with the same result to the token."""

from bisect import bisect_left

from schedsvc.sim.engine.books import Books
from schedsvc.sim.engine.cost import StepCost
from schedsvc.sim.engine.planner import Planner
from schedsvc.sim.engine.sequence import Sequence
from schedsvc.sim.engine.step import DecodeRun


class Runs:
    """Foresees and applies runs of steps in which all that runs decodes and nothing else happens.

    While a run lasts, free blocks only become fewer and seats stay taken, so what could not be
    admitted or brought back at its beginning cannot be within it, but for the delay factor, at
    whose end a run ends.
    """

    def __init__(self, books: Books, planner: Planner, cost: StepCost) -> None:
        self._books = books
        self._planner = planner
        self._cost = cost

    def plan(self, steps_max: int, duration_max_ns: int | None, now_ns: int) -> DecodeRun | None:
        """Foresee a run, and change nothing. O(running * log(steps))."""
        running = self._books.running
        if not running or not self._only_decodes(now_ns):
            return None
        steps = min(steps_max, min([s.output_tokens - s.produced_tokens for s in running]))
        kv_tokens = sum([s.computed_tokens for s in running]) + len(running)
        held_ns = self._planner.delay_left_ns(now_ns)
        if held_ns:
            within_ns = held_ns if duration_max_ns is None else duration_max_ns
            duration_max_ns = min(held_ns, within_ns)
        if duration_max_ns is not None:
            steps = self._steps_within(steps, kv_tokens, duration_max_ns)
        steps = self._steps_in_blocks(steps)
        if steps < 1:
            return None
        duration_ns = self._cost.decode_run_ns(steps, len(running), kv_tokens)
        return DecodeRun(steps, duration_ns, len(running), kv_tokens)

    def apply(self, steps: int) -> list[Sequence]:
        """Do the first steps of a run. Returns what is complete. O(running + blocks)."""
        pool = self._books.pool
        block_size = pool.block_size_tokens
        finished = []
        for sequence in self._books.running:
            computed = sequence.computed_tokens + steps
            sequence.computed_tokens = computed
            sequence.produced_tokens += steps
            count = -(-computed // block_size) - len(sequence.blocks)
            if count:
                pool.allocate(count, sequence.blocks)
            if sequence.produced_tokens == sequence.output_tokens:
                finished.append(sequence)
        return finished

    def _only_decodes(self, now_ns: int) -> bool:
        """Whether the next step, and those after it until one ends, are decodes of what runs."""
        books, config = self._books, self._books.config
        running = books.running
        if len(running) > config.step_tokens_max:
            return False
        for sequence in running:
            if sequence.computed_tokens < sequence.prefill_end_tokens:
                return False
        # Beams fork as they go, and answers copy the end of their prompt when they part.
        if books.groups_running and any(
            s.group is not None and (s.request.beam or books.must_copy(s)) for s in running
        ):
            return False
        if books.swapped:
            budget = config.step_tokens_max - len(running)
            return self._planner.next_return(budget) is None
        if len(running) == config.sequences_max:
            return True
        separate = config.prefill == "separate"
        budget = config.step_tokens_max - (0 if separate else len(running))
        return not budget or self._planner.next_admission(budget, now_ns) is None

    def _steps_within(self, steps: int, kv_tokens: int, duration_max_ns: int) -> int:
        """Find the fewest steps, at most `steps`, that reach the duration. O(log(steps))."""
        count = len(self._books.running)
        reached = bisect_left(
            range(steps),
            duration_max_ns,
            key=lambda n: self._cost.decode_run_ns(n, count, kv_tokens),
        )
        return min(steps, reached)

    def _steps_in_blocks(self, steps: int) -> int:
        """Find the most steps, up to `steps`, for which the free blocks suffice."""
        books = self._books
        free, size = self._free(), books.pool.block_size_tokens
        # No sequence takes more than this; where even that fits, nothing has to be counted.
        if len(books.running) * (steps // size + 1) <= free or self.blocks_ahead(steps) <= free:
            return steps
        # The first count of steps that does not fit, less one.
        return bisect_left(range(steps), free + 1, key=self.blocks_ahead) - 1

    def blocks_ahead(self, steps: int) -> int:
        """Count the blocks that so many steps take. O(running)."""
        running, size = self._books.running, self._books.pool.block_size_tokens
        return sum([-(-(s.computed_tokens + steps) // size) - len(s.blocks) for s in running])

    def _free(self) -> int:
        """Count the blocks that a run may take."""
        books = self._books
        if books.cache is not None:
            # Who waits may find less of its prompt when contents are given up, and then fit into
            # a step's budget with fewer blocks than before: that has to be looked at each time.
            first = books.waiting.peek()
            if first is not None and first.prefix_keys:
                return books.pool.unused
        return books.pool.free
