"""Reads the fields of a JSON object, and checks them."""

import math
from collections.abc import Mapping

from schedsvc_lab.workload.record import TOKENS_MAX, Bad, Message

ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
}


class Fields:
    """Reads a JSON object. Every getter raises Bad, which names the key."""

    def __init__(self, data: Mapping[str, object]) -> None:
        self.data = data

    def whole(self, key: str, least: int = 1, most: int = TOKENS_MAX) -> int:
        """Return a whole number."""
        return _whole(key, self._needed(key), least, most)

    def maybe_whole(self, key: str, least: int = 1, most: int = TOKENS_MAX) -> int | None:
        """Return a whole number, None if it is absent or null."""
        value = self.data.get(key)
        return None if value is None else _whole(key, value, least, most)

    def number(self, key: str) -> float:
        """Return a finite number, 0 or more."""
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Bad(key, f"not a number: {_short(value)}")
        try:
            number = float(value)
        except OverflowError:  # JSON's whole numbers have no bound
            number = math.inf
        if not math.isfinite(number) or number < 0:
            raise Bad(key, f"must be a finite number, 0 or more, is {_short(value)}")
        return number

    def maybe_number(self, key: str) -> float | None:
        """Return a finite number, 0 or more; None if it is absent or null."""
        return None if self.data.get(key) is None else self.number(key)

    def maybe_name(self, key: str) -> str | None:
        """Return a name; None if it is absent, null or empty."""
        value = self.maybe_text(key)
        if value:
            try:
                value.encode()
            except UnicodeEncodeError:
                raise Bad(key, "half of a surrogate pair") from None
        return value or None

    def maybe_text(self, key: str) -> str | None:
        """Return any text, None if it is absent or null."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, str):
            raise Bad(key, f"not text: {_short(value)}")
        return value

    def wholes(self, key: str, most: int = 2**63 - 1) -> tuple[int, ...]:
        """Return an array of whole numbers, empty where it is absent or null."""
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise Bad(key, f"not an array: {_short(value)}")
        return tuple(_whole(f"{key}[{at}]", item, 0, most) for at, item in enumerate(value))

    def messages(self, key: str, role: str = "role", content: str = "content") -> list[Message]:
        """Return an array of messages, empty where it is absent or null."""
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise Bad(key, f"not an array: {_short(value)}")
        found = []
        for at, item in enumerate(value):
            if not isinstance(item, dict):
                raise Bad(f"{key}[{at}]", f"not an object: {_short(item)}")
            said_by, said = item.get(role), item.get(content)
            known = ROLES.get(said_by) if isinstance(said_by, str) else None
            if known is None:
                raise Bad(f"{key}[{at}].{role}", f"unknown role: {_short(said_by)}")
            if not isinstance(said, str):
                raise Bad(f"{key}[{at}].{content}", f"not text: {_short(said)}")
            found.append(Message(known, said))
        return found

    def _needed(self, key: str) -> object:
        if key not in self.data:
            raise Bad(key, "missing")
        return self.data[key]


def _whole(key: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Bad(key, f"not a whole number: {_short(value)}")
    if not least <= value <= most:
        raise Bad(key, f"must be from {least} to {most}, is {value}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
