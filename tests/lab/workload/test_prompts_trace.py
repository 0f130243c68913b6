from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from schedsvc.cli import main
from schedsvc_lab.workload.prompts import PrefixPlan, PromptMaker
from schedsvc_lab.workload.prompts_trace import PromptRule, PromptWriter
from schedsvc_lab.workload.reader import TraceReader
from schedsvc_lab.workload.record import Bad, Message, Record
from schedsvc_lab.workload.tokenizers import ModelTokenizer


def prompts(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["workload", "prompts", "--trace", *map(str, arguments)])


def written(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def lengths(path: Path, tokenizer: ModelTokenizer) -> list[int]:
    """Return the counts of a server for each request of a trace."""
    return [
        len(record.token_ids) if record.text is None else tokenizer.count(record.text, True)
        for record in TraceReader(path)
    ]


def test_a_trace_gets_prompts_of_its_lengths(folders: dict[str, Path], tmp_path: Path) -> None:
    asked = [1, 2, 3, 700, 64, 1]
    trace = written(
        tmp_path / "in.jsonl",
        [{"arrival_s": at, "input_tokens": n, "output_tokens": 5} for at, n in enumerate(asked)],
    )
    out = tmp_path / "out.jsonl"
    more = ("--prefix-tokens", 20, "--common-tokens", 10, "--json")
    result = prompts(trace, "--out", out, "--tokenizer", folders["unigram"], *more)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told == {"requests": 6, "input_tokens": 771, "skipped": {}, "out": str(out)}
    assert lengths(out, ModelTokenizer.load(folders["unigram"])) == asked
    once = out.read_bytes()
    prompts(trace, "--out", out, "--tokenizer", folders["unigram"], *more)
    assert out.read_bytes() == once
    prompts(trace, "--out", out, "--tokenizer", folders["unigram"], *more, "--seed", 1)
    assert out.read_bytes() != once


def test_a_published_trace_with_blocks(folders: dict[str, Path], tmp_path: Path) -> None:
    """The prompts share exactly the blocks whose hashes are equal."""
    trace = written(
        tmp_path / "mooncake.jsonl",
        [
            {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [4, 5, 6]},
            {"timestamp": 10, "input_length": 1030, "output_length": 9, "hash_ids": [4, 5, 7]},
            {"timestamp": 20, "input_length": 600, "output_length": 9, "hash_ids": [4, 8]},
        ],
    )
    out = tmp_path / "out.jsonl"
    tokenizer = ModelTokenizer.load(folders["bpe"])
    shared = {}
    for option in ("--blocks", "--no-blocks"):
        result = prompts(trace, "--out", out, "--tokenizer", folders["bpe"], option)
        assert result.exit_code == 0, result.output
        assert "3 requests with 2,730 prompt tokens written to" in result.output
        assert lengths(out, tokenizer) == [1100, 1030, 600]
        first, second, third = (tokenizer.encode(r.text or "") for r in TraceReader(out))
        shared[option] = [
            first[:1024] == second[:1024],
            first[1024] == second[1024],
            first[:512] == third[:512],
            first[512] == third[512],
        ]
    assert shared == {"--blocks": [True, False, True, False], "--no-blocks": [False] * 4}


@pytest.fixture(scope="module")
def maker(folders: dict[str, Path]) -> PromptMaker:
    return PromptMaker(ModelTokenizer.load(folders["bpe"]))


def test_groups_by_tenant(maker: PromptMaker) -> None:
    write = PromptWriter(maker, PromptRule(plan=PrefixPlan(30, 10), groups=2, group_by="tenant"))
    made = [write(Record(tenant=tenant, input_tokens=50)).text for tenant in "abcab"]
    ids = [maker._tokenizer.encode(text) for text in made if text is not None]
    alike = [[one[:30] == other[:30] for other in ids] for one in ids]
    # a, b, c: the third tenant shares the first one's group.
    assert alike == [
        [(one - other) % 2 == 0 for other in (0, 1, 2, 0, 1)] for one in (0, 1, 2, 0, 1)
    ]
    assert all(one[:10] == ids[0][:10] and one[10:12] != [] for one in ids)
    assert len({tuple(one[:31]) for one in ids}) == 5


def test_random_groups_are_all_used(maker: PromptMaker) -> None:
    write = PromptWriter(maker, PromptRule(plan=PrefixPlan(8), groups=3))
    made = [maker._tokenizer.encode(write(Record(input_tokens=12)).text or "") for _ in range(40)]
    assert len({tuple(one[:8]) for one in made}) == 3
    assert len({tuple(one) for one in made}) == 40


@pytest.mark.parametrize(
    ("asked", "got"),
    [((90, 10), (90, 10)), ((91, 10), (90, 10)), ((50, 500), (1, 99)), ((300, None), (99, None))],
)
def test_a_request_is_cut_to_the_context(
    maker: PromptMaker, asked: tuple[int, int | None], got: tuple[int, int | None]
) -> None:
    write = PromptWriter(maker, PromptRule(context_tokens=100))
    blocks = tuple(range(-(-asked[0] // 16)))
    record = write(
        Record(input_tokens=asked[0], output_tokens=asked[1], blocks=blocks, block_tokens=16)
    )
    assert (record.input_tokens, record.output_tokens) == got
    assert record.blocks == tuple(range(-(-got[0] // 16)))
    assert maker._tokenizer.count(record.text or "") == got[0]


def test_request_that_cannot_get_a_prompt_is_named(maker: PromptMaker) -> None:
    write = PromptWriter(maker, PromptRule())
    with pytest.raises(Bad, match="has a prompt already"):
        write(Record(input_tokens=5, messages=(Message("user", "hi"),)))
    with pytest.raises(Bad, match="missing, so no prompt"):
        write(Record(output_tokens=5))


def test_errors_name_the_line_or_the_option(folders: dict[str, Path], tmp_path: Path) -> None:
    trace = written(
        tmp_path / "in.jsonl", [{"arrival_s": 0, "input_tokens": 4}, {"arrival_s": 1, "text": "x"}]
    )
    out = tmp_path / "out.jsonl"
    result = prompts(trace, "--out", out, "--tokenizer", folders["bpe"])
    assert result.exit_code == 1
    assert "in.jsonl:2:text: the request has a prompt already" in result.output
    assert not out.exists()
    result = prompts(trace, "--out", out)
    assert result.exit_code == 2
    assert "--tokenizer is missing: give a folder that holds the model's" in result.output
    result = prompts(trace, "--out", out, "--tokenizer", folders["bpe"], "--common-tokens", 3)
    assert result.exit_code == 2
    assert "--common-tokens: the common prefix of 3 tokens must be no longer" in result.output
