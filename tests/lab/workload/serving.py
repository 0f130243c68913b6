"""Runs an emulator that counts with a trained tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from schedsvc_lab.emulator.app import Emulator
from schedsvc_lab.emulator.server import Address, EmulatorServer
from schedsvc_lab.emulator.settings import EmulatorSettings
from schedsvc_lab.engine import load_profile
from schedsvc_lab.workload.tokenizers import ModelTokenizer

TOKENS_MAX = 8_192


@asynccontextmanager
async def emulator(folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    profile = load_profile("fast")
    config = profile.config(kv_tokens=1 << 17, context_tokens_max=TOKENS_MAX + 64)
    settings = EmulatorSettings(
        profile, config, "m", speed=10_000, tokenizer=ModelTokenizer.load(folder)
    )
    ready = asyncio.get_running_loop().create_future()
    server = EmulatorServer(Emulator(settings), Address(), ready.set_result)
    task = asyncio.create_task(server.listen())
    try:
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        async with aiohttp.ClientSession(ready.result().base_url) as http:
            yield http
    finally:
        server.stop()
        await task
