"""Sequences that decode in lockstep: a step moves one clock, instead of each of them."""

from bisect import bisect_left
from heapq import heappop, heappush

from schedsvc_lab.engine.blocks import BlockPool
from schedsvc_lab.engine.errors import EngineInvariantError
from schedsvc_lab.engine.sequence import STILL, Clock, Sequence


class Lockstep:
    """Running sequences of which each makes one token a step, and takes a block now and then.

    They are filed by the step at which they end, and by the step, modulo the block size, at which
    their next token begins a block: their phase. So a step costs O(log n + ends + blocks taken).
    Between `take()` and `advance()` it is under way, and they hold its blocks already.
    """

    __slots__ = ("_bases", "_ends", "_phases", "_pool", "clock", "members")

    def __init__(self, pool: BlockPool) -> None:
        self.clock = Clock()
        self._pool = pool
        self._bases = 0  # sum of all computed_base
        self._ends: list[tuple[int, int, Sequence]] = []  # heap of (clock at the end, key, who)
        self._phases: list[int] = []  # ascending
        self.members: list[Sequence] = []  # by phase

    def join(self, sequence: Sequence) -> None:
        """Take in a sequence that has but its newest token to compute, and blocks for the others.

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
        place = bisect_left(self._phases, phase)
        self._phases.insert(place, phase)
        self.members.insert(place, sequence)

    def dissolve(self) -> None:
        """Let all go their own ways, also while a step is under way. O(n)."""
        for sequence in self.members:
            self._part(sequence)
        self._ends.clear()
        self._phases.clear()
        self.members.clear()
        self._bases = 0

    def take(self, steps: int) -> None:
        """Allocate the blocks of the next steps, of which there are enough. O(log n + blocks)."""
        rounds, rest = divmod(steps, self._pool.block_size_tokens)
        if rounds:
            for sequence in self.members:
                self._pool.allocate(rounds, sequence.blocks)
        begin, end, wrapped = self._window(rest)
        self._pool.hand_out([s.blocks for s in self.members[begin:end]])
        if wrapped:
            self._pool.hand_out([s.blocks for s in self.members[:wrapped]])

    def advance(self, steps: int) -> list[Sequence]:
        """Do the steps whose blocks were taken, at most `steps_left()`.

        Returns who has ended and left, in order of key. O(ended * log n), and shifts as `join()`.
        """
        self.clock.steps = now = self.clock.steps + steps
        ends, ended = self._ends, []
        while ends and ends[0][0] <= now:
            sequence = heappop(ends)[2]
            place = self.members.index(sequence, bisect_left(self._phases, self._phase(sequence)))
            del self._phases[place], self.members[place]
            self._bases -= sequence.computed_base
            self._part(sequence)
            ended.append(sequence)
        return ended

    def steps_left(self) -> int:
        """Return the number of steps until the first member ends; there is one. O(1)."""
        return self._ends[0][0] - self.clock.steps

    def kv_tokens(self) -> int:
        """Count the tokens that the next step reads. O(1)."""
        return self._bases + len(self.members) * (self.clock.steps + 1)

    def blocks_ahead(self, steps: int) -> int:
        """Count the blocks that the next steps take. O(log n)."""
        rounds, rest = divmod(steps, self._pool.block_size_tokens)
        begin, end, wrapped = self._window(rest)
        return rounds * len(self.members) + end - begin + wrapped

    def steps_within(self, steps: int, blocks: int) -> int:
        """Find the most steps, up to `steps`, for which `blocks` blocks suffice. Needs a member.

        O(log n).
        """
        size, count = self._pool.block_size_tokens, len(self.members)
        # No member takes more blocks than this; if even that fits, no count is needed.
        if count * (steps // size + 1) <= blocks:
            return steps
        # In a round of as many steps as a block has tokens, each member takes one block. The blocks
        # that are left over decide at which step the next member finds none.
        rounds, left = divmod(blocks, count)
        now = self.clock.steps % size
        place = (bisect_left(self._phases, now) + left) % count
        return min(steps, rounds * size + (self._phases[place] - now) % size)

    def check(self, running: list[Sequence]) -> None:
        """Verify that the files agree with those that run in lockstep. Raises. O(n log n)."""
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

    def _window(self, steps: int) -> tuple[int, int, int]:
        """Find who begins a block in the next steps, fewer than a block has tokens, by place.

        They are from the first place to before the second one, and before the third one.
        """
        phases, size = self._phases, self._pool.block_size_tokens
        now = self.clock.steps % size
        begin = bisect_left(phases, now)
        if now + steps <= size:
            return begin, bisect_left(phases, now + steps, begin), 0
        return begin, len(phases), bisect_left(phases, now + steps - size, 0, begin)

    def _phase(self, sequence: Sequence) -> int:
        return -sequence.computed_base % self._pool.block_size_tokens

    def _part(self, sequence: Sequence) -> None:
        steps = self.clock.steps
        sequence.computed_base += steps
        sequence.produced_base += steps
        sequence.clock = STILL
