"""Sizes endpoints that run the model and make no tokens: embeddings, scores, classes, poolings.

Each element of a batch is a prompt of its own, and each pair of a query and a document is one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from schedsvc_vllm.answers import BadRequestError, Dialect
from schedsvc_vllm.estimate import MESSAGE_TOKENS
from schedsvc_vllm.image_sizes import ImageSizes, is_image
from schedsvc_vllm.prompt_forms import (
    Measured,
    Route,
    Size,
    chat,
    check_number,
    content_size,
    sum_sizes,
    text_bytes,
    texts_or_ids,
)
from schedsvc_vllm.usage_forms import COHERE_META, OPENAI, UsageForm

#: More elements than the scheduler takes prompts: they are put together before they are sent.
BATCH_MAX = 16_384
_PAIRS = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("query", "documents"),
)


def _inputs(body: Mapping[str, Any], images: ImageSizes) -> Measured:
    """Size the elements of `input`, or a conversation."""
    if body.get("input") is None and body.get("messages") is not None:
        return chat(body, images)
    if body.get("input") is None and body.get("data") is not None:
        return Measured([_plugin_size(body["data"], images)], False)
    return texts_or_ids(body.get("input"), "input", BATCH_MAX)


def _plugin_size(data: object, images: ImageSizes) -> Size:
    """Size what a plugin of the engine makes prompts of: its images, and all else as text."""
    tokens, text_bytes = 0, len(json.dumps(data))
    left = [data]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)
        elif isinstance(each, str) and is_image(each):
            tokens, text_bytes = tokens + images.of_text(each), text_bytes - len(each)
    return Size(tokens, max(1, text_bytes))


def _image(value: object, images: ImageSizes) -> int:
    return images.of_text(value) if isinstance(value, str) else images.tokens


def _cohere(body: Mapping[str, Any], images: ImageSizes) -> Measured:
    """Size what Cohere's API embeds: texts, images, or inputs of several parts."""
    sizes = [_one("texts", each, images) for each in _list(body, "texts")]
    sizes += [Size(_image(each, images), 0) for each in _list(body, "images")]
    sizes += [_one("inputs", each, images) for each in _list(body, "inputs")]
    if not sizes:
        raise BadRequestError("texts: must be a list of texts, and not empty", "texts")
    check_number("texts", sizes, BATCH_MAX)
    return Measured(sizes, all(not size.tokens for size in sizes))


def _pairs(body: Mapping[str, Any], images: ImageSizes) -> Measured:
    """Size each pair of a query and a document: one query goes with every document."""
    for first, second in _PAIRS:
        if body.get(first) is not None and body.get(second) is not None:
            break
    else:
        raise BadRequestError("documents: give a query (or queries, text_1) and documents (text_2)")
    queries = [_one(first, each, images) for each in _list(body, first)]
    documents = [_one(second, each, images) for each in _list(body, second)]
    if not queries or not documents:
        name = second if queries else first
        raise BadRequestError(f"{name}: must not be empty", name)
    check_number(second, documents, BATCH_MAX)
    if len(queries) not in (1, len(documents)):
        raise BadRequestError(
            f"{first}: has {len(queries)} entries; give one, or {len(documents)} as in {second}",
            first,
        )
    if len(queries) == 1:
        queries *= len(documents)
    frame = Size(MESSAGE_TOKENS, 0)
    pairs = [sum_sizes((*pair, frame)) for pair in zip(queries, documents, strict=True)]
    return Measured(pairs, all(pair.tokens == MESSAGE_TOKENS for pair in pairs))


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _one(field: str, value: object, images: ImageSizes) -> Size:
    """Size a text, or an object with parts."""
    if isinstance(value, str):
        return Size(0, text_bytes(value))
    if isinstance(value, dict):
        content = value.get("content", value.get("text"))
        if isinstance(content, str | list):
            return content_size(content, images)
    raise BadRequestError(f"{field}: must be a text, or an object with content, or a list", field)


def _route(
    path: str,
    field: str,
    measure: Callable[[Mapping[str, Any], ImageSizes], Measured],
    usage: UsageForm = OPENAI,
    dialect: Dialect = Dialect.OPENAI,
) -> Route:
    return Route(
        path,
        field,
        measure,
        several=True,
        leaves_usage=False,
        generates=False,
        batch_fields=frozenset({"input", "data", "texts", "images", "inputs"}.union(*_PAIRS)),
        usage=usage,
        dialect=dialect,
    )


POOLING_ROUTES = (
    *(_route(path, "input", _inputs) for path in ("/v1/embeddings", "/pooling", "/classify")),
    *(_route(path, "text_2", _pairs) for path in ("/score", "/v1/score")),
    *(_route(path, "documents", _pairs) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    _route("/v2/embed", "texts", _cohere, COHERE_META, Dialect.COHERE),
)
