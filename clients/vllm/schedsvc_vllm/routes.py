"""The gated endpoints, and how each writes its prompts.

Only the fields that decide about tokens are looked at, and strictly: where the gate and the app
could read a value differently, the gate refuses it. Everything else is the app's to judge.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from schedsvc_vllm import usage_forms
from schedsvc_vllm.answers import BadRequestError, Dialect
from schedsvc_vllm.estimate import MESSAGE_TOKENS, PART_TOKENS
from schedsvc_vllm.usage_forms import UsageForm

PROMPTS_MAX = 1_024
# vLLM's default for /v1/completions; the others run to the end of the context.
COMPLETION_TOKENS_DEFAULT = 16
# Parts of a message that a template writes as text; of others (images, sounds) only the engine
# knows the tokens.
_WRITTEN_PARTS = frozenset(
    {
        "function_call",
        "function_call_output",
        "reasoning",
        "refusal",
        "thinking",
        "tool_call",
        "tool_result",
        "tool_use",
    }
)

# What a template writes of a message besides its content.
_WRITTEN_FIELDS = frozenset({"tool_calls", "reasoning", "reasoning_content"})

# Where these hold parts of their own: Anthropic's tool results, and outputs of functions.
_RESULT_FIELDS = ("content", "output")


class Size(NamedTuple):
    """One prompt: tokens that are known or guessed without its text, and the bytes of its text."""

    tokens: int
    text_bytes: int


class Measured(NamedTuple):
    """The prompts of a body.

    `only_text`: what the engine counts teaches tokens for each byte. `exact`: nothing is guessed.
    `has_tools`: schemas, calls or results stand among the text.
    """

    prompts: list[Size]
    only_text: bool
    exact: bool = False
    has_tools: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """One gated endpoint."""

    path: str
    prompt_field: str
    measure: Callable[[Mapping[str, Any]], Measured]
    limit_fields: tuple[str, ...] = ("max_tokens",)
    output_tokens_default: int | None = None
    # Its body holds prompts that are independent, each as long as the context.
    several: bool = False
    # The object that holds the limit and `n`; empty: the body.
    params_field: str = ""
    params_optional: bool = False
    has_n: bool = False
    # The app can count its body's prompts (`count_prompt_tokens`).
    countable: bool = False
    # Its streams tell usage as `stream_options` ask.
    stream_options: bool = False
    # vLLM leaves the final usage in the request's state.
    leaves_usage: bool = True
    # Where its answers tell what was used.
    usage: UsageForm = usage_forms.OPENAI
    dialect: Dialect = Dialect.OPENAI


def route_of(path: str, body: Mapping[str, Any]) -> Route:
    """Return the route of a gated path; that of /invocations depends on its body."""
    if path != INVOCATIONS:
        return ROUTES[path]
    fields = [name for name in ("messages", "prompt") if name in body]
    if len(fields) != 1:
        raise BadRequestError(
            f"{INVOCATIONS}: the body must have either messages or a prompt, to be served as a "
            "chat or as a completion",
            fields[0] if fields else None,
        )
    return ROUTES["/v1/chat/completions" if fields[0] == "messages" else "/v1/completions"]


# Prompts of each form.


def _completion(body: Mapping[str, Any]) -> Measured:
    """Size each prompt of a completion: tokens for ids, bytes for text."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return Measured([Size(0, text_bytes(prompt))], True)
    if not isinstance(prompt, list) or not prompt:
        raise BadRequestError(
            "prompt: must be a string, a list of strings, a list of token ids, or a list of lists "
            "of token ids, and not empty",
            "prompt",
        )
    if type(prompt[0]) is int:
        return Measured([Size(len(prompt), 0)], False, exact=True)
    _check_number("prompt", prompt)
    sizes: list[Size] = []
    for number, part in enumerate(prompt):
        if isinstance(part, str):
            sizes.append(Size(0, text_bytes(part)))
        elif isinstance(part, list) and part and type(part[0]) is int:
            sizes.append(Size(len(part), 0))
        else:
            raise BadRequestError(
                f"prompt[{number}]: must be a string or a list of token ids, and not empty",
                "prompt",
            )
    only_text = all(size.tokens == 0 for size in sizes)
    return Measured(sizes, only_text, exact=not any(size.text_bytes for size in sizes))


