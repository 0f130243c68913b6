"""Reads a JSON array item by item: memory holds one item and one chunk, never the array."""

import json
import re
from collections.abc import Iterator
from typing import TextIO

CHUNK_CHARS = 1 << 18
ITEM_CHARS_MAX = 1 << 26
# Longer than any token that a chunk's end may have cut: an escape, `-Infinity`.
_CUT_CHARS_MAX = 16

_DECODER = json.JSONDecoder()
_NOT_SPACE = re.compile(r"[^ \t\r\n]")


class Malformed(ValueError):
    """The text is no JSON array; line and column count from 1."""

    def __init__(self, line: int, column: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.column = column


class ArrayReader:
    """Iterates over (line, item) of an array in a text file. O(characters). Raises Malformed."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._ended = False
        # Place of `_text[_mark]`, counted along the way, since column numbers restart at each line.
        self._mark = 0
        self._line = 1
        self._column = 1

    def __iter__(self) -> Iterator[tuple[int, object]]:
        """Yield each item with the line on which it begins."""
        if self._peek() != "[":
            raise self._wrong("expected [")
        self._at += 1
        if self._peek() == "]":
            self._at += 1
        else:
            yield from self._items()
        if self._peek():
            raise self._wrong("text after the end of the array")

    def _items(self) -> Iterator[tuple[int, object]]:
        while True:
            self._peek()
            line, _ = self._place()
            yield line, self._item()
            sign = self._peek()
            if sign not in {",", "]"}:
                what = "the file ends within the array" if not sign else "expected , or ]"
                raise self._wrong(what)
            self._at += 1
            if sign == "]":
                return

    def _peek(self) -> str:
        """Return the next character that is no space, "" at the end of the file."""
        while (found := _NOT_SPACE.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if self._ended:
                return ""
            self._fill()
        self._at = found.start()
        return found[0]

    def _item(self) -> object:
        while True:
            try:
                item, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                self._fill_after(error)
            except RecursionError:
                raise self._wrong("nested too deeply") from None
            except ValueError as error:
                raise self._wrong(str(error)) from None
            else:
                # A number may continue: `-1` of `-1.` and `5e-7`. Everything else has an end sign.
                cut = isinstance(item, int | float) and len(self._text) - end < _CUT_CHARS_MAX
                if self._ended or not cut:
                    self._at = end
                    return item
                self._fill()

    def _fill_after(self, error: json.JSONDecodeError) -> None:
        """Read on where the item may only have been cut by the end of what was read."""
        cut = error.pos > len(self._text) - _CUT_CHARS_MAX or error.msg.startswith("Unterminated")
        if self._ended or not cut:
            self._at = error.pos
            if error.pos >= len(self._text):
                raise self._wrong("the file ends within the array")
            raise self._wrong(error.msg)
        if len(self._text) - self._at > ITEM_CHARS_MAX:
            raise self._wrong(f"an item has more than {ITEM_CHARS_MAX:,} characters")
        self._fill()

    def _fill(self) -> None:
        """Drop the consumed part and read on; doubling keeps long items linear."""
        self._place()
        rest = self._text[self._at :]
        more = self._file.read(max(CHUNK_CHARS, len(rest)))
        self._ended = not more
        self._text = rest + more
        self._at = self._mark = 0

    def _place(self) -> tuple[int, int]:
        breaks = self._text.count("\n", self._mark, self._at)
        if breaks:
            self._line += breaks
            self._column = self._at - self._text.rfind("\n", self._mark, self._at)
        else:
            self._column += self._at - self._mark
        self._mark = self._at
        return self._line, self._column

    def _wrong(self, reason: str) -> Malformed:
        return Malformed(*self._place(), reason)
