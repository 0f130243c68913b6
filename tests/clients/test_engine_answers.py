"""Tests usage in answers as engines write them; each file names its source and version."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given
from schedsvc_vllm.routes import ROUTES
from schedsvc_vllm.usage import UsageFilter, UsageReader
from schedsvc_vllm.usage_forms import OPENAI

FILES = sorted((Path(__file__).parent / "answers").glob("*.yaml"))
ANSWERS = [
    pytest.param(answer, id=f"{file.stem}: {answer['name']}")
    for file in FILES
    for answer in yaml.safe_load(file.read_text())
]
_ALONE = re.compile(rb'"choices":\[\].*"usage":\{')
_STATED = re.compile(rb',"usage":\{')
COMPLETIONS = [
    answer
    for answer in ANSWERS
    if answer.values[0]["stream"] and ROUTES[answer.values[0]["path"]].usage is OPENAI
]


def test_every_file_names_its_engine_and_sources() -> None:
    names = {file.stem for file in FILES}
    assert {"vllm_0_32", "vllm_0_33", "sglang", "llama_cpp", "tgi", "ollama"} <= names
    for file in FILES:
        said = ("# Written from the sources of ", "# Recorded from vLLM ")
        assert file.read_text().startswith(said), file


@pytest.mark.parametrize("answer", ANSWERS)
@given(places=st.lists(st.integers(0, 2_000), max_size=8))
def test_usage_of_other_engines_is_read(answer: dict[str, Any], places: list[int]) -> None:
    whole = answer["body"].encode()
    form = ROUTES[answer["path"]].usage
    readers: list[Any] = [UsageReader(form, is_stream=answer["stream"])]
    if answer["stream"] and form is OPENAI:
        readers.append(UsageFilter(keep_last=True, keep_all=True))
    cuts = sorted({0, len(whole), *(place % len(whole) for place in places)})
    pieces = [whole[a:b] for a, b in pairwise(cuts)]
    for reader in readers:
        out = b"".join(reader.feed(piece, piece is pieces[-1]) for piece in pieces)
        counts = [reader.input_tokens, reader.cached_input_tokens, reader.output_tokens]
        assert (out, counts) == (whole, answer["counts"])


@pytest.mark.parametrize("keep_last", [False, True])
@pytest.mark.parametrize("answer", COMPLETIONS)
@given(places=st.lists(st.integers(0, 2_000), max_size=8))
def test_only_the_usage_is_cut_out_of_a_stream(
    answer: dict[str, Any], keep_last: bool, places: list[int]
) -> None:
    whole = answer["body"].encode()
    reader = UsageFilter(keep_last=keep_last, keep_all=False)
    cuts = sorted({0, len(whole), *(place % len(whole) for place in places)})
    out = [reader.feed(whole[a:b], b == len(whole)) for a, b in pairwise(cuts)]
    asked = whole.split(b"\n\n")
    if not keep_last:
        asked = [event for event in asked if not _ALONE.search(event)]
    told = b"".join(out).split(b"\n\n")
    stated = [event for event in asked if _STATED.search(event)]
    if keep_last and stated and asked[-2] == b"data: [DONE]" and not any(map(_ALONE.search, asked)):
        added = json.loads(told.pop(-3).removeprefix(b"data: "))
        assert added == {**json.loads(stated[-1].removeprefix(b"data: ")), "choices": []}
    for event, seen in zip(asked, told, strict=True):
        own = re.search(rb',"usage":(?:\{[^{}]*\}|null)', event)
        if own is None or _ALONE.search(event):
            assert seen == event
            continue
        usage = b',"usage":null' if keep_last else b""
        assert seen == event[: own.start()] + usage + event[own.end() :]
