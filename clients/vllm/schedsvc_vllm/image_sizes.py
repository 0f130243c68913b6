"""Estimates the tokens that an image in a body stands for, by its width and height.

The form of a body never counts: the same image has the same size in a message, in a tool's result
and at each endpoint. Width and height come from the first bytes of a data URL, in which PNG, JPEG,
GIF and WebP state them. An image that is elsewhere or in another format has a fixed size, because
the gate fetches and decodes nothing.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from schedsvc_vllm.estimate import PART_TOKENS

# Limits of any image in Qwen2-VL, unless its processor is set otherwise.
IMAGE_TOKENS_MIN = 4
IMAGE_TOKENS_MAX = 16_384
# More than any engine can hold, and few enough to be counted with.
_PIXELS_MAX = 1 << 40
# Models refuse images whose sides differ by more.
_RATIO_MAX = 200
# Before a JPEG's size: Exif, colour profiles and thumbnails, of 64 KiB each at most.
_SEGMENTS_MAX = 256
_IMAGE_TYPES = frozenset({"image", "image_url", "input_image"})
# JPEG: markers of a frame's size are 0xC0 to 0xCF, but for tables of codes and conditions.
_NO_FRAMES = frozenset({0xC4, 0xC8, 0xCC})
_NO_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """Says how a model turns images into tokens.

    `tokens` stands for an image whose size is unknown. If `patch_pixels` is given, any other image
    has at least one token for each square of that side, and from `tokens_min` to `tokens_max`
    (0: not known); else `tokens`. It never has fewer than the model counts.
    """

    tokens: int = PART_TOKENS
    patch_pixels: int = 0
    tokens_min: int = 0
    tokens_max: int = 0

    def on_engine(self, patch_pixels: int, pixels_min: int, pixels_max: int) -> ImageSizes:
        """Return the sizes with what the engine states, if they do not state it; 0: not known."""
        side = self.patch_pixels or patch_pixels
        if not side:
            return self
        return replace(
            self,
            patch_pixels=side,
            tokens_min=self.tokens_min or -(-pixels_min // side**2),
            tokens_max=self.tokens_max or max(pixels_max // side**2, IMAGE_TOKENS_MAX),
        )

    def asked(self, options: object) -> ImageSizes:
        """Return the sizes under a request's `mm_processor_kwargs`, which vLLM hands on."""
        if not self.patch_pixels:
            return self
        square = self.patch_pixels**2
        least, most = (-(-pixels // square) for pixels in pixel_limits(options))
        least = max(least, self.tokens_min or IMAGE_TOKENS_MIN)
        most = max(most, self.tokens_max or IMAGE_TOKENS_MAX, least)
        return replace(self, tokens_min=least, tokens_max=most)

    def of_part(self, part: Mapping[str, Any]) -> int:
        """Return the tokens of a message's part that is no text. O(1), whatever its bytes."""
        link, source = part.get("image_url"), part.get("source")
        if isinstance(link, dict):
            link = link.get("url")
        if isinstance(link, str):
            return self.of_text(link)
        if part.get("type") not in _IMAGE_TYPES:
            return PART_TOKENS
        if isinstance(source, dict):
            data = source.get("data") or source.get("url")
            return self.of_text(data) if isinstance(data, str) else self.tokens
        return self.tokens

    def of_text(self, text: str) -> int:
        """Return the tokens of an image that is given by its URL, or by base64 alone. O(1)."""
        size = self.patch_pixels and dimensions(text)
        if not size:
            return self.tokens
        width, height = size
        least, most = self.tokens_min or IMAGE_TOKENS_MIN, self.tokens_max or IMAGE_TOKENS_MAX
        side = self.patch_pixels
        patches = max(_patches(*each, side, least) for each in _scaled(width, height, side))
        if patches <= most:
            return patches
        # Scaled down, an image keeps one row of squares, however long that is.
        ratio = min(_RATIO_MAX, -(-max(size) // min(size)))
        return max(most, math.isqrt(most * ratio))


def pixel_limits(options: object) -> tuple[int, int]:
    """Return the least and the most pixels of an image in a processor's options; 0: not stated.

    Processors take them as `min_pixels` and `max_pixels`, or in `size` as `shortest_edge` and
    `longest_edge`, by themselves or in `images_kwargs`.
    """
    least = most = 0
    inner = _get(options, "images_kwargs")
    for each in (options, inner, _get(options, "size"), _get(inner, "size")):
        least = max(least, _pixels(each, "min_pixels"), _pixels(each, "shortest_edge"))
        most = max(most, _pixels(each, "max_pixels"), _pixels(each, "longest_edge"))
    return least, most


def _get(options: object, name: str) -> object:
    return options.get(name) if isinstance(options, Mapping) else getattr(options, name, None)


def _pixels(options: object, name: str) -> int:
    value = _get(options, name)
    if not isinstance(value, int | float) or not value > 0:
        return 0
    return math.ceil(min(value, _PIXELS_MAX))


def _scaled(width: int, height: int, side: int) -> Iterator[tuple[int, int]]:
    """Give the sizes to which models scale an image before they count its squares.

    Qwen's keep it. A side shorter than a square becomes one: in one step (GLM-4V), or first the
    height and then the width, rounded in between (PaddleOCR-VL, Keye).
    """
    yield width, height
    if min(width, height) >= side:
        return
    scale = max(side / height, side / width)
    yield int(width * scale), int(height * scale)
    if height < side:
        width, height = round(width * side / height), side
    if width < side:
        width, height = side, round(height * side / width)
    yield width, height


def _patches(width: int, height: int, side: int, least: int) -> int:
    """Count the squares of an image, scaled up if it has fewer pixels than `least` squares.

    Models round each side; rounded up, the count is never lower.
    """
    pixels = least * side**2
    scale = math.sqrt(pixels / (height * width)) if width * height < pixels else 1.0
    return math.ceil(height * scale / side) * math.ceil(width * scale / side)


UNKNOWN_MODEL = ImageSizes()


def is_image(text: str) -> bool:
    """Return whether a text is an image: a data URL, or base64 that begins as an image does."""
    return text.startswith(("data:", *_STARTS))


def dimensions(text: str) -> tuple[int, int] | None:
    """Return width and height of an image in base64 or in a data URL, in pixels. O(1).

    None: they cannot be read there.
    """
    start = 0
    if text.startswith("data:"):
        # A media type and its parameters are short.
        start = text.find(",", 0, 256) + 1
        if not text[:start].endswith(";base64,"):
            return None
    encoded = _Encoded(text, start)
    head = encoded.read(0, 30)
    size = _size_of(head) if head[:2] != b"\xff\xd8" else _jpeg(encoded)
    return size if size and all(size) else None


class _Encoded:
    """Decodes only those bytes of base64 that are read."""

    __slots__ = ("_start", "_text")

    def __init__(self, text: str, start: int) -> None:
        self._text, self._start = text, start

    def read(self, offset: int, size: int) -> bytes:
        """Return the bytes from an offset on; fewer at the end, or if they are no base64."""
        first = self._start + offset // 3 * 4
        last = self._start + -(-(offset + size) // 3) * 4
        try:
            decoded = binascii.a2b_base64(self._text[first:last])
        except ValueError:
            return b""
        return decoded[offset % 3 :][:size]


def _size_of(head: bytes) -> tuple[int, int] | None:
    """Read what PNG, GIF and WebP state in their first 30 bytes."""
    if len(head) >= 24 and head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR":
        return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    if len(head) >= 10 and head.startswith((b"GIF87a", b"GIF89a")):
        return int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    if len(head) < 30 or head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return None
    chunk = head[12:16]
    if chunk == b"VP8X":
        width = int.from_bytes(head[24:27], "little") + 1
        return width, int.from_bytes(head[27:30], "little") + 1
    if chunk == b"VP8L" and head[20] == 0x2F:
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width = int.from_bytes(head[26:28], "little") & 0x3FFF
        return width, int.from_bytes(head[28:30], "little") & 0x3FFF
    return None


def _jpeg(encoded: _Encoded) -> tuple[int, int] | None:
    """Read the size in a JPEG's first frame, which stands behind other segments."""
    at = 2
    for _ in range(_SEGMENTS_MAX):
        head = encoded.read(at, 9)
        if len(head) < 2 or head[0] != 0xFF:
            return None
        marker = head[1]
        if marker == 0xFF:  # a marker may be filled up in front
            at += 1
        elif marker in _NO_LENGTH:
            at += 2
        elif len(head) < 9 or marker in (0xD9, 0xDA):  # the end, or the pixels
            return None
        elif 0xC0 <= marker <= 0xCF and marker not in _NO_FRAMES:
            return int.from_bytes(head[7:9]), int.from_bytes(head[5:7])
        else:
            at += 2 + int.from_bytes(head[2:4])
    return None
