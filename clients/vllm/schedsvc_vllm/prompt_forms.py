"""Reads how bodies write their prompts, and what of them counts, for all tables of routes.

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
from schedsvc_vllm.image_sizes import ImageSizes
from schedsvc_vllm.usage_forms import UsageForm

PROMPTS_MAX = 1_024
# Parts of a message that a template writes as text; of others (images, sounds) only the engine
# knows the tokens.
_WRITTEN_PARTS = frozenset(
    {
        "custom_tool_call",
        "custom_tool_call_output",
        "function_call",
        "function_call_output",
        "reasoning",
        "redacted_thinking",
        "refusal",
        "thinking",
        "tool_addition",
        "tool_call",
        "tool_reference",
        "tool_removal",
        "tool_result",
        "tool_use",
    }
)

# Fields of a message that a template writes besides its content.
_WRITTEN_FIELDS = frozenset({"tool_calls", "reasoning", "reasoning_content"})

# Fields of a part that hold no text.
_MEDIA = frozenset(
    (
        *("audio", "audio_embeds", "audio_url", "data", "file", "file_id", "file_url", "image"),
        *("image_embeds", "image_pil", "image_url", "input_audio", "input_image", "source"),
        *("video", "video_url"),
    )
)

# Fields whose values have parts of their own: Anthropic's tool results, outputs of functions.
_RESULT_FIELDS = ("content", "output")


# A prompt may come as a tensor in base64: this is a small model's embedding of one token.
_EMBEDDING_CHARS = 2_732


class Size(NamedTuple):
    """Sizes one prompt: tokens that are known or guessed without its text, and its text's bytes."""

    tokens: int
    text_bytes: int


class Measured(NamedTuple):
    """Holds the prompts of a body.

    `only_text`: the engine's count teaches tokens for each byte. `exact`: nothing is guessed.
    `has_tools`: schemas, calls or results are in the text.
    """

    prompts: list[Size]
    only_text: bool
    exact: bool = False
    has_tools: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """Describes one gated endpoint."""

    path: str
    prompt_field: str
    measure: Callable[[Mapping[str, Any], ImageSizes], Measured]
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
    # Its streams report usage as `stream_options` ask.
    stream_options: bool = False
    # vLLM leaves the final usage in the request's state.
    leaves_usage: bool = True
    # It makes tokens. Else it takes room in the cache for its prompts, as long as it runs.
    generates: bool = True
    # Its body is a form with a file, and no JSON.
    is_form: bool = False
    # Lists of prompts, which may be as long as a batch may.
    batch_fields: frozenset[str] = frozenset()
    # The place at which its answers state their usage.
    usage: UsageForm = usage_forms.OPENAI
    dialect: Dialect = Dialect.OPENAI


def texts_or_ids(prompt: object, field: str, prompts_max: int = PROMPTS_MAX) -> Measured:
    """Size each prompt of a field: tokens for ids, bytes for text."""
    if isinstance(prompt, str):
        return Measured([Size(0, text_bytes(prompt))], True)
    if not isinstance(prompt, list) or not prompt:
        raise BadRequestError(
            f"{field}: must be a string, a list of strings, a list of token ids, or a list of "
            "lists of token ids, and not empty",
            field,
        )
    if any(kind is int for kind in set(map(type, prompt))):
        size = _ids_and_texts(prompt, field)
        return Measured([size], False, exact=not size.text_bytes)
    check_number(field, prompt, prompts_max)
    sizes: list[Size] = []
    for number, part in enumerate(prompt):
        if isinstance(part, str):
            sizes.append(Size(0, text_bytes(part)))
        elif isinstance(part, list) and part:
            sizes.append(_ids_and_texts(part, f"{field}[{number}]"))
        else:
            raise BadRequestError(
                f"{field}[{number}]: must be a string or a list of token ids, and not empty",
                field,
            )
    only_text = all(size.tokens == 0 for size in sizes)
    return Measured(sizes, only_text, exact=not any(size.text_bytes for size in sizes))


def _ids_and_texts(prompt: list[Any], field: str) -> Size:
    """Size one prompt of token ids; some servers take texts among them. O(prompt)."""
    if set(map(type, prompt)) == {int}:
        return Size(len(prompt), 0)
    texts = [part for part in prompt if isinstance(part, str)]
    ids = sum(type(part) is int for part in prompt)
    if ids + len(texts) < len(prompt):
        raise BadRequestError(f"{field}: must hold token ids alone", field.partition("[")[0])
    return Size(ids, sum(map(text_bytes, texts)))


def chat(body: Mapping[str, Any], images: ImageSizes) -> Measured:
    """Size a conversation."""
    written = written_bytes(body, "tools", "documents")
    return measured(conversation(body.get("messages"), "messages", written, images))


