"""Advances sequences that decode in lockstep: a step moves one clock, not each of them."""

from heapq import heappop, heappush

from schedsvc_lab.engine.blocks import BlockPool
from schedsvc_lab.engine.errors import EngineInvariantError
from schedsvc_lab.engine.sequence import STILL, Clock, Sequence


class Lockstep:
    """Runs sequences that each make one token a step, and take a block now and then.

    They are filed by the step at which they end, and by the step, modulo the block size, at which
    their next token begins a block: their phase. So a step costs O(log n + ends + blocks taken).
    Between `take()` and `advance()` it is under way, and they hold its blocks already. `changes`
    counts how often one has joined or left.
    """

    __slots__ = ("_bases", "_ends", "_phases", "_pool", "_size", "changes", "clock", "members")

    def __init__(self, pool: BlockPool) -> None:
        self.clock = Clock()
        self._pool = pool
        self._size = pool.block_size_tokens
        self._bases = 0  # sum of all computed_base
        self._ends: list[tuple[int, int, Sequence]] = []  # heap of (clock at the end, key, who)
        self._phases: list[int] = []  # ascending
        self.members: list[Sequence] = []  # by phase
        self.changes = 0

    def join(self, sequence: Sequence) -> None:
        """Take in a sequence that has only its newest token to compute, and blocks for the others.

        O(log n), and a shift of O(n) pointers.
        """
        steps = self.clock.steps
        sequence.computed_base -= steps
        sequence.produced_base -= steps
        sequence.scheduled_tokens = 1
        sequence.clock = self.clock
        self._bases += sequence.computed_base
        end = sequence.output_tokens - sequence.produced_base
        heappush(self._ends, (end, sequence.key, sequence))
        phase = self._phase(sequence)
        place = self._place(phase, 0, len(self.members))
        self._phases.insert(place, phase)
        self.members.insert(place, sequence)
        self.changes += 1

    def dissolve(self) -> None:
        """Release all from lockstep, even while a step is under way. O(n)."""
        for sequence in self.members:
            self._part(sequence)
        self._ends.clear()
        self._phases.clear()
        self.members.clear()
        self._bases = 0
        self.changes += 1

    def take(self, steps: int) -> None:
        """Allocate the blocks of the next steps; there are enough. O(log n + blocks)."""
        rounds, rest = steps // self._size, steps % self._size
        if rounds:
            for sequence in self.members:
                self._pool.allocate(rounds, sequence.blocks)
        begin = self._begin()
        end = self._end(rest, begin)
        self._hand_out(begin, end)
        wrapped = self._wrapped(rest, begin)
        if wrapped:
            self._hand_out(0, wrapped)

    def advance(self, steps: int) -> list[Sequence]:
        """Do the steps whose blocks were taken, at most `steps_left()`.

        Returns sequences that have left, in order of key. O(ended * log n), and shifts as `join()`.
        """
        now = self.clock.steps + steps
        self.clock.steps = now
        ends, ended = self._ends, []
        while ends and ends[0][0] <= now:
            sequence = heappop(ends)[2]
            self._leave(sequence)
            ended.append(sequence)
        return ended

    def _leave(self, sequence: Sequence) -> None:
        members = self.members
        place = self._place(self._phase(sequence), 0, len(members))
        while members[place] is not sequence:
            place += 1
        del members[place], self._phases[place]
        self._bases -= sequence.computed_base
        self._part(sequence)
        self.changes += 1

    def steps_left(self) -> int:
        """Return the number of steps until the first member ends; there is one. O(1)."""
        return self._ends[0][0] - self.clock.steps

    def kv_tokens(self) -> int:
        """Count the tokens that the next step reads. O(1)."""
        return self._bases + len(self.members) * (self.clock.steps + 1)

    def blocks_ahead(self, steps: int) -> int:
        """Count the blocks that the next steps take. O(log n)."""
        rounds, rest = steps // self._size, steps % self._size
        begin = self._begin()
        more = self._end(rest, begin) - begin + self._wrapped(rest, begin)
        return rounds * len(self.members) + more

    def steps_within(self, steps: int, blocks: int) -> int:
        """Find the most steps, up to `steps`, for which `blocks` blocks suffice. Needs a member.

        O(log n).
        """
        size, count = self._size, len(self.members)
        # No member takes more blocks than this; if even that fits, no count is needed.
        if count * (steps // size + 1) <= blocks:
            return steps
        # In a round of as many steps as a block has tokens, each member takes one block. The
        # remaining blocks decide at which step the next member finds none.
        rounds, left = blocks // count, blocks % count
        now = self.clock.steps % size
        place = (self._begin() + left) % count
        return min(steps, rounds * size + (self._phases[place] - now) % size)

    def check(self, running: list[Sequence]) -> None:
        """Verify that the files agree with the lockstep sequences. Raises. O(n log n)."""
        members = [s for s in running if s.clock is self.clock]
        ends = [(s.output_tokens - s.produced_base, s.key) for s in members]
        filed = sorted((phase, s.key) for phase, s in zip(self._phases, self.members, strict=True))
        if (
            self._bases != sum(s.computed_base for s in members)
            or sorted(ends) != sorted(entry[:2] for entry in self._ends)
            or sorted((self._phase(s), s.key) for s in members) != filed
            or self._phases != sorted(self._phases)
        ):
            raise EngineInvariantError("what decodes in lockstep is miscounted")

    # The members that begin a block in the next steps, fewer than a block has tokens, have places
    # from `_begin()` to before `_end()`, and before `_wrapped()`.

    def _begin(self) -> int:
        return self._place(self.clock.steps % self._size, 0, len(self.members))

    def _end(self, steps: int, begin: int) -> int:
        before = self.clock.steps % self._size + steps
        count = len(self.members)
        return self._place(before, begin, count) if before <= self._size else count

    def _wrapped(self, steps: int, begin: int) -> int:
        before = self.clock.steps % self._size + steps - self._size
        return self._place(before, 0, begin) if before > 0 else 0

    def _place(self, phase: int, low: int, high: int) -> int:
        """Find the first place from `low` to `high` at most with this phase or a later one.

        O(log n).
        """
        phases = self._phases
        while low < high:
            middle = (low + high) // 2
            at = phases[middle]
            if at < phase:
                low = middle + 1
            else:
                high = middle
        return low

    def _hand_out(self, begin: int, end: int) -> None:
        """Give a block to each member in a range of places. O(blocks)."""
        pool, members = self._pool, self.members
        pool.free_up(end - begin)
        for at in range(begin, end):
            sequence = members[at]
            pool.take_one(sequence.blocks)

    def _phase(self, sequence: Sequence) -> int:
        return -sequence.computed_base % self._size

    def _part(self, sequence: Sequence) -> None:
        steps = self.clock.steps
        sequence.computed_base += steps
        sequence.produced_base += steps
        sequence.clock = STILL
