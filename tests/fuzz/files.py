"""Fuzzes files of operators: configurations, traces, recordings."""

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from schedsvc.config import load, problem_text, read
from schedsvc.driver import new_core
from schedsvc.records.recording.form import (
    FIRST_LINE,
    Event,
    FormError,
    Kind,
    call_of,
    frame,
    header_bytes,
    header_of,
    pack,
    unpack,
)
from schedsvc_lab.sim.replay.reader import Recording, ReplayError
from schedsvc_lab.workload import FORMS, TraceError, TraceReader
from schedsvc_lab.workload.csv_forms import CsvForm

_ROOT = Path(__file__).parents[2]
_FOLDER = TemporaryDirectory(prefix="schedsvc-fuzz-")


def _file(data: bytes) -> Path:
    path = Path(_FOLDER.name) / "input"
    path.write_bytes(data)
    return path


# Configurations.

CONFIG_WORDS = (
    b"&a ", b"*a", b"<<: *a", b"!!int ", b"!!python/object:os.system ", b"? ", b"- ", b"|\n",
    b"null", b"~", b"1e999", b".inf", b".nan", b"-1", b"0x10", b"18446744073709551616",
    b"2001-01-01", b"tenants:\n", b"weight: ", b"name: ", b"quotas: ", b"listeners: ", b"{", b"}",
    b"[", b"]", b"  ", b"\t", b"\n", b"%YAML 1.1\n---\n", b"---\n", b"...\n",
)  # fmt: skip


def config_corpus() -> list[bytes]:
    """Return the sample, and the smallest that is right."""
    sample = (_ROOT / "schedsvc" / "data" / "schedsvc.yaml").read_bytes()
    small = b"listeners: [{tcp: '127.0.0.1:0'}]\n"
    limits = b"tenants: [{name: x, weight: 2, quotas: {requests_per_minute: 5}}]\n"
    return [
        sample,
        small,
        small + limits,
        small + b"scheduler: {prices: {cached: 0.5, kv: 0.001}}\n",
    ]


def config(data: bytes) -> None:
    """A file is right, and makes a core; or each of its faults is reported, with its place."""
    path = _file(data)
    reading = read(path, {})
    if reading.config is None:
        assert reading.problems
    else:
        assert load(path, {}) == reading.config
        new_core(reading.config, 0).check()
    lines = data.count(b"\n") + data.count(b"\r") + 2
    for problem in reading.problems:
        assert problem_text(path, problem).isprintable() or not data.isascii()
        assert 1 <= problem.place.line <= lines + data.count(b"\xe2") + data.count(b"\xc2")
        assert problem.message


# Traces.

TRACE_WORDS = (
    b",", b"\n", b'"', b'""', b"\r", b"nan", b"inf", b"-1", b"1e999", b"null", b"{", b"}", b"[",
    b"]", b'":', b"\xef\xbb\xbf", b"PAR1", b"2024-05-10 00:00:00", b"9" * 30, b"9" * 400,
    b"[" * 2_000,
)  # fmt: skip


def trace_corpus() -> list[bytes]:
    """Return a trace of each form, by its columns or keys."""
    found = []
    for form in FORMS.values():
        if isinstance(form, CsvForm):
            row = ",".join("2" for _ in form.columns)
            found.append(f"{','.join(form.columns)}\n{row}\n{row}\n".encode())
        else:
            item = dict.fromkeys(form.keys, 2)
            found.append(json.dumps(item).encode() + b"\n")
            found.append(json.dumps([item, item]).encode())
    azure = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01,7,5\n"
    own = {"tenant": "a", "arrival_s": 0.5, "input_tokens": 3, "output_tokens": 4}
    talk = {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]}
    return [*found, azure, json.dumps(own).encode(), json.dumps([{"id": "x", **talk}]).encode()]


def trace(data: bytes) -> None:
    """Read a trace, or refuse it with the place in it, as what it is and as every form."""
    path = _file(data)
    names = [None, *FORMS] if len(data) < 4_096 else [None]
    for form in names:
        told = ""
        try:
            for record in TraceReader(path, form=form):
                assert record.arrival_s is None or record.arrival_s >= 0
        except TraceError as error:
            told = str(error)
        assert not told or str(path) in told


# Recordings.

RECORDING_WORDS = (FIRST_LINE, b"\xf5REC", b'{"hex": "00"}', b"[]", b'["set_flow", [], {}]')


def recording_corpus() -> list[bytes]:
    """Return a recording with an event of each kind, and what stands in its frames."""
    header = {"version": 1, "schedsvc": "0", "options": {"hash_key": b"k"}, "setup": []}
    calls = [
        Event(Kind.SET, (0,), b'["set_flow", [{"hex": "66"}, 1000], {}]'),
        Event(Kind.ADMIT, (1, 0, 0), b"\x0a\x01r"),
        Event(Kind.POLL, (2,)),
        Event(Kind.CHECK, (3,)),
    ]
    raw = b"".join(pack(call) for call in calls)
    first = header_bytes(header)
    whole = FIRST_LINE + frame(0, first) + frame(1, raw) + frame(2, raw)
    return [whole, raw, first, calls[0].data]


def recording(data: bytes) -> None:
    """Read a recording as far as it is whole, or refuse it; and each of its parts."""
    with suppress(ReplayError):
        found = Recording(_file(data))
        list(found.events())
        assert found.cut_bytes <= len(data)
    with suppress(FormError):
        list(unpack(data))
    with suppress(FormError):
        header_of(data)
    with suppress(FormError):
        call_of(data)
    # Damage that a CRC would hide: the same bytes as the content of a whole frame.
    with suppress(ReplayError):
        list(Recording(_file(FIRST_LINE + frame(0, data) + frame(1, data))).events())
