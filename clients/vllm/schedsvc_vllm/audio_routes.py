"""Sizes transcription and translation of audio, forms with a file, by how long it plays.

A WAV file says how many bytes are a second. In any other format 4,000 bytes (32 kbit/s) count as
one. The engine takes the sound in pieces of 30 s, each a prompt of 50 tokens a second, as Whisper's
encoder makes them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from email.message import Message
from typing import Any, NamedTuple

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.image_sizes import ImageSizes
from schedsvc_vllm.prompt_forms import PROMPTS_MAX, Measured, Route, Size, text_bytes

BYTES_PER_S = 4_000
PIECE_S = 30
TOKENS_PER_S = 50
PARTS_MAX = 64
_HEAD_BYTES_MAX = 4_096
# Behind the size of the form chunk: format, channels, samples a second, bytes a second, bytes of
# all channels, bits of a sample.
_WAV = struct.Struct("<HHIIHH")


class Upload(NamedTuple):
    """Describes a file in a form by its bytes and the seconds that it plays."""

    size: int
    seconds: float


def parse_form(content_type: str, raw: bytes) -> dict[str, Any]:
    """Parse a form with files; texts and Uploads by name. O(bytes). Raises BadRequestError."""
    told = Message()
    told["content-type"] = content_type
    boundary = told.get_boundary()
    if told.get_content_type() != "multipart/form-data" or not boundary:
        raise BadRequestError(
            f"content-type: {content_type[:80]!r} is not taken; send multipart/form-data",
            status=415,
        )
    params = told.get_params([], unquote=False)
    if sum(name.lower().startswith("boundary") for name, _ in params) > 1:
        raise BadRequestError("content-type: it has two boundaries; send it with one")
    mark = b"\r\n--" + boundary.encode("latin-1", "replace")
    parts = (b"\r\n" + raw).split(mark, PARTS_MAX + 2)
    if len(parts) < 3 or len(parts) > PARTS_MAX + 2 or not parts[-1].startswith(b"--"):
        raise BadRequestError(f"the form is not whole, or has more than {PARTS_MAX} parts")
    form: dict[str, Any] = {}
    for part in parts[1:-1]:
        name, value = _part(part)
        if name in form and not name.endswith("[]"):
            raise BadRequestError(f"{name[:80]}: occurs twice in the form; send it once", name[:80])
        form[name] = value
    return form


def _part(part: bytes) -> tuple[str, Any]:
    head, separator, content = part.partition(b"\r\n\r\n")
    if head.partition(b"\r\n")[0].strip(b" \t"):
        # A server may read on here: such bytes only begin like the boundary.
        raise BadRequestError("the boundary of the form occurs in it as a part of longer text")
    if not separator or len(head) > _HEAD_BYTES_MAX:
        raise BadRequestError("a part of the form has no header")
    disposition = ""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            if disposition:
                raise BadRequestError("a part of the form has two names; send it once with each")
            disposition = value.strip()
    told = Message()
    told["content-disposition"] = disposition
    field = told.get_param("name", header="content-disposition")
    given = told.get_params([], header="content-disposition")
    if sum(name.lower() == "name" for name, _ in given) > 1:
        raise BadRequestError("a part of the form has two names; send it once with each")
    if not isinstance(field, str):
        raise BadRequestError("a part of the form has no name")
    if told.get_filename() is not None:
        return field, Upload(len(content), seconds_of(content))
    try:
        return field, content.decode()
    except UnicodeDecodeError:
        raise BadRequestError(f"{field[:80]}: is not UTF-8", field[:80]) from None


def seconds_of(sound: bytes) -> float:
    """Return how long a file plays, by its header or its bytes. O(1)."""
    at = sound.find(b"fmt ", 12, 512) + 8
    if sound[:4] == b"RIFF" and sound[8:12] == b"WAVE" and at > 8 and len(sound) >= at + _WAV.size:
        _, channels, rate, _, _, bits = _WAV.unpack_from(sound, at)
        bytes_per_s: int = channels * rate * bits // 8
        if bytes_per_s:
            return len(sound) / bytes_per_s
    return len(sound) / BYTES_PER_S


def _sound(body: Mapping[str, Any], _: ImageSizes) -> Measured:
    """Size the pieces of a sound, each with the text that precedes it."""
    file = body.get("file")
    if not isinstance(file, Upload) or not file.size:
        raise BadRequestError("file: must be an uploaded file, and not empty", "file")
    pieces = max(1, math.ceil(file.seconds / PIECE_S))
    if pieces > PROMPTS_MAX:
        hours = PROMPTS_MAX * PIECE_S / 3_600
        raise BadRequestError(f"file: plays longer than {hours:.1f} h; send a part of it", "file")
    tokens = math.ceil(file.seconds / pieces * TOKENS_PER_S)
    prompt = body.get("prompt")
    text = text_bytes(prompt) if isinstance(prompt, str) and prompt else 0
    return Measured([Size(max(1, tokens), text)] * pieces, False)


AUDIO_ROUTES = tuple(
    Route(
        f"/v1/audio/{task}",
        "file",
        _sound,
        ("max_completion_tokens",),
        several=True,
        has_n=True,
        leaves_usage=False,
        is_form=True,
    )
    for task in ("transcriptions", "translations")
)
