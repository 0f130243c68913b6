"""The engine: continuous batching over a paged KV cache, one step at a time."""

from bisect import bisect_left, insort
from operator import attrgetter
from typing import NamedTuple

from schedsvc.sim.engine.blocks import BlockPool
from schedsvc.sim.engine.config import EngineConfig
from schedsvc.sim.engine.cost import StepCost
from schedsvc.sim.engine.errors import EngineInvariantError, EngineRequestError
from schedsvc.sim.engine.sequence import EngineRequest, RequestId, Sequence, SequenceState
from schedsvc.sim.engine.waiting import WaitingQueue

_key = attrgetter("key")
# A sequence's key is priority * 2**64 + arrival, so that one integer orders both.
_ARRIVALS = 64


class EngineGauges(NamedTuple):
    """The engine at one moment, and totals since its start.

    `prompt_tokens` counts a request's prompt once, when the first of its sequences has computed
    it; what is recomputed after a preemption is not counted again.
    """

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    used_tokens: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    steps: int


class Step(NamedTuple):
    """A step that is under way: what it computes and how long it takes."""

    duration_ns: int
    sequences: list[Sequence]
    preempted: list[Sequence]
    prompt_tokens: int
    decodes: int
    kv_tokens: int


class DecodeRun(NamedTuple):
    """Decode steps that could be done at once; the first of them reads `kv_tokens`."""

    steps: int
    duration_ns: int
    decodes: int
    kv_tokens: int


class StepResult(NamedTuple):
    """What a step, or a run of decode steps, brought about.

    Each of `produced` has `tokens` more tokens of output; `finished` are those of them that are
    complete. `preempted` were thrown out when the step was planned, and wait again.
    """

    duration_ns: int
    tokens: int
    produced: list[Sequence]
    finished: list[Sequence]
    preempted: list[Sequence]


