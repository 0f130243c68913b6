"""Reads the engine's state from its `/metrics`, if no stat logger reports it.

Rendering that page costs the engine's API process some milliseconds, so it is asked for seldom and
never twice at once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from schedsvc_vllm.asgi import App, Message, Scope
from schedsvc_vllm.telemetry import Reading

T = TypeVar("T")

SCRAPE_PERIOD_S, SCRAPE_PERIOD_S_MAX = 5.0, 60.0
SCRAPE_S_MAX = 2.0
PAGE_BYTES_MAX = 8 << 20

Fetch = Callable[[], Awaitable[str]]
"""Returns the text of the page. Raises ScrapeError, OSError or TimeoutError."""

# vLLM's gauges and counter, one sample for each engine. Usage is a share of the whole cache.
_SAMPLE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc"
    r"|num_preemptions(?:_total)?)(?:\{[^}\n]*\})? ([0-9.eE+-]+)$",
    re.MULTILINE,
)
_TOLD = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions")


class ScrapeError(Exception):
    """The page cannot be read, or has no figures of an engine."""


def parse(text: str, capacity_tokens: int) -> Reading:
    """Sum the engines of a page up; `capacity_tokens` is that of all. Raises ScrapeError.

    If several API processes share the page, an engine's gauges appear with its first step; its
    counter is there from the start.
    """
    told: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        told.setdefault(name.removesuffix("_total"), []).append(float(value))
    running, waiting, usage, preemptions = (told.get(name, []) for name in _TOLD)
    if not preemptions and not (running and usage):
        raise ScrapeError("/metrics has no figures of the engine")
    engines = max(len(usage), len(preemptions))
    return Reading(
        running=round(sum(running)),
        waiting=round(sum(waiting)),
        used_tokens=round(sum(usage) / engines * capacity_tokens),
        preemptions=round(sum(preemptions)),
        known=True,
    )


async def within(work: Awaitable[T], seconds: float) -> T:
    """Wait for it, and cancel it when the time is up. Raises TimeoutError.

    Not wait_for: before Python 3.12 it may swallow a cancellation.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,), timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


async def fetch_from_app(app: App, outer: Scope) -> str:
    """Ask an app for its page, in process. `outer`: a scope of the same server."""
    status, parts, size = 0, list[bytes](), 0
    asked = asyncio.Event()

    async def receive() -> Message:
        if asked.is_set():
            await asyncio.Event().wait()  # this client never leaves
        asked.set()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, size
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > PAGE_BYTES_MAX:
                raise ScrapeError(f"/metrics has more than {PAGE_BYTES_MAX} bytes")

    root = outer.get("root_path", "")
    scope = {
        "type": "http",
        "asgi": outer.get("asgi", {"version": "3.0"}),
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": f"{root}/metrics",
        "raw_path": f"{root}/metrics".encode(),
        "query_string": b"",
        "root_path": root,
        "headers": [(b"host", b"localhost"), (b"accept", b"text/plain")],
        "client": None,
        "server": None,
        "app": outer.get("app"),
        "state": dict(outer.get("state") or {}),
    }
    await within(app(scope, receive, send), SCRAPE_S_MAX)
    if status != 200:
        raise ScrapeError(f"/metrics answers {status}")
    return b"".join(parts).decode("utf-8", "replace")
