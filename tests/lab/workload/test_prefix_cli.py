from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from schedsvc.cli import main
from schedsvc_lab.workload.reader import TraceReader

from . import trained

DATA = Path(__file__).parents[4] / "shared/data"
TALK = [
    {
        "id": f"talk-{number}",
        "conversations": [
            {"from": "human", "value": "Tell me what the module does, please, in a few words."},
            {"from": "gpt", "value": f"It parses {number} arguments and returns a namespace."},
            {"from": "human", "value": "And then?"},
            {"from": "gpt", "value": "Then it raises an error."},
        ],
    }
    for number in range(6)
]
BROKEN: list[Any] = [
    {"id": "none", "conversations": []},
    {"id": "role", "conversations": [{"from": "robot", "value": "beep"}]},
]


def prefix(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["prefix", "--trace", *map(str, arguments)])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talk") / "talk.json"
    path.write_text(json.dumps(TALK + BROKEN))
    return path


def test_conversations_single_and_multi_turn(
    folders: dict[str, Path], talk: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    more = ("--block-size", "8,4", "--think", 2, "--seed", 3)
    result = prefix(talk, "--tokenizer", folders["unigram"], "--out", out, *more)
    assert result.exit_code == 0, result.output
    assert "single_turn: 6 requests" in result.output
    assert "multi_turn: 12 requests" in result.output
    assert "multi_turn: 1 times: the conversation is empty" in result.output
    assert "multi_turn: 1 times: from: unknown role" in result.output
    assert "…" not in result.output  # a pipe gets all of it
    for name, count in (("single_turn", 6), ("multi_turn", 12)):
        check_files(out, name, count)
    for name in ("sharing.png", "caches.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    points = rows(out / "caches.csv")
    assert {(row["requests"], row["block_tokens"]) for row in points} == {
        (name, size) for name in ("single_turn", "multi_turn") for size in "84"
    }
    assert {row["policy"] for row in points} == {"lru", "fifo", "lfu", "belady"}


def check_files(out: Path, name: str, count: int) -> None:
    """Check that the files of one name hold the same figures."""
    statistics = json.loads((out / f"{name}_stats.json").read_text())
    requests = rows(out / f"{name}_request_metrics.csv")
    blocks = rows(out / f"{name}_block_metrics.csv")
    trace = list(TraceReader(out / f"{name}_trace.jsonl"))
    assert len(trace) == count == statistics["requests"]
    for size in (8, 4):
        summary = statistics["block_sizes"][str(size)]
        own = [row for row in requests if row["block_tokens"] == str(size)]
        assert len(own) == count
        assert sum(int(row["shared_tokens"]) for row in own) == summary["shared_tokens"] > 0
        assert sum(int(row["input_tokens"]) for row in own) == statistics["input_tokens"]
        hits = [int(row["hits"]) for row in blocks if row["block_tokens"] == str(size)]
        assert (len(hits), sum(hits)) == (summary["different_blocks"], summary["blocks"])
        everything = [
            point["token_hit_rate"]
            for point in statistics["caches"]
            if point["block_tokens"] == size
            and point["capacity_tokens"] == summary["different_blocks"] * size
        ]
        assert everything == [summary["shared_tokens_share"]] * 4
    firsts = [row for row in requests if row["block_tokens"] == "8"]
    for record, row in zip(trace, firsts, strict=True):
        assert (record.block_tokens, len(record.blocks)) == (8, int(row["blocks"]))
        assert record.input_tokens == int(row["input_tokens"])
        assert (record.conversation, str(record.turn)) == (row["conversation"], row["turn"])
        assert record.arrival_s == float(row["arrival_s"])
        assert record.output_tokens


def test_its_trace_can_be_analysed_again(
    folders: dict[str, Path], talk: Path, tmp_path: Path
) -> None:
    arguments = ("--tokenizer", folders["unigram"], "--policy", "", "--json")
    first = json.loads(prefix(talk, *arguments, "--out", tmp_path / "a").stdout)
    trace = tmp_path / "a/multi_turn_trace.jsonl"
    again = json.loads(prefix(trace, "--policy", "", "--json", "--out", tmp_path / "b").stdout)
    assert list(first) == list(again) == ["single_turn", "multi_turn"]
    for name, found in first.items():
        assert found["block_sizes"]["16"] == again[name]["block_sizes"]["16"]
    assert not (tmp_path / "a/caches.png").exists()


def test_text_and_ids_and_limits(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    text = "return the value of the function " * 4
    records = [
        {"arrival_s": 0, "text": text},
        {"arrival_s": 4, "text": text + "and more of it"},
        {"arrival_s": 5, "token_ids": [1, 2, 3]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = prefix(
        path,
        "--tokenizer",
        folders["unigram"],
        "--out",
        tmp_path / "o",
        "--json",
        "--block-size",
        8,
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["as_recorded"]
    known = Tokenizer.from_file(str(folders["unigram"] / "tokenizer.json"))
    first, second = (known.encode(str(record["text"])).ids for record in records[:2])
    assert found["input_tokens"] == len(first) + len(second) + 3
    sharing = found["block_sizes"]["8"]
    assert sharing["shared_tokens"] == len(first) // 8 * 8
    assert sharing["reuse_gap_s"]["max"] == 4.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--block-size", "0"), "'0' must be whole numbers of 1 or more, as in 8,16,32"),
        (("--block-size", "8,x"), "'8,x' must be whole numbers"),
        (("--policy", "lru,mru"), "'mru' is none of lru, fifo, lfu, belady"),
        (("--capacity", "-3"), "'-3' must be whole numbers"),
        ((), "--tokenizer is missing: give a folder that holds the model's"),
    ],
)
def test_wrong_options(talk: Path, tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    result = prefix(talk, "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (['{"arrival_s": 0, "input_tokens": 4}'], ":1:blocks: the request has neither blocks"),
        (
            ['{"arrival_s": 0, "token_ids": [4]}', '{"arrival_s": 1, "text": "x"}'],
            ":2:text: --tokenizer is missing",
        ),
        (
            [
                '{"arrival_s": 0, "input_tokens": 4, "blocks": [1], "block_tokens": 4}',
                '{"arrival_s": 0, "input_tokens": 8, "blocks": [1], "block_tokens": 8}',
            ],
            ":2:block_tokens: is 8, and was 4 before",
        ),
        (
            [
                '{"arrival_s": 0, "token_ids": [4]}',
                '{"arrival_s": 0, "input_tokens": 8, "blocks": [1], "block_tokens": 8}',
            ],
            ":2:token_ids: no prompt, but the requests before had one",
        ),
        (["{"], ":1:"),
    ],
)
def test_wrong_traces(tmp_path: Path, lines: list[str], told: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    result = prefix(path, "--out", tmp_path / "out")
    assert result.exit_code == 1, result.output
    assert f"trace.jsonl{told}" in result.output


def test_a_run_that_fails_leaves_its_part(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "token_ids": [4, 5]}\n' * 3)
    out = tmp_path / "out"
    assert prefix(path, "--out", out, "--block-size", 2).exit_code == 0
    with path.open("a") as file:
        file.write("{")
    result = prefix(path, "--out", out, "--block-size", 2)
    assert result.exit_code == 1
    assert "trace.jsonl:4:" in result.output
    assert not (out / "as_recorded_stats.json").exists()
    assert len(rows(out / "as_recorded_request_metrics.csv.partial")) == 3
    assert len(list(TraceReader(out / "as_recorded_trace.jsonl.partial"))) == 3


def test_an_interrupted_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("schedsvc_lab.workload.cli.prefix.curve", interrupt)
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "token_ids": [4, 5]}\n')
    result = prefix(path, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "interrupted" in result.output
    assert not (tmp_path / "out/as_recorded_stats.json").exists()


def test_blocks_are_multiples_of_the_traces_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "input_tokens": 4, "blocks": [1], "block_tokens": 4}')
    result = prefix(path, "--out", tmp_path / "out", "--block-size", 6)
    assert result.exit_code == 2
    assert "--block-size: 6 is no multiple of the trace's own blocks of 4" in result.output


def published(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the published files are not on this machine: {path}")
    return path


@pytest.mark.slow
def test_the_mooncake_trace(tmp_path: Path) -> None:
    trace = published("traces/mooncake_conversation_trace.jsonl")
    sizes = ("--policy", "lru", "--capacity", "11698560,93588480", "--json")
    result = prefix(trace, "--out", tmp_path, *sizes)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["as_recorded"]
    sharing = found["block_sizes"]["512"]
    assert (sharing["requests"], sharing["different_blocks"]) == (12_031, 182_790)
    assert round(100 * sharing["shared_blocks_share"], 1) == 36.6
    assert round(100 * sharing["shared_tokens_share"], 1) == 37.4
    limited, all_of_it = (point["token_hit_rate"] for point in found["caches"])
    assert all_of_it == sharing["shared_tokens_share"]
    assert round(100 * limited, 1) == 30.7


def test_multi_turn_shares_more_than_single_turn(tmp_path: Path) -> None:
    """ShareGPT is known for it; the tokenizer is like a model's: for English, roles one token."""
    talks = json.loads(published("conversations/sharegpt_format_fastchat.json").read_text())
    for line in published("conversations/mt_bench_question.jsonl").read_text().splitlines():
        asked = json.loads(line)["turns"]
        turns = [
            {"from": role, "value": value}
            for question in asked
            for role, value in (("human", question), ("gpt", ""))
        ]
        talks.append({"conversations": turns})
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    said = [turn["value"] for talk in talks for turn in talk["conversations"]]
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    roles = ["<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8_000, special_tokens=roles, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(said, trainer)
    template = (
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
        "{% endfor %}<|assistant|>"
    )
    folder = trained.save(model, tmp_path / "model", chat_template=template)
    options = ("--tokenizer", folder, "--policy", "", "--json", "--out", tmp_path / "out")
    result = prefix(tmp_path / "talks.json", *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [found[name]["requests"] for name in ("single_turn", "multi_turn")] == [580, 1_160]
    shares = {}
    for size in ("8", "16", "32"):
        single, multi = (found[name]["block_sizes"][size] for name in ("single_turn", "multi_turn"))
        shares[size] = [round(100 * one["shared_tokens_share"], 1) for one in (single, multi)]
        assert multi["sharing_fraction"]["mean"] > single["sharing_fraction"]["mean"]
        assert multi["block_reuse_rate"] > single["block_reuse_rate"]
        assert multi["block_hits"]["mean"] > single["block_hits"]["mean"]
    # The figures of docs/measure/traces.md.
    assert shares == {"8": [19.2, 45.0], "16": [0.0, 29.4], "32": [0.0, 12.6]}