class Engine:
    """Schedules as vLLM's V1 scheduler does, in a model that is deterministic and sans-IO.

    A step serves the running sequences first, in order of key (arrival; or priority, then
    arrival), then admits waiting ones while the token budget, the sequence limit and the blocks
    last. Where a running sequence gets no block, the last one by key is preempted: its blocks are
    freed, it goes back to its place at the front of the queue, and what it had computed, its
    output included, is computed anew. Nothing is admitted in a step that preempts.

    One step costs O(running + admitted * log(waiting) + blocks allocated).
    """

    def __init__(self, config: EngineConfig, cost: StepCost) -> None:
        if len(cost.decode_table_ns) <= config.sequences_max:
            raise ValueError("cost: its table is smaller than sequences_max")
        self.config = config
        self.cost = cost
        self.blocks = BlockPool(config.blocks, config.block_size_tokens)
        self._running: list[Sequence] = []  # ascending by key
        self._waiting = WaitingQueue()
        self._requests: dict[RequestId, list[Sequence]] = {}  # only unfinished sequences
        self._prompts_open: set[RequestId] = set()  # prompts that are not counted yet
        self._step: Step | None = None
        self._arrivals = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._steps = 0

    def add(self, request: EngineRequest) -> list[Sequence]:
        """Queue a request. Returns its sequences. O(sequences * log n).

        Raises EngineRequestError where its id is in use or it could never run.
        """
        self._check_request(request)
        base = request.priority << _ARRIVALS if self.config.policy == "priority" else 0
        sequences = []
        for index in range(len(request.output_tokens)):
            sequence = Sequence(request, index, base + self._arrivals)
            self._arrivals += 1
            self._waiting.push(sequence)
            sequences.append(sequence)
        self._requests[request.request_id] = list(sequences)
        self._prompts_open.add(request.request_id)
        return sequences

    def abort(self, request_id: RequestId) -> bool:
        """End a request at once and free its blocks, also within a step. False: not known here.

        O(sequences * running).
        """
        sequences = self._requests.pop(request_id, None)
        if sequences is None:
            return False
        self._prompts_open.discard(request_id)
        for sequence in sequences:
            waiting = sequence.state == SequenceState.WAITING
            sequence.state = SequenceState.ABORTED
            if waiting:
                self._waiting.forget()
            else:
                self._leave(sequence)
        return True

    def plan_step(self) -> Step | None:
        """Decide the next step and take the blocks it needs; None where there is nothing to do.

        The caller lets `duration_ns` pass and calls `finish_step()`.
        """
        if self._step is not None:
            raise EngineInvariantError("a step is under way; finish it first")
        planned: list[Sequence] = []
        preempted: list[Sequence] = []
        if self.config.prefill == "separate":
            self._plan_waiting(planned, self.config.step_tokens_max)
        if not planned:
            budget = self._plan_running(planned, preempted)
            if not preempted:
                self._plan_waiting(planned, budget)
        if not planned:
            return None
        prompt_tokens = decodes = kv_tokens = 0
        for sequence in planned:
            if sequence.computed_tokens < sequence.prefill_end_tokens:
                prompt_tokens += sequence.scheduled_tokens
            else:
                decodes += 1
                kv_tokens += sequence.computed_tokens + 1
        duration_ns = self.cost.duration_ns(prompt_tokens, decodes, kv_tokens)
        self._step = Step(duration_ns, planned, preempted, prompt_tokens, decodes, kv_tokens)
        return self._step

    def finish_step(self) -> StepResult:
        """Apply the step that was planned; what was aborted meanwhile produces nothing."""
        step = self._step
        if step is None:
            raise EngineInvariantError("no step is under way; plan one first")
        self._step = None
        self._steps += 1
        produced: list[Sequence] = []
        finished: list[Sequence] = []
        for sequence in step.sequences:
            if sequence.state != SequenceState.RUNNING:
                continue
            computed = sequence.computed_tokens + sequence.scheduled_tokens
            sequence.computed_tokens = computed
            if computed < sequence.prefill_end_tokens:
                continue
            if sequence.produced_tokens == 0:
                self._count_prompt(sequence.request)
            sequence.produced_tokens += 1
            produced.append(sequence)
            if sequence.produced_tokens == sequence.output_tokens:
                finished.append(sequence)
        self._generation_tokens += len(produced)
        for sequence in finished:
            self._finish(sequence)
        return StepResult(step.duration_ns, 1, produced, finished, step.preempted)

    def step(self) -> StepResult | None:
        """Plan and finish one step at once, for a caller in virtual time."""
        return None if self.plan_step() is None else self.finish_step()

    def run_decodes(self, steps_max: int, duration_max_ns: int | None = None) -> StepResult | None:
        """Do many steps at once, exactly as so many calls of `step()` would.

        Only while all running sequences decode and nothing can be admitted: up to and including
        the step in which the first sequence ends, at most `steps_max` steps, and no step begins at
        or after `duration_max_ns`. None where not even one step is of that kind.
        O(running * log(steps)).
        """
        run = self.plan_decodes(steps_max, duration_max_ns)
        return None if run is None else self.finish_decodes(run, run.steps)

    def plan_decodes(self, steps_max: int, duration_max_ns: int | None = None) -> DecodeRun | None:
        """Foresee what `run_decodes()` would do, and change nothing. O(running * log(steps))."""
        if self._step is not None:
            raise EngineInvariantError("a step is under way; finish it first")
        running = self._running
        if not running or not self._only_decodes():
            return None
        steps = min(steps_max, min([s.output_tokens - s.produced_tokens for s in running]))
        kv_tokens = sum([s.computed_tokens for s in running]) + len(running)
        if duration_max_ns is not None:
            steps = self._steps_within(steps, kv_tokens, duration_max_ns)
        steps = self._steps_in_blocks(steps)
        if steps < 1:
            return None
        duration_ns = self.cost.decode_run_ns(steps, len(running), kv_tokens)
        return DecodeRun(steps, duration_ns, len(running), kv_tokens)

    def finish_decodes(self, run: DecodeRun, steps: int) -> StepResult:
        """Apply the first `steps` steps of a run; nothing may have been added or aborted since.

        O(running + blocks allocated).
        """
        running, pool = self._running, self.blocks
        block_size = pool.block_size_tokens
        if self._step is not None or len(running) != run.decodes or not 1 <= steps <= run.steps:
            raise EngineInvariantError("this is no run of decodes that was planned just now")
        finished = []
        for sequence in running:
            computed = sequence.computed_tokens + steps
            sequence.computed_tokens = computed
            sequence.produced_tokens += steps
            count = -(-computed // block_size) - len(sequence.blocks)
            if count:
                pool.allocate(count, sequence.blocks)
            if sequence.produced_tokens == sequence.output_tokens:
                finished.append(sequence)
        produced = list(running)
        self._steps += steps
        self._generation_tokens += steps * len(produced)
        for sequence in finished:
            self._finish(sequence)
        duration_ns = self.cost.decode_run_ns(steps, run.decodes, run.kv_tokens)
        return StepResult(duration_ns, steps, produced, finished, [])

    def gauges(self) -> EngineGauges:
        """Take the figures of this moment. O(1)."""
        return EngineGauges(
            running=len(self._running),
            waiting=len(self._waiting),
            used_blocks=self.blocks.used,
            total_blocks=self.blocks.total,
            used_tokens=self.blocks.used * self.blocks.block_size_tokens,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
        )

    def running(self) -> list[Sequence]:
        """List the running sequences in order of service. O(running)."""
        return list(self._running)

    def waiting(self) -> list[Sequence]:
        """List the waiting sequences in order of service. O(waiting * log(waiting))."""
        return self._waiting.live()

    def check(self) -> None:
        """Verify the books; raises EngineInvariantError. O(blocks + sequences * log n)."""
        running, waiting = self._running, self._waiting.live()
        self.blocks.check(s.blocks for s in running)
        _check(len(waiting) == len(self._waiting), "the queue miscounts what waits")
        keys = [s.key for s in running]
        _check(keys == sorted(set(keys)), "the running sequences are out of order")
        _check(len(running) <= self.config.sequences_max, "too many sequences run")
        for s in running:
            _check(s.state == SequenceState.RUNNING, f"{s} runs in the wrong state")
            planned = s.scheduled_tokens if self._step else 0
            _check(
                self._blocks_for(s.computed_tokens)
                <= len(s.blocks)
                <= self._blocks_for(s.computed_tokens + planned),
                f"{s} holds {len(s.blocks)} blocks",
            )
            _check(s.computed_tokens <= s.known_tokens, f"{s} computed more than it knows")
            _check(s.produced_tokens < s.output_tokens, f"{s} should have ended")
        for s in waiting:
            _check(not s.blocks and s.computed_tokens == 0, f"{s} waits and holds blocks")
        open_sequences = sum(len(group) for group in self._requests.values())
        _check(open_sequences == len(running) + len(waiting), "a sequence is lost")

    def _check_request(self, request: EngineRequest) -> None:
        if request.request_id in self._requests:
            raise EngineRequestError("request_id", f"{request.request_id!r} is in use")
        if request.prompt_tokens < 1:
            raise EngineRequestError("prompt_tokens", "must be at least 1")
        if not request.output_tokens or min(request.output_tokens) < 1:
            raise EngineRequestError("output_tokens", "must name at least one length, each >= 1")
        total = request.prompt_tokens + max(request.output_tokens)
        if total > self.config.context_tokens_max:
            raise EngineRequestError(
                "prompt_tokens",
                f"prompt and output are {total} tokens, more than the context of "
                f"{self.config.context_tokens_max}",
            )

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.blocks.block_size_tokens)

    def _plan_running(self, planned: list[Sequence], preempted: list[Sequence]) -> int:
        """Schedule what runs, oldest first. Returns what is left of the token budget."""
        running, pool = self._running, self.blocks
        block_size = pool.block_size_tokens
        budget = self.config.step_tokens_max
        position = 0
        while position < len(running) and budget:
            sequence = running[position]
            known = sequence.request.prompt_tokens + sequence.produced_tokens
            tokens = min(known - sequence.computed_tokens, budget)
            end = sequence.computed_tokens + tokens
            count = -(-end // block_size) - len(sequence.blocks)
            if count > 0:
                # The victim stands last, so it was not scheduled in this step; at worst it is
                # the sequence itself, and the loop ends.
                while count > pool.free and position < len(running):
                    preempted.append(self._preempt())
                if position == len(running):
                    break
                pool.allocate(count, sequence.blocks)
            sequence.scheduled_tokens = tokens
            planned.append(sequence)
            budget -= tokens
            position += 1
        for sequence in running[position:]:
            sequence.scheduled_tokens = 0
        return budget

    def _plan_waiting(self, planned: list[Sequence], budget: int) -> None:
        """Admit what waits, in order, until the first that does not fit."""
        while budget and len(self._running) < self.config.sequences_max:
            sequence = self._waiting.peek()
            if sequence is None:
                return
            tokens = self._admissible(sequence, budget)
            if not tokens:
                return
            self._waiting.pop()
            self.blocks.allocate(self._blocks_for(tokens), sequence.blocks)
            sequence.state = SequenceState.RUNNING
            sequence.prefill_end_tokens = sequence.known_tokens
            sequence.scheduled_tokens = tokens
            insort(self._running, sequence, key=_key)
            planned.append(sequence)
            budget -= tokens

    def _admissible(self, sequence: Sequence, budget: int) -> int:
        """Tokens that a waiting sequence could compute in a step now; 0: it has to wait."""
        tokens = sequence.known_tokens
        if tokens > budget:
            if self.config.prefill != "chunked":
                return 0
            tokens = budget
        return tokens if self._blocks_for(tokens) <= self.blocks.free else 0

    def _preempt(self) -> Sequence:
        """Throw out the last running sequence; what it computed is lost."""
        sequence = self._running.pop()
        self.blocks.release(sequence.blocks)
        sequence.computed_tokens = 0
        sequence.scheduled_tokens = 0
        sequence.preemptions += 1
        sequence.state = SequenceState.WAITING
        self._waiting.push(sequence)
        self._preemptions += 1
        return sequence

    def _only_decodes(self) -> bool:
        """Whether the next step, and those after it until one ends, are decodes of what runs."""
        running = self._running
        if len(running) > self.config.step_tokens_max:
            return False
        if any(s.computed_tokens < s.prefill_end_tokens for s in running):
            return False
        if len(running) == self.config.sequences_max:
            return True
        head = self._waiting.peek()
        if head is None:
            return True
        separate = self.config.prefill == "separate"
        budget = self.config.step_tokens_max - (0 if separate else len(running))
        return not budget or not self._admissible(head, budget)

    def _steps_within(self, steps: int, kv_tokens: int, duration_max_ns: int) -> int:
        """Find the fewest steps, at most `steps`, that reach the duration. O(log(steps))."""
        count = len(self._running)
        reached = bisect_left(
            range(steps),
            duration_max_ns,
            key=lambda n: self.cost.decode_run_ns(n, count, kv_tokens),
        )
        return min(steps, reached)

    def _steps_in_blocks(self, steps: int) -> int:
        """Find the most steps, up to `steps`, for which the free blocks suffice."""
        free = self.blocks.free
        # No sequence takes more than this; where even that fits, nothing has to be counted.
        if len(self._running) * (steps // self.blocks.block_size_tokens + 1) <= free:
            return steps

        def needed(n: int) -> int:
            return sum(
                self._blocks_for(s.computed_tokens + n) - len(s.blocks) for s in self._running
            )

        if needed(steps) <= free:
            return steps
        # The first count of steps that does not fit, less one.
        return bisect_left(range(steps), free + 1, key=needed) - 1

    def _count_prompt(self, request: EngineRequest) -> None:
        if request.request_id in self._prompts_open:
            self._prompts_open.remove(request.request_id)
            self._prompt_tokens += request.prompt_tokens

    def _finish(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.FINISHED
        self._leave(sequence)
        group = self._requests[sequence.request.request_id]
        group.remove(sequence)
        if not group:
            del self._requests[sequence.request.request_id]

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones and free its blocks."""
        del self._running[bisect_left(self._running, sequence.key, key=_key)]
        self.blocks.release(sequence.blocks)


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise EngineInvariantError(what)
