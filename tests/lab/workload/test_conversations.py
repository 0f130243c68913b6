from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from schedsvc.cli import main
from schedsvc_lab.workload.conversations import (
    CONTEXT_CUT,
    TURNS_CUT,
    Ask,
    Chats,
    Conversation,
    Limits,
    Simulation,
    Timing,
    conversations,
)
from schedsvc_lab.workload.reader import TraceReader
from schedsvc_lab.workload.record import Message, Record
from schedsvc_lab.workload.tokenizers import ModelTokenizer


def turn(question: str, answer: str | None, number: int, name: str = "a") -> Record:
    return Record(
        messages=(Message("user", question),), answer=answer, conversation=name, turn=number
    )


def talk(name: str, turns: int) -> Conversation:
    made = (turn(f"question {at}", f"answer {at} of it", at + 1, name) for at in range(turns))
    return Conversation(name, None, tuple(made))


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> ModelTokenizer:
    return ModelTokenizer.load(folders["unigram"])


def asks(
    tokenizer: ModelTokenizer,
    held: list[Conversation],
    limits: Limits | None = None,
    **timing: Any,
) -> list[Ask]:
    made = Timing(**{"rate_per_s": 2.0, "seed": 3, **timing})
    return list(Simulation(Chats(tokenizer), made, limits or Limits()).asks(held))


def test_turns_are_put_together() -> None:
    records = [
        turn("a1", "x", 1),
        turn("a2", "y", 2),
        turn("again", "z", 1),  # another conversation of the same name
        turn("b1", None, 1, "b"),
        Record(text="no messages"),
        Record(messages=(Message("user", "nameless"),)),
        Record(messages=(Message("user", "nameless too"),)),
    ]
    skipped: Counter[str] = Counter()
    found = list(conversations(records, skipped))
    texts = [[turn.messages[0].content for turn in one.turns] for one in found]
    assert texts == [["a1", "a2"], ["again"], ["b1"], ["nameless"], ["nameless too"]]
    assert [one.name for one in found] == ["a", "a", "b", "conversation-4", "conversation-5"]
    assert skipped == {"the request holds no messages": 1}


def test_a_prompt_is_all_that_was_said(tokenizer: ModelTokenizer) -> None:
    found = asks(tokenizer, [talk("a", 3)])
    assert [ask.turn for ask in found] == [1, 2, 3]
    said: list[dict[str, str]] = []
    for ask, added in zip(found, talk("a", 3).turns, strict=True):
        said.append({"role": "user", "content": added.messages[0].content})
        assert list(ask.token_ids) == tokenizer.apply_chat_template(said)
        assert ask.output_tokens == tokenizer.count(added.answer or "")
        said.append({"role": "assistant", "content": added.answer or ""})
    # A prefix cache is of use only if a prompt begins with the one before and its answer.
    for before, after in pairwise(found):
        assert len(after.token_ids) > len(before.token_ids)
        assert after.token_ids[: len(before.token_ids)] == before.token_ids


def test_a_turn_waits_for_the_answer_and_for_thought(tokenizer: ModelTokenizer) -> None:
    held = [talk(str(number), 3) for number in range(400)]
    found = asks(tokenizer, held, think_s=5.0, output_tokens_per_s=4.0)
    assert [ask.arrival_s for ask in found] == sorted(ask.arrival_s for ask in found)
    starts = [ask.arrival_s for ask in found if ask.turn == 1]
    assert np.diff(starts).mean() == pytest.approx(1 / 2.0, rel=0.15)
    by_name: dict[str, list[Ask]] = {}
    for ask in found:
        by_name.setdefault(ask.conversation, []).append(ask)
    thought = [
        after.arrival_s - before.arrival_s - before.output_tokens / 4.0
        for talked in by_name.values()
        for before, after in pairwise(talked)
    ]
    assert len(thought) == 800
    assert min(thought) > 0
    assert np.mean(thought) == pytest.approx(5.0, rel=0.1)
    assert np.std(thought) == pytest.approx(5.0, rel=0.15)  # exponential: deviation is the mean
    at_once = asks(tokenizer, [talk("a", 2)], think_s=0.0, output_tokens_per_s=4.0)
    assert at_once[1].arrival_s - at_once[0].arrival_s == at_once[0].output_tokens / 4.0


def test_the_seed_decides_and_turns_do_not_change_starts(tokenizer: ModelTokenizer) -> None:
    held = [talk(str(number), 3) for number in range(20)]
    assert asks(tokenizer, held) == asks(tokenizer, held)
    assert asks(tokenizer, held) != asks(tokenizer, held, seed=4)
    single = asks(tokenizer, held, Limits(turns_max=1))
    assert single == [ask for ask in asks(tokenizer, held) if ask.turn == 1]


