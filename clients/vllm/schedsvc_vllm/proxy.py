"""Forwards requests as an ASGI app, behind the gate, to a server that cannot load the gate.

It needs aiohttp (`pip install schedsvc-vllm[proxy]`); the gate inside an engine does not. A client
that leaves closes the connection to the upstream server, which ends its generation.
"""

from __future__ import annotations

import asyncio
import logging
import re
import select
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import aiohttp
from aiohttp.connector import Connection
from yarl import URL

from schedsvc_vllm import answers, metrics_page
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import (
    BodyTooLargeError,
    ClientLeftError,
    Mailbox,
    Receive,
    Scope,
    Send,
    disconnected,
    header,
)
from schedsvc_vllm.bodies import Bodies, BodiesFullError
from schedsvc_vllm.caller import Sources, peer_of, read_caller
from schedsvc_vllm.proxy_headers import Fields, answer_headers, asked_headers
from schedsvc_vllm.refusals import Reason
from schedsvc_vllm.scrape import ScrapeError
from schedsvc_vllm.upstream_probe import HEALTH_PATH, UpstreamProbe, probes, send_empty

PROBE_PERIOD_S = 1.0
CONNECT_S_MAX = 10.0
SCRAPE_S_MAX = 5.0
_NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX)
_PAGE_LIMIT = aiohttp.ClientTimeout(total=SCRAPE_S_MAX)
# As common servers have them.
_HEADER_BYTES_MAX = 1 << 16
# Servers close a connection that is idle for 5 s (uvicorn's default): it must not be used then.
_KEEPALIVE_S = 4.0
# The HTTP client adds these if the caller sent none.
_NOT_ADDED = ("accept", "accept-encoding", "content-type", "user-agent")
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
# Reported without being asked for: errors and the end of both directions.
_CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_CACHE = re.compile(r"^vllm:cache_config_info\{([^}\n]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_STARTED = re.compile(r"^process_start_time_seconds (\S+)$", re.MULTILINE)
_ID_CHARS_MAX = 128
_log = logging.getLogger("schedsvc_vllm")


@dataclass(frozen=True, slots=True)
class Told:
    """Holds an upstream server's report of its engine; 0: not reported."""

    capacity_tokens: int
    block_size_tokens: int
    context_tokens: int
    started_ns: int


def _id_of(scope: Scope) -> str:
    """Return the id of a request, which its client or the gate has set; "-": neither has."""
    return header(scope, b"x-request-id").decode("latin-1")[:_ID_CHARS_MAX] or "-"


class _Passing:
    """Passes an answer on as it comes."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.begun = self.between_events = False

    async def all_of(self, response: aiohttp.ClientResponse) -> None:
        """Pass on an answer. Raises aiohttp.ClientError if it breaks off."""
        headers = answer_headers(response.raw_headers, response.url)
        self.begun = True
        is_stream = response.content_type == "text/event-stream"
        send, content = self.send, response.content
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        piece = b""
        try:
            while piece := await content.readany():
                # It is known already in most cases: then the end needs no message of its own.
                is_last = content.at_eof() and content.exception() is None
                await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
                if is_last:
                    return
        except BaseException:
            self.between_events = is_stream and piece.endswith(_EVENT_ENDS)
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Upstream:
    """Forwards every HTTP request to one server. `url` is its root, without a path.

    `wait_s`: how long its start waits for a server that does not answer yet. `health_s`: how long a
    probe waits. `kept_headers`: those that a setting names, so that a client's `Connection` field
    cannot drop them. `fronted`: a front states the addresses of clients.
    """

    def __init__(
        self, url: str, *, wait_s: float = 600.0, health_s: float = 2.0,
        body_bytes_max: int = 64 << 20, bodies_bytes_max: int = 48 << 20,
        kept_headers: frozenset[bytes] = frozenset(), fronted: bool = False,
    ) -> None:  # fmt: skip
        self.url = url.rstrip("/")
        self._probe = UpstreamProbe(lambda: self._text(HEALTH_PATH, health_s))
        # Under vLLM's names: the gate reads the engine's sizes here.
        self.state = SimpleNamespace(
            vllm_config=None, fetch_metrics=self.metrics, engine_in_doubt=False,
            upstream_up=lambda: self._probe.up,
        )  # fmt: skip
        self.told: Told | None = None
        #: Whether the server has to stop; it does not check that itself while it starts.
        self.stopping: Callable[[], bool] = lambda: False
        self._wait_s = wait_s
        self._kept_headers = kept_headers
        self._bodies = Bodies(body_bytes_max, bodies_bytes_max)
        self._sources = Sources(fronted=fronted)
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one scope."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1011, "reason": "not proxied"})
        elif probes(scope):
            await self._answer_probe(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    async def _answer_probe(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_page = scope["path"] == metrics_page.PATH
        if await (self._probe.ask_for_page() if is_page else self._probe.ask()):
            if scope["path"] != HEALTH_PATH or scope["method"] == "OPTIONS":
                await self._forward(scope, receive, send)
                return
        elif not is_page:
            message = "the server behind this one does not answer its probe"
            await answers.unavailable(message, Reason.UPSTREAM_UNREACHABLE, "-").send(send)
            return
        await send_empty(send)

    async def metrics(self) -> str:
        """Return the text of the upstream's `/metrics`. Raises ScrapeError.

        Notes when the upstream was started: a restarted one has its own sizes.
        """
        page = await self._text("/metrics")
        told = self.told
        is_another = told is not None and _started_ns(page) not in (0, told.started_ns)
        # If it reported a cache before, it will report one again once it has it.
        if is_another and (_CACHE.search(page) or not (told and told.capacity_tokens)):
            _log.warning("the upstream has been restarted")
            await self._learn(page)
            is_another = False
        self.state.engine_in_doubt = is_another
        return page

    def _doubt(self, error: Exception) -> None:
        """Have the gate check the engine before the next request: it may have been restarted."""
        if isinstance(error, asyncio.TimeoutError):
            return  # it is slow
        self.state.engine_in_doubt = self.told is not None and self.told.started_ns > 0

    # One request.

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = None
        try:
            if not _path_of(scope).startswith(b"/"):
                # `http://other/` or `@other/`: put behind the upstream's address, it names another.
                raise BadRequestError("the request target has to be a path that begins with /")
            headers = asked_headers(scope, self._kept_headers)
        except BadRequestError as error:
            await answers.bad_request(error, "-").send(send)
            return
        if isinstance(receive, Mailbox) and (body := receive.take_body()) is not None:
            # The gate has read and counted it.
            await self._pass_on(scope, headers, body, receive, send)
            return
        caller = read_caller(scope["headers"], peer_of(scope, self._sources), self._sources)
        held = self._bodies.open(caller.network)
        try:
            # A server that reads no body of a GET would take it for the next request.
            if scope["method"] not in _BODILESS:
                body = await held.read(scope, receive)
            await self._pass_on(scope, headers, body, receive, send)
        except ClientLeftError:
            return
        except BodyTooLargeError:
            text = f"the body has more than {self._bodies.each_max} bytes"
            await answers.bad_request(BadRequestError(text, status=413), "-").send(send)
        except BodiesFullError as error:
            await answers.unavailable(error.message, Reason.BODIES_FULL, _id_of(scope)).send(send)
        except BadRequestError as error:
            await answers.bad_request(error, "-").send(send)
        finally:
            held.release()

    async def _pass_on(
        self, scope: Scope, headers: Fields, body: bytes | None, receive: Receive, send: Send
    ) -> None:
        # In a task of its own: each piece wakes fewer coroutines than stand above this one.
        answering = asyncio.ensure_future(self._answer(scope, headers, body, send))
        leaving = asyncio.ensure_future(disconnected(receive))
        # The end of `answering` closes the connection, by which the upstream learns of it.
        leaving.add_done_callback(lambda _: answering.cancel())
        try:
            await answering
        except (Exception, asyncio.CancelledError):
            if not leaving.done() or _is_cancelled():
                raise
        finally:
            leaving.cancel()

    async def _answer(self, scope: Scope, headers: Fields, body: bytes | None, send: Send) -> None:
        """Ask the upstream, and pass its answer on as it comes.

        Raises aiohttp.ClientError if the upstream breaks off: the client's connection then does
        too, but a stream of events first gets an event that says why.
        """
        path = _path_of(scope)
        query = scope.get("query_string") or b""
        target = self.url + (path + b"?" + query if query else path).decode("latin-1")
        passing = _Passing(send)
        try:
            async with self._session().request(
                scope["method"],
                URL(target, encoded=True),
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=_PAGE_LIMIT if probes(scope) else _NO_LIMIT,
            ) as response:
                await passing.all_of(response)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            if scope["path"] == metrics_page.PATH and probes(scope) and not passing.begun:
                self._probe.up = False  # it answers its probe and not this
                await send_empty(send)
                return
            await self._broke(error, passing, _id_of(scope))

    async def _broke(self, error: Exception, passing: _Passing, request_id: str) -> None:
        """Answer for an upstream that did not, or end a stream with a reason; else raise."""
        self._doubt(error)
        if passing.between_events:
            event = answers.stream_error("the server behind this one broke off its answer")
            await passing.send({"type": "http.response.body", "body": event, "more_body": True})
        if passing.begun:
            raise error
        if isinstance(error, aiohttp.ClientResponseError):
            _log.warning("the upstream's answer is not valid HTTP: %r", error.message)
            message = f"the server behind this one gave no valid HTTP answer: {error.message}"
            await answers.bad_gateway(message[:500], "-").send(passing.send)
            return
        _log.warning("the upstream cannot be reached: %s", error or type(error).__name__)
        message = "the server behind this one cannot be reached"
        await answers.unavailable(message, Reason.UPSTREAM_UNREACHABLE, request_id).send(
            passing.send
        )

    # The upstream's start, and ours.

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._wait()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        except ScrapeError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
        finally:
            self._probe.close()
            if self._http is not None:
                await self._http.close()

    async def _wait(self) -> None:
        """Wait until the upstream answers, and read its sizes. Raises ScrapeError."""
        deadline_s = time.monotonic() + self._wait_s
        while True:
            try:
                await self._text(HEALTH_PATH)
                break
            except ScrapeError as error:
                if time.monotonic() > deadline_s:
                    waited = f"{self._wait_s:g} s"
                    raise ScrapeError(f"--upstream: after {waited} still {error}") from None
                if self.stopping():
                    raise ScrapeError(f"stopped while waiting: {error}") from None
                _log.info("waiting for the upstream: %s", error)
                await asyncio.sleep(PROBE_PERIOD_S)
        try:
            page = await self._text("/metrics")
        except ScrapeError:
            page = ""
        await self._learn(page)

    async def _learn(self, page: str) -> None:
        """Keep the upstream's report of its engine, under the names that the gate reads."""
        self.told = told = await self._read(page)
        self.state.engine_started_ns = told.started_ns
        self.state.upstream_is_vllm = _CACHE.search(page) is not None
        self.state.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(
                kv_cache_size_tokens=told.capacity_tokens, block_size=told.block_size_tokens
            ),
            model_config=SimpleNamespace(max_model_len=told.context_tokens),
            scheduler_config=SimpleNamespace(),
        )

    async def _read(self, page: str) -> Told:
        """Read the upstream's report: its cache from vLLM's metrics, summed over engines."""
        engines = [dict(_LABEL.findall(labels)) for labels in _CACHE.findall(page)]
        return Told(
            capacity_tokens=sum(_whole(engine.get("kv_cache_size_tokens")) for engine in engines),
            block_size_tokens=_whole(engines[0].get("block_size")) if engines else 0,
            context_tokens=await self._context(),
            started_ns=_started_ns(page),
        )

    async def _context(self) -> int:
        """Return the model's context as `/v1/models` states it."""
        try:
            async with self._session().get(f"{self.url}/v1/models") as response:
                listed: Any = await response.json(content_type=None)
            return _whole(listed["data"][0].get("max_model_len"))
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError):
            return 0

    async def _text(self, path: str, seconds: float = SCRAPE_S_MAX) -> str:
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session().get(self.url + path, timeout=timeout) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            self._doubt(error)
            reason = str(error) or type(error).__name__
            raise ScrapeError(f"{self.url}{path}: {reason}") from None
        if response.status != 200:
            raise ScrapeError(f"{self.url}{path} answers {response.status}")
        return text

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=_Connector(),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=_NO_LIMIT,
                request_class=_Request,
                skip_auto_headers=_NOT_ADDED,
                auto_decompress=False,
                read_bufsize=1 << 18,
                max_line_size=_HEADER_BYTES_MAX,
                max_field_size=_HEADER_BYTES_MAX,
            )
        return self._http


