"""Tests Parquet files of WildChat and of Chutes, and the message if pyarrow is missing."""

import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from schedsvc_lab.workload import Record, TraceError, TraceReader, read_trace

pa = pytest.importorskip("pyarrow", reason="pyarrow is optional: pip install 'schedsvc[parquet]'")
parquet = pytest.importorskip("pyarrow.parquet")

AT = datetime(2024, 5, 1, 12, 0, 0, 250_000, tzinfo=timezone.utc)


def said(role: str, content: str, at: datetime | None = None) -> dict[str, Any]:
    return {"role": role, "content": content, "timestamp": at, "hashed_ip": None}


def write(path: Path, rows: list[dict[str, Any]], schema: Any = None) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def test_wildchat(tmp_path: Path) -> None:
    later = AT.replace(second=4)
    rows = [
        {
            "conversation_hash": "c1",
            "model": "gpt-4",
            "timestamp": AT,
            "conversation": [
                said("user", "Why?", AT),
                said("assistant", "So.", AT),
                said("user", "And?", later),
                said("assistant", "Thus.", later),
            ],
            "turn": 2,
            "language": "English",
            "hashed_ip": "ip1",
        },
        {
            "conversation_hash": "c2",
            "model": "gpt-4",
            "timestamp": AT,
            "conversation": [said("alien", "?")],
            "turn": 1,
            "language": "English",
            "hashed_ip": "ip2",
        },
    ]
    reader = TraceReader(write(tmp_path / "w.parquet", rows), in_order=False)
    records = list(reader)
    assert reader.form == "wildchat"
    assert [(r.arrival_s, r.tenant, r.turn, r.answer) for r in records] == [
        (0.0, "ip1", 1, "So."),
        (4.0, "ip1", 2, "Thus."),
    ]
    assert sum(reader.skipped.values()) == 1


def chutes(**more: Any) -> dict[str, Any]:
    return {
        "invocation_id": "i",
        "function_name": "chat_stream",
        "chute_id": "m",
        "user_id": "u",
        "rehash_round": 1,
        "instance_id": "x",
        "started_at": datetime(1970, 1, 1),
        "completed_at": datetime(1970, 1, 1),
        "it": 100,
        "ot": 20,
        "ct": 0,
        "ttft": 0.5,
        **more,
    }


@pytest.mark.parametrize("unit", ["us", "ns"])
def test_chutes(tmp_path: Path, unit: str) -> None:
    rows = [
        chutes(),
        chutes(started_at=datetime(1970, 1, 1, 0, 0, 1, 500_000), rehash_round=2, it=7, ot=3),
        chutes(started_at=datetime(1970, 1, 2), ot=None),
        chutes(started_at=datetime(1970, 1, 2), ot=0),
    ]
    schema = pa.Table.from_pylist(rows).schema
    at = schema.get_field_index("started_at")
    schema = schema.set(at, pa.field("started_at", pa.timestamp(unit)))
    path = write(tmp_path / "chutes.parquet", rows, schema)
    reader = TraceReader(path)
    assert list(reader) == [
        Record(
            arrival_s=arrival_s,
            tenant=tenant,
            input_tokens=asked,
            output_tokens=given,
            model="m",
            request_class="chat_stream",
        )
        for arrival_s, tenant, asked, given in ((0.0, "u-1", 100, 20), (1.5, "u-2", 7, 3))
    ]
    assert reader.form == "chutes"
    assert reader.skipped == {"no input or output tokens": 2}
    assert len(list(read_trace(path))) == 2


def test_chutes_exported_to_csv(tmp_path: Path) -> None:
    path = tmp_path / "chutes.csv"
    path.write_text(
        "user_id,rehash_round,started_at,it,ot,chute_id,function_name\n"
        "u,1,1970-01-01 00:00:00.125,5,6,m,chat\nu,1,1970-01-01 00:00:02.125,5,x,m,chat\n"
    )
    reader = iter(TraceReader(path))
    assert next(reader).tenant == "u-1"
    with pytest.raises(TraceError, match=r"chutes\.csv:3:ot: not a whole number: 'x'"):
        next(reader)


def test_our_own_form(tmp_path: Path) -> None:
    rows = [{"arrival_s": 0.5, "tenant": "a", "input_tokens": 3, "output_tokens": 4}]
    (record,) = TraceReader(write(tmp_path / "own.parquet", rows))
    assert record == Record(arrival_s=0.5, tenant="a", input_tokens=3, output_tokens=4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([chutes(), chutes(started_at=None)], r"x\.parquet:2:started_at: not a time: ''"),
        ([chutes(it=-4)], r"x\.parquet:1:it: must be from 1 to"),
        ([{"a": 1}], r"x\.parquet:1:header: column missing: .*Known JSON forms"),
        (
            [chutes(started_at=datetime(1970, 1, 2)), chutes(started_at=datetime(1970, 1, 1))],
            r"x\.parquet:2:started_at: arrives before the row above it",
        ),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    path = write(tmp_path / "x.parquet", rows)
    with pytest.raises(TraceError, match=message):
        list(TraceReader(path))


def test_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [], pa.schema([("it", pa.int64())]))
    with pytest.raises(TraceError, match="the trace holds no request"):
        list(TraceReader(path))


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", [chutes()])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TraceError, match=r"x\.parquet:1:1: a parquet file: install pyarrow"):
        list(TraceReader(path))
