"""Asks whether the server behind the proxy answers: one request for all that probe at a time.

A server that is stopped takes connections and answers nothing. Load balancers and Prometheus probe
the proxy by these pages, and have to learn that from an answer, not from a silence of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from schedsvc_vllm import metrics_page
from schedsvc_vllm.asgi import Scope, Send
from schedsvc_vllm.paths import SAFE_METHODS
from schedsvc_vllm.scrape import ScrapeError

HEALTH_PATH = "/health"
#: Pages that are asked for only once the server has answered a probe.
PATHS = frozenset({HEALTH_PATH, metrics_page.PATH, "/ping", "/version"})
#: A page of metrics waits this long for a probe; without an answer, the server counts as down.
PAGE_S = 0.5
_log = logging.getLogger("schedsvc_vllm")


def probes(scope: Scope) -> bool:
    """Return whether a request is a probe."""
    # HAProxy's `option httpchk` sends OPTIONS.
    return scope["method"] in SAFE_METHODS and scope["path"] in PATHS


class UpstreamProbe:
    """Probes one server. `fetch` asks for its health within a limit, or raises ScrapeError."""

    def __init__(self, fetch: Callable[[], Awaitable[object]]) -> None:
        #: Whether the server answered the last probe, in time for those that waited.
        self.up = True
        self._logged_up = True
        self._fetch = fetch
        self._probing: asyncio.Task[None] | None = None

    async def ask(self, wait_s: float | None = None) -> bool:
        """Probe the server, or join the probe that runs; return whether it answers by `wait_s`."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.ensure_future(self._probe())
        _, late = await asyncio.wait((self._probing,), timeout=wait_s)
        if late:
            self.up = False
        return self.up

    async def ask_for_page(self) -> bool:
        """Return whether the server answers soon enough for a page of metrics."""
        return await self.ask(PAGE_S)

    def close(self) -> None:
        """End a probe that runs."""
        if self._probing is not None:
            self._probing.cancel()

    async def _probe(self) -> None:
        problem = ""
        try:
            await self._fetch()
        except ScrapeError as error:
            problem = str(error)
        is_up = not problem
        if self._logged_up and problem:
            _log.warning("the upstream does not answer its probe: %s", problem)
        elif is_up and not self._logged_up:
            _log.warning("the upstream answers its probe again")
        self.up = self._logged_up = is_up


async def send_page(send: Send, page: bytes = b"") -> None:
    """Answer with a page, behind which the gate writes its own lines. O(bytes)."""
    size = str(len(page)).encode()
    headers = [(b"content-type", b"text/plain; version=0.0.4"), (b"content-length", size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": page})
