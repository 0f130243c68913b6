"""Keeps an engine's state at one moment, and moves sequences between its queues."""

from schedsvc_lab.engine.adapters import Adapters
from schedsvc_lab.engine.blocks import BlockPool
from schedsvc_lab.engine.cache import PrefixCache
from schedsvc_lab.engine.config import EngineConfig
from schedsvc_lab.engine.eviction import Future
from schedsvc_lab.engine.lockstep import Lockstep
from schedsvc_lab.engine.sequence import (
    ABORTED,
    FINISHED,
    HELD,
    RUNNING,
    STILL,
    SWAPPED,
    WAITING,
    Group,
    RequestId,
    Sequence,
)
from schedsvc_lab.engine.waiting import SwappedQueue, WaitingQueue

# Before every place that a key could give: with the naive front-insert, victims go there.
_FRONT = -(1 << 128)


class BlockAccounting:
    """Queues, block tables, groups and adapters. Its methods are the moves between the queues.

    A unit is what a preemption removes together: a sequence, or the running members of its group.
    """

    def __init__(self, config: EngineConfig, future: Future | None = None) -> None:
        self.config = config
        self._size = config.block_size_tokens
        self._sequences_max = config.sequences_max
        self._step_tokens_max = config.step_tokens_max
        cache = None
        if config.prefix_cache != "off":
            cache = PrefixCache(config.prefix_cache, config.cache_blocks_max, future)
        self.cache = cache
        self.pool = BlockPool(config.blocks, config.block_size_tokens, cache)
        self.host = BlockPool(config.swap_blocks, config.block_size_tokens)
        self.adapters = None
        if config.adapters_max:
            self.adapters = Adapters(config.adapters_max, config.adapter_blocks, self.pool)
        self.running: list[Sequence] = []  # ascending by key
        self.lockstep = Lockstep(self.pool)  # those of these that a step treats alike
        self.waiting = WaitingQueue()
        self.swapped = SwappedQueue()
        self.requests: dict[RequestId, list[Sequence]] = {}  # only unfinished sequences
        self.seats_held = 0  # for group members that run as soon as their prompt is computed
        self.groups_running = 0
        self.preemptions = 0
        self.swapped_blocks = 0  # moved in either direction
        self.copied_blocks = 0
        self.front = _FRONT

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that `tokens` tokens take."""
        return -(-tokens // self._size)

    def group_blocks(self, group: Group) -> int:
        """Return the blocks for all that a group knows, whose members share only their prompt."""
        prompt_tokens = group.request.prompt_tokens
        shared = prompt_tokens // self.config.block_size_tokens
        own = sum(self.blocks_for(m.known_tokens) - shared for m in group.members)
        return shared + own if group.members[0].produced_tokens else self.blocks_for(prompt_tokens)

    def seats_free(self) -> int:
        """Return the number of sequences that could run in addition."""
        return self._sequences_max - len(self.running) - self.seats_held

    def must_copy(self, sequence: Sequence) -> bool:
        """Return whether the sequence's next token goes into a block that others hold as well."""
        return (
            sequence.group is not None
            and sequence.computed_tokens % self._size > 0
            and self.pool.is_shared(sequence.blocks[-1])
        )

    def seat(self, sequence: Sequence) -> None:
        """Let a sequence that has its blocks run, and keep seats for its later forks."""
        group = sequence.group
        sequence.state = RUNNING
        self._enter(sequence)
        if group is not None and group.members[0] is sequence:
            self.groups_running += 1
            if not group.forked:
                self.seats_held += len(group.members) - 1

    def fork(self, group: Group) -> None:
        """Let the members of a group run whose prompt has just been computed."""
        self.seats_held -= len(group.members) - 1
        for member in group.fork(self.pool):
            member.state = RUNNING
            self._enter(member)
            self.use_adapter(member, 0)

    def gather(self) -> int:
        """Move the sequences into lockstep that only decode and precede all others.

        Returns how many do. O(others + joining * log n); O(running) if others now precede them:
        after a preemption, or by priority.
        """
        running, lockstep = self.running, self.lockstep
        together = len(lockstep.members)
        if together == len(running):
            return together
        for place in range(together, len(running)):
            sequence = running[place]
            if sequence.clock is not STILL:
                lockstep.dissolve()
                together = 0
                break
        for place in range(together, min(len(running), self._step_tokens_max)):
            sequence = running[place]
            if not self._only_decodes(sequence):
                break
            lockstep.join(sequence)
            together += 1
        return together

    def _only_decodes(self, sequence: Sequence) -> bool:
        """Return whether a sequence computes only its newest token, into a block of its own."""
        if sequence.computed_base < sequence.prefill_end_tokens:
            return False
        # Beams fork as they go, and answers copy the end of their prompt when they part.
        return sequence.group is None or not (sequence.request.beam or self.must_copy(sequence))

    def finish(self, sequence: Sequence) -> None:
        """End a running sequence whose output is complete."""
        sequence.state = FINISHED
        self._unseat(sequence)
        group = sequence.group
        if group is not None:
            group.members.remove(sequence)
            if not group.members:
                self.groups_running -= 1
        request_id = sequence.request.request_id
        left = self.requests[request_id]
        if len(left) > 1:
            left.remove(sequence)
        else:
            del self.requests[request_id]

    def abort(self, sequences: list[Sequence]) -> None:
        """End all sequences of a request, in whichever queue they are."""
        group = sequences[0].group
        if any(sequence.clock is not STILL for sequence in sequences):
            self.lockstep.dissolve()
        if group is not None and sequences[0].state == RUNNING:
            self.groups_running -= 1
            if not group.forked:
                self.seats_held -= len(group.members) - 1
        for sequence in sequences:
            state, sequence.state = sequence.state, ABORTED
            if state == RUNNING:
                self._unseat(sequence)
            elif state == SWAPPED:
                self.swapped.remove(sequence)
                self.host.release(sequence.blocks)
            elif state == WAITING:
                self.waiting.forget()
        if group is not None:
            group.members.clear()

    def use_adapter(self, sequence: Sequence, free_min: int) -> bool:
        """Count a user of the sequence's adapter. Returns whether it had to be loaded."""
        adapter = sequence.request.adapter
        if adapter is None or self.adapters is None:
            return False
        return self.adapters.use(adapter, free_min)

    def throw_out(self) -> list[Sequence]:
        """Take the last running unit out: to the host if it has room; otherwise its work is lost.

        The unit is nowhere until `requeue()`.
        """
        last = self.running[-1]
        group = last.group
        unit = [last] if group is None else [m for m in group.members if m.blocks]
        if [True for sequence in unit if sequence.clock is not STILL]:
            self.lockstep.dissolve()
        del self.running[len(self.running) - len(unit) :]
        if group is not None:
            self.groups_running -= 1
            if not group.forked:
                self.seats_held -= len(group.members) - 1
        for sequence in unit:
            # Return the blocks that this step had allocated to the sequence.
            self.pool.trim(sequence.blocks, self.blocks_for(sequence.computed_tokens))
        swap = self.config.preemption == "swap"
        if swap and len({block for s in unit for block in s.blocks}) <= self.host.count_free():
            self.swapped_blocks += self.pool.move([s.blocks for s in unit], self.host)
            state = SWAPPED
        else:
            state = WAITING
            self._forget_computed(unit, group)
        for sequence in unit:
            sequence.state = state
            sequence.scheduled_tokens = 0
            sequence.preemptions += 1
            self._leave_adapter(sequence)
        self.preemptions += len(unit)
        return unit

    def requeue(self, units: list[list[Sequence]]) -> None:
        """Queue the sequences that one step preempted, in the order of `resume`."""
        if self.config.resume == "front":
            self.front -= len(units)
            for place, unit in enumerate(units, self.front):
                unit[0].place = place
        for unit in units:
            if unit[0].state == SWAPPED:
                self.swapped.push(unit)
                continue
            for sequence in unit[1:]:
                sequence.state = HELD
            self.waiting.push(unit[0])

    def swap_in(self, unit: list[Sequence]) -> int:
        """Bring the first swapped unit back. Returns how many blocks were moved."""
        self.swapped.pop()
        moved = self.host.move([s.blocks for s in unit], self.pool)
        self.swapped_blocks += moved
        for sequence in unit:
            self.seat(sequence)
        return moved

    def _forget_computed(self, unit: list[Sequence], group: Group | None) -> None:
        for sequence in unit:
            self.pool.release(sequence.blocks)
            sequence.computed_base = 0
            sequence.registered_blocks = 0
        if group is not None:
            group.forked = False

    def _unseat(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones and free its blocks."""
        del self.running[self._place(sequence)]
        self.pool.release(sequence.blocks)
        self._leave_adapter(sequence)

    def _enter(self, sequence: Sequence) -> None:
        self.running.insert(self._place(sequence), sequence)

    def _place(self, sequence: Sequence) -> int:
        """Find the place of a sequence among the running ones, or its place if it ran. O(log n)."""
        running, key = self.running, sequence.key
        low, high = 0, len(running)
        if high:
            other = running[high - 1]
            if other.key < key:  # usually it is the last to arrive
                return high
        while low < high:
            middle = (low + high) // 2
            other = running[middle]
            if other.key < key:
                low = middle + 1
            else:
                high = middle
        return low

    def _leave_adapter(self, sequence: Sequence) -> None:
        adapter = sequence.request.adapter
        if adapter is None or self.adapters is None:
            return
        if self.adapters.leave(adapter):
            self.waiting.unpark()