def _is_cancelled() -> bool:
    """Return whether this task itself was cancelled; Python 3.10 does not say."""
    return bool(getattr(asyncio.current_task(), "cancelling", int)())


def _path_of(scope: Scope) -> bytes:
    return scope.get("raw_path") or str(scope["path"]).encode()


class _Request(aiohttp.ClientRequest):
    """Has aiohttp work out once, not for each request, which headers it does not add: all."""

    _skip_auto_headers: Any = None

    def update_auto_headers(self, skip_auto_headers: Iterable[str] | None) -> None:
        """Add none; if aiohttp keeps elsewhere which those are, it works that out each time."""
        if self._skip_auto_headers is None:
            super().update_auto_headers(skip_auto_headers)
            _Request._skip_auto_headers = self._skip_auto_headers


class _Connector(aiohttp.TCPConnector):
    """Hands out no kept connection that the server has closed.

    The proxy sends no request twice: a server that reads a request and hangs up may have run it.
    So a dead connection has to be found before the request is written to it.
    """

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=_KEEPALIVE_S)
        self._known: WeakSet[object] = WeakSet()

    async def connect(self, *arguments: Any, **options: Any) -> Connection:
        """Return a connection for a request: a kept one that lives, else a new one."""
        while True:
            connection = await super().connect(*arguments, **options)
            if (protocol := connection.protocol) is None:
                return connection
            if protocol not in self._known:
                self._known.add(protocol)
                return connection
            if not _is_dead(connection):
                return connection
            connection.close()


def _is_dead(connection: Connection) -> bool:
    """Return whether the server has closed the connection; asyncio may not have noticed it yet.

    O(1).
    """
    transport = connection.transport
    opened = transport.get_extra_info("socket") if transport is not None else None
    if opened is None or (number := opened.fileno()) < 0:
        return True
    poll = select.poll()
    poll.register(number, _CLOSED)
    return bool(poll.poll(0))


def _started_ns(page: str) -> int:
    started = _STARTED.search(page)
    return int(float(started[1]) * 1e9) if started else 0


def _whole(text: object) -> int:
    return int(text) if isinstance(text, str | int) and str(text).isdecimal() else 0
