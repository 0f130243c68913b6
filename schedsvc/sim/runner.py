"""One engine in virtual time: steps and runs of decodes, cut where something arrives."""

from bisect import bisect_right
from collections.abc import Hashable

from schedsvc.sim.engine import DecodeRun, Engine, EngineRequest, Sequence, SequenceState
from schedsvc.sim.requests import NEVER

_STEPS_MAX = 1 << 40


class EngineRunner:
    """Lets an engine work between the times at which the world looks at it.

    While the engine only decodes, the steps up to the first end are foreseen as one run and
    applied at once; `add()` cuts a run at the step that is under way, so that the result is the
    same to the token as stepping. Where `round_steps` is given, no run goes over that many decode
    steps since `rounds_done()`.
    """

    __slots__ = (
        "_decodes",
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
            first = [_index(s) for s in result.produced if s.produced_tokens == 1]
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
        return first, finished

    def is_between(self) -> bool:
        """Whether no step is under way, so that what is added now runs in the next one."""
        return self.end_ns == NEVER

    def round_is_due(self) -> bool:
        """Whether new work may be considered now: after `round_steps` decode steps, or idle."""
        return self.is_between() and (self._decodes >= self._round_steps or not self.live)

    def round_done(self) -> None:
        """Begin to count decode steps anew."""
        self._decodes = 0

    def report(self, now_ns: int) -> tuple[list[tuple[int, int]], int]:
        """List each live request with its output tokens so far; and `used_tokens`. O(live)."""
        done = self._steps_done(now_ns)
        running = SequenceState.RUNNING
        totals = [
            (index, s.produced_tokens + done if s.state is running else s.produced_tokens)
            for index, s in self.live.items()
        ]
        return totals, self._used_tokens(done)

    def used_tokens(self, now_ns: int) -> int:
        """KV cache held, in tokens of whole blocks. O(live)."""
        return self._used_tokens(self._steps_done(now_ns))

    def _used_tokens(self, done: int) -> int:
        size = self.engine.config.block_size_tokens
        blocks = self.engine.blocks.used
        if done:
            blocks += self.engine.blocks_ahead(done)
        return blocks * size

    def _steps_done(self, now_ns: int) -> int:
        """Count the steps of the run under way that have ended. O(log(steps))."""
        run = self._run
        if run is None:
            return 0
        cost = self.engine.cost
        return bisect_right(
            range(1, run.steps + 1),
            now_ns - self._start_ns,
            key=lambda n: cost.decode_run_ns(n, run.decodes, run.kv_tokens),
        )

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
