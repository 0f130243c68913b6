"""Serves the web console on the metrics listener: a page for a person, and what it asks for.

It is read-only, and it asks for no credentials: like `/metrics`, it belongs on an address that only
operators reach. The files of the page are in `schedsvc/data/console`. The page loads nothing from
elsewhere, and its Content-Security-Policy lets a browser load nothing from elsewhere.
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from aiohttp import web
from schedsvc_client.v1 import explain_pb2, scheduler_pb2

from schedsvc.driver import Broken, Driver
from schedsvc.server.console_state import ConsoleState
from schedsvc.service import stories
from schedsvc.text.printable import printable, printable_message
from schedsvc.text.reason_words import WAIT_WORDS
from schedsvc.text.request_ids import known_ids

__all__ = ["CONSOLE_PATH", "Console"]

CONSOLE_PATH = "/console/"

#: Sent with every answer. A page that forbids all, and the few things that it is made of.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "console.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_SCRIPT_TYPE = "text/javascript; charset=utf-8"
_ID_CHARS_MAX = 256
_STORIES_MAX = 20


class Console:
    """Serves the console's paths."""

    def __init__(self, driver: Driver, state: ConsoleState) -> None:
        """Show a driver. Reads the files of the page once."""
        self._driver = driver
        self._state = state
        self._files = {
            entry.name: (_TYPES.get(entry.name, _SCRIPT_TYPE), entry.read_bytes())
            for entry in files("schedsvc").joinpath("data/console").iterdir()
            if entry.name in _TYPES or entry.name.endswith(".mjs")
        }

    def add_to(self, app: web.Application) -> None:
        """Serve the page, its files and its data. `/` leads to the page."""
        app.router.add_get("/", self._lead)
        app.router.add_get(CONSOLE_PATH.rstrip("/"), self._lead)
        app.router.add_get(CONSOLE_PATH, self._page)
        app.router.add_get(f"{CONSOLE_PATH}state.json", self._get_state)
        app.router.add_get(f"{CONSOLE_PATH}history.json", self._get_history)
        app.router.add_get(f"{CONSOLE_PATH}why.json", self._why)
        app.router.add_get(f"{CONSOLE_PATH}{{name}}", self._file)

    async def _lead(self, _: web.Request) -> web.Response:
        return web.Response(status=302, headers={**_HEADERS, "Location": CONSOLE_PATH})

    async def _page(self, _: web.Request) -> web.Response:
        return self._answer("index.html")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._files:
            return web.Response(status=404, text="not found\n", headers=_HEADERS)
        return self._answer(name)

    def _answer(self, name: str) -> web.Response:
        content_type, body = self._files[name]
        return web.Response(body=body, headers={**_HEADERS, "Content-Type": content_type})

    async def _get_state(self, _: web.Request) -> web.Response:
        text, fresh_ms = await self._state.document()
        # The page asks again when the next document can be had, and not before.
        headers = {"Content-Type": "application/json", "X-Fresh-Ms": str(fresh_ms)}
        return web.Response(body=text, headers={**_HEADERS, **headers})

    async def _get_history(self, _: web.Request) -> web.Response:
        headers = {**_HEADERS, "Content-Type": "application/json"}
        return web.Response(body=self._state.past(), headers=headers)

    async def _why(self, request: web.Request) -> web.Response:
        """Answer what is known of the request `id`, of `tenant` if it is named. O(tenants)."""
        request_id, tenant = request.query.get("id", ""), request.query.get("tenant", "")
        if not 0 < len(request_id) <= _ID_CHARS_MAX or len(tenant) > _ID_CHARS_MAX:
            text = f"id must have 1 to {_ID_CHARS_MAX} characters, tenant at most {_ID_CHARS_MAX}"
            return _json({"problem": text}, 400)
        try:
            for known in known_ids(request_id):
                if found := stories(self._driver, known, tenant):
                    break
        except ValueError as error:
            return _json({"problem": printable(str(error))}, 400)
        except Broken as error:
            return _json({"problem": printable(str(error))}, 503)
        told = [_plain(printable_message(story)) for story in found[:_STORIES_MAX]]
        return _json({"requests": told, "left_out": max(0, len(found) - _STORIES_MAX)}, 200)


def _json(content: Mapping[str, Any], status: int) -> web.Response:
    return web.json_response(dict(content), status=status, headers=_HEADERS)


def _plain(story: explain_pb2.RequestStory) -> dict[str, Any]:
    """Return a story for the page: names instead of numbers."""
    return {
        "message": story.message,
        "tenant": story.tenant,
        "request_class": story.request_class,
        "state": explain_pb2.RequestState.Name(story.state).removeprefix("REQUEST_STATE_").lower(),
        "outcome": scheduler_pb2.Outcome.Name(story.outcome).removeprefix("OUTCOME_").lower(),
        "pool": story.pool,
        "prompt_tokens": story.prompt_tokens,
        "max_output_tokens": story.max_output_tokens,
        "sequences": story.sequences,
        "queue_us": story.queue_duration_us,
        "ttft_ms": story.ttft_ms,
        "ttft_expected_ms": story.ttft_expected_ms,
        "waited": [{"reason": _reason(row.reason), "time_us": row.time_us} for row in story.waited],
        "pools": [
            {
                "pool": row.pool,
                "attached": row.attached,
                "next": "this request" if row.is_next else row.next_tenant,
                "reason": _reason(row.reason),
                "need_tokens": row.need_tokens,
                "load_tokens": row.load_tokens,
                "load_max_tokens": row.load_max_tokens,
            }
            for row in story.pools
        ],
    }


def _reason(number: int) -> str:
    name = explain_pb2.WaitReason.Name(explain_pb2.WaitReason.ValueType(number))
    return WAIT_WORDS[name.removeprefix("WAIT_REASON_")]
