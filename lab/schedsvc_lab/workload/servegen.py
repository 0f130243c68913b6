"""Reads ServeGen's client pools (arXiv 2505.09999): rates, burstiness, lengths of real clients.

They are no traces, but the data to draw one. A folder such as `data/language/m-large` of
alibaba/ServeGen holds for each client `chunk-N-trace.csv`, without a header: the start of a window
in seconds, requests per second, coefficient of variation, `Gamma` or `Weibull` (empty if nothing
came), shape, scale; and `chunk-N-dataset.json`: from a time on, the share of requests for each
number of input and output tokens.
"""

import ast
import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsvc_lab.workload.record import Record, TraceError

_TRACE = re.compile(r"chunk-(\d+)-trace\.csv")
_COLUMNS = ("timestamp", "rate", "cv", "pattern", "shape", "scale")
_PATTERNS = ("Gamma", "Weibull")
_LENGTHS = ("input_tokens", "output_tokens")
_LAST_WINDOW_S = 600

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """Describes a client's behaviour from a time on: requests per second, and their gaps' shape."""

    start_s: int
    rate: float
    pattern: str
    shape: float

    def gaps(self, count: int, stream: np.random.Generator) -> Floats:
        """Draw gaps whose mean is 1."""
        if self.pattern == "Gamma":
            return np.asarray(stream.gamma(self.shape, 1 / self.shape, count))
        return np.asarray(stream.weibull(self.shape, count) / math.gamma(1 + 1 / self.shape))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Counts tokens and, cumulated, how often each count occurs."""

    tokens: NDArray[np.int64]
    cumulated: Floats

    def draw(self, count: int, stream: np.random.Generator) -> NDArray[np.int64]:
        """Draw counts, 1 or more."""
        places = np.searchsorted(self.cumulated, stream.random(count), side="right")
        return np.maximum(self.tokens[np.minimum(places, len(self.tokens) - 1)], 1)


@dataclass(frozen=True, slots=True)
class Client:
    """Describes one client: its windows, and its lengths from a time on, both in order of time."""

    number: int
    windows: tuple[Window, ...]
    lengths: tuple[tuple[int, Lengths, Lengths], ...]

    def lengths_at(self, at_s: float) -> tuple[Lengths, Lengths]:
        """Return input and output lengths: the latest that apply by then, else the first."""
        known = [entry for entry in self.lengths if entry[0] <= at_s]
        return (known[-1] if known else self.lengths[0])[1:]


def read_pool(folder: Path) -> list[Client]:
    """Read all clients that ever ask something. Raises TraceError and OSError. O(bytes)."""
    numbers = sorted(
        int(found[1]) for path in folder.iterdir() if (found := _TRACE.fullmatch(path.name))
    )
    if not numbers:
        raise TraceError(folder, 1, "1", "no chunk-N-trace.csv is in this folder")
    clients = []
    for number in numbers:
        windows = _windows(folder / f"chunk-{number}-trace.csv")
        lengths = _lengths(folder / f"chunk-{number}-dataset.json")
        if lengths and any(window.rate > 0 for window in windows):
            clients.append(Client(number, windows, lengths))
    if not clients:
        raise TraceError(folder, 1, "1", "no client in this folder asks anything")
    return clients


def draw(
    clients: list[Client], *, from_s: float, duration_s: float, rate_scale: float, seed: int
) -> Iterator[Record]:
    """Yield requests in order of arrival, from a time of the pool on.

    Each client is a renewal process in the time that its own rate measures, so gaps keep their
    shape when the rate changes. Input and output are drawn independently of each other, since the
    pools do not relate them. Memory: the requests of one window.
    """
    streams = np.random.default_rng(seed).spawn(len(clients))
    starts = sorted({window.start_s for client in clients for window in client.windows})
    ends = [*starts[1:], starts[-1] + _LAST_WINDOW_S]
    by_start = [{window.start_s: window for window in client.windows} for client in clients]
    # The time by its own measure until a client's next request; None before its first.
    left: list[float | None] = [None] * len(clients)
    for start_s, end_s in zip(starts, ends, strict=True):
        low_s, high_s = max(start_s, from_s), min(end_s, from_s + duration_s)
        if low_s >= high_s:
            continue
        found: list[tuple[float, int, int, int]] = []
        for at, client in enumerate(clients):
            window = by_start[at].get(start_s)
            if window is None or window.rate <= 0:
                continue
            rate = window.rate * rate_scale
            places, left[at] = _renew(window, rate * (high_s - low_s), left[at], streams[at])
            inputs, outputs = client.lengths_at(low_s)
            asked = inputs.draw(len(places), streams[at]).tolist()
            given = outputs.draw(len(places), streams[at]).tolist()
            times = (low_s - from_s + places / rate).tolist()
            numbers = [client.number] * len(times)
            found += zip(times, numbers, asked, given, strict=True)
        for arrival_s, number, input_tokens, output_tokens in sorted(found):
            yield Record(
                arrival_s=arrival_s,
                tenant=f"client-{number}",
                input_tokens=input_tokens,
                output_tokens=output_tokens,
            )


def _renew(
    window: Window, span: float, left: float | None, stream: np.random.Generator
) -> tuple[Floats, float]:
    """Place requests in a span of a client's own time; returns also the rest to the next."""
    # The first request of all falls anywhere in its gap.
    at = left if left is not None else float(window.gaps(1, stream)[0] * stream.random())
    pieces: list[Floats] = []
    while at < span:
        count = max(16, math.ceil((span - at) * 1.1))
        places = at + np.concatenate(([0.0], np.cumsum(window.gaps(count, stream))))
        pieces.append(places[:-1][places[:-1] < span])
        at = float(places[len(pieces[-1])])
    placed = np.concatenate(pieces) if pieces else np.empty(0)
    return placed, at - span


