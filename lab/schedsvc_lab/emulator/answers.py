"""Answers in OpenAI's form: whole, and as server-sent events."""

import json
from dataclasses import dataclass
from typing import Literal

from schedsvc_lab.emulator.errors import ApiError
from schedsvc_lab.emulator.realtime import Delta, Generation

Kind = Literal["completion", "chat", "generate"]
_DONE = b"data: [DONE]\n\n"

_ID_PREFIX = {"completion": "cmpl", "chat": "chatcmpl"}
_OBJECT = {"completion": "text_completion", "chat": "chat.completion"}
_CHUNK_OBJECT = {"completion": "text_completion", "chat": "chat.completion.chunk"}


@dataclass(slots=True)
class PromptTokensDetails:
    """Counts the tokens of the prompt that were found in the prefix cache."""

    cached_tokens: int


@dataclass(slots=True)
class UsageInfo:
    """Tokens of one request, under vLLM's names."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None

    @classmethod
    def of(cls, generation: Generation) -> "UsageInfo":
        """Count what a generation has used so far. A prompt counts once, whatever n is.

        Cached tokens are reported unless there are none, as by vLLM's
        --enable-prompt-tokens-details.
        """
        prompt, completion = generation.prompt_tokens, generation.completion_tokens
        cached = generation.cached_tokens
        details = PromptTokensDetails(cached) if cached else None
        return cls(prompt, completion, prompt + completion, details)

    def json(self) -> str:
        """Give the JSON object."""
        details = "null"
        if self.prompt_tokens_details is not None:
            details = f'{{"cached_tokens":{self.prompt_tokens_details.cached_tokens}}}'
        return (
            f'{{"prompt_tokens":{self.prompt_tokens},"total_tokens":{self.total_tokens},'
            f'"completion_tokens":{self.completion_tokens},"prompt_tokens_details":{details}}}'
        )


class Answer:
    """Writes what a generation has produced.

    The events are put together from text, not through a JSON encoder: the words have only letters
    and spaces, and a chunk is written for every sequence and step.
    """

    __slots__ = ("_continuous_usage", "_generation", "_head", "_include_usage", "_kind", "_roles")

    def __init__(
        self,
        kind: Kind,
        generation: Generation,
        *,
        request_id: str,
        model: str,
        created_s: int,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._kind = kind
        self._generation = generation
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._roles: set[int] = set()
        self._head = (
            f'"id":{json.dumps(f"{_ID_PREFIX[kind]}-{request_id}")},'
            f'"created":{created_s},"model":{json.dumps(model)}'
        )

    def events(self, deltas: list[Delta]) -> bytes:
        """Write the events for what is new, in chat the role first."""
        parts = []
        for delta in deltas:
            if self._kind == "chat" and delta.choice not in self._roles:
                self._roles.add(delta.choice)
                role = '"delta":{"role":"assistant","content":""},"logprobs":null'
                parts.append(self._event(f'{{"index":{delta.choice},{role},"finish_reason":null}}'))
            parts.append(self._event(self._choice(delta)))
        return "".join(parts).encode()

    def end(self) -> bytes:
        """Write the last events: the usage, where it was asked for, and the end of the stream."""
        if not self._include_usage:
            return _DONE
        usage = UsageInfo.of(self._generation).json()
        head = f'{self._head},"object":"{_CHUNK_OBJECT[self._kind]}"'
        return f'data: {{{head},"choices":[],"usage":{usage}}}\n\n'.encode() + _DONE

    def cut(self, error: ApiError) -> bytes:
        """Write the end of a stream that has begun and cannot go on."""
        return b"data: " + error.body() + b"\n\n" + _DONE

    def whole(self) -> bytes:
        """Write the answer in one piece."""
        generation = self._generation
        choices = [
            self._choice(Delta(choice, 0, output.tokens, True), whole=True)
            for choice, output in enumerate(generation.outputs)
        ]
        usage = UsageInfo.of(generation).json()
        head = f'{self._head},"object":"{_OBJECT[self._kind]}"'
        body = f'{{{head},"choices":[{",".join(choices)}],"usage":{usage},'
        return f'{body}"system_fingerprint":null}}'.encode()

    def _event(self, choice: str) -> str:
        usage = ""
        if self._continuous_usage:
            usage = f',"usage":{UsageInfo.of(self._generation).json()}'
        elif self._include_usage:
            usage = ',"usage":null'
        head = f'{self._head},"object":"{_CHUNK_OBJECT[self._kind]}"'
        return f'data: {{{head},"choices":[{choice}]{usage}}}\n\n'

    def _choice(self, delta: Delta, whole: bool = False) -> str:
        output = self._generation.outputs[delta.choice]
        text = output.text(delta.start, delta.end)
        finish = stop = "null"
        if delta.finished:
            finish = f'"{output.finish_reason}"'
            stop = json.dumps(output.stop_reason)
        if self._kind == "completion":
            content = f'"text":"{text}"'
        elif whole:
            content = f'"message":{{"role":"assistant","content":"{text}","refusal":null}}'
        else:
            content = f'"delta":{{"content":"{text}"}}'
        return (
            f'{{"index":{delta.choice},{content},"logprobs":null,'
            f'"finish_reason":{finish},"stop_reason":{stop}}}'
        )