def _chat(body: Mapping[str, Any]) -> Measured:
    written = _written(body, "tools", "documents")
    return _measured(_conversation(body.get("messages"), "messages", written))


def _batch(body: Mapping[str, Any]) -> Measured:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError(
            "messages: must be a list of conversations, and not empty", "messages"
        )
    _check_number("messages", messages)
    measured = [
        _conversation(conversation, f"messages[{number}]", 0)
        for number, conversation in enumerate(messages)
    ]
    return _measured(*measured)


def _anthropic(body: Mapping[str, Any]) -> Measured:
    written = _written(body, "tools")
    said = _conversation(body.get("messages"), "messages", written)
    return _measured(said._replace(size=_sum((said.size, _content(body.get("system"))))))


def _responses(body: Mapping[str, Any]) -> Measured:
    """Size a response's input, which is a text or a list of items."""
    if body.get("background"):
        raise BadRequestError(
            "background: a response that outlives its request cannot run behind this server's "
            "admission gate; leave it out, and stream",
            "background",
        )
    written = _written(body, "tools", "instructions")
    value = body.get("input")
    if isinstance(value, str):
        said = Said(Size(0, text_bytes(value) + written), bool(written), frames=1)
    else:
        said = _conversation(value, "input", written)
    # Kept at the server, and unknown to the gate.
    earlier = [name for name in ("previous_response_id", "prompt") if body.get(name)]
    unknown = Size(PART_TOKENS * len(earlier), 0)
    return _measured(said._replace(size=_sum((said.size, unknown))))


def _generate(body: Mapping[str, Any]) -> Measured:
    token_ids = body.get("token_ids")
    if not isinstance(token_ids, list) or not token_ids:
        raise BadRequestError("token_ids: must be a list of token ids, and not empty", "token_ids")
    parts = body.get("content_parts")
    unknown = PART_TOKENS * len(parts) if isinstance(parts, list) else 0
    return Measured([Size(len(token_ids) + unknown, 0)], False, exact=not unknown)


def _inputs(body: Mapping[str, Any]) -> Measured:
    inputs = body.get("inputs")
    if not isinstance(inputs, str) or not inputs:
        raise BadRequestError("inputs: must be a text, and not empty", "inputs")
    return Measured([Size(0, text_bytes(inputs))], True)


INVOCATIONS = "/invocations"
ROUTES = {
    route.path: route
    for route in (
        Route(
            "/v1/completions",
            "prompt",
            _completion,
            output_tokens_default=COMPLETION_TOKENS_DEFAULT,
            several=True,
            has_n=True,
            countable=True,
            stream_options=True,
        ),
        Route(
            "/v1/chat/completions",
            "messages",
            _chat,
            ("max_completion_tokens", "max_tokens"),
            has_n=True,
            countable=True,
            stream_options=True,
        ),
        Route(
            "/v1/chat/completions/batch",
            "messages",
            _batch,
            ("max_completion_tokens", "max_tokens"),
            several=True,
            has_n=True,
        ),
        Route(
            "/v1/responses",
            "input",
            _responses,
            ("max_output_tokens",),
            leaves_usage=False,
            usage=usage_forms.RESPONSES,
        ),
        Route(
            "/v1/messages",
            "messages",
            _anthropic,
            dialect=Dialect.ANTHROPIC,
            usage=usage_forms.ANTHROPIC,
        ),
        Route(
            "/inference/v1/generate",
            "token_ids",
            _generate,
            params_field="sampling_params",
            has_n=True,
            stream_options=True,
        ),
        Route(
            "/cohere/v2/chat",
            "messages",
            _chat,
            dialect=Dialect.COHERE,
            usage=usage_forms.COHERE,
        ),
        *(
            Route(
                path,
                "inputs",
                _inputs,
                ("max_new_tokens",),
                output_tokens_default=COMPLETION_TOKENS_DEFAULT,
                params_field="parameters",
                params_optional=True,
                leaves_usage=False,
                usage=usage_forms.GENERATE,
            )
            for path in ("/generate", "/generate_stream")  # of LightLLM and S-LoRA
        ),
    )
}
GATED_PATHS = frozenset(ROUTES) | {INVOCATIONS}
#: Gated paths whose bodies hold one prompt, so that the context bounds their text.
ONE_PROMPT_PATHS = frozenset(path for path, route in ROUTES.items() if not route.several)


