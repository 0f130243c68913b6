"""Tests that an image has one size wherever a body holds it, and that its bytes are never text."""

from __future__ import annotations

import base64
import io
import json
import math
import random
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from PIL import Image
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.engine import EngineView
from schedsvc_vllm.estimate import MESSAGE_TOKENS, PART_TOKENS, TokenRatios
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.image_sizes import IMAGE_TOKENS_MAX, UNKNOWN_MODEL, ImageSizes, dimensions
from schedsvc_vllm.request_sizing import Call, Sizes, parse_json, size_call
from schedsvc_vllm.routes import ROUTES
from schedsvc_vllm.settings import Settings, SettingsError

from .asgi import Exchange, owner

PATCH = 28
FORMATS = ("PNG", "GIF", "JPEG", "WEBP")
QWEN = ImageSizes(patch_pixels=PATCH)


def encoded(image: Image.Image, form: str, **options: Any) -> str:
    out = io.BytesIO()
    image.save(out, form, **options)
    return base64.b64encode(out.getvalue()).decode()


def noise(width: int, height: int) -> Image.Image:
    pixels = random.Random(1).randbytes(width * height * 3)
    return Image.frombytes("RGB", (width, height), pixels)


#: 180 kB of base64: as text they would be 54,000 tokens.
DATA = encoded(noise(300, 150), "PNG")
TOKENS = 11 * 6
URL = f"data:image/png;base64,{DATA}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}

