"""Holds conversations as clients do: when each turn is asked, and with which prompt.

Conversations start as a Poisson process. A turn's prompt is all that was said before it, by the
model's chat template. The next turn comes when the answer has been written, at a stated speed, and
its reader has thought for an exponentially distributed time.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from schedsvc_lab.workload.chat import ChatTemplateError, plain_text
from schedsvc_lab.workload.record import Message, Record
from schedsvc_lab.workload.tokenizers import ModelTokenizer

_STARTS, _THINKING = range(2)
TURNS_CUT, CONTEXT_CUT = "turns beyond the limit", "turns beyond the context"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Holds a recorded conversation: its turns, each what it adds to the one before."""

    name: str
    tenant: str | None
    turns: tuple[Record, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Says when conversations start and go on; times in seconds, all drawn from the seed."""

    rate_per_s: float = 1.0
    think_s: float = 10.0
    output_tokens_per_s: float = 30.0
    seed: int = 0

    def starts(self) -> Iterator[float]:
        """Yield the start of one conversation after another."""
        rng = np.random.default_rng([self.seed, _STARTS])
        start_s = 0.0
        while True:
            for gap_s in rng.exponential(1 / self.rate_per_s, 1_024).tolist():
                start_s += gap_s
                yield start_s

    def thinking(self, number: int) -> Iterator[float]:
        """Yield how long the reader thinks after each answer of conversation `number`."""
        rng = np.random.default_rng([self.seed, _THINKING, number])
        while True:
            yield float(rng.exponential(self.think_s)) if self.think_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits how much of the conversations is held.

    A conversation ends before the turn whose prompt and output together are longer than the
    context. An answer that was not recorded, or is empty, has `unanswered_tokens`.
    """

    conversations_max: int | None = None
    turns_max: int | None = None
    context_tokens: int | None = None
    output_tokens_max: int | None = None
    unanswered_tokens: int = 128


@dataclass(frozen=True, slots=True)
class Ask:
    """Holds one request of a conversation: its whole prompt as ids, and what the turn adds."""

    arrival_s: float
    conversation: str
    turn: int
    tenant: str | None
    token_ids: "array[int]"
    output_tokens: int
    added: Record

    def as_ids(self) -> Record:
        """Return it for a trace, with the prompt as token ids."""
        return Record(
            arrival_s=round(self.arrival_s, 6),
            tenant=self.tenant,
            input_tokens=len(self.token_ids),
            output_tokens=self.output_tokens,
            token_ids=tuple(self.token_ids),
            conversation=self.conversation,
            turn=self.turn,
        )

    def as_messages(self) -> Record:
        """Return it for a trace, with the messages that the turn adds, and its answer."""
        return Record(
            arrival_s=round(self.arrival_s, 6),
            tenant=self.tenant,
            input_tokens=len(self.token_ids),
            output_tokens=self.output_tokens,
            messages=self.added.messages,
            answer=self.added.answer,
            conversation=self.conversation,
            turn=self.turn,
        )


def conversations(records: Iterable[Record], skipped: Counter[str]) -> Iterator[Conversation]:
    """Put the turns of a trace together again; a conversation's turns stand one after another.

    Records without messages are counted in `skipped`. Memory: one conversation.
    """
    turns: list[Record] = []
    number = 0
    for record in records:
        if not record.messages:
            skipped["the request holds no messages"] += 1
            continue
        same = turns and record.conversation == turns[-1].conversation
        if turns and not (same and record.turn and record.turn > (turns[-1].turn or 0)):
            number += 1
            yield _conversation(turns, number)
            turns = []
        turns.append(record)
    if turns:
        yield _conversation(turns, number + 1)


def _conversation(turns: Sequence[Record], number: int) -> Conversation:
    tenant = next((turn.tenant for turn in turns if turn.tenant), None)
    return Conversation(turns[0].conversation or f"conversation-{number}", tenant, tuple(turns))


class Chats:
    """Writes conversations as prompts.

    `plain` counts, by reason, the prompts that the tokenizer's template refused, and that are
    written without it.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.tokenizer = tokenizer
        self.plain: Counter[str] = Counter()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the conversation so far, ready for the next answer. O(tokens)."""
        said = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self.tokenizer.chat_text(said)
        except ChatTemplateError as error:
            self.plain[str(error)] += 1
            text = plain_text(said)
        return self.tokenizer.encode(text)


def output_tokens(turn: Record, tokenizer: ModelTokenizer, limits: Limits) -> int:
    """Count the answered turns, within the limits. O(tokens)."""
    tokens = tokenizer.count(turn.answer) if turn.answer else 0
    tokens = tokens or limits.unanswered_tokens
    return min(tokens, limits.output_tokens_max or tokens)


class Simulation:
    """Holds conversations in virtual time.

    `cut` counts what the limits left out, by reason.
    """

    def __init__(self, chats: Chats, timing: Timing, limits: Limits) -> None:
        self._chats = chats
        self._timing = timing
        self._limits = limits
        self.cut: Counter[str] = Counter()

    def asks(self, held: Iterable[Conversation]) -> Iterator[Ask]:
        """Yield the requests of all conversations by arrival.

        O(log(conversations under way)) each, beside O(tokens) for its prompt. Memory: the prompts
        of the conversations that are under way at a time.
        """
        waiting: list[tuple[float, int, int, Ask]] = []
        numbered = enumerate(zip(self._timing.starts(), held, strict=False))
        for number, (start_s, conversation) in islice(numbered, self._limits.conversations_max):
            while waiting and waiting[0][0] <= start_s:
                yield heapq.heappop(waiting)[-1]
            for ask in self._hold(conversation, number, start_s):
                heapq.heappush(waiting, (ask.arrival_s, number, ask.turn, ask))
        while waiting:
            yield heapq.heappop(waiting)[-1]

    def _hold(self, conversation: Conversation, number: int, start_s: float) -> Iterator[Ask]:
        limits = self._limits
        said: list[Message] = []
        thinking = self._timing.thinking(number)
        arrival_s = start_s
        for turn, added in enumerate(conversation.turns, 1):
            if limits.turns_max is not None and turn > limits.turns_max:
                self.cut[TURNS_CUT] += len(conversation.turns) - turn + 1
                return
            said += added.messages
            ids = array("I", self._chats.prompt(said))
            answered = output_tokens(added, self._chats.tokenizer, limits)
            context = limits.context_tokens
            if context is not None and len(ids) + answered > context:
                self.cut[CONTEXT_CUT] += len(conversation.turns) - turn + 1
                return
            tenant = added.tenant or conversation.tenant
            yield Ask(arrival_s, conversation.name, turn, tenant, ids, answered, added)
            said.append(Message("assistant", added.answer or ""))
            arrival_s += answered / self._timing.output_tokens_per_s + next(thinking)
