"""Forwards requests as an ASGI app, behind the gate, to a server that cannot load the gate.

It needs httptools (`pip install schedsvc-vllm[proxy]`); the gate inside an engine does not. A
client that leaves closes the connection to the upstream server, which ends its generation.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from schedsvc_vllm import answers, metrics_page
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import (
    BodyTooLargeError,
    ClientLeftError,
    Headers,
    Incoming,
    Mailbox,
    Receive,
    Scope,
    Send,
    any_done,
    header,
)
from schedsvc_vllm.bodies import UNCOUNTED_BYTES, Bodies, BodiesFullError
from schedsvc_vllm.caller import Sources, peer_of, read_caller
from schedsvc_vllm.door.passing import Passing
from schedsvc_vllm.door.pool import Pool
from schedsvc_vllm.door.upstream import InvalidAnswerError, UpstreamConnection, UpstreamError
from schedsvc_vllm.proxy_headers import asked_headers
from schedsvc_vllm.refusals import Reason
from schedsvc_vllm.router import MODELS_PATH, WAY, UnansweredError, Way
from schedsvc_vllm.scrape import ScrapeError
from schedsvc_vllm.upstream_probe import HEALTH_PATH, UpstreamProbe, probes, send_page

PROBE_PERIOD_S = 1.0
SCRAPE_S_MAX = 5.0
#: A page that is only asked for after a probe is complete by then.
PAGE_S_MAX = 5.0
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
_TARGET = re.compile(rb"/[^\0- \x7f]*")
_CACHE = re.compile(r"^vllm:cache_config_info\{([^}\n]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_STARTED = re.compile(r"^process_start_time_seconds (\S+)$", re.MULTILINE)
_ID_CHARS_MAX = 128
_log = logging.getLogger("schedsvc_vllm")

#: A request as the upstream gets it: its target, its headers, and its body if it has one.
Asked = tuple[bytes, Headers, bytes | None]


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
        #: Its own list of models; empty: it has none, or none that can be read.
        self.models: list[Mapping[str, Any]] = []
        #: Whether the server has to stop; it does not check that itself while it starts.
        self.stopping: Callable[[], bool] = lambda: False
        self._wait_s = wait_s
        self._kept_headers = kept_headers
        self._bodies = Bodies(body_bytes_max, bodies_bytes_max)
        self._sources = Sources(fronted=fronted)
        self._pool = Pool(self.url)
        # Answers that may still come from another upstream.
        self._unbegun: set[Passing] = set()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one scope. The caller must await the result."""
        if scope["type"] == "lifespan":
            return self._lifespan(receive, send)
        if probes(scope):
            return self._answer_probe(scope, receive, send)
        return self._forward(scope, receive, send)

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
        await send_page(send)

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
            target = _target_of(scope)
            headers = asked_headers(scope, self._kept_headers)
        except BadRequestError as error:
            await answers.bad_request(error, "-").send(send)
            return
        if scope["method"] in _BODILESS:
            # A server that reads no body of a GET would take it for the next request.
            await self._pass_on(scope, (target, headers, None), receive, send, probes(scope))
            return
        # The gate has read a body and counted it. Else a small one is not counted.
        most = None if isinstance(receive, Mailbox) else min(UNCOUNTED_BYTES, self._bodies.each_max)
        if isinstance(receive, Incoming) and (body := receive.take_body(most)) is not None:
            await self._pass_on(scope, (target, headers, body), receive, send)
            return
        caller = read_caller(scope["headers"], peer_of(scope, self._sources), self._sources)
        held = self._bodies.open(caller.network)
        try:
            body = await held.read(scope, receive)
            await self._pass_on(scope, (target, headers, body), receive, send)
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
        self, scope: Scope, asked: Asked, receive: Receive, send: Send, is_probe: bool = False
    ) -> None:
        """Ask the upstream, and pass its answer on as it comes.

        Raises UpstreamError if the upstream breaks off: the client's connection then does too, but
        a stream of events first gets an event that says why.
        """
        passing = Passing(send, self.url)
        own = None if isinstance(receive, Incoming) else Mailbox(receive, None)
        # The end of this closes the connection, by which the upstream learns of it.
        (own or cast("Incoming", receive)).watch(passing.leave)
        way: Way | None = scope.get(WAY)
        moves = way is not None and way.moves
        if moves:
            self._unbegun.add(passing)
        try:
            asking = self._ask(scope["method"], asked, passing)
            if is_probe:
                await asyncio.wait_for(asking, PAGE_S_MAX)
            else:
                await asking
        except (UpstreamError, asyncio.TimeoutError) as error:
            if is_probe and scope["path"] == metrics_page.PATH and not passing.begun:
                self._probe.up = False  # it answers its probe and not this
                await send_page(send)
                return
            if moves and not passing.begun and not isinstance(error, InvalidAnswerError):
                self._doubt(error)
                raise UnansweredError(str(error)) from error
            await self._broke(error, passing, _id_of(scope))
        finally:
            self._unbegun.discard(passing)
            if own is not None:
                own.close()

    async def _ask(self, method: str, asked: Asked, passing: Passing) -> None:
        target, headers, body = asked
        connection = self._pool.take() or await self._connected(passing)
        if connection is None:
            return
        lines = [b"%b: %b\r\n" % pair for pair in headers]
        if body is not None:
            lines.append(b"content-length: %d\r\n" % len(body))
        head = self._pool.head(method.encode("latin-1"), target, b"".join(lines))
        try:
            connection.ask(head, body, passing, is_head=method == "HEAD")
            await passing.all_of(connection)
        finally:
            connection.abandon(passing)

    async def _connected(self, passing: Passing) -> UpstreamConnection | None:
        """Return a new connection; None: the client has left meanwhile. Raises UpstreamError."""
        connecting = asyncio.ensure_future(self._pool.connect())
        passing.on_left = connecting.cancel
        try:
            await any_done((connecting,))
        except BaseException:
            connecting.cancel()
            connecting.add_done_callback(_close_unused)
            raise
        finally:
            passing.on_left = None
        return None if connecting.cancelled() else connecting.result()

    async def _broke(self, error: Exception, passing: Passing, request_id: str) -> None:
        """Answer for an upstream that did not, or end a stream with a reason; else raise."""
        self._doubt(error)
        if passing.is_between_events:
            event = answers.stream_error("the server behind this one broke off its answer")
            await passing.send({"type": "http.response.body", "body": event, "more_body": True})
        if passing.begun:
            reason = str(error) or type(error).__name__
            _log.warning("the upstream broke off an answer: %s", reason)
            raise error if isinstance(error, UpstreamError) else UpstreamError(reason)
        if isinstance(error, InvalidAnswerError):
            _log.warning("the upstream's answer is not valid HTTP: %s", error)
            message = f"the server behind this one gave no valid HTTP answer: {error}"
            await answers.bad_gateway(message[:500], "-").send(passing.send)
            return
        _log.warning("the upstream cannot be reached: %s", error or type(error).__name__)
        message = "the server behind this one cannot be reached"
        await answers.unavailable(message, Reason.UPSTREAM_UNREACHABLE, request_id).send(
            passing.send
        )

    def give_up(self) -> None:
        """Fail the requests that may be asked elsewhere and have no answer yet. O(those)."""
        for passing in tuple(self._unbegun):
            if not passing.begun:
                passing.failed(UpstreamError("it does not answer its probe"))

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
            self.close()

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
        await self.greet()

    async def greet(self) -> None:
        """Read its sizes, as far as it reports them."""
        try:
            page = await self._text("/metrics")
        except ScrapeError:
            page = ""
        await self._learn(page)

    async def check(self) -> bool:
        """Ask for its health, and for its models if it answers; return whether it does."""
        if not await self._probe.ask():
            return False
        self.models = await self._listed() or self.models
        return True

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
        listed = await self._listed()
        return _whole(listed[0].get("max_model_len")) if listed else 0

    async def _listed(self) -> list[Mapping[str, Any]]:
        """Return the entries of `/v1/models`; none: it does not answer, or does not say."""
        try:
            _, text = await self._pool.fetch(MODELS_PATH, SCRAPE_S_MAX)
            return [entry for entry in json.loads(text)["data"] if isinstance(entry, dict)]
        except (UpstreamError, asyncio.TimeoutError):
            return []
        except (ValueError, LookupError, TypeError, AttributeError):
            return []  # it does not say

    async def _text(self, path: str, seconds: float = SCRAPE_S_MAX) -> str:
        try:
            status, text = await self._pool.fetch(path, seconds)
        except (UpstreamError, asyncio.TimeoutError) as error:
            self._doubt(error)
            reason = str(error) or type(error).__name__
            raise ScrapeError(f"{self.url}{path}: {reason}") from None
        if status != 200:
            raise ScrapeError(f"{self.url}{path} answers {status}")
        return text

    def close(self) -> None:
        """Close the connections that no request uses."""
        self._pool.close()


def _close_unused(connecting: asyncio.Future[UpstreamConnection]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


def _target_of(scope: Scope) -> bytes:
    """Return the path and the query of a request. Raises BadRequestError."""
    path: bytes = scope.get("raw_path") or str(scope["path"]).encode()
    query = scope.get("query_string")
    target = path + b"?" + query if query else path
    if _TARGET.fullmatch(target) is None:
        # `http://other/` names another server, and a space or line would end the target.
        raise BadRequestError("the request target has to be a path that begins with /")
    return target


def _started_ns(page: str) -> int:
    started = _STARTED.search(page)
    return int(float(started[1]) * 1e9) if started else 0


def _whole(text: object) -> int:
    return int(text) if isinstance(text, str | int) and str(text).isdecimal() else 0
