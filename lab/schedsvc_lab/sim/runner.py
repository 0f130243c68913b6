"""One engine in virtual time: steps and runs of decodes, cut where something arrives."""

from collections.abc import Hashable

from schedsvc_lab.engine import DecodeRun, Engine, EngineRequest, Sequence
from schedsvc_lab.sim.requests import NEVER

_STEPS_MAX = 1 << 40


Totals = tuple[tuple[int, ...], list[int]]
"""Requests of one engine (the same tuple until they change), and the output of each so far."""


class EngineRunner:
    """Lets an engine work between the times at which the world looks at it.

    While the engine only decodes, the steps up to the first end are foreseen as one run and
    applied at once; `add()` cuts a run at the step that is under way, so that the result is the
    same to the token as stepping. Where `round_steps` is given, no run goes over that many decode
    steps since `rounds_done()`.
    """

    __slots__ = (
        "_decodes",
        "_indices",
        "_round_steps",
        "_run",
        "_start_ns",
        "cached",
        "end_ns",
        "engine",
        "live",
    )

    def __init__(self, engine: Engine, round_steps: int = 0) -> None:
        self.engine = engine
        self.live: dict[int, Sequence] = {}
        self.cached: dict[int, int] = {}
        self._indices: tuple[int, ...] | None = ()  # of what is live, if it has not changed
        self.end_ns = NEVER  # of what is under way
        self._start_ns = 0
        self._run: DecodeRun | None = None
        self._round_steps = round_steps
        self._decodes = 0

    def add(
        self,
        now_ns: int,
        index: int,
        prompt_tokens: int,
        output_tokens: int,
        keys: tuple[Hashable, ...] = (),
        adapter: str | None = None,
    ) -> None:
        """Hand in a request. Raises EngineRequestError where it can never run.

        `keys` name what the blocks of its prompt hold.
        """
        self._cut(now_ns)
        request = EngineRequest(
            index, prompt_tokens, (output_tokens,), prefix_keys=keys, adapter=adapter
        )
        self.live[index] = self.engine.add(request, now_ns)[0]
        self._indices = None

    def plan(self, now_ns: int) -> None:
        """Begin the next step or run, unless one is under way or there is nothing to do."""
        if self.end_ns != NEVER:
            return
        steps_max = self._round_steps - self._decodes if self._round_steps else _STEPS_MAX
        self._run = self.engine.plan_decodes(steps_max, now_ns=now_ns)
        if self._run is not None:
            self._start_ns = now_ns
            self.end_ns = now_ns + self._run.duration_ns
        else:
            self._plan_step(now_ns)

    def finish(self) -> tuple[list[int], list[int]]:
        """Apply what ends at `end_ns`: requests with their first token, and those complete.

        How much of the latters' prompts was found in the prefix cache is in `cached`.
        """
        self.end_ns = NEVER
        first: list[int] = []
        if self._run is not None:
            result = self.engine.finish_decodes(self._run, self._run.steps)
            self._run = None
            self._decodes += result.tokens
        else:
            result = self.engine.finish_step()
            first = [_index(s) for s in result.started]
            if len(first) < len(result.produced):
                self._decodes += 1
        self.cached.clear()
        finished = []
        for sequence in result.finished:
            index = _index(sequence)
            finished.append(index)
            if sequence.cached_tokens:
                self.cached[index] = sequence.cached_tokens
            del self.live[index]
            self._indices = None
        return first, finished

    def is_between(self) -> bool:
        """Return whether no step is under way, so that what is added now runs in the next one."""
        return self.end_ns == NEVER

    def round_is_due(self) -> bool:
        """Return whether new work may be considered: after `round_steps` decode steps, or idle."""
        return self.is_between() and (self._decodes >= self._round_steps or not self.live)

    def round_done(self) -> None:
        """Count decode steps from 0 again."""
        self._decodes = 0

    def report(self, now_ns: int) -> tuple[Totals, int]:
        """Return the output tokens so far of all live requests, and `used_tokens`. O(live)."""
        done = self._steps_done(now_ns)
        # This is asked often, and most often of sequences that are all in lockstep, as in a run.
        lockstep = self.engine.lockstep
        clock, live = lockstep.clock, self.live.values()
        ahead = clock.steps + done
        if len(lockstep.members) == len(live):
            outputs = [s.produced_base + ahead for s in live]
        else:
            outputs = [
                s.produced_base + ahead if s.clock is clock else s.produced_base for s in live
            ]
        if self._indices is None:
            self._indices = tuple(self.live)
        return (self._indices, outputs), self._used_tokens(done)

    def used_tokens(self, now_ns: int) -> int:
        """KV cache held, in tokens of whole blocks. O(log n)."""
        return self._used_tokens(self._steps_done(now_ns))

    def _used_tokens(self, done: int) -> int:
        size = self.engine.config.block_size_tokens
        blocks = self.engine.blocks.used
        if done:
            blocks += self.engine.blocks_ahead(done)
        return blocks * size

    def _steps_done(self, now_ns: int) -> int:
        """Count the steps of the run under way that have ended. O(1)."""
        run = self._run
        if run is None:
            return 0
        elapsed_ns = now_ns - self._start_ns
        done = self.engine.cost.decode_steps_done(elapsed_ns, run.decodes, run.kv_tokens)
        return min(run.steps, done)

    def _cut(self, now_ns: int) -> None:
        """Apply what has ended of a run; what began before now stays under way as one step."""
        run = self._run
        if run is None:
            return
        done = self._steps_done(now_ns)
        self._run = None
        self.end_ns = NEVER
        if done:
            result = self.engine.finish_decodes(run, done)
            self._start_ns += result.duration_ns
            self._decodes += done
        if self._start_ns < now_ns:
            self._plan_step(self._start_ns)

    def _plan_step(self, now_ns: int) -> None:
        step = self.engine.plan_step(now_ns)
        if step is not None:
            self.end_ns = now_ns + step.duration_ns


def _index(sequence: Sequence) -> int:
    return int(sequence.request.request_id)
