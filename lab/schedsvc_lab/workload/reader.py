"""Opens a trace file, finds out its form, and yields its requests one by one."""

import csv
import json
from codecs import utf_8_decode
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from io import BufferedReader, FileIO, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

from schedsvc_lab.workload.csv_forms import CSV_FORMS, CsvForm
from schedsvc_lab.workload.fields import Fields
from schedsvc_lab.workload.json_array import ArrayReader, Malformed
from schedsvc_lab.workload.json_forms import JSON_FORMS, JsonForm, is_own
from schedsvc_lab.workload.parquet import ParquetError
from schedsvc_lab.workload.parquet import rows as parquet_rows
from schedsvc_lab.workload.record import Bad, Record, Skip, TraceError

_KEYED = tuple(form for form in JSON_FORMS if form.keys)
FORMS: dict[str, CsvForm | JsonForm] = {form.name: form for form in (*JSON_FORMS, *CSV_FORMS)}
LINE_CHARS_MAX = 1 << 26
_HEAD_BYTES = 1 << 16
_PARQUET = b"PAR1"
_PACKED = {
    b"\x1f\x8b": "a gzip file; unpack it first",
    b"PK\x03\x04": "a zip file; unpack it first",
    b"\x28\xb5\x2f\xfd": "a zstd file; unpack it first",
}


