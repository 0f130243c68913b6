"""From a request's body to what the scheduler has to know of it.

Only the fields that decide about tokens are looked at, and strictly: where the gate and the app
could read a value differently ("n": "5"), the gate refuses it. Everything else is the app's to
judge.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.estimate import MESSAGE_TOKENS, PART_TOKENS, TokenRatios

INT_MAX = (1 << 31) - 1
PROMPTS_MAX = 1_024
# vLLM's default for /v1/completions; chat runs to the end of the context.
COMPLETION_TOKENS_DEFAULT = 16
_PROMPT_FIELDS = frozenset({"prompt", "messages"})
_ASK_ALL = {"include_usage": True, "continuous_usage_stats": True}
_ASK_ALL_TAIL = b',"stream_options":' + json.dumps(_ASK_ALL, separators=(",", ":")).encode() + b"}"

CountTokens = Callable[[Mapping[str, Any]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Route:
    """One gated endpoint."""

    path: str
    prompt_field: str
    limit_fields: tuple[str, ...]
    output_tokens_default: int | None


ROUTES = {
    route.path: route
    for route in (
        Route("/v1/completions", "prompt", ("max_tokens",), COMPLETION_TOKENS_DEFAULT),
        Route("/v1/chat/completions", "messages", ("max_completion_tokens", "max_tokens"), None),
    )
}


@dataclass(frozen=True, slots=True)
class Prompts:
    """The input tokens of each prompt.

    Where they were estimated from text alone, `text_bytes` and `frame_tokens` (what is no text)
    are what the estimate can learn from.
    """

    tokens: list[int]
    exact: bool
    text_bytes: int = 0
    frame_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One request, sized."""

    body: bytes  # as the app gets it
    rewritten: bool
    prompts: Prompts
    n: int
    max_output_tokens: int
    stream: bool
    keep_last_usage: bool
    keep_all_usage: bool
    limit_field: str

    @property
    def sequences(self) -> int:
        """Sequences that the engine will run."""
        return len(self.prompts.tokens) * self.n


@dataclass(frozen=True, slots=True)
class Sizes:
    """The engine's limits; 0: not known."""

    context_tokens: int
    capacity_tokens: int


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a body that has to be a JSON object. Raises BadRequestError."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadRequestError("the body must be a JSON object")
    return parsed


def size_call(
    route: Route,
    raw: bytes,
    body: Mapping[str, Any],
    *,
    sizes: Sizes,
    count: CountTokens | None,
    ratios: TokenRatios,
    tenant: str | bytes,
) -> Call:
    """Work out what a request may use. O(prompt). Raises BadRequestError naming the field."""
    n = max(_count(body, "n", 1), _count(body, "best_of", 1))
    stream = _flag(body, "stream")
    limit_field, limit = _limit(route, body)
    prompts = _prompts(route, body, count, ratios, tenant)
    tokens = prompts.tokens
    if len(tokens) * n > PROMPTS_MAX:
        raise BadRequestError(
            f"n: {len(tokens)} prompts times {n} are more than {PROMPTS_MAX} sequences", "n"
        )
    if sizes.context_tokens:
        _fit(route, prompts, limit_field, limit, sizes.context_tokens)
    room = (sizes.context_tokens or sizes.capacity_tokens or INT_MAX) - max(tokens)
    keep_last, keep_all, sent = _usage_options(raw, body) if stream else (False, False, raw)
    return Call(
        body=sent,
        rewritten=sent is not raw,
        prompts=prompts,
        n=n,
        max_output_tokens=max(1, room if limit is None else limit),
        stream=stream,
        keep_last_usage=keep_last,
        keep_all_usage=keep_all,
        limit_field=limit_field,
    )


def _fit(route: Route, prompts: Prompts, name: str, limit: int | None, context: int) -> None:
    """Refuse what cannot fit the context; an estimate is cut, for the engine will count."""
    tokens = prompts.tokens
    if not prompts.exact:
        most = max(1, context - (limit or 1))
        tokens[:] = [min(prompt, most) for prompt in tokens]
        return
    longest = max(tokens)
    if longest >= context:
        raise BadRequestError(
            f"This model's maximum context length is {context} tokens, of which at least one is "
            f"for the output. However, your request has {longest} input tokens. "
            f"Please reduce the length of the {route.prompt_field}.",
            route.prompt_field,
            code="context_length_exceeded",
        )
    if limit is not None and longest + limit > context:
        raise BadRequestError(
            f"{name} is too large: {limit}. This model's maximum context length is {context} "
            f"tokens and your request has {longest} input tokens.",
            name,
            code="context_length_exceeded",
        )