#: Path, and its body with the image.
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
    ),
    "messages-data-url": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": URL}}]}]},
    ),
    "messages-tool-result": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t",
             "content": [{"type": "image", "source": SOURCE}]}]}]},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": URL}}]}]},
    ),
    "chat-plain-url": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"image_url": URL}]}]},
    ),
    "chat-tool": (
        "/v1/chat/completions",
        {"messages": [{"role": "tool", "tool_call_id": "t", "content": [
            {"type": "image_url", "image_url": {"url": URL}}]}]},
    ),
    "chat-batch": (
        "/v1/chat/completions/batch",
        {"messages": [[{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": URL}}]}]]},
    ),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    ),
    "responses-output": (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_image", "image_url": URL}]}]},
    ),
    "responses-custom-output": (
        "/v1/responses",
        {"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": [
            {"type": "input_image", "image_url": URL}]}]},
    ),
    "generate": (
        "/inference/v1/generate",
        {"token_ids": [1] * MESSAGE_TOKENS, "sampling_params": {}, "content_parts": [
            {"type": "image_url", "image_url": {"url": URL}}]},
    ),
    "embeddings": (
        "/v1/embeddings",
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": URL}}]}]},
    ),
    "pooling-plugin": ("/pooling", {"data": {"image": URL}}),
    "pooling-base64": ("/pooling", {"data": [{"image": DATA}]}),
    "embed": ("/v2/embed", {"images": [URL]}),
    "embed-inputs": (
        "/v2/embed",
        {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": URL}}]}]},
    ),
}  # fmt: skip


def size(path: str, body: dict[str, Any], images: ImageSizes = QWEN) -> Call:
    raw = json.dumps(body).encode()
    return size_call(
        ROUTES[path],
        raw,
        parse_json(raw),
        sizes=Sizes(1 << 20, 1 << 20),
        count=None,
        ratios=TokenRatios(),
        tenant="t",
        reads_answer=True,
        images=images,
    )


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(("images", "tokens"), [(QWEN, TOKENS), (UNKNOWN_MODEL, PART_TOKENS)])
def test_an_image_has_one_size_in_every_body(name: str, images: ImageSizes, tokens: int) -> None:
    path, body = BODIES[name]
    call = size(path, body, images)
    assert tokens <= call.prompts.tokens[0] < tokens + 40  # a frame, and how a tool's result says
    assert call.prompts.text_bytes == 0  # nothing to learn from


@pytest.mark.parametrize("form", FORMATS)
@given(st.integers(1, 700), st.integers(1, 700), st.booleans(), st.booleans())
def test_every_format_states_its_width_and_height(
    form: str, width: int, height: int, other: bool, as_url: bool
) -> None:
    options: dict[str, dict[str, Any]] = {
        "PNG": {"optimize": other},
        "GIF": {"interlace": other},
        "JPEG": {"progressive": other, "exif": b"Exif\0\0" + b"x" * 60_000, "dpi": (72, 72)},
        "WEBP": {"lossless": other},
    }
    text = encoded(Image.new("RGB", (width, height)), form, **options[form])
    if as_url:
        text = f"data:image/{form.lower()};base64,{text}"
    assert dimensions(text) == (width, height)


def test_webp_with_an_alpha_channel_states_its_size() -> None:
    text = encoded(Image.new("RGBA", (301, 17), (1, 2, 3, 4)), "WEBP", exif=b"Exif\0\0x")
    assert base64.b64decode(text)[12:16] == b"VP8X"
    assert dimensions(text) == (301, 17)


def test_size_of_a_jpeg_stands_behind_a_large_profile() -> None:
    text = encoded(noise(64, 33), "JPEG", icc_profile=b"p" * 600_000)
    assert dimensions(text) == (64, 33)


VALID = [encoded(noise(40, 30), form) for form in FORMATS]


@given(
    st.sampled_from(VALID),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
    st.integers(0, 400),
)
def test_a_broken_image_has_the_size_of_an_unknown_one(
    text: str, changes: list[tuple[int, int]], end: int
) -> None:
    data = bytearray(base64.b64decode(text)[:end])
    for at, byte in changes:
        if data:
            data[at % len(data)] = byte
    told = dimensions(base64.b64encode(data).decode())
    assert told is None or (min(told) > 0 and max(told) < 1 << 32)
    assert 1 <= QWEN.of_text(base64.b64encode(data).decode()) <= IMAGE_TOKENS_MAX


@given(st.text(max_size=60), st.sampled_from(["", "data:", "data:image/png;base64,", "/9j/"]))
def test_any_text_instead_of_an_image_has_a_size(text: str, start: str) -> None:
    assert 1 <= QWEN.of_text(start + text) <= IMAGE_TOKENS_MAX
    part = {"type": "image", "source": {"data": start + text}}
    assert QWEN.of_part(part) == QWEN.of_text(start + text)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png,plain"}},
        {"type": "image_url", "image_url": {}},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
        {"type": "image", "source": {"type": "base64", "data": 5}},
        {"type": "image", "source": None},
        {"type": "input_image", "file_id": "f"},
        {"type": "input_image", "image_url": base64.b64encode(b"BM" + b"x" * 90).decode()},
    ],
)
def test_an_image_that_cannot_be_read_has_the_stated_size(part: dict[str, Any]) -> None:
    assert ImageSizes(tokens=77, patch_pixels=PATCH).of_part(part) == 77


def test_a_sound_is_no_image() -> None:
    images = ImageSizes(tokens=77, patch_pixels=PATCH)
    assert images.of_part({"type": "input_audio", "input_audio": {"data": DATA}}) == PART_TOKENS


def test_a_jpeg_of_many_segments_is_given_up() -> None:
    endless = b"\xff\xd8" + b"\xff\xe1\0\x02" * 100_000
    assert dimensions(base64.b64encode(endless).decode()) is None


def test_an_image_counts_no_more_than_the_most() -> None:
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (1 << 31).to_bytes(4) * 2
    text = base64.b64encode(header + b"x" * 9).decode()
    assert QWEN.of_text(text) == 16_384
    assert ImageSizes(patch_pixels=PATCH, tokens_max=2_880).of_text(text) == 2_880


