"""Reads the published CSV forms of traces. Columns are found by name; others are ignored."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from schedsvc_lab.workload.record import TOKENS_MAX, Bad, Record, Skip
from schedsvc_lab.workload.times import Since, timestamp_ns

Cell = Callable[[str], str]
"""Gives the text of a named column in the current row; "" for an optional one that is not there."""

Parse = Callable[[Cell], Record]
"""Makes a row a record. Raises Bad and Skip."""


@dataclass(frozen=True)
class CsvForm:
    """Describes a CSV form: its columns, which one holds the time, how to parse one file's rows."""

    name: str
    about: str
    columns: tuple[str, ...]
    time: str
    parser: Callable[[], Parse]


def _whole(cell: Cell, column: str, least: int = 1) -> int:
    text = cell(column)
    try:
        value = int(text)
    except ValueError:
        raise Bad(column, f"not a whole number: {text!r}") from None
    if not least <= value <= TOKENS_MAX:
        raise Bad(column, f"must be from {least} to {TOKENS_MAX}, is {value}")
    return value


def _seconds(cell: Cell, column: str) -> float:
    text = cell(column)
    try:
        value = float(text)
    except ValueError:
        raise Bad(column, f"not a number of seconds: {text!r}") from None
    if not math.isfinite(value) or value < 0:
        raise Bad(column, f"must be a finite number of seconds, 0 or more, is {text!r}")
    return value


def _lmsys() -> Parse:
    def parse(cell: Cell) -> Record:
        tenant = cell("client")
        if not tenant:
            raise Bad("client", "is empty")
        return Record(
            arrival_s=_seconds(cell, "arrival_s"),
            tenant=tenant,
            input_tokens=_whole(cell, "prompt_tokens"),
            output_tokens=_whole(cell, "output_tokens"),
        )

    return parse


def _azure() -> Parse:
    since = Since()

    def parse(cell: Cell) -> Record:
        text = cell("TIMESTAMP")
        try:
            arrival_s = since(timestamp_ns(text))
        except ValueError as error:
            raise Bad("TIMESTAMP", f"not a time: {text!r} ({error})") from None
        input_tokens = _whole(cell, "ContextTokens", 0)
        output_tokens = _whole(cell, "GeneratedTokens", 0)
        if input_tokens == 0 or output_tokens == 0:
            raise Skip("0 context or generated tokens")
        return Record(arrival_s=arrival_s, input_tokens=input_tokens, output_tokens=output_tokens)

    return parse


def _burstgpt() -> Parse:
    def parse(cell: Cell) -> Record:
        arrival_s = _seconds(cell, "Timestamp")
        input_tokens = _whole(cell, "Request tokens", 0)
        output_tokens = _whole(cell, "Response tokens", 0)
        if output_tokens == 0:
            raise Skip("failed: 0 response tokens")
        if input_tokens == 0:
            raise Skip("0 request tokens")
        return Record(
            arrival_s=arrival_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            conversation=cell("Session ID") or None,
            model=cell("Model") or None,
            request_class=cell("Log Type").lower().removesuffix(" log") or None,
        )

    return parse


def _chutes() -> Parse:
    since = Since()

    def parse(cell: Cell) -> Record:
        text = cell("started_at")
        try:
            arrival_s = since(timestamp_ns(text))
        except ValueError as error:
            raise Bad("started_at", f"not a time: {text!r} ({error})") from None
        counts = {column: cell(column) for column in ("it", "ot")}
        if not all(counts.values()) or "0" in counts.values():
            raise Skip("no input or output tokens")
        # The trace hashes names differently every three months, so a name means one user only with
        # its round.
        user, turn = cell("user_id"), cell("rehash_round")
        return Record(
            arrival_s=arrival_s,
            tenant=f"{user}-{turn}" if user and turn else user or None,
            input_tokens=_whole(cell, "it"),
            output_tokens=_whole(cell, "ot"),
            model=cell("chute_id") or None,
            request_class=cell("function_name") or None,
        )

    return parse


_BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Log Type")

CSV_FORMS = (
    CsvForm(
        "lmsys",
        "the VTC paper's LMSYS arena workload and its reference results (arXiv 2401.00588)",
        ("arrival_s", "client", "prompt_tokens", "output_tokens"),
        "arrival_s",
        _lmsys,
    ),
    CsvForm(
        "azure",
        "Azure LLM inference traces of 2023 and 2024 (Azure/AzurePublicDataset)",
        ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        "TIMESTAMP",
        _azure,
    ),
    CsvForm(
        "burstgpt",
        "BurstGPT 1, 2 and 3, with or without failed requests (arXiv 2401.17644)",
        _BURSTGPT_COLUMNS,
        "Timestamp",
        _burstgpt,
    ),
    CsvForm(
        "chutes",
        "Chutes, a year of a public inference service (HarvardMadSys/chutes_workload), as parquet "
        "or exported to CSV",
        ("user_id", "started_at", "it", "ot"),
        "started_at",
        _chutes,
    ),
)