def _count(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= INT_MAX:
        raise BadRequestError(f"{name}: must be a whole number from 1 to {INT_MAX}", name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise BadRequestError(f"{name}: must be true or false", name)
    return bool(value)


def _limit(route: Route, body: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the most output tokens and their field; None: up to the context."""
    for name in route.limit_fields:
        value = body.get(name)
        if value is None:
            continue
        # vLLM lets 0 through where only the prompt is to be scored.
        if type(value) is not int or not 0 <= value <= INT_MAX:
            raise BadRequestError(f"{name}: must be a whole number from 1 to {INT_MAX}", name)
        return name, max(1, value)
    name = route.limit_fields[-1]
    return name, None if name in body else route.output_tokens_default


def _prompts(
    route: Route,
    body: Mapping[str, Any],
    count: CountTokens | None,
    ratios: TokenRatios,
    tenant: str | bytes,
) -> Prompts:
    """Size each prompt: exactly for token ids or where the server counts, else estimated."""
    value = body.get(route.prompt_field)
    if route.prompt_field == "messages":
        sized, learnable = _messages(value, _template_bytes(body))
    else:
        sized = _prompt_parts(value)
        learnable = all(tokens == 0 for tokens, _ in sized)
    if not any(text_bytes for _, text_bytes in sized):
        return Prompts([_truncated(body, tokens) for tokens, _ in sized], exact=True)
    if count is not None:
        others = _PROMPT_FIELDS - {route.prompt_field}
        with contextlib.suppress(Exception):  # the app will say what it dislikes
            counted = count({name: body[name] for name in body if name not in others})
            if len(counted) == len(sized):
                exact = [_truncated(body, max(1, tokens)) for tokens in counted]
                return Prompts(exact, exact=True)
    estimated = [
        _truncated(body, tokens + (ratios.tokens(tenant, size) if size else 0))
        for tokens, size in sized
    ]
    if not learnable:
        return Prompts(estimated, exact=False)
    frame_tokens, text_bytes = (sum(column) for column in zip(*sized, strict=True))
    return Prompts(estimated, False, text_bytes, frame_tokens)


def _truncated(body: Mapping[str, Any], tokens: int) -> int:
    most = body.get("truncate_prompt_tokens")
    return min(tokens, most) if type(most) is int and most > 0 else tokens


def _prompt_parts(prompt: object) -> list[tuple[int, int]]:
    """Size each prompt of a completion: (tokens, 0) for ids, (0, bytes) for text."""
    if isinstance(prompt, str):
        return [(0, _text_bytes(prompt))]
    if not isinstance(prompt, list) or not prompt:
        raise BadRequestError(
            "prompt: must be a string, a list of strings, a list of token ids, or a list of lists "
            "of token ids, and not empty",
            "prompt",
        )
    if type(prompt[0]) is int:
        return [(len(prompt), 0)]
    if len(prompt) > PROMPTS_MAX:
        raise BadRequestError(f"prompt: at most {PROMPTS_MAX} prompts are allowed", "prompt")
    parts: list[tuple[int, int]] = []
    for number, part in enumerate(prompt):
        if isinstance(part, str):
            parts.append((0, _text_bytes(part)))
        elif isinstance(part, list) and part and type(part[0]) is int:
            parts.append((len(part), 0))
        else:
            raise BadRequestError(
                f"prompt[{number}]: must be a string or a list of token ids, and not empty",
                "prompt",
            )
    return parts


def _messages(messages: object, text_bytes: int) -> tuple[list[tuple[int, int]], bool]:
    """Size a conversation, and tell whether it is text alone.

    Gives the tokens of its frame and of what is no text, and the bytes of its text, to which the
    template adds `text_bytes`.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages: must be a list of messages, and not empty", "messages")
    tokens, only_text = 0, True
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequestError(f"messages[{number}]: must be an object", "messages")
        tokens += MESSAGE_TOKENS
        content = message.get("content")
        if isinstance(content, str):
            text_bytes += _text_bytes(content)
        elif isinstance(content, list):
            for part in content:
                text = part.get("text") if isinstance(part, dict) else part
                if isinstance(text, str):
                    text_bytes += _text_bytes(text)
                else:
                    tokens, only_text = tokens + PART_TOKENS, False
        for field in ("tool_calls", "reasoning", "reasoning_content"):
            if message.get(field):
                text_bytes += len(json.dumps(message[field]))
    return [(tokens, max(1, text_bytes))], only_text


def _template_bytes(body: Mapping[str, Any]) -> int:
    """Return the bytes of what a chat template writes besides the messages."""
    return sum(len(json.dumps(body[name])) for name in ("tools", "documents") if body.get(name))


def _text_bytes(text: str) -> int:
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return max(1, size)


def _usage_options(raw: bytes, body: Mapping[str, Any]) -> tuple[bool, bool, bytes]:
    """Return what usage the client asked for (last, all), and the body that asks for all."""
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequestError("stream_options: must be an object", "stream_options")
    options = options or {}
    last = _option(options, "include_usage")
    every = last and _option(options, "continuous_usage_stats")
    if every:
        return last, every, raw
    if "stream_options" not in body:
        text = raw.rstrip(b" \t\r\n")
        if raw[:1] == b"{" and b"\0" not in raw[:4]:
            return last, every, text[:-1] + _ASK_ALL_TAIL
    asked = {**body, "stream_options": {**options, **_ASK_ALL}}
    return last, every, json.dumps(asked).encode()


def _option(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name)
    if value is not None and type(value) is not bool:
        raise BadRequestError(f"stream_options.{name}: must be true or false", "stream_options")
    return bool(value)