#: Width and height, and the tokens that image processors of transformers 5.19 make of them: with
#: squares of 28 pixels and at least 4 (Qwen2-VL), 188 and 1 (PaddleOCR-VL) and 16 (GLM-4V). None:
#: it refuses the image.
COUNTED: list[tuple[int, int, tuple[int | None, ...]]] = [
    (10, 600, (16, 214, 60, 60)),
    (600, 10, (16, 214, 60, 60)),
    (1, 1, (4, 196, 1, 9)),
    (1, 200, (29, 200, 200, 200)),
    (200, 1, (29, 200, 200, 200)),
    (1, 27, (11, 219, 28, 27)),
    (27, 1, (11, 216, 27, 27)),
    (28, 28, (4, 196, 1, 9)),
    (27, 29, (6, 210, 1, 9)),
    (5, 900, (27, 368, 180, 180)),
    (2, 399, (29, 200, 200, 200)),
    (33, 6600, (236, 236, 236, 236)),
    (300, 150, (55, 200, 55, 55)),
    (1024, 768, (999, 999, 999, 999)),
    (43, 1, (14, 270, 43, 43)),
    (31, 3, (7, 225, 10, 10)),
    (4, 9, (6, 189, 2, 10)),
    (1, 300, (None, None, None, None)),
]
LEAST = (4, 188, 1, 16)


def a_png(width: int, height: int) -> str:
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + width.to_bytes(4) + height.to_bytes(4)
    return base64.b64encode(header + b"x" * 9).decode()


@pytest.mark.parametrize(("width", "height", "counted"), COUNTED)
def test_no_model_counts_more_than_the_gate_reserves(
    width: int, height: int, counted: tuple[int | None, ...]
) -> None:
    for least, tokens in zip(LEAST, counted, strict=True):
        reserved = ImageSizes(patch_pixels=PATCH, tokens_min=least).of_text(a_png(width, height))
        assert reserved >= (tokens or 1)


def test_thin_image_is_reserved_as_scaled_up() -> None:
    assert QWEN.of_text(a_png(10, 600)) == 60
    assert QWEN.of_text(a_png(600, 28)) == 22  # an image of this height is not scaled


def test_thin_image_has_one_row_beyond_the_most_tokens() -> None:
    # 1 to 200 in 100 squares: the row of a processor that scales it down has 141.
    thin = ImageSizes(patch_pixels=PATCH, tokens_max=100)
    assert thin.of_text(a_png(20_000, 100)) == 141
    assert thin.of_text(a_png(20_000, 20_000)) == 100


@pytest.mark.parametrize(
    "options",
    [
        {"min_pixels": 784_000},
        {"size": {"shortest_edge": 784_000, "longest_edge": 1_000_000}},
        {"images_kwargs": {"min_pixels": 784_000.0}},
        {"images_kwargs": {"size": {"shortest_edge": 784_000}}},
    ],
)
def test_processor_options_of_a_request_enlarge_its_image(options: dict[str, Any]) -> None:
    path, body = BODIES["chat"]
    before, after = size(path, body), size(path, {**body, "mm_processor_kwargs": options})
    # 300 x 150 pixels become 1,252.2 x 626.1.
    assert after.prompts.tokens[0] - before.prompts.tokens[0] == 45 * 23 - TOKENS


@pytest.mark.parametrize(
    "options", [{}, None, [], "x", 5, {"size": 7}, {"min_pixels": math.nan}, {"min_pixels": -1}]
)
def test_other_processor_options_change_no_image(options: object) -> None:
    path, body = BODIES["chat"]
    assert size(path, {**body, "mm_processor_kwargs": options}).prompts == size(path, body).prompts


def test_processor_options_of_a_request_raise_the_most() -> None:
    large = a_png(1 << 14, 1 << 14)
    raised = QWEN.asked({"max_pixels": 20_000 * PATCH**2})
    assert (QWEN.of_text(large), raised.of_text(large)) == (IMAGE_TOKENS_MAX, 20_000)
    assert UNKNOWN_MODEL.asked({"min_pixels": 784_000}).of_text(large) == PART_TOKENS
    # Options that no engine can obey have a size too.
    for most in (10**400, 1e308, math.inf):
        assert QWEN.asked({"min_pixels": most}).of_text(large) > 1 << 30


