"""Builds whole prompts from a conversation's turns: a trace holds only what each turn adds."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from schedsvc_lab.workload import Message, TraceRequest


def with_history(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Put the messages of earlier turns, with the trace's answers, before each turn's own.

    Memory grows with the text of the conversations.
    """
    said: dict[str, tuple[Message, ...]] = {}
    for request in requests:
        record = request.record
        if record is None or record.conversation is None or not record.messages:
            yield request
            continue
        first = record.turn == 1
        messages = (() if first else said.get(record.conversation, ())) + record.messages
        answered = () if record.answer is None else (Message("assistant", record.answer),)
        said[record.conversation] = messages + answered
        yield replace(request, record=replace(record, messages=messages))
