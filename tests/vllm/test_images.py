"""Compares what the gate reserves for an image on a vision model with the engine's count."""

from __future__ import annotations

import asyncio
import base64
import struct
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from . import programs
from .stack import Stack

TENANT = "image-0"
# The template writes a mark before the image's tokens, and one behind them.
MARKS = 2
TEXT = {"type": "text", "text": "hello"}


@pytest.fixture(scope="module")
def vision(folder: Path) -> Iterator[Stack]:
    """Run a scheduler, and a vision model without weights behind the gate."""
    own = folder / "vision"
    own.mkdir()
    machine = replace(programs.on_cpu(), model=own / "model")
    python, script = machine.environment / "bin" / "python", "make_vision_model.py"
    subprocess.run([python, Path(__file__).parent / script, machine.model], check=True)
    with (
        programs.Scheduler(own, [TENANT]) as scheduler,
        programs.vllm(own, gated=True, machine=machine) as server,
    ):
        made = Stack(server, scheduler)
        made.connected()
        yield made


def png(width: int, height: int) -> str:
    """Draw a picture of one colour, as a data URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\x7f\x40\x20" * width) * height)
    image = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(image).decode()


async def sized(stack: Stack, content: list[dict[str, Any]]) -> tuple[int, int]:
    """Ask once; return the reserved tokens, and the charged ones of the prompt."""
    body = {
        "model": programs.MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
    }
    before = stack.flow(TENANT)

    async def ask() -> int:
        async with (
            aiohttp.ClientSession(stack.url, headers={"x-tenant-id": TENANT}) as session,
            session.post("/v1/chat/completions", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            return int((await response.json())["usage"]["prompt_tokens"])

    with stack.server.engine_paused():
        asked = asyncio.ensure_future(ask())
        await asyncio.to_thread(stack.until, lambda: stack.stats().totals.live_leases)
        reserved = stack.stats().totals.promised_tokens
    told = await asked
    await asyncio.to_thread(stack.rest)
    assert stack.flow(TENANT).input_tokens - before.input_tokens == told
    return reserved, told


# The start of a second engine takes longer than all other tests of the gate.
@pytest.mark.slow
async def test_image_is_reserved_and_charged_as_the_engine_counts(vision: Stack) -> None:
    text_reserved, text_tokens = await sized(vision, [TEXT])
    # A side shorter than a patch is scaled to one: 10 x 600 pixels become 28 x 1,680.
    sizes = {(28, 28): 1, (224, 224): 64, (1_008, 700): 900, (10, 600): 60, (600, 10): 60}
    for (width, height), patches in sizes.items():
        image = {"type": "image_url", "image_url": {"url": png(width, height)}}
        reserved, tokens = await sized(vision, [TEXT, image])
        assert tokens - text_tokens == patches + MARKS
        # Reservations are whole blocks; without the size, an image would take 1,024 tokens.
        assert abs(reserved - text_reserved - patches) <= programs.BLOCK_TOKENS