def _windows(path: Path) -> tuple[Window, ...]:
    windows: list[Window] = []
    with path.open(newline="", encoding="utf-8") as file:
        for line, row in enumerate(csv.reader(file), 1):
            if len(row) != len(_COLUMNS):
                raise TraceError(path, line, "row", f"has {len(row)} of {len(_COLUMNS)} columns")
            cells = dict(zip(_COLUMNS, row, strict=True))
            values = {name: _number(path, line, name, cells[name]) for name in _COLUMNS[:2]}
            start_s = int(values["timestamp"])
            if windows and start_s <= windows[-1].start_s:
                raise TraceError(path, line, "timestamp", "is not after the row above it")
            pattern = cells["pattern"] or _PATTERNS[0]
            if pattern not in _PATTERNS:
                raise TraceError(path, line, "pattern", f"{pattern!r} is not Gamma or Weibull")
            shape = _number(path, line, "shape", cells["shape"])
            rate = values["rate"] if cells["pattern"] else 0.0
            if rate > 0 and shape <= 0:
                raise TraceError(path, line, "shape", f"must be above 0, is {shape}")
            windows.append(Window(start_s, rate, pattern, shape))
    return tuple(windows)


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise TraceError(path, line, column, f"must be a number, 0 or more, is {text!r}")
    return value


def _lengths(path: Path) -> tuple[tuple[int, Lengths, Lengths], ...]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TraceError(path, error.lineno, str(error.colno), error.msg) from None
    if not isinstance(told, dict):
        raise TraceError(path, 1, "1", "must be an object of times")
    found = []
    for start, fields in told.items():
        if not start.isdigit() or not isinstance(fields, dict):
            raise TraceError(path, 1, start, "must map a time in seconds to an object")
        inputs, outputs = (_pdf(path, f"{start}.{name}", fields, name) for name in _LENGTHS)
        if inputs is not None and outputs is not None:
            found.append((int(start), inputs, outputs))
    return tuple(sorted(found, key=lambda entry: entry[0]))


def _pdf(path: Path, column: str, fields: Mapping[str, Any], name: str) -> Lengths | None:
    """Read a distribution, which is a Python dictionary as text; None if it is empty."""
    try:
        shares = ast.literal_eval(fields[name])
        tokens = np.array(list(shares), dtype=np.int64)
        weights = np.array(list(shares.values()), dtype=np.float64)
    except (ValueError, SyntaxError, TypeError, LookupError, AttributeError, OverflowError):
        raise TraceError(path, 1, column, "is not a text {tokens: share, ...}") from None
    if not len(tokens):
        return None
    if not (weights >= 0).all() or not weights.sum() > 0 or (tokens < 0).any():
        raise TraceError(path, 1, column, "has a share or a token count below 0, or only zeros")
    order = np.argsort(tokens)
    return Lengths(tokens[order], np.cumsum(weights[order]) / weights.sum())