def test_least_and_most_pixels_of_the_model_are_read() -> None:
    def told(processor: object, **kwargs: int) -> tuple[int, int]:
        class Info:
            def get_hf_processor(self) -> Any:
                if processor is None:
                    raise ValueError("it has none")
                return SimpleNamespace(image_processor=processor)

        renderer = SimpleNamespace(mm_processor=SimpleNamespace(info=Info()))
        media = SimpleNamespace(mm_processor_kwargs=kwargs)
        model = SimpleNamespace(multimodal_config=media)
        state = SimpleNamespace(
            engine_client=SimpleNamespace(renderer=renderer),
            vllm_config=SimpleNamespace(model_config=model),
        )
        app: Any = SimpleNamespace(state=state)
        return EngineView({"app": app}, app).image_pixels

    edges = SimpleNamespace(shortest_edge=147_456, longest_edge=2_359_296)
    paddle = SimpleNamespace(size=edges)
    assert told(paddle) == (147_456, 2_359_296)
    assert told(paddle, min_pixels=200_000, max_pixels=1) == (200_000, 2_359_296)
    assert told(SimpleNamespace(size={"height": 336, "width": 336})) == (0, 0)
    assert told(None) == (0, 0)
    known = ImageSizes().on_engine(PATCH, *told(paddle))
    assert (known.tokens_min, known.tokens_max) == (189, IMAGE_TOKENS_MAX)
    set_by_hand = ImageSizes(tokens_min=7, tokens_max=9).on_engine(PATCH, *told(paddle))
    assert (set_by_hand.tokens_min, set_by_hand.tokens_max) == (7, 9)
    assert ImageSizes().on_engine(0, 0, 0) == UNKNOWN_MODEL


def test_patches_of_a_model_that_keeps_resolution_are_read() -> None:
    def told(**vision: Any) -> int:
        model = SimpleNamespace(hf_config=SimpleNamespace(vision_config=SimpleNamespace(**vision)))
        state = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model))
        app: Any = SimpleNamespace(state=state)
        return EngineView({"app": app}, app).image_patch_pixels

    assert told(patch_size=14, spatial_merge_size=2) == 28  # Qwen2-VL
    assert told(patch_size=16, spatial_merge_size=2) == 32  # Qwen3-VL
    assert told(patch_size=14, image_size=336) == 0  # LLaVA: scaled to one size
    assert told() == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
async def test_the_gate_sizes_images_as_it_is_set(fake: FakeScheduler, path: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    name = {
        "/v1/messages": "messages",
        "/v1/chat/completions": "chat",
        "/v1/responses": "responses",
    }
    body = BODIES[name[path]][1] | {"max_tokens": 9}
    for number, (variables, tokens) in enumerate(
        [({}, PART_TOKENS), ({"SCHEDSVC_IMAGE_TOKENS": "576"}, 576),
         ({"SCHEDSVC_IMAGE_PATCH_PIXELS": "28"}, TOKENS),
         ({"SCHEDSVC_IMAGE_PATCH_PIXELS": "28", "SCHEDSVC_IMAGE_TOKENS_MIN": "100"}, 8 * 15),
         ({"SCHEDSVC_IMAGE_PATCH_PIXELS": "2", "SCHEDSVC_IMAGE_TOKENS_MAX": "640"}, 640)]
    ):  # fmt: skip
        settings = Settings.from_environment(
            {"SCHEDSVC_TARGET": fake.target, "SCHEDSVC_POOL_MAX_MODEL_TOKENS": "8000"} | variables
        )
        gate = Gate(app, settings)
        await Exchange(gate, json.dumps(body).encode(), path, owner=owner()).run()
        [sized] = fake.admits[number].input_tokens
        assert sized - MESSAGE_TOKENS in (tokens, tokens + 1)
        await gate._close()


def test_a_wrong_size_of_images_is_named() -> None:
    with pytest.raises(SettingsError, match="SCHEDSVC_IMAGE_PATCH_PIXELS: must be a whole number"):
        Settings.from_environment({"SCHEDSVC_TARGET": "x:1", "SCHEDSVC_IMAGE_PATCH_PIXELS": "0"})