def test_limits(tokenizer: ModelTokenizer) -> None:
    held = [talk(str(number), 4) for number in range(5)]
    assert {ask.conversation for ask in asks(tokenizer, held, Limits(conversations_max=2))} == {
        "0",
        "1",
    }
    whole = asks(tokenizer, held[:1])
    context = len(whole[2].token_ids) + whole[2].output_tokens
    simulation = Simulation(Chats(tokenizer), Timing(), Limits(context_tokens=context))
    assert [ask.turn for ask in simulation.asks(held[:1])] == [1, 2, 3]
    assert simulation.cut == {CONTEXT_CUT: 1}
    simulation = Simulation(Chats(tokenizer), Timing(), Limits(turns_max=1))
    assert len(list(simulation.asks(held))) == 5
    assert simulation.cut == {TURNS_CUT: 15}
    silent = Conversation("s", None, (turn("why", None, 1, "s"), turn("why", "", 2, "s")))
    limits = Limits(unanswered_tokens=9, output_tokens_max=3)
    assert [ask.output_tokens for ask in asks(tokenizer, [silent], limits)] == [3, 3]


def test_text_that_the_template_refuses_is_written_plainly(tokenizer: ModelTokenizer) -> None:
    twice = Record(messages=(Message("user", "one"), Message("user", "two")), turn=1)
    chats = Chats(tokenizer)
    simulation = Simulation(chats, Timing(), Limits())
    (ask,) = simulation.asks([Conversation("c", "t", (twice,))])
    plain = "<user>\none\n<user>\ntwo\n<assistant>\n"
    assert list(ask.token_ids) == tokenizer.encode(plain)
    assert ask.tenant == "t"
    assert chats.plain == {"roles must alternate": 1}


def write(path: Path, talks: list[object]) -> Path:
    path.write_text(json.dumps(talks))
    return path


TALKS: list[object] = [
    {
        "id": f"talk-{number}",
        "conversations": [
            {"from": "human", "value": "Tell me what the module does."},
            {"from": "gpt", "value": "It parses arguments."},
            {"from": "human", "value": "And then?"},
            {"from": "gpt", "value": "It returns a namespace."},
        ],
    }
    for number in range(3)
]
BROKEN: list[object] = [
    {"id": "empty", "conversations": []},
    {"id": "alone", "conversations": [{"from": "gpt", "value": "Hello?"}]},
    {"id": "role", "conversations": [{"from": "robot", "value": "beep"}]},
    {"id": "text", "conversations": [{"from": "human", "value": 5}]},
]


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["workload", "conversations", "--trace", *map(str, arguments)])


def test_a_trace_of_them(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write(tmp_path / "talks.json", TALKS + BROKEN)
    out = tmp_path / "trace.jsonl"
    known = ("--tokenizer", folders["unigram"], "--out", out, "--seed", 5)
    result = command(file, *known, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["requests"] == 6
    assert told["skipped"] == {
        "the conversation is empty": 1,
        "no message of a user or tool": 1,
        "from: unknown role": 1,
        "value: not text": 1,
    }
    records = list(TraceReader(out))
    assert sum(record.input_tokens or 0 for record in records) == told["input_tokens"]
    assert sum(record.output_tokens or 0 for record in records) == told["output_tokens"]
    assert all(len(record.token_ids) == record.input_tokens for record in records)
    assert Counter(record.conversation for record in records) == {
        f"talk-{number}": 2 for number in range(3)
    }
    again = command(file, *known, "--write", "messages", "--turns", 1, "--think", 0)
    assert again.exit_code == 0, again.output
    assert "3 requests of" in again.output
    assert "4 records" not in again.output
    assert "1 records left out: no message of a user or tool" in again.output
    assert "3 turns beyond the limit" in again.output
    single = list(TraceReader(out))
    assert [record.messages[0].content for record in single] == [
        "Tell me what the module does."
    ] * 3
    assert single[0].answer == "It parses arguments."
    assert [record.arrival_s for record in single] == [r.arrival_s for r in records if r.turn == 1]


def test_wrong_input(folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    file = write(tmp_path / "talks.json", BROKEN)
    assert command(file, "--out", out).exit_code == 2
    assert "--tokenizer is missing" in command(file, "--out", out).output
    result = command(file, "--out", out, "--tokenizer", folders["bpe"])
    assert result.exit_code == 1
    assert "talks.json" in result.output
    assert "holds no request" in result.output
    file = write(tmp_path / "talks.json", TALKS)
    result = command(file, "--out", out, "--tokenizer", folders["bpe"], "--context-tokens", 3)
    assert result.exit_code == 1
    assert "no request is left; 6 turns beyond the context" in result.output
