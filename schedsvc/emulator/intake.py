"""From a checked request to what the engine has to do."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from schedsvc.emulator.answers import Kind
from schedsvc.emulator.errors import ApiError
from schedsvc.emulator.output import OutputRule, plan_output, prompt_digest
from schedsvc.emulator.protocol import (
    INT64_MAX,
    SEQUENCES_MAX,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Prompt,
    parse_body,
    parse_messages,
    parse_prompts,
    prompt_tokens,
)
from schedsvc.emulator.realtime import PromptPlan
from schedsvc.emulator.tokenizer import Tokenizer

PRIORITY_HEADER = b"x-vllm-priority"
REQUEST_ID_HEADER = b"x-request-id"


@dataclass(frozen=True, slots=True)
class Work:
    """One request, ready for the engine, and how its answer is wanted."""

    kind: Kind
    plans: Sequence[PromptPlan]
    priority: int
    request_id: str
    stream: bool
    include_usage: bool
    continuous_usage: bool


class Intake:
    """Turns requests into work for an engine of one model and context length."""

    def __init__(self, tokenizer: Tokenizer, model: str, context_tokens_max: int) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._context_tokens_max = context_tokens_max

    def completion(self, data: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Work:
        """Take in a request for /v1/completions. O(prompt tokens). Raises ApiError."""
        body = parse_body(CompletionBody, data)
        prompts = parse_prompts(body.prompt)
        return self._work("completion", body, prompts, ("max_tokens", body.max_tokens), headers)

    def chat(self, data: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Work:
        """Take in a request for /v1/chat/completions. O(prompt tokens). Raises ApiError."""
        body = parse_body(ChatBody, data)
        messages = parse_messages(body.messages)
        text = self._tokenizer.chat_text(messages, body.add_generation_prompt)
        limit = ("max_tokens", body.max_tokens)
        if body.max_completion_tokens is not None:
            limit = ("max_completion_tokens", body.max_completion_tokens)
        return self._work("chat", body, [text], limit, headers)

    def count_prompt_tokens(self, data: Mapping[str, Any]) -> list[int]:
        """Count the tokens of each prompt of a completion or chat body. O(length).

        Raises ApiError where there is neither a valid `prompt` nor valid `messages`.
        """
        if "messages" in data:
            messages = parse_messages(data["messages"])
            return [self._tokenizer.count(self._tokenizer.chat_text(messages))]
        return [prompt_tokens(self._tokenizer, p) for p in parse_prompts(data.get("prompt"))]

    def check_model(self, model: str | None) -> None:
        """Refuse another model's name; no name means this one."""
        if model is not None and model != self._model:
            raise ApiError(f"The model `{model}` does not exist.", "model", HTTPStatus.NOT_FOUND)

    def _work(
        self,
        kind: Kind,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        limit: tuple[str, int | None],
        headers: Mapping[bytes, bytes],
    ) -> Work:
        self.check_model(body.model)
        body.check()
        choices = body.n or 1
        if len(prompts) * choices > SEQUENCES_MAX:
            raise ApiError(
                f"n: {len(prompts)} prompts times {choices} are more than the "
                f"{SEQUENCES_MAX} sequences that a request may have",
                "n",
            )
        field = "messages" if kind == "chat" else "prompt"
        options = body.stream_options
        include_usage = bool(options and options.include_usage)
        return Work(
            kind=kind,
            plans=[self._plan(body, prompt, choices, limit, field) for prompt in prompts],
            priority=_priority(body.priority, headers),
            request_id=_request_id(headers),
            stream=bool(body.stream),
            include_usage=include_usage,
            # As in vLLM, usage in every chunk has to be asked for together with the last one's.
            continuous_usage=bool(options and options.continuous_usage_stats and include_usage),
        )

    def _plan(
        self,
        body: GenerationBody,
        prompt: Prompt,
        choices: int,
        limit: tuple[str, int | None],
        field: str,
    ) -> PromptPlan:
        tokens = prompt_tokens(self._tokenizer, prompt)
        rule = self._rule(body, tokens, limit, field)
        digest = prompt_digest(prompt, body.seed)
        outputs = [plan_output(digest, choice, rule) for choice in range(choices)]
        return PromptPlan(tokens, outputs)

    def _rule(
        self, body: GenerationBody, tokens: int, limit: tuple[str, int | None], field: str
    ) -> OutputRule:
        context = self._context_tokens_max
        if tokens >= context:
            raise ApiError(
                f"This model's maximum context length is {context} tokens, of which at least one "
                f"is for the output. However, your request has {tokens} input tokens. "
                f"Please reduce the length of {field}.",
                field,
            )
        name, asked = limit
        if asked is not None and tokens + asked > context:
            raise ApiError(
                f"{name} is too large: {asked}. This model's maximum context length is {context} "
                f"tokens and your request has {tokens} input tokens.",
                name,
            )
        tokens_max = context - tokens if asked is None else asked
        tokens_min = body.min_tokens or 0
        if tokens_min > tokens_max:
            raise ApiError(
                f"min_tokens must be at most the limit of {tokens_max} tokens, not {tokens_min}",
                "min_tokens",
            )
        return OutputRule(
            tokens_max=tokens_max,
            tokens_min=tokens_min,
            ignore_eos=body.ignore_eos,
            eos_tokens=body.emulated_output_tokens,
            stop=body.stop_strings,
            include_stop=body.include_stop_str_in_output,
        )


def _priority(priority: int, headers: Mapping[bytes, bytes]) -> int:
    """Read the priority; the header goes before the body, as in vLLM."""
    value = headers.get(PRIORITY_HEADER)
    if value is None:
        return priority
    name = PRIORITY_HEADER.decode()
    try:
        number = int(value)
    except ValueError as error:
        raise ApiError(f"the header {name} must be an integer", name) from error
    if abs(number) > INT64_MAX:
        raise ApiError(f"the header {name} must fit into 64 bits", name)
    return number


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    value = headers.get(REQUEST_ID_HEADER)
    return value.decode("latin-1") if value else uuid.uuid4().hex
