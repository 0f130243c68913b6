"""Escapes text from outside for a terminal: names of pools, messages of other servers.

A terminal obeys control characters, and shows what a bidirectional override says instead of what is
there. Everything that a caller, a file or another server wrote is printed through this module.
"""

from typing import TypeVar

from google.protobuf.message import Message

__all__ = ["printable", "printable_message"]

M = TypeVar("M", bound=Message)


def printable(text: str) -> str:
    r"""Write what cannot be printed as an escape, such as \x1b or \u202e. O(text)."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def printable_message(message: M) -> M:
    """Return a copy of a protobuf message in which all text is printable. O(message)."""
    copy = type(message)()
    copy.CopyFrom(message)
    _escape(copy)
    return copy


def _escape(message: Message) -> None:
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            if field.is_repeated:
                value[:] = [printable(text) for text in value]
            else:
                setattr(message, field.name, printable(value))
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else [value]:
                _escape(part)
