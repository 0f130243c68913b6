"""Runs the engine: continuous batching over a paged KV cache, one step at a time."""

from schedsvc_lab.engine.block_accounting import BlockAccounting
from schedsvc_lab.engine.blocks import BlockPool
from schedsvc_lab.engine.config import EngineConfig
from schedsvc_lab.engine.cost import StepCost
from schedsvc_lab.engine.errors import EngineInvariantError, EngineRequestError
from schedsvc_lab.engine.eviction import Future
from schedsvc_lab.engine.invariants import check_invariants
from schedsvc_lab.engine.lockstep import Lockstep
from schedsvc_lab.engine.planner import Planner
from schedsvc_lab.engine.runs import Runs
from schedsvc_lab.engine.sequence import (
    HELD,
    RUNNING,
    EngineRequest,
    Group,
    RequestId,
    Sequence,
)
from schedsvc_lab.engine.step import DecodeRun, EngineGauges, Step, StepResult

# A sequence's key is priority * 2**64 + arrival, so that one integer orders both.
_ARRIVALS = 64
# The widest beam search: each step compares the square of this number.
BEAMS_MAX = 64


class Engine:
    """Models a continuous-batching engine as its configuration describes, deterministic, sans-IO.

    Times are the caller's; they matter only if the delay factor is on. Belady's rule for the prefix
    cache needs the future. One step costs O(running + admitted * log(waiting) + blocks allocated).
    Raises ValueError if cost, future and configuration do not go together.
    """

    def __init__(self, config: EngineConfig, cost: StepCost, future: Future | None = None) -> None:
        if len(cost.decode_table_ns) <= config.sequences_max:
            raise ValueError("cost: its table is smaller than sequences_max")
        self.config = config
        self.cost = cost
        self._size = config.block_size_tokens
        self._context_tokens_max = config.context_tokens_max
        self._by_priority = config.policy == "priority"
        self._accounting = BlockAccounting(config, future)
        self._planner = Planner(self._accounting, cost)
        self._runs = Runs(self._accounting, self._planner, cost)
        self._prompts_open: set[RequestId] = set()  # prompts that are not counted yet
        self._step: Step | None = None
        self._arrivals = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._steps = 0

    @property
    def blocks(self) -> BlockPool:
        """The device's KV blocks."""
        return self._accounting.pool

    @property
    def lockstep(self) -> Lockstep:
        """Return the sequences that decode in lockstep, to be looked at."""
        return self._accounting.lockstep

    def add(self, request: EngineRequest, now_ns: int = 0) -> list[Sequence]:
        """Queue a request. Returns its sequences. O(sequences * log n).

        Raises EngineRequestError if its id is in use or it could never run.
        """
        several = len(request.output_tokens) > 1
        forks = request.beam or (several and self.config.groups == "fork")
        self._check_request(request, forks)
        base = request.priority << _ARRIVALS if self._by_priority else 0
        group = Group(request) if forks else None
        keys = request.prefix_keys if self._accounting.cache is not None else ()
        if keys and request.adapter is not None:
            # Another adapter cannot use the KV cache that an adapter has computed.
            keys = tuple([(request.adapter, key) for key in keys])
        sequences = []
        for index in range(len(request.output_tokens)):
            sequence = Sequence(request, index, base + self._arrivals, now_ns, group)
            sequence.prefix_keys = keys
            self._arrivals += 1
            sequences.append(sequence)
            if group is not None and index:
                sequence.state = HELD
            else:
                self._accounting.waiting.push(sequence)
        if group is not None:
            group.members = list(sequences)
        self._accounting.requests[request.request_id] = list(sequences)
        self._prompts_open.add(request.request_id)
        return sequences

    def abort(self, request_id: RequestId) -> bool:
        """End a request at once and free its blocks, also within a step. False: not known here.

        O(sequences * running).
        """
        accounting = self._accounting
        sequences = accounting.requests.pop(request_id, None)
        if sequences is None:
            return False
        self._prompts_open.discard(request_id)
        accounting.abort(sequences)
        if accounting.cache is not None:
            accounting.cache.pass_by(request_id, sequences[0].prefix_keys)
        return True

    def plan_step(self, now_ns: int = 0) -> Step | None:
        """Decide the next step and take the blocks it needs; None if there is nothing to do.

        The caller lets `duration_ns` pass and calls `finish_step()`.
        """
        if self._step is not None:
            raise EngineInvariantError("a step is under way; finish it first")
        self._step = self._planner.plan(now_ns)
        return self._step

    def finish_step(self) -> StepResult:
        """Apply the step that was planned; requests aborted meanwhile produce nothing."""
        step = self._step
        if step is None:
            raise EngineInvariantError("no step is under way; plan one first")
        self._step = None
        self._steps += 1
        sequences = step.sequences
        produced: list[Sequence] = []
        finished: list[Sequence] = []
        started: list[Sequence] = []
        groups: dict[RequestId, Group] = {}
        # Otherwise a part of it was aborted, and each sequence continues by itself.
        begin = 0
        if step.together and step.together == len(self._accounting.lockstep.members):
            finished = self._accounting.lockstep.advance(1)
            begin = step.together
            produced = sequences[:begin]
        for place in range(begin, len(sequences)):
            sequence = sequences[place]
            if sequence.state != RUNNING:
                continue
            computed = sequence.computed_base + sequence.scheduled_tokens
            sequence.computed_base = computed
            if sequence.prefix_keys and sequence.registered_blocks < len(sequence.prefix_keys):
                self._register(sequence)
            if computed < sequence.prefill_end_tokens:
                continue
            group = sequence.group
            if group is not None and (sequence.request.beam or not group.forked):
                groups[sequence.request.request_id] = group
                continue
            self._produce(sequence, started)
            produced.append(sequence)
            if sequence.produced_base == sequence.output_tokens:
                finished.append(sequence)
        for group in groups.values():
            for sequence in self._extend(group):
                self._produce(sequence, started)
                produced.append(sequence)
                if sequence.produced_base == sequence.output_tokens:
                    finished.append(sequence)
        self._generation_tokens += len(produced)
        for sequence in finished:
            self._accounting.finish(sequence)
        return StepResult(step.duration_ns, 1, produced, finished, step.preempted, started)

    def step(self, now_ns: int = 0) -> StepResult | None:
        """Plan and finish one step at once, for a caller in virtual time."""
        return None if self.plan_step(now_ns) is None else self.finish_step()

    def run_decodes(
        self, steps_max: int, duration_max_ns: int | None = None, now_ns: int = 0
    ) -> StepResult | None:
        """Do up to `steps_max` steps at once, with the same result as single calls of `step()`.

        Only while all running sequences decode and nothing can be admitted: up to and including the
        step in which the first sequence ends, at most `steps_max` steps, and no step begins at or
        after `duration_max_ns`. None if not even one step is of that kind. As `plan_decodes()` and
        `finish_decodes()`.
        """
        run = self.plan_decodes(steps_max, duration_max_ns, now_ns)
        return None if run is None else self.finish_decodes(run, run.steps)

    def plan_decodes(
        self, steps_max: int, duration_max_ns: int | None = None, now_ns: int = 0
    ) -> DecodeRun | None:
        """Foresee what `run_decodes()` would do, and decide nothing.

        O(log n), and the cost of `BlockAccounting.gather()` unless all were in lockstep.
        """
        if self._step is not None:
            raise EngineInvariantError("a step is under way; finish it first")
        return self._runs.plan(steps_max, duration_max_ns, now_ns)

    def finish_decodes(self, run: DecodeRun, steps: int) -> StepResult:
        """Apply the first `steps` steps of a run; no request may have been added or aborted since.

        O(running) to copy a list, and as `advance_decodes()`.
        """
        produced = list(self._accounting.running)
        finished = self.advance_decodes(run, steps)
        duration_ns = self.cost.decode_run_ns(steps, run.decodes, run.kv_tokens)
        return StepResult(duration_ns, steps, produced, finished, [], [])

    def advance_decodes(self, run: DecodeRun, steps: int) -> list[Sequence]:
        """Do the same, and return only complete requests. O(blocks allocated + ended * log n)."""
        running = self._accounting.running
        if (
            self._step is not None
            or not run.decodes == len(running) == len(self._accounting.lockstep.members)
            or not 1 <= steps <= run.steps
        ):
            raise EngineInvariantError("this is no run of decodes that was planned just now")
        finished = self._runs.apply(steps)
        self._steps += steps
        self._generation_tokens += steps * run.decodes
        for sequence in finished:
            self._accounting.finish(sequence)
        return finished

    def gauges(self) -> EngineGauges:
        """Take the figures of this moment. O(1)."""
        accounting = self._accounting
        pool, adapters = accounting.pool, accounting.adapters
        used = pool.used
        return EngineGauges(
            running=len(accounting.running),
            waiting=len(accounting.waiting),
            used_blocks=used,
            total_blocks=pool.total,
            used_tokens=used * pool.block_size_tokens,
            preemptions=accounting.preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
            swapped=len(accounting.swapped),
            cached_blocks=pool.cached,
            cache_query_tokens=self._planner.cache_query_tokens,
            cache_hit_tokens=self._planner.cache_hit_tokens,
            cache_evictions=0 if accounting.cache is None else accounting.cache.evictions,
            swapped_blocks=accounting.swapped_blocks,
            copied_blocks=accounting.copied_blocks,
            adapters_loaded=0 if adapters is None else adapters.loaded,
            adapter_loads=0 if adapters is None else adapters.loads,
        )

    def counts(self) -> tuple[int, int, int]:
        """Count running and waiting requests, and preemptions since the start. O(1)."""
        accounting = self._accounting
        return len(accounting.running), len(accounting.waiting), accounting.preemptions

    def blocks_ahead(self, steps: int) -> int:
        """Count the blocks that the next `steps` steps of a planned run take. O(log n)."""
        return self._accounting.lockstep.blocks_ahead(steps)

    def running(self) -> list[Sequence]:
        """List the running sequences in order of service. O(running)."""
        return list(self._accounting.running)

    def waiting(self) -> list[Sequence]:
        """List the waiting sequences in order of service. O(waiting * log(waiting))."""
        return self._accounting.waiting.live()

    def swapped(self) -> list[list[Sequence]]:
        """List the units in host memory in the order in which they return. O(swapped)."""
        return self._accounting.swapped.units()

    def check(self) -> None:
        """Verify the books; raises EngineInvariantError. O(blocks + sequences * log n)."""
        check_invariants(self._accounting, self._step is not None)

    def _check_request(self, request: EngineRequest, forks: bool) -> None:
        if request.request_id in self._accounting.requests:
            raise EngineRequestError("request_id", f"{request.request_id!r} is in use")
        if request.prompt_tokens < 1:
            raise EngineRequestError("prompt_tokens", "must be at least 1")
        outputs = request.output_tokens
        if not outputs or min(outputs) < 1:
            raise EngineRequestError("output_tokens", "must name at least one length, each >= 1")
        longest = outputs[0] if len(outputs) == 1 else max(outputs)
        total = request.prompt_tokens + longest
        if total > self._context_tokens_max:
            raise EngineRequestError(
                "prompt_tokens",
                f"prompt and output are {total} tokens, more than the context of "
                f"{self._context_tokens_max}",
            )
        if not 0 <= request.returned <= len(outputs):
            raise EngineRequestError(
                "returned", f"must be 0 to {len(outputs)}, the number of output lengths"
            )
        if len(request.prefix_keys) > request.prompt_tokens // self._size:
            raise EngineRequestError("prefix_keys", "are more than the prompt has full blocks")
        if request.adapter is not None and not self.config.adapters_max:
            raise EngineRequestError("adapter", "is not possible: adapters_max is 0")
        if request.beam and (len(outputs) > BEAMS_MAX or min(outputs) != max(outputs)):
            raise EngineRequestError(
                "output_tokens", f"of a beam search are 1 to {BEAMS_MAX}, all of one length"
            )
        if forks:
            self._check_group(request)

    def _check_group(self, request: EngineRequest) -> None:
        """Refuse a group that could not end even alone in the engine."""
        outputs = request.output_tokens
        if len(outputs) > self.config.sequences_max:
            raise EngineRequestError(
                "output_tokens",
                f"the {len(outputs)} sequences of a group run together, and at most "
                f"{self.config.sequences_max} run",
            )
        # They share the full blocks of their prompt, and may later share nothing else.
        shared = request.prompt_tokens // self.config.block_size_tokens
        own = [self._accounting.blocks_for(request.prompt_tokens + n) - shared for n in outputs]
        room = self.config.blocks
        if request.adapter is not None:
            room -= self.config.adapter_blocks
        if shared + sum(own) > room:
            raise EngineRequestError(
                "output_tokens",
                f"the group may need {shared + sum(own)} blocks, and there are {room}",
            )

    def _register(self, sequence: Sequence) -> None:
        """Make the prompt blocks that have just been computed known to the prefix cache."""
        cache = self._accounting.cache
        if cache is None:
            return
        keys, table = sequence.prefix_keys, sequence.blocks
        done = sequence.registered_blocks
        full = min(len(keys), sequence.computed_base // self._size)
        for at in range(done, full):
            cache.register(keys[at], table[at])
        sequence.registered_blocks = max(done, full)

    def _produce(self, sequence: Sequence, started: list[Sequence]) -> None:
        """Give a sequence its next token, and count its prompt with the first one."""
        if sequence.produced_base == 0:
            started.append(sequence)
            if sequence.request.request_id in self._prompts_open:
                self._prompts_open.remove(sequence.request.request_id)
                self._prompt_tokens += sequence.request.prompt_tokens
        sequence.produced_base += 1

    def _extend(self, group: Group) -> list[Sequence]:
        """Fork a group whose prompt is computed, and extend beams that are ready.

        Returns the sequences that get a token. After a preemption a sampled answer must first
        recompute the tokens that it had produced.
        """
        if not group.forked:
            self._accounting.fork(group)
        if not group.request.beam:
            return [m for m in group.members if m.computed_tokens == m.known_tokens]
        if not group.is_ready():
            return []
        group.extend(self._accounting.pool)
        return group.members
