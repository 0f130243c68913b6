"""Turns a checked request into work for the engine."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from schedsvc_lab.emulator.answers import Kind
from schedsvc_lab.emulator.errors import ApiError
from schedsvc_lab.emulator.generate import parse_generate
from schedsvc_lab.emulator.output import OutputRule, plan_output, prompt_digest
from schedsvc_lab.emulator.protocol import (
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
from schedsvc_lab.emulator.realtime import PromptPlan
from schedsvc_lab.emulator.tokenizer import TextTokenizer
from schedsvc_lab.engine.prefix import keys_of_tokens

PRIORITY_HEADER = b"x-vllm-priority"
REQUEST_ID_HEADER = b"x-request-id"
_PROMPT_FIELDS = {"completion": "prompt", "chat": "messages", "generate": "inputs"}


@dataclass(frozen=True, slots=True)
class Work:
    """Holds one request, ready for the engine, and how its answer is wanted."""

    kind: Kind
    plans: Sequence[PromptPlan]
    priority: int
    request_id: str
    stream: bool
    include_usage: bool
    continuous_usage: bool


class Intake:
    """Turns requests into work for an engine of one model and context length.

    If `cached_block_tokens` is not 0, each block of that many tokens gets a key for a prefix cache.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        model: str,
        context_tokens_max: int,
        cached_block_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._context_tokens_max = context_tokens_max
        self._cached_block_tokens = cached_block_tokens

    def completion(self, data: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Work:
        """Take in a request for /v1/completions. O(prompt tokens). Raises ApiError."""
        body = parse_body(CompletionBody, data)
        prompts = parse_prompts(body.prompt, self._tokenizer.vocab_size)
        return self._work("completion", body, prompts, ("max_tokens", body.max_tokens), headers)

    def chat(self, data: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Work:
        """Take in a request for /v1/chat/completions. O(prompt tokens). Raises ApiError."""
        body = parse_body(ChatBody, data)
        messages = parse_messages(body.messages)
        text = self.chat_text(messages, body.add_generation_prompt)
        limit = ("max_tokens", body.max_tokens)
        if body.max_completion_tokens is not None:
            limit = ("max_completion_tokens", body.max_completion_tokens)
        return self._work("chat", body, [text], limit, headers)

    def generate(self, data: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Work:
        """Take in a request for /generate. O(prompt tokens). Raises ApiError."""
        inputs, body = parse_generate(data)
        return self._work("generate", body, [inputs], ("max_new_tokens", body.max_tokens), headers)

    def generate_stream(self, data: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Work:
        """Take in a request for /generate_stream. O(prompt tokens). Raises ApiError."""
        return replace(self.generate(data, headers), stream=True)

    def count_prompt_tokens(self, data: Mapping[str, Any]) -> list[int]:
        """Count the tokens of each prompt of a body. O(length).

        Raises ApiError if there are no valid `prompt`, `messages` or `inputs`.
        """
        if "inputs" in data:
            return [prompt_tokens(self._tokenizer, parse_generate(data)[0], True)]
        if "messages" in data:
            messages = parse_messages(data["messages"])
            return [self._tokenizer.count(self.chat_text(messages))]
        prompts = parse_prompts(data.get("prompt"), self._tokenizer.vocab_size)
        return [prompt_tokens(self._tokenizer, prompt, True) for prompt in prompts]

    def chat_text(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Join messages as the model sees them. Raises ApiError if its template refuses them."""
        try:
            return self._tokenizer.chat_text(messages, add_generation_prompt)
        except ValueError as error:
            raise ApiError(f"messages: {error}", "messages") from error

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
        field = _PROMPT_FIELDS[kind]
        options = body.stream_options
        include_usage = bool(options and options.include_usage)
        return Work(
            kind=kind,
            plans=[self._plan(body, prompt, choices, limit, field) for prompt in prompts],
            priority=_priority(body.priority, headers),
            request_id=_request_id(headers),
            stream=bool(body.stream),
            include_usage=include_usage,
            # As in vLLM, usage in every chunk requires the usage of the last one.
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
        special = body.add_special_tokens
        special = field != "messages" if special is None else special
        tokens = prompt_tokens(self._tokenizer, prompt, special)
        rule = self._rule(body, tokens, limit, field)
        digest = prompt_digest(prompt, body.seed)
        outputs = [plan_output(digest, choice, rule) for choice in range(choices)]
        return PromptPlan(tokens, outputs, self._prefix_keys(prompt, special))

    def _prefix_keys(self, prompt: Prompt, special: bool) -> tuple[int, ...]:
        """Name the prompt's blocks by their tokens. O(length), nothing without a prefix cache."""
        if not self._cached_block_tokens:
            return ()
        ids = self._tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt
        return keys_of_tokens(ids, self._cached_block_tokens)

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
    """Read the priority; the header takes precedence over the body, as in vLLM."""
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
