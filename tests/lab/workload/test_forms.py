"""Tests every published form in a small file of its own, with its traps."""

import json
from pathlib import Path
from typing import Any

import pytest

from schedsvc_lab.workload import FORMS, Message, Record, TraceError, TraceReader, read_trace

DATA = Path(__file__).parents[3].parent / "shared" / "data"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)


def lines(*objects: Any) -> str:
    return "".join(json.dumps(item) + "\n" for item in objects)


def reader(tmp_path: Path, text: str | bytes, **options: Any) -> TraceReader:
    path = tmp_path / "trace"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return TraceReader(path, **options)


def read(tmp_path: Path, text: str, form: str, **options: Any) -> list[Record]:
    """Return the records of a file whose form must be found out to be `form`."""
    source = reader(tmp_path, text, **options)
    records = list(source)
    assert source.form == form
    return records


def test_azure_2024_mixes_fractions_and_zones(tmp_path: Path) -> None:
    text = (
        AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01+00:00,2399,6\n"
        "2024-05-10 00:00:02,76,15\n"
        "2024-05-10 02:00:02.5+02:00,5,1\n"
        "2024-05-10 00:00:03.1234567,8,1\n"
    )
    records = read(tmp_path, text, "azure")
    assert [record.arrival_s for record in records] == [0.0, 0.99007, 1.99007, 2.49007, 3.1135267]
    assert [record.input_tokens for record in records] == [2162, 2399, 76, 5, 8]
    assert {record.tenant for record in records} == {None}


def test_azure_rows_without_tokens_are_counted(tmp_path: Path) -> None:
    source = reader(tmp_path, AZURE + "2024-05-10 00:00:00,3,0\n2024-05-10 00:00:01,3,1\n")
    assert len(list(source)) == 1
    assert source.skipped == {"0 context or generated tokens": 1}


def test_burstgpt_1_leaves_failures_out(tmp_path: Path) -> None:
    text = (
        BURST + "5,ChatGPT,472,18,490,Conversation log\n"
        "45.25,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,API log\n"
    )
    source = reader(tmp_path, text)
    assert list(source) == [
        Record(
            arrival_s=5.0,
            input_tokens=472,
            output_tokens=18,
            model="ChatGPT",
            request_class="conversation",
        ),
        Record(
            arrival_s=118.0,
            input_tokens=417,
            output_tokens=276,
            model="GPT-4",
            request_class="api",
        ),
    ]
    assert source.skipped == {"failed: 0 response tokens": 1}


def test_burstgpt_3_inserts_two_columns(tmp_path: Path) -> None:
    text = BURST_3 + "3.5,17,0.25,GPT-4,40,20,60,Conversation log\n4,,1,GPT-4,7,2,9,API log\n"
    first, second = read(tmp_path, text, "burstgpt")
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (3.5, 40, 20)
    assert (first.conversation, second.conversation) == ("17", None)


def test_mooncake_milliseconds_and_a_partial_last_block(tmp_path: Path) -> None:
    request = {"timestamp": 1500, "input_length": 513, "output_length": 3, "hash_ids": [4, 9]}
    assert read(tmp_path, lines(request), "mooncake") == [
        Record(arrival_s=1.5, input_tokens=513, output_tokens=3, blocks=(4, 9), block_tokens=512)
    ]