def text_bytes(text: str) -> int:
    """Return the bytes of a text, at least 1. O(text)."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return max(1, size)


class Said(NamedTuple):
    """A conversation: its parts, those that are no text as tokens, and how many frames it has."""

    size: Size
    has_tools: bool
    frames: int


def _measured(*said: Said) -> Measured:
    sizes = [
        Size(each.size.tokens + MESSAGE_TOKENS * each.frames, max(1, each.size.text_bytes))
        for each in said
    ]
    only_text = not any(each.size.tokens for each in said)
    return Measured(sizes, only_text, has_tools=any(each.has_tools for each in said))


def _conversation(messages: object, field: str, written_bytes: int) -> Said:
    """Size a list of messages or items. The template writes `written_bytes` besides."""
    outer = field.partition("[")[0]
    if not isinstance(messages, list) or not messages:
        raise BadRequestError(f"{field}: must be a list of messages, and not empty", outer)
    tokens, size = 0, written_bytes
    has_tools = written_bytes > 0
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequestError(f"{field}[{number}]: must be an object", outer)
        content = message.get("content")
        if isinstance(content, str):
            size += text_bytes(content)
        elif isinstance(content, list):
            said = _content(content)
            tokens, size = tokens + said.tokens, size + said.text_bytes
            has_tools = has_tools or _has_tools(content)
        elif "content" not in message and message.get("type") in _WRITTEN_PARTS:
            said = _parts([message])
            tokens, size, has_tools = tokens + said.tokens, size + said.text_bytes, True
            continue
        if not _WRITTEN_FIELDS.isdisjoint(message):
            size += _written(message, *_WRITTEN_FIELDS)
            has_tools = has_tools or bool(message.get("tool_calls"))
    return Said(Size(tokens, size), has_tools, len(messages))


def _has_tools(content: object) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in _WRITTEN_PARTS for part in content
    )


def _content(content: object) -> Size:
    """Size what a message says: a text, or a list of parts."""
    if isinstance(content, str):
        return Size(0, text_bytes(content))
    return _parts(content) if isinstance(content, list) else Size(0, 0)


def _parts(parts: Iterable[object]) -> Size:
    tokens = size = 0
    written: list[Mapping[str, Any]] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            size += text_bytes(text)
        elif isinstance(part, dict) and part.get("type") in _WRITTEN_PARTS:
            # What a tool returns may hold images, as a message does.
            inner = {
                name: part[name] for name in _RESULT_FIELDS if isinstance(part.get(name), list)
            }
            written.append({name: value for name, value in part.items() if name not in inner})
            for value in inner.values():
                said = _content(value)
                tokens, size = tokens + said.tokens, size + said.text_bytes
        else:
            tokens += PART_TOKENS
    # At once: each ", " and the brackets are no part of them.
    return Size(tokens, size + (len(json.dumps(written)) - 2 * len(written) if written else 0))


def _sum(sizes: Iterable[Size]) -> Size:
    tokens = size = 0
    for each in sizes:
        tokens, size = tokens + each.tokens, size + each.text_bytes
    return Size(tokens, size)


def _written(body: Mapping[str, Any], *names: str) -> int:
    """Return the bytes of fields that a template writes besides the messages."""
    return sum(len(json.dumps(body[name])) for name in names if body.get(name))


def _check_number(field: str, prompts: list[Any]) -> None:
    if len(prompts) > PROMPTS_MAX:
        raise BadRequestError(f"{field}: at most {PROMPTS_MAX} prompts are allowed", field)