def text_bytes(text: str) -> int:
    """Return the bytes of a text, at least 1. O(text)."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return max(1, size)


def embeds_tokens(data: object) -> int:
    """Return the tokens of a prompt's embeddings in base64: as many as a small model's would be."""
    return -(-len(data) // _EMBEDDING_CHARS) if isinstance(data, str) and data else 1


class Said(NamedTuple):
    """Holds a conversation: its parts, those without text as tokens, and its frames."""

    size: Size
    has_tools: bool
    frames: int


def measured(*said: Said) -> Measured:
    """Return what is known of conversations, each a prompt."""
    sizes = [
        Size(each.size.tokens + MESSAGE_TOKENS * each.frames, max(1, each.size.text_bytes))
        for each in said
    ]
    only_text = not any(each.size.tokens for each in said)
    return Measured(sizes, only_text, has_tools=any(each.has_tools for each in said))


def conversation(messages: object, field: str, written: int, images: ImageSizes) -> Said:
    """Size a list of messages or items. The template writes `written` bytes besides."""
    outer = field.partition("[")[0]
    if not isinstance(messages, list) or not messages:
        raise BadRequestError(f"{field}: must be a list of messages, and not empty", outer)
    tokens, size = 0, written
    has_tools = written > 0
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequestError(f"{field}[{number}]: must be an object", outer)
        content = message.get("content")
        if isinstance(content, str):
            size += text_bytes(content)
        elif isinstance(content, list):
            said = content_size(content, images)
            tokens, size = tokens + said.tokens, size + said.text_bytes
            has_tools = has_tools or _has_tools(content)
        elif "content" not in message and message.get("type") in _WRITTEN_PARTS:
            said = _parts([message], images)
            tokens, size, has_tools = tokens + said.tokens, size + said.text_bytes, True
            continue
        if not _WRITTEN_FIELDS.isdisjoint(message):
            size += written_bytes(message, *_WRITTEN_FIELDS)
            has_tools = has_tools or bool(message.get("tool_calls"))
    return Said(Size(tokens, size), has_tools, len(messages))


def _has_tools(content: object) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in _WRITTEN_PARTS for part in content
    )


def content_size(content: object, images: ImageSizes) -> Size:
    """Size a message's content: a text, or a list of parts."""
    if isinstance(content, str):
        return Size(0, text_bytes(content))
    return _parts(content, images) if isinstance(content, list) else Size(0, 0)


def _parts(parts: Iterable[object], images: ImageSizes) -> Size:
    tokens = size = 0
    written: list[Mapping[str, Any]] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str) and not _holds_more(part):
            size += text_bytes(text)
        elif isinstance(part, dict) and part.get("type") == "prompt_embeds":
            tokens += embeds_tokens(part.get("data"))
        elif isinstance(part, dict) and part.get("type") in _WRITTEN_PARTS:
            # A tool's result may hold images, as a message does.
            inner = {
                name: part[name] for name in _RESULT_FIELDS if isinstance(part.get(name), list)
            }
            written.append({name: value for name, value in part.items() if name not in inner})
            for value in inner.values():
                said = content_size(value, images)
                tokens, size = tokens + said.tokens, size + said.text_bytes
        else:
            tokens += images.of_part(part) if isinstance(part, dict) else PART_TOKENS
            size += text_bytes(text) if isinstance(text, str) else 0
    # At once: each ", " and the brackets are no part of them.
    return Size(tokens, size + (_json_bytes(written) - 2 * len(written) if written else 0))


def _holds_more(part: object) -> bool:
    """Return whether a part with a text may be sized by more than that text."""
    if not isinstance(part, dict):
        return False
    return not str(part.get("type", "text")).endswith("text") or not _MEDIA.isdisjoint(part)


def sum_sizes(sizes: Iterable[Size]) -> Size:
    """Add sizes up."""
    tokens = size = 0
    for each in sizes:
        tokens, size = tokens + each.tokens, size + each.text_bytes
    return Size(tokens, size)


def written_bytes(body: Mapping[str, Any], *names: str) -> int:
    """Return the bytes of fields that a template writes besides the messages."""
    return sum(_json_bytes(body[name]) for name in names if body.get(name))


def _json_bytes(value: object) -> int:
    """Return the bytes of a value as a template writes it: text beyond ASCII is no escape."""
    return text_bytes(json.dumps(value, ensure_ascii=False))


def check_number(field: str, prompts: list[Any], most: int = PROMPTS_MAX) -> None:
    """Raise BadRequestError if there are too many prompts."""
    if len(prompts) > most:
        raise BadRequestError(f"{field}: at most {most} prompts are allowed", field)
