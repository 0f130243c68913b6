"""Writes traces: the project's own form, and Mooncake's, which other load generators replay."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from schedsvc_lab.workload.json_forms import own_line
from schedsvc_lab.workload.record import Bad, Record, block_count

MOONCAKE_BLOCK_TOKENS = 512

Line = Callable[[Record], str]
"""Makes a record a line of text, without its end. Raises Bad where the form needs more."""


class MooncakeLines:
    """Writes Mooncake's form: milliseconds, and one id for each 512 tokens of the prefix.

    Blocks of a size that divides 512 are joined; ids are numbered in the order of their first use,
    as in the published files. A request without blocks shares nothing. Memory grows with the
    number of different blocks.
    """

    def __init__(self) -> None:
        self._id_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._next = 0

    def __call__(self, record: Record) -> str:
        """Make a line. Raises Bad where a time or a length is missing, or blocks do not fit."""
        for key in ("arrival_s", "input_tokens", "output_tokens"):
            if getattr(record, key) is None:
                raise Bad(key, "Mooncake's form needs it, and this trace does not have it")
        assert record.arrival_s is not None
        assert record.input_tokens is not None
        line = {
            "timestamp": round(record.arrival_s * 1_000),
            "input_length": record.input_tokens,
            "output_length": record.output_tokens,
            "hash_ids": self._ids(record, record.input_tokens),
        }
        return json.dumps(line)

    def _ids(self, record: Record, input_tokens: int) -> list[int]:
        count = block_count(input_tokens, MOONCAKE_BLOCK_TOKENS)
        if not record.blocks or record.block_tokens is None:
            return self._fresh(count)
        if MOONCAKE_BLOCK_TOKENS % record.block_tokens:
            raise Bad(
                "block_tokens",
                f"is {record.block_tokens}, which does not divide {MOONCAKE_BLOCK_TOKENS}",
            )
        joined = MOONCAKE_BLOCK_TOKENS // record.block_tokens
        ids: list[int] = []
        before = -1
        for at in range(0, len(record.blocks), joined):
            # With the earlier messages, since not every form's hashes stand for their whole prefix.
            key = (before, record.blocks[at : at + joined])
            if key not in self._id_of:
                self._id_of[key] = self._next
                self._next += 1
            before = self._id_of[key]
            ids.append(before)
        # Short by one if the last block was partial and had no hash.
        return ids + self._fresh(count - len(ids))

    def _fresh(self, count: int) -> list[int]:
        """Return ids that nothing shares."""
        self._next += count
        return list(range(self._next - count, self._next))


def line_writer(form: str) -> Line:
    """Return the writer of a form: `schedsvc` or `mooncake`."""
    return MooncakeLines() if form == "mooncake" else own_line


WRITTEN_FORMS = ("schedsvc", "mooncake")


def partial_path(path: Path) -> Path:
    """Return where a trace is written until it is complete."""
    return path.with_name(path.name + ".partial")


def write_trace(
    records: Iterable[Record], path: Path, line: Line, wrong: Callable[[str, str], Exception]
) -> int:
    """Write records to a file, one line each, and return how many.

    The file appears under its name when it is complete; until then, and for good if something
    fails, its whole lines are in `partial_path`. `wrong` makes the error for a record that the form
    cannot hold. Raises it, the errors of `records`, and OSError.
    """
    partial = partial_path(path)
    count = 0
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            try:
                text = line(record)
            except Bad as bad:
                raise wrong(bad.column, str(bad)) from None
            file.write(text + "\n")
            count += 1
    partial.replace(path)
    return count
