"""Speaks LightLLM's and S-LoRA's protocol: /generate, and /generate_stream, an event a token.

A request is `{model_dir, lora_dir, inputs, parameters}`; the emulator serves one model, so the
first two are accepted and change nothing.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from schedsvc_lab.emulator.errors import ApiError
from schedsvc_lab.emulator.output import WORDS
from schedsvc_lab.emulator.protocol import CompletionBody, Limit, StrictBody, parse_body
from schedsvc_lab.emulator.realtime import Delta, Generation

_Finite = Annotated[float, Field(allow_inf_nan=False)]


class GenerateParameters(StrictBody):
    """Names sampling parameters as LightLLM does; only some change an emulated answer."""

    do_sample: bool = False
    presence_penalty: Annotated[_Finite, Field(ge=0)] = 0.0
    frequency_penalty: Annotated[_Finite, Field(ge=0)] = 0.0
    temperature: Annotated[_Finite, Field(gt=0)] = 1.0
    top_p: Annotated[_Finite, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    ignore_eos: bool = False
    max_new_tokens: Limit = 16
    stop_sequences: str | list[str] | None = None
    return_details: bool = False
    emulated_output_tokens: Limit | None = None


class GenerateBody(StrictBody):
    """Describes a request for /generate and /generate_stream."""

    inputs: Annotated[str, Field(min_length=1)]
    parameters: GenerateParameters = Field(default_factory=GenerateParameters)
    model_dir: str | None = None
    lora_dir: str | None = None
    req_id: str | None = None


def parse_generate(data: Mapping[str, Any]) -> tuple[str, CompletionBody]:
    """Return a request's prompt, and what it asks for as a completion would.

    Raises ApiError naming the first field that is wrong.
    """
    body = parse_body(GenerateBody, data, frozenset(GenerateParameters.model_fields))
    asked = body.parameters
    if asked.top_k == 0:
        raise ApiError("parameters.top_k: must be -1 (no limit) or at least 1", "parameters.top_k")
    completion = {
        "prompt": body.inputs,
        "max_tokens": asked.max_new_tokens,
        "ignore_eos": asked.ignore_eos,
        "stop": asked.stop_sequences,
        "emulated_output_tokens": asked.emulated_output_tokens,
    }
    try:
        return body.inputs, CompletionBody.model_validate(completion)
    except ValueError:
        reason = "at most 16 strings, none of them empty"
        raise ApiError(
            f"parameters.stop_sequences: {reason}", "parameters.stop_sequences"
        ) from None


class TokenAnswer:
    """Writes what a generation has produced, a token an event.

    The last event has `finished` true, and `details` with the counts, which S-LoRA leaves null.
    """

    __slots__ = ("_generation",)

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def events(self, deltas: list[Delta]) -> bytes:
        """Write the events for what is new."""
        return "".join(
            self._event(at, at + 1 == delta.end and delta.finished)
            for delta in deltas
            for at in range(delta.start, delta.end)
        ).encode()

    def end(self) -> bytes:
        """Write nothing: the last token's event is the end."""
        return b""

    def cut(self, error: ApiError) -> bytes:
        """Write the end of a stream that has begun and cannot go on."""
        return b"data:" + error.body() + b"\n\n"

    def whole(self) -> bytes:
        """Write the answer in one piece."""
        output = self._generation.outputs[0]
        body = {
            "generated_text": [output.text(0, output.tokens)],
            "count_output_tokens": output.tokens,
            "finish_reason": output.finish_reason,
            "prompt_tokens": self._generation.prompt_tokens,
        }
        return json.dumps(body).encode()

    def _event(self, at: int, last: bool) -> str:
        output = self._generation.outputs[0]
        details = "null"
        if last:
            details = (
                f'{{"finish_reason":"{output.finish_reason}","generated_tokens":{output.tokens},'
                f'"prompt_tokens":{self._generation.prompt_tokens}}}'
            )
        number = (output.first + output.stride * at) % len(WORDS)
        return (
            f'data:{{"token":{{"id":{number},"text":"{output.text(at, at + 1)}","logprob":null,'
            f'"special":false}},"generated_text":null,"finished":{"true" if last else "false"},'
            f'"details":{details}}}\n\n'
        )
