"""Runs one engine in virtual time: steps and runs of decodes, cut when something arrives."""

from array import array
from collections.abc import Hashable
from struct import Struct

from schedsvc_lab.engine.engine import Engine
from schedsvc_lab.engine.sequence import EngineRequest, Sequence
from schedsvc_lab.engine.step import DecodeRun
from schedsvc_lab.sim.requests import NEVER

_STEPS_MAX = 1 << 40
_FORMS: dict[int, Struct] = {}  # forms of as many numbers as sequences run


class Report:
    """Holds a shim's report: `requests` of one engine, and the output of each in `outputs()`.

    `requests` is the same tuple until they change. Output i is `bases[i] + ahead`, the bases being
    64-bit numbers in bytes: most often only `ahead` grows from one report to the next.
    `used_tokens` of KV cache are held, in whole blocks.
    """

    __slots__ = ("ahead", "bases", "requests", "used_tokens")

    def __init__(
        self, requests: tuple[int, ...], bases: bytes, ahead: int, used_tokens: int
    ) -> None:
        self.requests = requests
        self.bases = bases
        self.ahead = ahead
        self.used_tokens = used_tokens

    def outputs(self) -> list[int]:
        """List the output of each request."""
        return [base + self.ahead for base in array("q", self.bases)]


class EngineRunner:
    """Lets an engine work between the world's looks at it.

    While the engine only decodes, the steps up to the first end are foreseen as one run and
    applied at once; `add()` cuts a run at the step that is under way, so that the result is the
    same to the token as stepping. Where `round_steps` is given, no run goes over that many decode
    steps since `rounds_done()`.
    """

    __slots__ = (
        "_bases",
        "_changes",
        "_decodes",
        "_indices",
        "_lockstep",
        "_round_steps",
        "_run",
        "_size",
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
        self._lockstep = engine.lockstep
        self._size = engine.config.block_size_tokens
        self._bases = b""  # bases of live requests, if all were in lockstep
        self._changes = -1  # the lockstep's changes when the bases were taken; -1: never
        self._indices: tuple[int, ...] | None = ()  # live requests, if unchanged
        self.end_ns = NEVER  # end of the step or run under way
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
        """Hand in a request. Raises EngineRequestError if it can never run.

        `keys` name the contents of its prompt's blocks.
        """
        self._cut(now_ns)
        request = EngineRequest(
            index, prompt_tokens, (output_tokens,), 0, False, 0, 0, keys, adapter
        )
        self.live[index] = self.engine.add(request, now_ns)[0]
        self._indices = None

    def plan(self, now_ns: int) -> None:
        """Begin the next step or run, unless one is under way or there is nothing to do."""
        if self.end_ns != NEVER:
            return
        steps_max = self._round_steps - self._decodes if self._round_steps else _STEPS_MAX
        self._run = self.engine.plan_decodes(steps_max, None, now_ns)
        if self._run is not None:
            self._start_ns = now_ns
            self.end_ns = now_ns + self._run.duration_ns
        else:
            self._plan_step(now_ns)

    def finish(self) -> tuple[list[int], list[int]]:
        """Apply the events at `end_ns`: requests with their first token, and complete ones.

        How much of the latters' prompts was found in the prefix cache is in `cached`.
        """
        self.end_ns = NEVER
        first: list[int] = []
        if self._run is not None:
            steps = self._run.steps
            ended = self.engine.advance_decodes(self._run, steps)
            self._run = None
            self._decodes += steps
        else:
            result = self.engine.finish_step()
            first = [_index(s) for s in result.started]
            if len(first) < len(result.produced):
                self._decodes += 1
            ended = result.finished
        self.cached.clear()
        finished: list[int] = []
        for sequence in ended:
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

    def report(self, now_ns: int) -> Report:
        """Report on all live requests. O(1); O(live) if they, or their pace, have changed."""
        done, lockstep = self._steps_done(now_ns), self._lockstep
        ahead = lockstep.clock.steps + done
        if len(lockstep.members) == len(self.live):
            if self._changes != lockstep.changes:
                self._bases = _packed([s.produced_base for s in self.live.values()])
                self._changes = lockstep.changes
            bases = self._bases
        else:
            bases = _packed(self._outputs(ahead))
            ahead = 0
        if self._indices is None:
            self._indices = tuple(self.live)
        return Report(self._indices, bases, ahead, self._used_tokens(done))

    def _outputs(self, ahead: int) -> list[int]:
        """List the outputs of live requests, of which only some are in lockstep. O(live)."""
        clock, outputs = self._lockstep.clock, []
        for sequence in self.live.values():
            base = sequence.produced_base
            outputs.append(base + ahead if sequence.clock is clock else base)
        return outputs

    def used_tokens(self, now_ns: int) -> int:
        """KV cache held, in tokens of whole blocks. O(log n)."""
        return self._used_tokens(self._steps_done(now_ns))

    def _used_tokens(self, done: int) -> int:
        pool = self.engine.blocks
        blocks = pool.total - pool.count_free()
        if done:
            blocks += self._lockstep.blocks_ahead(done)
        return blocks * self._size

    def _steps_done(self, now_ns: int) -> int:
        """Count the steps of the run under way that have ended. O(1)."""
        run = self._run
        if run is None:
            return 0
        elapsed_ns = now_ns - self._start_ns
        done = self.engine.cost.decode_steps_done(elapsed_ns, run.decodes, run.kv_tokens)
        return min(run.steps, done)

    def _cut(self, now_ns: int) -> None:
        """Apply the ended part of a run; the step that began before now stays under way."""
        run = self._run
        if run is None:
            return
        done = self._steps_done(now_ns)
        self._run = None
        self.end_ns = NEVER
        if done:
            duration_ns = self.engine.cost.decode_run_ns(done, run.decodes, run.kv_tokens)
            self.engine.advance_decodes(run, done)
            self._start_ns += duration_ns
            self._decodes += done
        if self._start_ns < now_ns:
            self._plan_step(self._start_ns)

    def _plan_step(self, now_ns: int) -> None:
        step = self.engine.plan_step(now_ns)
        if step is not None:
            self.end_ns = now_ns + step.duration_ns


def _packed(numbers: list[int]) -> bytes:
    """Encode 64-bit numbers in a third of the time that an array takes."""
    form = _FORMS.get(len(numbers))
    if form is None:
        form = _FORMS[len(numbers)] = Struct(f"={len(numbers)}q")
    return form.pack(*numbers)


def _index(sequence: Sequence) -> int:
    return int(sequence.request.request_id)
