"""Describes one request of a trace, and what can be wrong with one."""

from dataclasses import dataclass, field
from pathlib import Path

TOKENS_MAX = 2**31 - 1


class TraceError(ValueError):
    """A trace file is wrong. Its text is `file:line:column: reason`; line 1 is a CSV's header.

    The column is a name (a CSV column, a JSON key) or, if JSON cannot be read, a number.
    """

    def __init__(self, path: Path, line: int, column: str, reason: str) -> None:
        super().__init__(f"{path}:{line}:{column}: {reason}")
        self.path = path
        self.line = line
        self.column = column
        self.reason = reason


class Bad(ValueError):
    """A field is wrong; the reader of the file adds where, and raises TraceError."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(reason)
        self.column = column


class Skip(ValueError):
    """A record is well-formed but no request; the reader counts it by this reason and goes on."""


@dataclass(frozen=True, slots=True)
class Message:
    """Holds one message of a conversation. Roles: system, user, assistant, tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Holds one request of a trace file; fields that the file lacks are None or empty.

    `messages` are those that this turn adds to its conversation; the prompt is all earlier ones
    with their answers, then these. `blocks` are the hashes of the prompt's blocks of `block_tokens`
    tokens, each standing for the whole prefix that it ends; the last block may be partial.
    """

    arrival_s: float | None = None
    tenant: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    text: str | None = None
    messages: tuple[Message, ...] = ()
    answer: str | None = None
    token_ids: tuple[int, ...] = ()
    blocks: tuple[int, ...] = field(default=(), repr=False)
    block_tokens: int | None = None
    conversation: str | None = None
    turn: int | None = None
    model: str | None = None
    adapter: str | None = None
    request_class: str | None = None
    deadline_ms: int | None = None


def block_count(input_tokens: int, block_tokens: int) -> int:
    """Return how many blocks hold a prompt, a partial last one included."""
    return -(-input_tokens // block_tokens)
