"""The recorded answers are what this vLLM writes, and their usage is read as it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from . import answers
from .stack import Stack

RECORDED = Path(__file__).parents[1] / "clients" / "answers" / "vllm_0_32.yaml"


@pytest.mark.parametrize(
    ("name", "path", "body"), answers.requests(), ids=[name for name, *_ in answers.requests()]
)
def test_an_answer_is_read_as_its_recording(
    stack: Stack, name: str, path: str, body: dict[str, Any]
) -> None:
    [recorded] = [each for each in yaml.safe_load(RECORDED.read_text()) if each["name"] == name]
    before = stack.flow("truth-0")
    text = answers.ask(stack.url, path, body)
    input_tokens, _, output_tokens = answers.counts(path, text, bool(body.get("stream")))
    assert [input_tokens, output_tokens] == [recorded["counts"][0], recorded["counts"][2]]
    stack.rest()
    after = stack.flow("truth-0")
    assert after.output_tokens - before.output_tokens == output_tokens
    if input_tokens is not None:
        assert after.input_tokens - before.input_tokens == input_tokens
