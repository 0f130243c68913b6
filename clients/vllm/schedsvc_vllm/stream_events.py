"""Knows the events that begin, end and break off each form of stream that servers send.

A stream of completions or chats has no names: it ends with the data `[DONE]`, and an error is data
with a field `error`.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

DONE = b"[DONE]"


class Named(NamedTuple):
    """Holds the names of one form's events.

    `frames`: before the first token, and between tokens. `last`: the answer is whole. `failures`:
    the request failed.
    """

    frames: tuple[bytes, ...]
    last: tuple[bytes, ...]
    failures: tuple[bytes, ...] = (b"error",)


FORMS = {
    "responses": Named(
        frames=(b"response.queued", b"response.created", b"response.in_progress"),
        last=(b"response.completed", b"response.incomplete", b"response.failed"),
        failures=(b"error", b"response.failed"),
    ),
    "messages": Named(frames=(b"message_start", b"ping"), last=(b"message_stop",)),
    "cohere": Named(frames=(b"message-start",), last=(b"message-end",)),
}
FRAMES = frozenset(chain.from_iterable(form.frames for form in FORMS.values()))
LAST = frozenset(chain.from_iterable(form.last for form in FORMS.values()))
FAILURES = frozenset(chain.from_iterable(form.failures for form in FORMS.values()))
