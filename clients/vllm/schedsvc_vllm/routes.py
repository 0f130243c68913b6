"""Lists the gated endpoints, and how each writes its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedsvc_vllm import usage_forms
from schedsvc_vllm.answers import BadRequestError, Dialect
from schedsvc_vllm.audio_routes import AUDIO_ROUTES
from schedsvc_vllm.estimate import PART_TOKENS
from schedsvc_vllm.image_sizes import ImageSizes
from schedsvc_vllm.pooling_routes import POOLING_ROUTES
from schedsvc_vllm.prompt_forms import (
    Measured,
    Route,
    Said,
    Size,
    chat,
    check_number,
    content_size,
    conversation,
    embeds_tokens,
    measured,
    sum_sizes,
    text_bytes,
    texts_or_ids,
    written_bytes,
)

# vLLM's default for /v1/completions; the others run to the end of the context.
COMPLETION_TOKENS_DEFAULT = 16


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


def _completion(body: Mapping[str, Any], _: ImageSizes) -> Measured:
    """Size the prompts, and embeddings that stand for further ones."""
    embeds = body.get("prompt_embeds")
    if not embeds:
        return texts_or_ids(body.get("prompt"), "prompt")
    given = [Size(embeds_tokens(each), 0) for each in _each(embeds)]
    texts = texts_or_ids(body["prompt"], "prompt").prompts if body.get("prompt") else []
    check_number("prompt_embeds", given + texts)
    return Measured(given + texts, False)


def _each(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _batch(body: Mapping[str, Any], images: ImageSizes) -> Measured:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError(
            "messages: must be a list of conversations, and not empty", "messages"
        )
    check_number("messages", messages)
    conversations = [
        conversation(each, f"messages[{number}]", 0, images) for number, each in enumerate(messages)
    ]
    return measured(*conversations)


def _anthropic(body: Mapping[str, Any], images: ImageSizes) -> Measured:
    written = written_bytes(body, "tools")
    said = conversation(body.get("messages"), "messages", written, images)
    system = content_size(body.get("system"), images)
    return measured(said._replace(size=sum_sizes((said.size, system))))


def _responses(body: Mapping[str, Any], images: ImageSizes) -> Measured:
    """Size a response's input, which is a text or a list of items."""
    if body.get("background"):
        raise BadRequestError(
            "background: a response that outlives its request cannot run behind this server's "
            "admission gate; leave it out, and stream",
            "background",
        )
    written = written_bytes(body, "tools", "instructions")
    value = body.get("input")
    if isinstance(value, str):
        said = Said(Size(0, text_bytes(value) + written), bool(written), frames=1)
    else:
        said = conversation(value, "input", written, images)
    # Kept at the server, and unknown to the gate.
    earlier = [name for name in ("previous_response_id", "prompt") if body.get(name)]
    unknown = Size(PART_TOKENS * len(earlier), 0)
    return measured(said._replace(size=sum_sizes((said.size, unknown))))


def _generate(body: Mapping[str, Any], images: ImageSizes) -> Measured:
    token_ids = body.get("token_ids")
    if not isinstance(token_ids, list) or not token_ids:
        raise BadRequestError("token_ids: must be a list of token ids, and not empty", "token_ids")
    parts = body.get("content_parts")
    said = content_size(parts, images) if isinstance(parts, list) else Size(0, 0)
    size = said._replace(tokens=len(token_ids) + said.tokens)
    return Measured([size], False, exact=not any(said))


def _inputs(body: Mapping[str, Any], _: ImageSizes) -> Measured:
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
            chat,
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
            chat,
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
        *POOLING_ROUTES,
        *AUDIO_ROUTES,
    )
}
GATED_PATHS = frozenset(ROUTES) | {INVOCATIONS}
#: Gated paths that an operator may let through without a size.
OPENABLE_PATHS = frozenset(route.path for route in (*POOLING_ROUTES, *AUDIO_ROUTES))
#: Gated paths whose bodies are forms.
FORM_PATHS = frozenset(path for path, route in ROUTES.items() if route.is_form)
#: Gated paths whose bodies hold one prompt, so that the context bounds their text.
ONE_PROMPT_PATHS = frozenset(path for path, route in ROUTES.items() if not route.several)
