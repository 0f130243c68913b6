"""Drives the engine model in real time: one task, one schedule of absolute times."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from schedsvc_lab.emulator.output import Output
from schedsvc_lab.engine import Engine, EngineRequest, StepResult
from schedsvc_lab.engine.sequence import RequestId

# A delay of the process beyond this is lost time, as it would be for an engine that was paused.
# The engine catches up shorter delays, so that the jitter of timers does not slow it down.
LAG_MAX_NS = 50_000_000
# Timers of the event loop count in milliseconds.
TICK_NS = 1_000_000
# The most steps that are done before other tasks get their turn.
STEPS_IN_A_ROW = 32


class PromptPlan(NamedTuple):
    """Holds one prompt of a request, its answers, and its blocks' keys in the prefix cache."""

    prompt_tokens: int
    outputs: Sequence[Output]
    prefix_keys: tuple[Any, ...] = ()


class Delta(NamedTuple):
    """Holds new tokens of one choice: its tokens start..end-1."""

    choice: int
    start: int
    end: int
    finished: bool


class Generation:
    """Follows one HTTP request in the engine: its choices, prompt by prompt, and their new tokens.

    `waiting()` before `take()`: deltas pile up while the client is slow, and are merged.
    """

    __slots__ = (
        "_changed",
        "_dirty",
        "_taken",
        "arrived_ns",
        "cached",
        "client_gone",
        "cut_off",
        "engine_ids",
        "first_token_ns",
        "open_choices",
        "outputs",
        "produced",
        "prompt_tokens",
    )

    def __init__(self, plans: Sequence[PromptPlan], arrived_ns: int) -> None:
        self.outputs = [output for plan in plans for output in plan.outputs]
        self.prompt_tokens = sum(plan.prompt_tokens for plan in plans)
        self.produced = [0] * len(self.outputs)
        self.open_choices = len(self.outputs)
        self.engine_ids: list[int] = []
        # Tokens of each prompt that its first sequence found cached, when that first ran.
        self.cached: dict[RequestId, int] = {}
        self.arrived_ns = arrived_ns
        self.first_token_ns = 0
        self.cut_off = False
        self.client_gone = False
        self._taken = [0] * len(self.outputs)
        self._dirty: set[int] = set()
        self._changed = asyncio.Event()

    @property
    def completion_tokens(self) -> int:
        """Return the output tokens so far, over all choices."""
        return sum(self.produced)

    @property
    def cached_tokens(self) -> int:
        """Return the prompt tokens that were found in the prefix cache."""
        return sum(self.cached.values())

    @property
    def finished(self) -> bool:
        """Return whether every choice is complete."""
        return self.open_choices == 0

    async def wait(self) -> None:
        """Wait until there is something to take, or the generation is cut off."""
        await self._changed.wait()

    async def wait_finished(self) -> None:
        """Wait until every choice is complete, or the generation is cut off."""
        while not self.finished and not self.cut_off:
            await self._changed.wait()
            self._changed.clear()

    def take(self) -> list[Delta]:
        """Take the new tokens, by choice. Empty if the generation was cut off."""
        self._changed.clear()
        deltas = []
        for choice in sorted(self._dirty):
            start, end = self._taken[choice], self.produced[choice]
            self._taken[choice] = end
            deltas.append(Delta(choice, start, end, end == self.outputs[choice].tokens))
        self._dirty.clear()
        return deltas

    def note(self, choice: int, tokens: int) -> None:
        """Record new tokens of a choice."""
        self.produced[choice] += tokens
        if self.produced[choice] == self.outputs[choice].tokens:
            self.open_choices -= 1
        self._dirty.add(choice)
        self._changed.set()

    def cut(self) -> None:
        """End it before it is complete."""
        self.cut_off = True
        self._dirty.clear()
        self._changed.set()


