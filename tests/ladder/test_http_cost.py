"""Tests the cost of gate and proxy against an earlier commit: when its measurement begins."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest
from aiohttp import web

from bench import http_cost


class _Side(http_cost.ProxySide):
    """Holds a side whose process runs as long as `ended` is None."""

    ended: int | None = None

    def __init__(self, path: Path) -> None:
        super().__init__(cast("Any", SimpleNamespace(poll=lambda: self.ended)), path, 1)
        self.asked = asyncio.Event()

    async def serve(self, requests: int) -> None:
        try:
            await super().serve(requests)
        finally:
            self.asked.set()


async def test_a_socket_that_does_not_listen_yet_is_asked_again(tmp_path: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="data: [DONE]\n\n", headers={"x-schedsvc-mode": "enforced"})

    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        side = _Side(tmp_path / "s")
        first = asyncio.ensure_future(http_cost._first(side))
        asked = asyncio.ensure_future(side.asked.wait())
        await asyncio.wait((first, asked), timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert not first.done()
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.SockSite(runner, bound).start()
        await asyncio.wait_for(first, 60)
        await side.close()
        await runner.cleanup()


async def test_a_process_that_has_ended_is_not_asked_again(tmp_path: Path) -> None:
    side = _Side(tmp_path / "s")
    side.ended = 1
    with pytest.raises(click.ClickException, match="no answer to the first request"):
        await http_cost._first(side)
    await side.close()
