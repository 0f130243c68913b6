"""What the engine works on: requests, and the sequences that they fan out to."""

from dataclasses import dataclass
from enum import IntEnum

RequestId = int | str


class SequenceState(IntEnum):
    """Where a sequence stands."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    ABORTED = 3


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt, and the true output length of each of its sequences.

    The model cannot know when a language model would stop, so the caller says it: sequence i ends
    after exactly `output_tokens[i]` tokens. A lower `priority` runs first where the engine's
    policy is "priority".
    """

    request_id: RequestId
    prompt_tokens: int
    output_tokens: tuple[int, ...]
    priority: int = 0


class Sequence:
    """One output in the making.

    `computed_tokens` have their keys and values in the cache, `produced_tokens` of output exist;
    the newest of these is not computed yet. `prefill_end_tokens` have to be computed before the
    next token comes out of them: the prompt, and after a preemption also what was produced.
    """

    __slots__ = (
        "blocks",
        "computed_tokens",
        "index",
        "key",
        "output_tokens",
        "preemptions",
        "prefill_end_tokens",
        "produced_tokens",
        "request",
        "scheduled_tokens",
        "state",
    )

    def __init__(self, request: EngineRequest, index: int, key: int) -> None:
        self.request = request
        self.index = index
        self.key = key
        self.output_tokens = request.output_tokens[index]
        self.prefill_end_tokens = request.prompt_tokens
        self.blocks: list[int] = []
        self.computed_tokens = 0
        self.produced_tokens = 0
        self.scheduled_tokens = 0
        self.preemptions = 0
        self.state = SequenceState.WAITING

    @property
    def known_tokens(self) -> int:
        """Prompt and output so far."""
        return self.request.prompt_tokens + self.produced_tokens

    def __repr__(self) -> str:
        return (
            f"<{self.state.name.lower()} {self.request.request_id!r}[{self.index}] "
            f"{self.computed_tokens} computed, {self.produced_tokens}/{self.output_tokens} out>"
        )
