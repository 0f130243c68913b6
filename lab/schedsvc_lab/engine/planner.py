"""Plans the next step: which sequences go on, are preempted, return, or are admitted."""

from schedsvc_lab.engine.block_accounting import BlockAccounting
from schedsvc_lab.engine.cache import PrefixCache
from schedsvc_lab.engine.cost import StepCost
from schedsvc_lab.engine.sequence import RUNNING, SWAPPED, Sequence
from schedsvc_lab.engine.step import Step

_PPM = 1_000_000


class Admission:
    """Holds a waiting sequence that may be admitted: the tokens to compute, the blocks it finds."""

    __slots__ = ("found", "sequence", "tokens")

    def __init__(self, sequence: Sequence, tokens: int, found: list[int]) -> None:
        self.sequence = sequence
        self.tokens = tokens
        self.found = found


class Planner:
    """Plans steps as vLLM's schedulers do, over the books of one engine.

    A step serves the running sequences first, in order of key (arrival; or priority, then arrival),
    then brings swapped ones back, then, if none are left, admits waiting ones while the token
    budget, the sequence limit and the blocks last. If a running sequence gets no block, the last
    unit by key is preempted, and then nothing is brought back or admitted.
    """

    def __init__(self, accounting: BlockAccounting, cost: StepCost) -> None:
        self._accounting = accounting
        self._config = accounting.config
        self._cost = cost
        self._size = accounting.config.block_size_tokens
        self._step_tokens_max = accounting.config.step_tokens_max
        self._delay_factor_ppm = accounting.config.delay_factor_ppm
        self._separate = accounting.config.prefill == "separate"
        self._prompt_step_ns = 0  # duration of the last step with prompts
        self._transfer_ns = 0  # transfer time of the step that is being planned
        self.cache_query_tokens = 0
        self.cache_hit_tokens = 0

    def plan(self, now_ns: int) -> Step | None:
        """Plan a step and take the blocks it needs. O(running + admitted * log(waiting))."""
        accounting = self._accounting
        planned: list[Sequence] = []
        preempted: list[Sequence] = []
        separate = self._separate
        self._transfer_ns = 0
        together = 0
        if separate and not accounting.swapped:
            self._plan_waiting(planned, self._step_tokens_max, now_ns)
        if not planned:
            together = self._plan_lockstep(planned)
            budget = self._plan_running(planned, preempted, together)
            together = min(together, len(accounting.lockstep.members))  # a victim may have ended it
            if not preempted:
                if accounting.swapped:
                    budget = self._plan_swapped(planned, budget)
                if not separate and not accounting.swapped:
                    self._plan_waiting(planned, budget, now_ns)
        if not planned:
            return None
        prompt_tokens, decodes = 0, together
        kv_tokens = accounting.lockstep.kv_tokens() if together else 0
        for place in range(together, len(planned)):
            sequence = planned[place]
            if sequence.computed_base < sequence.prefill_end_tokens:
                prompt_tokens += sequence.scheduled_tokens
            else:
                decodes += 1
                kv_tokens += sequence.computed_base + 1
        transfer_ns = self._transfer_ns
        duration_ns = self._cost.duration_ns(prompt_tokens, decodes, kv_tokens) + transfer_ns
        if prompt_tokens:
            self._prompt_step_ns = duration_ns
        return Step(
            duration_ns,
            planned,
            preempted,
            prompt_tokens,
            decodes,
            kv_tokens,
            transfer_ns,
            together,
        )

    def next_admission(self, budget: int, now_ns: int) -> Admission | None:
        """Find the waiting sequence that could be admitted next; None: none can be admitted now."""
        accounting = self._accounting
        while True:
            sequence = accounting.waiting.peek()
            if sequence is None:
                return None
            if self._delay_factor_ppm and self.delay_left_ns(now_ns) > 0:
                return None
            group = sequence.group
            seats = 1 if group is None else len(group.members)
            if seats > accounting.seats_free():
                return None
            adapter, adapters = sequence.request.adapter, accounting.adapters
            if adapter is None or adapters is None or adapters.has_slot(adapter):
                return self._admissible(sequence, budget)
            # Adapters in use take every slot: requests that need no slot pass.
            accounting.waiting.park()

    def delay_left_ns(self, now_ns: int) -> int:
        """Return for how long the first in the queue is still held back; 0: it is not."""
        factor = self._delay_factor_ppm
        if not factor or not self._accounting.running:
            return 0
        first = self._accounting.waiting.peek()
        if first is None:
            return 0
        # Admitted when it has waited for longer than this.
        until_ns = first.arrival_ns + self._prompt_step_ns * factor // _PPM
        return max(0, until_ns - now_ns + 1)

    def next_return(self, budget: int) -> list[Sequence] | None:
        """Find the swapped unit that could continue now; None: none. O(blocks of the unit)."""
        accounting = self._accounting
        unit = accounting.swapped.peek()
        if unit is None or not budget:
            return None
        group = unit[0].group
        # The answers that wait for their prompt have no blocks, but will need a seat.
        seats = len(unit) if group is None else len(group.members)
        if seats > accounting.seats_free():
            return None
        need = self._need(unit, budget)
        free = accounting.pool.count_free()
        adapter, adapters = unit[0].request.adapter, accounting.adapters
        if adapters is not None:
            if adapter is not None and not adapters.has_slot(adapter):
                return None
            need += adapters.blocks_needed(adapter)
            free += adapters.reclaimable(adapter)
        return unit if need <= free else None

    def _need(self, unit: list[Sequence], budget: int) -> int:
        """Count the blocks of a swapped unit, its copies and its next tokens included."""
        size = self._size
        partial = [s.blocks[-1] for s in unit if s.computed_tokens % size]
        need = _distinct(unit) + len(partial) - len(set(partial))
        for sequence in unit:
            end = sequence.computed_tokens + _due(sequence, budget)
            need += -(-end // size) - len(sequence.blocks)
        return need

    def _plan_lockstep(self, planned: list[Sequence]) -> int:
        """Schedule the sequences in lockstep, if there are blocks for all. Returns their number."""
        accounting = self._accounting
        lockstep, count = accounting.lockstep, accounting.gather()
        if lockstep.blocks_ahead(1) > accounting.pool.count_free():
            lockstep.dissolve()
            return 0
        lockstep.take(1)
        planned += accounting.running[:count]
        return count

    def _plan_running(
        self, planned: list[Sequence], preempted: list[Sequence], position: int
    ) -> int:
        """Schedule running sequences from a position on, oldest first; earlier ones are planned.

        Returns the rest of the token budget.
        """
        accounting = self._accounting
        running, pool = accounting.running, accounting.pool
        block_size = pool.block_size_tokens
        budget = self._step_tokens_max - position
        thrown_out: list[list[Sequence]] = []
        while position < len(running) and budget:
            sequence = running[position]
            computed = sequence.computed_base
            end = sequence.prefill_end_tokens
            if computed >= end:
                end = sequence.request.prompt_tokens + sequence.produced_base
            if end - computed > budget:
                end = computed + budget
            sequence.scheduled_tokens = end - computed
            position += 1
            if end == computed:
                continue  # a beam whose search waits for the other beams
            count = -(-end // block_size) - len(sequence.blocks)
            copies = sequence.group is not None and accounting.must_copy(sequence)
            if count > 0 or copies:
                # The victim is the last, so it was not scheduled in this step; at worst it is the
                # sequence itself, with its group, and the loop ends.
                while count + copies > pool.count_free() and position <= len(running):
                    if accounting.adapters is None or not accounting.adapters.reclaim(
                        count + copies
                    ):
                        thrown_out.append(accounting.throw_out())
                if position > len(running):
                    break
                self._take(sequence, count, copies)
            planned.append(sequence)
            budget -= end - computed
        for place in range(position, len(running)):
            sequence = running[place]
            sequence.scheduled_tokens = 0
        if thrown_out:
            self._throw_out(thrown_out, planned, preempted)
        return budget

    def _take(self, sequence: Sequence, count: int, copies: bool) -> None:
        """Give a sequence the blocks that its next tokens go to."""
        accounting = self._accounting
        if copies:
            accounting.pool.copy_last(sequence.blocks)
            accounting.copied_blocks += 1
            self._transfer_ns += self._cost.copy_ns(self._size)
        if count > 0:
            accounting.pool.allocate(count, sequence.blocks)

    def _throw_out(
        self, units: list[list[Sequence]], planned: list[Sequence], preempted: list[Sequence]
    ) -> None:
        """Queue the victims, and forget their earlier plans."""
        for unit in units:
            preempted += unit
            if unit[0].state == SWAPPED:
                self._move_cost(_distinct(unit))
        self._accounting.requeue(units)
        planned[:] = [s for s in planned if s.state == RUNNING]

    def _plan_swapped(self, planned: list[Sequence], budget: int) -> int:
        """Bring swapped units back, in order, until the first that does not fit."""
        accounting = self._accounting
        while (unit := self.next_return(budget)) is not None:
            need = self._need(unit, budget)
            for sequence in unit:
                self._adapter_cost(accounting.use_adapter(sequence, need))
            if accounting.adapters is not None:  # even if the unit itself has none
                accounting.adapters.reclaim(need)
            self._move_cost(accounting.swap_in(unit))
            for sequence in unit:
                tokens = _due(sequence, budget)
                end = sequence.computed_tokens + tokens
                sequence.scheduled_tokens = tokens
                if not tokens:
                    continue
                count = accounting.blocks_for(end) - len(sequence.blocks)
                self._take(sequence, count, accounting.must_copy(sequence))
                planned.append(sequence)
                budget -= tokens
        return budget

    def _plan_waiting(self, planned: list[Sequence], budget: int, now_ns: int) -> None:
        """Admit waiting units in order, until the first that does not fit."""
        while budget:
            admission = self.next_admission(budget, now_ns)
            if admission is None:
                return
            self._admit(admission)
            planned.append(admission.sequence)
            budget -= admission.tokens

    def _admissible(self, sequence: Sequence, budget: int) -> Admission | None:
        """Return what a waiting sequence could compute in a step now, if it fits."""
        accounting = self._accounting
        target, found = _target(sequence), []
        tokens, free = target, accounting.pool.count_free()
        if sequence.prefix_keys and accounting.cache is not None:
            # The last token is computed in any case: its output is the next token.
            size = self._size
            found = accounting.cache.find(sequence.prefix_keys, (target - 1) // size)
            tokens -= len(found) * size
            free -= sum([block in accounting.cache for block in found])
        if tokens > budget:
            if self._config.prefill != "chunked":
                return None
            tokens = budget
        need = accounting.blocks_for(tokens)
        if self._config.reserve_prompt:
            need = accounting.blocks_for(target) - len(found)
        if sequence.group is not None:
            # Once its prompt is computed, its members need the tokens from before a preemption.
            need = max(need, accounting.group_blocks(sequence.group) - len(found))
        adapters = accounting.adapters
        if adapters is not None:
            need += adapters.blocks_needed(sequence.request.adapter)
            free += adapters.reclaimable(sequence.request.adapter)
        return None if need > free else Admission(sequence, tokens, found)

    def _admit(self, admission: Admission) -> None:
        sequence, tokens, found = admission.sequence, admission.tokens, admission.found
        accounting = self._accounting
        accounting.waiting.pop()
        sequence.prefill_end_tokens = _target(sequence)
        if sequence.prefix_keys and accounting.cache is not None:
            self._hold_found(sequence, found, accounting.cache)
        need = accounting.blocks_for(sequence.computed_base + tokens) - len(sequence.blocks)
        self._adapter_cost(accounting.use_adapter(sequence, need))
        if need > accounting.pool.count_free() and accounting.adapters is not None:
            accounting.adapters.reclaim(need)
        accounting.pool.allocate(need, sequence.blocks)
        sequence.scheduled_tokens = tokens
        accounting.seat(sequence)

    def _hold_found(self, sequence: Sequence, found: list[int], cache: PrefixCache) -> None:
        """Let a sequence begin behind the blocks that the prefix cache has for it."""
        for block in found:
            self._accounting.pool.reuse(block)
            sequence.blocks.append(block)
        cache.count_hits(found)
        cache.pass_by(sequence.request.request_id, sequence.prefix_keys)
        tokens = len(found) * self._size
        sequence.computed_base = sequence.cached_tokens = tokens
        sequence.registered_blocks = len(found)
        if not sequence.preemptions:
            self.cache_query_tokens += sequence.request.prompt_tokens
            self.cache_hit_tokens += tokens

    def _adapter_cost(self, loaded: bool) -> None:
        if loaded:
            self._transfer_ns += self._cost.adapter_load_ns

    def _move_cost(self, blocks: int) -> None:
        self._transfer_ns += self._cost.swap_ns(blocks * self._size)


def _target(sequence: Sequence) -> int:
    """Tokens to be computed before the next token, once it is admitted."""
    # A group computes its prompt once more, then each member its earlier output.
    if sequence.group is not None:
        return sequence.request.prompt_tokens
    return sequence.request.prompt_tokens + sequence.produced_base + sequence.clock.steps


def _due(sequence: Sequence, budget: int) -> int:
    """Return the tokens that a sequence could compute in its next step."""
    computed, end = sequence.computed_tokens, sequence.prefill_end_tokens
    if computed >= end:
        end = sequence.known_tokens
    return min(end - computed, budget)


def _distinct(unit: list[Sequence]) -> int:
    """Count the blocks of a unit; blocks that its sequences share count once."""
    return len({block for sequence in unit for block in sequence.blocks})