class TraceReader:
    """Reads the requests of one trace file, in its order. Iterate once.

    `form` names the file's form; None: the header or the keys of the first object decide. While it
    runs, `form` is the detected one, `skipped` counts by reason the records that are no requests,
    and `bytes_read` is its progress. `in_order` refuses an arrival before the one above it. Memory:
    one record, and what the form keeps to number conversations.

    Iterating raises TraceError if the file is wrong or holds no request, and OSError.
    """

    def __init__(self, path: Path, *, form: str | None = None, in_order: bool = True) -> None:
        if form is not None and form not in FORMS:
            raise ValueError(f"unknown form {form!r}; known: {', '.join(FORMS)}")
        self.path = path
        self.form = form
        self.in_order = in_order
        self.skipped: Counter[str] = Counter()
        self._raw: FileIO | None = None
        self._line = 1
        self._time = "arrival"

    @property
    def size_bytes(self) -> int:
        """Return the size of the file; 0 for what is no file, such as a pipe."""
        return self.path.stat().st_size if self.path.is_file() else 0

    @property
    def bytes_read(self) -> int:
        """Return how much of the file was read."""
        if self._raw is None or self._raw.closed or not self._raw.seekable():
            return 0
        return self._raw.tell()

    def __iter__(self) -> Iterator[Record]:
        """Yield the requests. Closes the file at the end, and where the iteration is given up."""
        with FileIO(self.path) as raw, closing(self._checked(raw)) as records:
            self._raw = raw
            yield from records

    def _checked(self, raw: FileIO) -> Generator[Record]:
        last_s = 0.0
        count = 0
        for record in self._records(raw):
            if self.in_order and record.arrival_s is not None:
                if record.arrival_s < last_s:
                    raise self.wrong(
                        self._time, "arrives before the row above it; sort the trace by arrival"
                    )
                last_s = record.arrival_s
            count += 1
            yield record
        if count == 0:
            raise self.wrong("row", "the trace holds no request")

    def _records(self, raw: FileIO) -> Iterator[Record]:
        buffered = BufferedReader(raw, _HEAD_BYTES)
        head = buffered.peek(_HEAD_BYTES)
        for magic, what in _PACKED.items():
            if head.startswith(magic):
                raise TraceError(self.path, 1, "1", what)
        if head.startswith(_PARQUET):
            yield from self._parse_parquet()
            return
        sign = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        file = TextIOWrapper(buffered, encoding="utf-8-sig", newline="")
        try:
            if self._is_json(sign):
                items = self._array(file) if sign == b"[" else self._lines(file)
                yield from self._parse_objects(items)
            else:
                yield from self._parse_rows(file)
        except UnicodeDecodeError as error:
            line, column = _undecodable(self.path)
            raise TraceError(self.path, line, str(column), f"not UTF-8: {error.reason}") from None

    def _is_json(self, sign: bytes) -> bool:
        if self.form is None:
            return sign in {b"[", b"{"}
        return isinstance(FORMS[self.form], JsonForm)

    def wrong(self, column: str, reason: str) -> TraceError:
        """Make the error to raise for the record that was read last."""
        return TraceError(self.path, self._line, column, reason)

    def _parse_rows(self, file: TextIOWrapper) -> Iterator[Record]:
        notes = 0
        first = file.readline()
        while first.startswith("#"):  # the VTC artifact puts its configuration there
            notes += 1
            first = file.readline()
        rows = csv.reader(chain((first,), file))
        try:
            header = [name.strip() for name in next(rows, [])]
            self._line = notes + 1
            form = self._csv_form(header)
            self.form, self._time = form.name, form.time
            place = {name: index for index, name in enumerate(header)}
            parse = form.parser()
            row: list[str] = []

            def cell(column: str) -> str:
                index = place.get(column)
                if index is None:
                    return ""
                if index >= len(row):
                    what = f"missing: the row has {len(row)} of {len(header)} columns"
                    raise Bad(column, what)
                return row[index].strip()

            for row in rows:
                self._line = rows.line_num + notes
                if row:
                    try:
                        yield parse(cell)
                    except Skip as skip:
                        self.skipped[str(skip)] += 1
                    except Bad as bad:
                        raise self.wrong(bad.column, str(bad)) from None
        except csv.Error as error:
            raise TraceError(self.path, rows.line_num + notes, "row", str(error)) from None

    def _parse_parquet(self) -> Iterator[Record]:
        """Read a parquet file by the JSON form or, where its columns are flat, the CSV form.

        An error names the row, as there is no line.
        """
        items = self._parquet_rows()
        first = next(items, None)
        if first is None:
            return
        items = chain((first,), items)
        known = any(first.keys() >= set(form.keys) for form in _KEYED) or is_own(first)
        if known if self.form is None else isinstance(FORMS[self.form], JsonForm):
            yield from self._parse_objects(items)
        else:
            yield from self._parse_cells(list(first), items)

    def _parquet_rows(self) -> Iterator[dict[str, Any]]:
        try:
            for at, row in enumerate(parquet_rows(self.path), 1):
                self._line = at
                yield row
        except ParquetError as error:
            raise self.wrong("1", str(error)) from None

    def _parse_cells(self, header: list[str], items: Iterator[dict[str, Any]]) -> Iterator[Record]:
        form = self._csv_form(header)
        self.form, self._time = form.name, form.time
        parse = form.parser()
        for row in items:

            def cell(column: str, row: dict[str, Any] = row) -> str:
                value = row.get(column)
                return "" if value is None else str(value).strip()

            try:
                yield parse(cell)
            except Skip as skip:
                self.skipped[str(skip)] += 1
            except Bad as bad:
                raise self.wrong(bad.column, str(bad)) from None

    def _csv_form(self, header: list[str]) -> CsvForm:
        names = set(header)
        forced = FORMS.get(self.form or "")
        forms = (forced,) if isinstance(forced, CsvForm) else CSV_FORMS
        for form in forms:
            if names.issuperset(form.columns):
                return form
        if not any(header):
            raise self.wrong("header", "the file begins with no header and no JSON; is it empty?")
        wanted = min(forms, key=lambda form: len(set(form.columns) - names))
        missing = ", ".join(name for name in wanted.columns if name not in names)
        known = "; ".join(f"{form.name} ({','.join(form.columns)})" for form in CSV_FORMS)
        raise self.wrong(
            "header",
            f"column missing: {missing}. Known CSV forms: {known}. Known JSON forms: "
            f"{', '.join(form.name for form in JSON_FORMS)}",
        )

    def _array(self, file: TextIOWrapper) -> Iterator[object]:
        try:
            for self._line, item in ArrayReader(file):
                yield item
        except Malformed as error:
            raise TraceError(self.path, error.line, str(error.column), str(error)) from None

    def _lines(self, file: TextIOWrapper) -> Iterator[object]:
        line = 0
        while text := file.readline(LINE_CHARS_MAX):
            line += 1
            self._line = line
            if len(text) == LINE_CHARS_MAX:
                raise self.wrong("1", f"a line has {LINE_CHARS_MAX:,} characters or more")
            if not text.isspace():
                try:
                    yield json.loads(text)
                except json.JSONDecodeError as error:
                    raise self.wrong(str(error.pos + 1), error.msg) from None
                except RecursionError:
                    raise self.wrong("1", "nested too deeply") from None
                except ValueError as error:
                    raise self.wrong("1", str(error)) from None

    def _parse_objects(self, items: Iterator[object]) -> Iterator[Record]:
        parse = None
        for item in items:
            if not isinstance(item, dict):
                raise self.wrong("1", f"not an object: {str(item)[:40]!r}")
            if parse is None:
                form = self._json_form(item)
                self.form, self._time = form.name, form.time
                parse = form.parser()
            try:
                yield from parse(Fields(item))
            except Skip as skip:
                self.skipped[str(skip)] += 1
            except Bad as bad:
                raise self.wrong(bad.column, str(bad)) from None

    def _json_form(self, first: dict[str, object]) -> JsonForm:
        forced = FORMS.get(self.form or "")
        if isinstance(forced, JsonForm):
            return forced
        for form in JSON_FORMS:
            if form.keys and first.keys() >= set(form.keys):
                return form
        if is_own(first):
            return JSON_FORMS[-1]
        known = "; ".join(f"{form.name} ({', '.join(form.keys)})" for form in JSON_FORMS)
        raise self.wrong(
            "1",
            f"unknown form: the keys are {', '.join(first) or 'none'}. Known JSON forms: {known}. "
            f"Known CSV forms: {', '.join(form.name for form in CSV_FORMS)}",
        )


def _undecodable(path: Path) -> tuple[int, int]:
    """Find the line and column of the first bytes that are no UTF-8. O(file)."""
    line, column = 1, 1
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            rest += chunk
            try:
                text, used = utf_8_decode(rest)
            except UnicodeDecodeError as error:
                text, used = rest[: error.start].decode(), 0
            line += text.count("\n")
            column = len(text) - text.rfind("\n") if "\n" in text else column + len(text)
            if not used:
                break
            rest = rest[used:]
    return line, column