class RealTimeEngine:
    """Runs an engine against a monotonic clock; `speed` divides every duration.

    A step is planned when the previous step ends, and its tokens are delivered when it ends.
    Ends follow one another on an absolute schedule, so late timers do not add up. All calls have to
    come from the event loop that runs `run()`.
    """

    def __init__(
        self,
        engine: Engine,
        speed: float,
        *,
        on_first_token: Callable[[Generation], None],
        on_end: Callable[[Generation], None],
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.engine = engine
        self.lost_ns = 0
        self._speed = speed
        self._clock = clock
        self._sleep = sleep
        self._on_first_token = on_first_token
        self._on_end = on_end
        self._generations: dict[RequestId, tuple[Generation, int]] = {}
        self._engine_ids = 0
        self._work = asyncio.Event()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Return whether every request is cut off."""
        return self._closed

    @property
    def live(self) -> int:
        """Generations that have not ended. O(live)."""
        return len({id(generation) for generation, _ in self._generations.values()})

    def submit(self, plans: Sequence[PromptPlan], priority: int) -> Generation:
        """Queue a request in the engine. After `close()` it is cut off at once.

        Raises EngineRequestError if it could never run; then no part of it is queued.
        """
        generation = Generation(plans, self._clock())
        if self._closed:
            generation.cut()
            return generation
        choice = 0
        try:
            for plan in plans:
                engine_id = self._engine_ids
                lengths = tuple(output.tokens for output in plan.outputs)
                self.engine.add(
                    EngineRequest(
                        engine_id,
                        plan.prompt_tokens,
                        lengths,
                        priority,
                        prefix_keys=plan.prefix_keys,
                    ),
                    self._engine_ns(generation.arrived_ns),
                )
                self._engine_ids += 1
                self._generations[engine_id] = (generation, choice)
                generation.engine_ids.append(engine_id)
                choice += len(lengths)
        except Exception:
            self._drop(generation)
            raise
        self._work.set()
        return generation

    def abort(self, generation: Generation) -> None:
        """End a generation that is not complete, and free its blocks at once. Idempotent."""
        if generation.finished or generation.cut_off:
            return
        self._drop(generation)
        generation.cut()
        self._on_end(generation)

    def close(self) -> None:
        """Cut off every generation, and every later one. Idempotent."""
        self._closed = True
        for generation, _ in list(self._generations.values()):
            self.abort(generation)

    async def run(self) -> None:
        """Run steps while there is work, until the task is cancelled."""
        due_ns = self._clock()
        in_a_row = 0
        while True:
            step = self.engine.plan_step(self._engine_ns(due_ns))
            if step is None:
                self._work.clear()
                await self._work.wait()
                due_ns, in_a_row = self._clock(), 0
                continue
            due_ns += round(step.duration_ns / self._speed)
            late_ns = self._clock() - due_ns
            if late_ns > LAG_MAX_NS:
                self.lost_ns += late_ns
                due_ns += late_ns
            in_a_row += 1
            if late_ns < 0:
                await self._sleep_until(due_ns)
                in_a_row = 0
            elif in_a_row == STEPS_IN_A_ROW:
                await self._sleep(0)
                in_a_row = 0
            self._deliver(self.engine.finish_step())

    def _engine_ns(self, clock_ns: int) -> int:
        """Turn a time of the clock into the engine's, which goes `speed` times as fast."""
        return round(clock_ns * self._speed)

    async def _sleep_until(self, due_ns: int) -> None:
        while (left_ns := due_ns - self._clock()) > 0:
            ticks = -(-left_ns // TICK_NS)
            await self._sleep(ticks * TICK_NS / 1e9)

    def _deliver(self, result: StepResult) -> None:
        for sequence in result.produced:
            generation, base = self._generations[sequence.request.request_id]
            if not generation.first_token_ns:
                generation.first_token_ns = self._clock()
                self._on_first_token(generation)
            if sequence.prefix_keys and sequence.index == 0:
                generation.cached.setdefault(sequence.request.request_id, sequence.cached_tokens)
            generation.note(base + sequence.index, result.tokens)
        for sequence in result.finished:
            entry = self._generations.get(sequence.request.request_id)
            # Its last choices may end in one step; the first of them has ended it already.
            if entry is not None and entry[0].finished:
                self._drop(entry[0])
                self._on_end(entry[0])

    def _drop(self, generation: Generation) -> None:
        """Forget a generation, also in the engine."""
        for engine_id in generation.engine_ids:
            self.engine.abort(engine_id)
            del self._generations[engine_id]
        generation.engine_ids = []
