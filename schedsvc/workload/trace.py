"""Readers of request traces, one row at a time.

Two CSV forms are told apart by the names in their header; other columns are ignored:

- the form of the VTC paper's LMSYS arena workload (arXiv 2401.00588, artifact):
  `arrival_s,client,prompt_tokens,output_tokens`;
- the form of the Azure LLM inference traces (Azure/AzurePublicDataset):
  `TIMESTAMP,ContextTokens,GeneratedTokens`, which name no tenant.
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _csv import Reader

TOKENS_MAX = 2**31 - 1


class TraceError(ValueError):
    """A trace file is wrong. Its text is `file:line:column: reason`; line 1 is the header."""

    def __init__(self, path: Path, line: int, column: str, reason: str) -> None:
        super().__init__(f"{path}:{line}:{column}: {reason}")
        self.path = path
        self.line = line
        self.column = column
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: who asked, when (seconds after the trace's start), how much."""

    arrival_s: float
    tenant: str
    prompt_tokens: int
    output_tokens: int


Cell = Callable[[str], str]
"""Gives the text of a named column in the current row."""


class _Bad(ValueError):
    """A cell is wrong; the reader adds where."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(reason)
        self.column = column


def _tokens(cell: Cell, column: str, least: int) -> int:
    text = cell(column)
    try:
        value = int(text)
    except ValueError:
        raise _Bad(column, f"not a whole number: {text!r}") from None
    if not least <= value <= TOKENS_MAX:
        raise _Bad(column, f"must be from {least} to {TOKENS_MAX}, is {value}")
    return value


def _seconds(cell: Cell, column: str) -> float:
    text = cell(column)
    try:
        value = float(text)
    except ValueError:
        raise _Bad(column, f"not a number of seconds: {text!r}") from None
    if not math.isfinite(value) or value < 0:
        raise _Bad(column, f"must be a finite number of seconds, 0 or more, is {text!r}")
    return value


def timestamp_ns(text: str) -> int:
    """Nanoseconds since 1970 of `YYYY-MM-DD HH:MM:SS[.fraction][zone]`; UTC where no zone is given.

    Takes fractions of any length (the Azure trace of 2023 has 7 digits) and drops what is below a
    nanosecond. Raises ValueError.
    """
    whole, dot, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    if dot and not digits:
        raise ValueError("no digits after the decimal point")
    moment = datetime.fromisoformat(whole + rest[len(digits) :])
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    since = moment - datetime(1970, 1, 1, tzinfo=timezone.utc)
    return (since.days * 86_400 + since.seconds) * 10**9 + int((digits + "0" * 9)[:9])


def _read_lmsys(cell: Cell) -> TraceRequest:
    tenant = cell("client")
    if not tenant:
        raise _Bad("client", "is empty")
    return TraceRequest(
        arrival_s=_seconds(cell, "arrival_s"),
        tenant=tenant,
        prompt_tokens=_tokens(cell, "prompt_tokens", 1),
        output_tokens=_tokens(cell, "output_tokens", 1),
    )


def _azure_reader(tenant: str) -> Callable[[Cell], TraceRequest]:
    first_ns: int | None = None

    def read(cell: Cell) -> TraceRequest:
        nonlocal first_ns
        text = cell("TIMESTAMP")
        try:
            now_ns = timestamp_ns(text)
        except ValueError as error:
            raise _Bad("TIMESTAMP", f"not a time: {text!r} ({error})") from None
        first_ns = now_ns if first_ns is None else first_ns
        return TraceRequest(
            arrival_s=(now_ns - first_ns) / 1e9,
            tenant=tenant,
            prompt_tokens=_tokens(cell, "ContextTokens", 1),
            output_tokens=_tokens(cell, "GeneratedTokens", 1),
        )

    return read


LMSYS_COLUMNS = ("arrival_s", "client", "prompt_tokens", "output_tokens")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _pick_reader(path: Path, header: list[str], tenant: str) -> Callable[[Cell], TraceRequest]:
    names = set(header)
    if names.issuperset(LMSYS_COLUMNS):
        return _read_lmsys
    if names.issuperset(AZURE_COLUMNS):
        return _azure_reader(tenant)
    wanted = min((LMSYS_COLUMNS, AZURE_COLUMNS), key=lambda form: len(set(form) - names))
    missing = ", ".join(name for name in wanted if name not in names)
    raise TraceError(
        path,
        1,
        "header",
        f"column missing: {missing}. Known forms: {','.join(LMSYS_COLUMNS)} and "
        f"{','.join(AZURE_COLUMNS)}",
    )


def read_trace(path: Path, *, tenant: str = "default") -> Iterator[TraceRequest]:
    """Yield the requests of a CSV trace in its order, which must be the order of arrival.

    `tenant` labels the requests of a form that names none. Memory does not grow with the file.
    Raises TraceError where the file is wrong, also where it holds no request, and OSError.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        try:
            yield from _read_rows(path, rows, tenant)
        except csv.Error as error:
            raise TraceError(path, rows.line_num, "row", str(error)) from None
        except UnicodeDecodeError as error:
            raise TraceError(path, rows.line_num + 1, "row", f"not UTF-8: {error.reason}") from None


def _read_rows(path: Path, rows: "Reader", tenant: str) -> Iterator[TraceRequest]:
    header = [name.strip() for name in next(rows, [])]
    read = _pick_reader(path, header, tenant)
    place = {name: index for index, name in enumerate(header)}
    row: list[str] = []
    last_s = 0.0
    count = 0

    def cell(column: str) -> str:
        index = place[column]
        if index >= len(row):
            raise _Bad(column, f"missing: the row has {len(row)} of {len(header)} columns")
        return row[index].strip()

    for row in rows:
        if not row:
            continue
        try:
            request = read(cell)
            if request.arrival_s < last_s:
                raise _Bad(header[0], "arrives before the row above it; sort the trace by arrival")
        except _Bad as bad:
            raise TraceError(path, rows.line_num, bad.column, str(bad)) from None
        last_s = request.arrival_s
        count += 1
        yield request
    if count == 0:
        raise TraceError(path, rows.line_num, "row", "the trace holds no request")


def rescale(
    requests: Iterable[TraceRequest], *, rate_scale: float = 1.0, duration_s: float = math.inf
) -> Iterator[TraceRequest]:
    """Yield requests at `rate_scale` times their rate, up to `duration_s` of the scaled time.

    The changing density of the arrivals is kept.
    """
    for request in requests:
        arrival_s = request.arrival_s / rate_scale
        if arrival_s >= duration_s:
            return
        yield replace(request, arrival_s=arrival_s)