def test_qwen_follows_conversations(tmp_path: Path) -> None:
    def request(chat: int, parent: int, at: float, turn: int, length: int) -> dict[str, Any]:
        return {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": at,
            "input_length": length,
            "output_length": 2,
            "type": "text",
            "turn": turn,
            "hash_ids": list(range(-(-length // 16))),
        }

    text = lines(
        request(159, -1, 0.061, 1, 17),
        request(160, -1, 0.1, 1, 16),
        request(161, 159, 8.0, 2, 33),
        request(162, 161, 9.0, 3, 48),
        request(170, 7, 9.5, 4, 1),
    )
    # The published description does not mention hashes of partial blocks.
    without = {**request(171, -1, 9.6, 1, 31), "hash_ids": [5]}
    assert read(tmp_path, lines(without), "qwen")[0].blocks == (5,)
    del without["hash_ids"]
    assert read(tmp_path, lines(without), "qwen")[0].blocks == ()
    with pytest.raises(TraceError, match=":1:hash_ids: 3 blocks, but 31 tokens fill 2 of 16"):
        list(reader(tmp_path, lines({**without, "hash_ids": [5, 6, 7]})))
    records = read(tmp_path, text, "qwen")
    assert [record.conversation for record in records] == ["159", "160", "159", "159", "7"]
    assert [record.turn for record in records] == [1, 1, 2, 3, 4]
    assert [len(record.blocks) for record in records] == [2, 1, 3, 3, 1]
    assert records[0].arrival_s == 0.061
    assert {(record.block_tokens, record.request_class) for record in records} == {(16, "text")}


def wildchat(**change: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "conversation_hash": "c1",
        "model": "gpt-4",
        "timestamp": "2023-04-09T00:02:53+00:00",
        "conversation": [
            {"role": "user", "content": "hi", "timestamp": None, "hashed_ip": "ip1"},
            {"role": "assistant", "content": "hello", "timestamp": "2023-04-09T00:00:10"},
            {"role": "user", "content": "more", "timestamp": "2023-04-09T00:01:10.5"},
            {"role": "assistant", "content": "no", "timestamp": "2023-04-09T00:01:20"},
        ],
        "turn": 2,
        "language": "English",
        "hashed_ip": "ip1",
    }
    return {**record, **change}


def test_wildchat_turns_tenants_and_times(tmp_path: Path) -> None:
    later = wildchat(
        conversation_hash="c0",
        timestamp=1_680_998_400_000,
        hashed_ip=None,
        conversation=[
            {"role": "user", "content": "q", "hashed_ip": "ip2"},
            {"role": "assistant", "content": "a", "hashed_ip": None},
        ],
    )
    records = read(tmp_path, lines(wildchat(), later), "wildchat", in_order=False)
    assert records[0] == Record(
        arrival_s=0.0,
        tenant="ip1",
        messages=(Message("user", "hi"),),
        answer="hello",
        conversation="c1",
        turn=1,
        model="gpt-4",
    )
    assert (records[1].arrival_s, records[1].turn, records[1].answer) == (60.5, 2, "no")
    # 2023-04-09 00:00:00, ten seconds before the first.
    assert (records[2].arrival_s, records[2].tenant) == (-10.0, "ip2")


SHAREGPT = [
    {
        "id": "a_0",
        "conversations": [
            {"from": "gpt", "value": "unasked"},
            {"from": "human", "value": "one"},
            {"from": "human", "value": "two"},
            {"from": "gpt", "value": "answer"},
            {"from": "gpt", "value": "again"},
            {"from": "human", "value": "three"},
        ],
    },
    {"id": "b", "conversations": []},
    {"id": "c", "conversations": [{"from": "gpt", "value": "alone"}]},
    {"id": "d", "conversations": [{"from": "martian", "value": "?"}]},
    {"id": "e", "conversations": [{"from": "human", "value": None}]},
    {"id": "f", "conversations": "nonsense"},
    {
        "conversations": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "x"},
            {"role": "system", "content": "be brief"},
            {"role": "assistant", "content": "y"},
        ]
    },
]


@pytest.mark.parametrize("text", [json.dumps(SHAREGPT, indent=2), lines(*SHAREGPT)])
def test_sharegpt_both_dialects_as_array_and_lines(tmp_path: Path, text: str) -> None:
    source = reader(tmp_path, text)
    assert list(source) == [
        Record(
            messages=(
                Message("assistant", "unasked"),
                Message("user", "one"),
                Message("user", "two"),
            ),
            answer="answer",
            conversation="a_0",
            turn=1,
        ),
        Record(
            messages=(Message("assistant", "again"), Message("user", "three")),
            conversation="a_0",
            turn=2,
        ),
        Record(
            messages=(
                Message("system", "be kind"),
                Message("user", "x"),
                Message("system", "be brief"),
            ),
            answer="y",
            conversation="line-7",
            turn=1,
        ),
    ]
    assert source.form == "sharegpt"
    assert source.skipped == {
        "the conversation is empty": 1,
        "no message of a user or tool": 1,
        "from: unknown role": 1,
        "value: not text": 1,
        "conversations: not an array": 1,
    }


def test_the_vtc_reference_has_a_comment_first(tmp_path: Path) -> None:
    text = (
        '# {"config": {"duration": 600}}\n'
        "arrival_s,client,prompt_tokens,output_tokens,first_token_latency_s,request_latency_s\n"
        "2.0000,client-0,256,128,0.1374,9.1256\n4.0,client-1,256,0,0.1,9\n"
    )
    source = reader(tmp_path, text)
    requests = iter(source)
    assert next(requests) == Record(
        arrival_s=2.0, tenant="client-0", input_tokens=256, output_tokens=128
    )
    with pytest.raises(TraceError, match=r"trace:4:output_tokens: must be from 1"):
        next(requests)


MOON = '{"timestamp": 0, "input_length": 513, "output_length": 3, "hash_ids": [0, 1]}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", ":1:header: column missing: "),
        ('{"question": 1}\n', ":1:1: unknown form: the keys are question. Known JSON forms: qwen"),
        (MOON + '{"timestamp": 1,, }\n', ":2:17: Expecting property name"),
        (MOON + '{"timestamp": 1\n', ":2:17: Expecting ',' delimiter"),
        (MOON + "[1]\n", ":2:1: not an object"),
        (MOON + '{"timestamp": 1}\n', ":2:input_length: missing"),
        (MOON + MOON.replace("0,", '"0",', 1), ":2:timestamp: not a number: '0'"),
        (MOON + MOON.replace("513", "5.5"), ":2:input_length: not a whole number: 5.5"),
        (MOON + MOON.replace("513", "512"), ":2:hash_ids: 2 blocks, but 512 tokens fill 1 of 512"),
        (MOON + MOON.replace("[0, 1]", "[0]"), ":2:hash_ids: 1 blocks, but 513 tokens fill 2"),
        (MOON + MOON.replace("[0, 1]", "[0, true]"), ":2:hash_ids[1]: not a whole number: True"),
        (MOON.replace(": 0,", ": 5,") + MOON, ":2:timestamp: arrives before the row above it"),
        (MOON.replace(": 0,", ": NaN,"), ":1:timestamp: must be a finite number"),
        (MOON.encode() + b'{"timestamp": \xff', ":2:15: not UTF-8"),
        ('[{"conversations": []},\n {"id": 1,, "conversations"', ":2:11: Expecting property name"),
        ('[{"conversations": [{"from": "human", "value": "x"}]}', ":1:54: the file ends within"),
        ('[{"conversations": [{"from": "hu', ":1:30: Unterminated string"),
        ("[] x", ":1:4: text after the end of the array"),
        ("[]", ":1:row: the trace holds no request"),
        ('[{"conversations": []}]', ":1:row: the trace holds no request"),
        ("[" * 100_000, ":1:2: nested too deeply"),
        ('{"a":' * 100_000 + "\n", ":1:1: nested too deeply"),
        (lines(wildchat(timestamp="noon", conversation=[{"role": "user", "content": "q"}])),
         ":1:timestamp: not a time: 'noon'"),
        (lines({"arrival_s": 1, "tennant": "a"}), ":1:tennant: unknown key; known: arrival_s"),
        (lines({"text": "x", "token_ids": [1]}), ":1:text: give one of"),
        (lines({"input_tokens": 2, "token_ids": [1]}), ":1:input_tokens: is 2 for 1 token_ids"),
        (lines({"input_tokens": 2, "blocks": [1]}), ":1:block_tokens: missing"),
        (lines({"input_tokens": 2, "tenant": "\ud800"}), ":1:tenant: half of a surrogate pair"),
        (b"PAR1rest", ":1:1: not a readable parquet file"),
        (b"\x1f\x8brest", ":1:1: a gzip file"),
    ],
)  # fmt: skip
def test_errors_name_file_line_column_and_reason(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(TraceError) as caught:
        list(reader(tmp_path, text))
    assert str(caught.value).startswith(f"{tmp_path}/trace{message}")


def test_every_form_is_named_where_none_fits(tmp_path: Path) -> None:
    for text in ("a,b\n", '{"question": 1}\n'):
        with pytest.raises(TraceError) as caught:
            list(reader(tmp_path, text))
        assert all(name in str(caught.value) for name in FORMS)


def test_a_form_can_be_forced(tmp_path: Path) -> None:
    request = {**json.loads(MOON), "chat_id": 1, "parent_chat_id": -1}
    (record,) = reader(tmp_path, lines(request), form="mooncake")
    assert record.block_tokens == 512
    with pytest.raises(TraceError, match="column missing: TIMESTAMP"):
        list(reader(tmp_path, MOON, form="azure"))
    with pytest.raises(TraceError, match=":1:1: Expecting value"):
        list(reader(tmp_path, AZURE, form="mooncake"))
    with pytest.raises(ValueError, match="unknown form 'csv'; known: qwen"):
        reader(tmp_path, AZURE, form="csv")


def test_a_byte_order_mark_and_line_ends_of_windows(tmp_path: Path) -> None:
    assert len(read(tmp_path, "\ufeff" + MOON.replace("\n", "\r\n") * 2, "mooncake")) == 2
    text = "\ufeff" + (AZURE + "2024-05-10 00:00:00,3,1\n").replace("\n", "\r\n")
    assert len(read(tmp_path, text, "azure")) == 1


def test_trace_that_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(json.dumps(SHAREGPT))
    with pytest.raises(TraceError, match=r":1:arrival_s: no arrival time"):
        list(read_trace(path))
    path.write_text(lines(wildchat()))
    with pytest.raises(TraceError, match=r":1:input_tokens: no token counts"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("name", "form", "requests", "tenants"),
    [
        ("traces/AzureLLMInferenceTrace_conv.csv", "azure", 19_366, 1),
        ("traces/mooncake_conversation_trace.jsonl", "mooncake", 12_031, 1),
        ("traces/lmsys_arena_vtc.csv", "lmsys", 1_500, 27),
        ("reference/vtc_a10g/fcfs_overload.csv", "lmsys", 2_700, 2),
        ("reference/vtc_a10g/vtc_poisson_short_long.csv", "lmsys", 5_700, 2),
        ("conversations/sharegpt_format_fastchat.json", "sharegpt", 1_000, 1),
    ],
)
def test_the_published_files_import_completely(
    name: str, form: str, requests: int, tenants: int
) -> None:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the published traces are not on this machine: {path}")
    source = TraceReader(path)
    records = list(source)
    assert (source.form, len(records), not source.skipped) == (form, requests, True)
    assert len({record.tenant for record in records}) == tenants
