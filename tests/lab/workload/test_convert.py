"""Tests that a written trace is read back, whole or marked as partial."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from schedsvc.cli import main
from schedsvc_lab.workload import Message, Record, TraceReader, read_trace
from schedsvc_lab.workload.convert import MooncakeLines, write_trace
from schedsvc_lab.workload.fields import Fields
from schedsvc_lab.workload.json_forms import own_line, own_record
from schedsvc_lab.workload.order import in_order_of_arrival
from schedsvc_lab.workload.record import block_count
from tests import forked
from tests.waiting import wait_until

from .test_forms import DATA, SHAREGPT, lines, wildchat

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
COUNTS = st.integers(1, 2**31 - 1)
PROMPTS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"text": st.text()}),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.builds(Message, st.sampled_from(["system", "user", "assistant"]), st.text()),
                min_size=1,
                max_size=3,
            ).map(tuple)
        }
    ),
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    fields: dict[str, Any] = {**draw(PROMPTS), "input_tokens": draw(st.none() | COUNTS)}
    if draw(st.booleans()):
        block_tokens = draw(st.integers(1, 512))
        fields["input_tokens"] = draw(st.integers(1, 5 * block_tokens))
        whole = fields["input_tokens"] // block_tokens
        count = draw(st.sampled_from([whole, block_count(fields["input_tokens"], block_tokens)]))
        ids = st.lists(st.integers(0, 2**63 - 1), min_size=count, max_size=count)
        fields |= {"block_tokens": block_tokens, "blocks": tuple(draw(ids))}
    for name in ("tenant", "conversation", "model", "adapter", "request_class"):
        fields[name] = draw(st.none() | NAMES)
    return Record(
        **fields,
        arrival_s=draw(st.none() | st.floats(0, 1e9)),
        output_tokens=draw(st.none() | COUNTS),
        answer=draw(st.none() | st.text()),
        turn=draw(st.none() | COUNTS),
        deadline_ms=draw(st.none() | COUNTS),
    )


@given(records())
@settings(max_examples=200, deadline=None)
def test_the_own_form_round_trips(record: Record) -> None:
    assert own_record(Fields(json.loads(own_line(record)))) == record


def test_token_ids_round_trip() -> None:
    record = Record(token_ids=(0, 7, 2**31 - 1), input_tokens=3)
    assert own_record(Fields(json.loads(own_line(record)))) == record


def convert(tmp_path: Path, text: str, *options: str) -> Result:
    path = tmp_path / "in"
    path.write_text(text)
    out = str(tmp_path / "out.jsonl")
    return CliRunner().invoke(
        main, ["workload", "convert", "--trace", str(path), "--out", out, *options]
    )


def test_converted_files_read_alike(tmp_path: Path) -> None:
    result = convert(tmp_path, json.dumps(SHAREGPT), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["requests"], told["form"], sum(told["skipped"].values())) == (3, "sharegpt", 5)
    again = TraceReader(tmp_path / "out.jsonl")
    assert list(again) == list(TraceReader(tmp_path / "in"))
    assert again.form == "schedsvc"
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_output_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n0,a,1,1\n")
    result = CliRunner().invoke(
        main, ["workload", "convert", "--trace", str(path), "--out", f"{tmp_path}/no/o.jsonl"]
    )
    assert result.exit_code == 2
    assert f"--out: the folder {tmp_path}/no does not exist; make it" in result.output


@pytest.mark.parametrize("text", ["", "\n", "# a note\n"])
def test_trace_that_is_empty_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    result = CliRunner().invoke(
        main, ["workload", "convert", "--trace", str(path), "--out", f"{tmp_path}/o.jsonl"]
    )
    assert result.exit_code == 1
    assert "begins with no header and no JSON; is it empty?" in result.output


def test_parts_left_out_are_reported(tmp_path: Path) -> None:
    result = convert(tmp_path, json.dumps(SHAREGPT))
    assert "3 requests of form sharegpt written to" in result.stdout
    assert "1 records left out: no message of a user or tool" in result.stderr


def test_sorting_puts_the_first_arrival_at_zero(tmp_path: Path) -> None:
    early = wildchat(
        conversation_hash="c0",
        timestamp="2023-04-09T00:00:00",
        conversation=[{"role": "user", "content": "q"}],
    )
    trace = lines(wildchat(), early)
    result = convert(tmp_path, trace)
    assert result.exit_code == 1
    assert "/in:2:timestamp: arrives before the row above it" in result.output
    assert "--sort does it" in result.output
    assert convert(tmp_path, trace, "--sort").exit_code == 0
    found = list(TraceReader(tmp_path / "out.jsonl"))
    assert [(record.conversation, record.arrival_s) for record in found] == [
        ("c0", 0.0),
        ("c1", 10.0),
        ("c1", 70.5),
    ]
    result = convert(tmp_path, json.dumps(SHAREGPT), "--sort")
    assert "/in:1:arrival_s: no arrival time to sort by" in result.output


def test_sorting_keeps_the_order_of_equal_arrivals() -> None:
    trace = [Record(arrival_s=float(at * 7 % 3), turn=at + 1) for at in range(1_000)]
    found = list(in_order_of_arrival(trace, ValueError))
    assert found == sorted(trace, key=lambda record: record.arrival_s or 0.0)


def test_an_error_leaves_the_good_lines_marked_as_partial(tmp_path: Path) -> None:
    text = "arrival_s,client,prompt_tokens,output_tokens\n0,a,1,1\n1,b,2,2\nx,c,3,3\n"
    result = convert(tmp_path, text)
    assert result.exit_code == 1
    assert "/in:4:arrival_s: not a number of seconds: 'x'" in result.output
    assert not (tmp_path / "out.jsonl").exists()
    partial = tmp_path / "out.jsonl.partial"
    assert [request.tenant for request in read_trace(partial)] == ["a", "b"]


def test_an_interrupt_leaves_whole_lines(tmp_path: Path) -> None:
    def interrupted() -> Iterator[Record]:
        yield Record(input_tokens=1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(interrupted(), tmp_path / "out", own_line, ValueError)
    assert (tmp_path / "out.partial").read_text() == '{"input_tokens": 1}\n'
    assert not (tmp_path / "out").exists()


def test_control_c_reports_the_partial_file(tmp_path: Path) -> None:
    pipe, out = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    command = [
        sys.executable,
        "-m",
        "schedsvc",
        "workload",
        "convert",
        "--trace",
        "/dev/stdin",
        "--out",
        out,
    ]
    process = forked.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write('{"input_tokens": 1}\n' * 10_000)
    process.stdin.flush()
    partial = tmp_path / "out.partial"
    wait_until(lambda: partial.exists() and partial.stat().st_size)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "interrupted; the requests so far are in" in errors
    assert set(partial.read_text().splitlines()) == {'{"input_tokens": 1}'}
    assert not out.exists()


def test_mooncake_is_written_byte_for_byte(tmp_path: Path) -> None:
    path = DATA / "traces/mooncake_conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"the published traces are not on this machine: {path}")
    own, out = tmp_path / "own.jsonl", tmp_path / "out.jsonl"
    write_trace(TraceReader(path), own, own_line, ValueError)
    assert write_trace(TraceReader(own), out, MooncakeLines(), ValueError) == 12_031
    assert out.read_bytes() == path.read_bytes()


def test_small_blocks_are_joined_and_nothing_else_is_shared() -> None:
    line = MooncakeLines()

    def ids(blocks: tuple[int, ...], input_tokens: int) -> list[int]:
        record = Record(
            arrival_s=1.0006,
            input_tokens=input_tokens,
            output_tokens=2,
            blocks=blocks,
            block_tokens=16 if blocks else None,
        )
        written = json.loads(line(record))
        assert (written["timestamp"], written["input_length"]) == (1001, input_tokens)
        assert len(written["hash_ids"]) == block_count(input_tokens, 512)
        return list(written["hash_ids"])

    first = tuple(range(33))
    assert ids(first, 513) == [0, 1]
    assert ids((), 600) == [2, 3]
    assert ids(first[:32], 512) == [0]
    assert ids((*first[:32], 99), 520) == [0, 4]
    # The same last blocks after other ones are another prefix.
    assert ids((77, *first[1:]), 513) == [5, 6]
    assert ids((*first[:31], 50, first[32]), 513) == [7, 8]
    assert ids(first, 520) == [0, 1]
    # Without a hash for the partial last block.
    assert ids(first[:32], 520) == [0, 9]
    assert ids(first[:32], 512) == [0]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"input_tokens": 1, "output_tokens": 1}, "/in:1:arrival_s: Mooncake's form needs it"),
        ({"arrival_s": 0, "input_tokens": 1}, "/in:1:output_tokens: Mooncake's form needs it"),
        (
            {
                "arrival_s": 0,
                "input_tokens": 1,
                "output_tokens": 1,
                "blocks": [1],
                "block_tokens": 24,
            },
            "/in:1:block_tokens: is 24, which does not divide 512",
        ),
    ],
)
def test_request_that_mooncakes_form_cannot_hold_is_refused(
    tmp_path: Path, request_: dict[str, Any], message: str
) -> None:
    result = convert(tmp_path, lines(request_), "--to", "mooncake")
    assert result.exit_code == 1
    assert message in result.output


def test_an_unknown_form_lists_the_known(tmp_path: Path) -> None:
    result = convert(tmp_path, "a,b\n", "--from", "alien")
    assert result.exit_code == 2
    assert all(name in result.output for name in ("azure", "burstgpt", "mooncake", "sharegpt"))
