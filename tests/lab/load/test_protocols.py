"""Tests the three protocols: what is sent, and how an answer is read."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from schedsvc_lab.load.generator import LoadRun, Pace
from schedsvc_lab.load.history import with_history
from schedsvc_lab.load.prompts import PromptError, Prompts
from schedsvc_lab.load.samples import Fate
from schedsvc_lab.load.sse import TokenScanner
from schedsvc_lab.load.target import Backend, OutputMode, Target
from schedsvc_lab.load.texts import EMULATOR_CHAT_TOKENS, EmulatorTexts, TokenizerTexts
from schedsvc_lab.workload import Message, Record, TraceRequest

from .fake import DONE, serving, stream, token, usage


def token_event(text: str, finished: Any = False, details: Any = None) -> bytes:
    data = {
        "token": {"id": 3, "text": text, "logprob": None, "special": False},
        "generated_text": None,
        "finished": finished,
        "details": details,
    }
    return b"data:" + json.dumps(data).encode() + b"\n\n"


SAMPLE = TraceRequest(0.0, "a", 7, 3)
TRICKY = ('"finished":false', '"finished": true}', 'x\\"error', "\u2028 data:")


def scan(pieces: list[bytes]) -> tuple[int, TokenScanner]:
    scanner = TokenScanner()
    return sum(scanner.feed(piece) for piece in pieces), scanner


@given(st.lists(st.integers(0, 400)), st.lists(st.sampled_from(TRICKY), max_size=3))
def test_token_streams_may_be_cut_anywhere(cuts: list[int], texts: list[str]) -> None:
    whole = b"".join([*(token_event(text) for text in texts), token_event("end", finished=True)])
    places = sorted({0, *(cut for cut in cuts if cut < len(whole)), len(whole)})
    count, scanner = scan([whole[low:high] for low, high in pairwise(places)])
    assert count == len(texts) + 1
    assert scanner.done
    assert scanner.usage == {"prompt_tokens": None, "completion_tokens": len(texts) + 1}


def test_a_token_stream_that_the_server_gave_up() -> None:
    assert scan([token_event("a"), token_event("", finished=-1)])[1].refused == "finished: -1"
    assert not scan([token_event("a")])[1].done
    _, scanner = scan([b'data:{"error": {"code": "dead"}}\n\n'])
    assert scanner.error == {"code": "dead"}
    details = {"generated_tokens": 9, "prompt_tokens": 4}
    _, scanner = scan([token_event("a", finished=True, details=details)])
    assert scanner.usage == {"prompt_tokens": 4, "completion_tokens": 9}


async def test_generate_stream_is_sent_as_s_lora_wants_it() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        count = body["parameters"]["max_new_tokens"]
        pieces = [token_event("x")] * (count - 1) + [token_event("x", finished=True)]
        return await stream(request, *pieces)

    record = Record(adapter="lora/1")
    trace = [SAMPLE, TraceRequest(0.0, "b", 5, 2, record)]
    async with serving(answer) as fake:
        target = Target(
            fake.url,
            model="base",
            backend=Backend.GENERATE_STREAM,
            texts=EmulatorTexts(1),
            extra={"temperature": 0.5},
        )
        result = await LoadRun(target, trace, Pace(warmup_requests=1)).run()
    first, second = sorted(fake.bodies[1:], key=lambda body: body["lora_dir"] or "")
    assert set(first) == {"model_dir", "lora_dir", "inputs", "parameters"}
    assert (first["model_dir"], first["lora_dir"], second["lora_dir"]) == ("base", None, "lora/1")
    assert first["parameters"] == {
        "do_sample": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "stop_sequences": None,
        "ignore_eos": True,
        "max_new_tokens": 3,
    }
    assert len(first["inputs"].split()) == 7
    assert [(s.fate, s.prompt_tokens, s.output_tokens) for s in result.recorder.samples] == [
        (Fate.COMPLETED, 7, 3),
        (Fate.COMPLETED, 5, 2),
    ]


async def test_a_refusal_inside_generate_stream() -> None:
    async def answer(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, token_event("", finished=-1))

    async with serving(answer) as fake:
        target = Target(fake.url, backend=Backend.GENERATE_STREAM, texts=EmulatorTexts(1))
        result = await LoadRun(target, [SAMPLE], Pace()).run()
    assert Counter(sample.fate for sample in result.recorder.samples) == {Fate.REFUSED: 1}


async def test_chat_is_sent_as_messages() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        pieces = [token()] * body["max_tokens"]
        return await stream(request, *pieces, usage(18, body["max_tokens"]), DONE)

    said = Record(messages=(Message("system", "Be brief."), Message("user", "Why?")))
    trace = [TraceRequest(0.0, "a", 18, 3), TraceRequest(0.05, "a", 9, 1, said)]
    async with serving(answer) as fake:
        target = Target(fake.url, backend=Backend.OPENAI_CHAT, texts=EmulatorTexts(1))
        result = await LoadRun(target, trace, Pace()).run()
    made, given_ = fake.bodies
    assert [message["role"] for message in made["messages"]] == ["user"]
    assert len(made["messages"][0]["content"].split()) == 18 - EMULATOR_CHAT_TOKENS
    assert given_["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
    ]
    assert result.recorder.samples[0].prompt_tokens == 18


def prompts(texts: Any = None) -> Prompts:
    return Prompts(7, 100, 199, texts)


def test_prompts_of_the_trace_are_sent_as_they_are() -> None:
    def completion(**record: Any) -> Any:
        request = TraceRequest(0.0, "a", 2, 1, Record(**record))
        return json.loads(prompts().completion(request))

    assert completion(token_ids=(5, 6)) == [5, 6]
    assert completion(text='say "x"') == 'say "x"'
    assert completion(messages=(Message("user", "a"), Message("user", "b"))) == "a\nb"


def test_equal_blocks_are_equal_ids_and_nothing_else_is() -> None:
    def ids(tokens: int, *blocks: int) -> list[int]:
        record = Record(blocks=blocks, block_tokens=8)
        made: list[int] = json.loads(maker.completion(TraceRequest(0.0, "a", tokens, 1, record)))
        return made

    maker = prompts()
    first, second, third = ids(20, 1, 2, 3), ids(20, 1, 2), ids(16, 1, 9)
    assert [len(part) for part in (first, second, third)] == [20, 20, 16]
    assert first[:16] == second[:16]
    assert first[16:] != second[16:]
    assert third[:8] == first[:8]
    assert third[8:] != first[8:16]
    again = prompts()
    record = Record(blocks=(1, 2, 3), block_tokens=8)
    assert json.loads(again.completion(TraceRequest(0.0, "a", 20, 1, record))) == first


def test_a_turn_holds_the_turns_before_it() -> None:
    def turn(at_s: float, name: str, number: int, answer: str | None = None) -> TraceRequest:
        said = (Message("user", f"{name}{number}?"),)
        record = Record(messages=said, conversation=name, turn=number, answer=answer)
        return TraceRequest(at_s, "t", 9, 3, record)

    plain = TraceRequest(2.5, "t", 9, 3)
    asked = [turn(0, "a", 1, "A1."), turn(1, "b", 1), turn(2, "a", 2, "A2."), plain]
    asked += [turn(3, "b", 2), turn(4, "a", 3), turn(5, "a", 1)]
    made = list(with_history(asked))
    texts = [
        [message.content for message in request.record.messages] if request.record else None
        for request in made
    ]
    assert texts == [
        ["a1?"],
        ["b1?"],
        ["a1?", "A1.", "a2?"],
        None,
        # The answer here is not known.
        ["b1?", "b2?"],
        ["a1?", "A1.", "a2?", "A2.", "a3?"],
        # The trace begins this conversation again.
        ["a1?"],
    ]
    assert made[2].record is not None
    assert [message.role for message in made[2].record.messages] == ["user", "assistant", "user"]


def test_text_without_a_tokenizer_says_how_to_give_one() -> None:
    with pytest.raises(PromptError, match="--tokenizer DIR"):
        prompts().text(SAMPLE)
    with pytest.raises(PromptError, match="--tokenizer emulator"):
        prompts().messages(SAMPLE)


def test_output_modes() -> None:
    request = TraceRequest(0.0, "a", 3, 9)
    texts = EmulatorTexts(1)

    def parameters(**target: Any) -> dict[str, Any]:
        made = Target("http://x", backend=Backend.GENERATE_STREAM, texts=texts, **target)
        body: dict[str, Any] = json.loads(made.body(request, "m", made.prompts(0)))
        return body["parameters"]

    emulated = parameters(output=OutputMode.EMULATED, max_tokens=64)
    assert (emulated["max_new_tokens"], emulated["emulated_output_tokens"]) == (64, 9)
    assert emulated["ignore_eos"] is False
    free = parameters(output=OutputMode.FREE, max_tokens=64)
    assert (free["max_new_tokens"], "emulated_output_tokens" in free) == (64, False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from schedsvc_lab.workload.tokenizers import ModelTokenizer

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    text = Path(__file__).parents[3].joinpath("STYLE.md").read_text()
    trained.train_from_iterator([text], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    trained.save(str(folder / "tokenizer.json"))
    return ModelTokenizer.load(folder)


@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
def test_texts_have_exactly_the_asked_tokens(tokenizer: Any, tokens: int) -> None:
    texts = TokenizerTexts(tokenizer, 3)
    assert tokenizer.count(texts.text(tokens, 1), True) == tokens
    said = texts.chat(tokens + 30, 2)
    assert tokenizer.count(tokenizer.chat_text([{"role": "user", "content": said}])) == tokens + 30
    assert texts.text(tokens, 1) == texts.text(tokens, 1)
    if tokens > 2:
        assert texts.text(tokens, 1) != texts.text(tokens, 2)


def test_blocks_become_shared_text(tokenizer: Any) -> None:
    for texts, count in (
        (TokenizerTexts(tokenizer, 3), lambda text: tokenizer.encode(text)),
        (EmulatorTexts(3), str.split),
    ):
        first, second = (count(texts.text(40, number, (5, 6), 16)) for number in (1, 2))
        assert len(first) == len(second) == 40
        assert first[:32] == second[:32]
        assert first[32:] != second[32:]
