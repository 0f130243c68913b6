"""Wraps a server that generates in pure ASGI: the gate.

A request for a gated endpoint is sized, admitted, run, reported and completed. Whatever way it
ends (an answer, an error, a client that leaves while queued or streaming, a cancelled task), its
lease is ended exactly once: by a plain `finally` without a single await.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from functools import partial

from schedsvc_client import ClientOptions, api_key_hash
from schedsvc_client.aio import AsyncScheduler

from schedsvc_vllm import answers, metrics_page
from schedsvc_vllm.access import Access, is_open, open_paths
from schedsvc_vllm.answers import Answer, BadRequestError, Dialect
from schedsvc_vllm.asgi import (
    App,
    BodyTooLargeError,
    ClientLeftError,
    Mailbox,
    Message,
    Receive,
    Scope,
    Send,
    header,
    path_of,
)
from schedsvc_vllm.bodies import Bodies, Body
from schedsvc_vllm.caller import Caller, Sources, peer_of, read_caller
from schedsvc_vllm.certificates import XFCC
from schedsvc_vllm.decoding import DecodingError
from schedsvc_vllm.delivery import ClientStalledError
from schedsvc_vllm.engine import EngineView
from schedsvc_vllm.engine_scope import scope_for_engine
from schedsvc_vllm.exchange import Exchange, Rules
from schedsvc_vllm.gated_request import GatedRequest
from schedsvc_vllm.http_limits import bound_server, certificates_unseen
from schedsvc_vllm.idempotency import Entry, Key, Replays
from schedsvc_vllm.identity import Identifier, check_operator
from schedsvc_vllm.log_limit import limit_lines
from schedsvc_vllm.paths import SAFE_METHODS, Place, with_path
from schedsvc_vllm.queue_comments import QueueComments
from schedsvc_vllm.refusals import Reason
from schedsvc_vllm.response_ids import ResponseIds
from schedsvc_vllm.router import UnansweredError
from schedsvc_vllm.routes import FORM_PATHS, GATED_PATHS, ROUTES
from schedsvc_vllm.runtime import Runtime, credentials_of, now_ns
from schedsvc_vllm.scheduler_keys import ASK_S_MAX, SchedulerKeys
from schedsvc_vllm.settings import Settings, SettingsError
from schedsvc_vllm.tracing import QueueSpan, Tracing, open_tracing
from schedsvc_vllm.turn import first, refusal_of, wait_for_turn

HEALTH_PATH = "/health"
_MISCONFIGURED = "the gate of this server is misconfigured"
_log = logging.getLogger("schedsvc_vllm")


class Gate:
    """Wraps an ASGI app: `vllm serve MODEL --middleware schedsvc_vllm.gate.Gate`.

    Without `settings` they are read from the environment. A setting that is wrong does not raise
    here, where some servers would swallow it: the server's start fails with it, and every gated
    request is answered with 503.
    """

    def __init__(self, app: App, settings: Settings | None = None) -> None:
        self.app = app
        self._started_ns = now_ns()
        self._settings: Settings | None = settings
        self._broken: SettingsError | None = None
        self._runtime: Runtime | None = None
        self._engine_origins: tuple[str, ...] = ()
        self._replays = Replays()
        self._tracing: Tracing | None = None
        self._bodies = Bodies(0, 0)  # without settings, none is read
        self._access: Access | None = None
        self._sources = Sources()
        self._let_through = frozenset[str]()
        limit_lines(_log)
        try:
            self._settings = settings or Settings.from_environment()
            self._identifier = Identifier(self._settings)
            limits = (self._settings.body_bytes_max, self._settings.bodies_bytes_max)
            self._bodies = Bodies(*limits)
            self._sources = Sources.of(self._settings)
            self._let_through = self._settings.open_paths
            responses = ResponseIds(self._settings.response_key)
            self._rules = Rules(self._identifier, responses)
            self._access = Access(self._identifier, responses, self._settings.operator_keys_sha256)
        except SettingsError as error:
            _log.error("the gate cannot work: %s", error)
            self._broken, self._access = error, None
        self._open_paths = open_paths(self._settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one scope."""
        kind = scope["type"]
        if kind == "lifespan":
            await self._lifespan(scope, receive, send)
        elif kind == "websocket":
            await self._websocket(scope, receive, send)
        elif is_open(scope, self._open_paths):
            await self._read(scope, receive, send)
        else:
            await self._checked(scope, receive, send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._begin(scope)
        access = None if self._refuses_ungated else self._access
        if access is None or not await access.takes_websocket(self._caller(scope), scope):
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "not gated"})
            return
        await self.app(scope, receive, send)

    def _read(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass a request to the app, and add the gate's knowledge to its page, or to its health.

        The caller must await the result: no coroutine of its own.
        """
        path, runtime = path_of(scope), self._runtime
        if runtime is not None and path == metrics_page.PATH:
            scope, send = (
                metrics_page.plain_scope(scope),
                metrics_page.adding(runtime.counts, send),
            )
        if runtime is not None and path == HEALTH_PATH:
            refused = runtime.session.pool_refused
            if refused is not None:  # no router may send requests here
                answer = answers.unavailable(refusal_of(refused), Reason.POOL_REFUSED, "-")
                return self._say(answer, scope, send)
        return self.app(scope, receive, send)

    # One request.

    def _caller(self, scope: Scope) -> Caller:
        return read_caller(scope["headers"], peer_of(scope, self._sources), self._sources)

    @property
    def _refuses_ungated(self) -> bool:
        return self._settings is None or self._settings.refuse_ungated

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that needs a credential, or may cost the engine something."""
        if self._runtime is None:
            self._begin(scope)
        exchange = Exchange()
        place = exchange.head(scope, self._sources, self._let_through)
        caller = exchange.caller
        if place is None:
            told = str(scope["path"])[:200]
            error = BadRequestError(f"the path {told!r} contains characters that no endpoint uses")
            await self._refuse(error, caller, scope, send)
            return
        if not place.as_written:
            scope = with_path(scope, place.path)
        if scope["method"] in SAFE_METHODS and place.path in GATED_PATHS:
            error = BadRequestError(f"{place.path}: the method must be POST", status=405)
            await self._refuse(error, caller, scope, send)
        elif not place.gated:
            await self._ungated(place, caller, scope, receive, send)
        else:
            body = self._bodies.open(caller.network)
            try:
                await self._gated(body, exchange, scope, receive, send)
            finally:
                body.release()

    async def _ungated(
        self, place: Place, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            if not place.known and not place.operators and self._refuses_ungated:
                raise BadRequestError(
                    f"{place.path} is not served here: this server's admission gate does not cover"
                    " it (its operator can open it with SCHEDSVC_UNGATED)",
                    status=501,
                    code="not_gated",
                )
            if self._access is None:
                if place.operators:
                    check_operator(caller, place.path, frozenset())
                raise BadRequestError(_MISCONFIGURED, status=503, code=Reason.GATE_MISCONFIGURED)
            await self._access.check(caller, place)
        except BadRequestError as error:
            await self._refuse(error, caller, scope, send)
            return
        await self._read(scope, receive, send)

    async def _gated(
        self, held: Body, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        runtime, caller = self._runtime, exchange.caller
        if runtime is None or self._settings is None:
            answer = answers.unavailable(_MISCONFIGURED, Reason.GATE_MISCONFIGURED, "-")
            await self._say(answer, scope, send)
            return
        entry = None
        try:
            raw, read_s = await self._take_in(runtime, held, exchange, scope, receive)
            # Unidentified callers share one empty name: one must not read another's answer.
            if caller.idempotency_key and self._settings.joins_retries:
                entry = self._entry(exchange, raw)
        except ClientLeftError:
            return
        except RecursionError:
            error = BadRequestError("the body is nested too deeply")
            await self._refuse(error, caller, scope, send)
            return
        except BodyTooLargeError:
            most = self._settings.body_bytes_max
            error = BadRequestError(f"the body has more than {most} bytes", status=413)
            await self._refuse(error, caller, scope, send)
            return
        except BadRequestError as error:
            await self._refuse(error, caller, scope, send)
            return
        if entry is None:
            await self._run(runtime, exchange, read_s, scope, receive, send)
            return
        run = partial(self._run, runtime, exchange, read_s, scope)
        if exchange.call.stream:
            await self._replays.stream(entry[0], run, receive, send)
        else:
            await self._replays.join(*entry, run, receive, send)

    def _entry(self, exchange: Exchange, raw: bytes) -> tuple[Key, Entry] | None:
        """Return the entry of a request that may be a retry; None: it runs by itself."""
        tenant, path = exchange.identity.key, exchange.place.path if exchange.place else ""
        if not tenant:
            return None
        key, is_stream = exchange.caller.idempotency_key, exchange.call.stream
        return self._replays.entry(key, tenant, path, raw, is_stream=is_stream)

    async def _take_in(
        self, runtime: Runtime, held: Body, exchange: Exchange, scope: Scope, receive: Receive
    ) -> tuple[bytes, float]:
        """Prove the caller, and read and size the body; return it, and when it was there.

        Raises BadRequestError, BodyTooLargeError, ClientLeftError, RecursionError.
        """
        caller, identifier = exchange.caller, self._identifier
        proved = await identifier.prove(caller) if identifier.asks_for_proof else None
        encoding = header(scope, b"content-encoding")
        if encoding not in (b"", b"identity"):
            raise BadRequestError(
                f"content-encoding: {encoding[:40].decode('latin-1')!r} is not taken; send the body"
                " as it is",
                status=415,
            )
        known = proved or identifier.trusted(caller)
        held.caller = identifier.listed_key(caller, proved) or known.key or held.caller
        raw = await held.read(scope, receive)
        read_s = time.monotonic()
        is_form = exchange.place is not None and exchange.place.path in FORM_PATHS
        kind = header(scope, b"content-type") if is_form else b""
        exchange.body(self._rules, runtime, proved, raw, kind)
        return raw, read_s

    async def _run(
        self, runtime: Runtime, exchange: Exchange, read_s: float, scope: Scope,
        receive: Receive, send: Send,
    ) -> None:  # fmt: skip
        """Wait for its turn and run it; repeat once if another engine has come meanwhile."""
        scope.setdefault("state", {})
        span: QueueSpan | None = None
        traceparent = b""
        if self._tracing is not None:
            scope, traceparent, span = self._tracing.begin(scope, read_s)
        told, comments = self._settings, None
        if told is not None and told.queue_comments_s and exchange.call.stream:
            comments = QueueComments(send, told.queue_comments_s, exchange.id)
            send = comments.send
        mailbox = Mailbox(receive, exchange.call.body)
        gated = GatedRequest(runtime, exchange, mailbox, send)
        gated.read_s = read_s
        if span is not None:
            gated.traceparent, gated.span = traceparent, span
            span.attributes.update(exchange.span_attributes())
        elif traceparent:
            gated.traceparent = traceparent
        try:
            while await self._run_once(runtime, exchange, gated, scope, send):
                mailbox.play_again()
                gated = gated.again()
        finally:
            mailbox.close()
            if span is not None and self._tracing is not None:
                self._tracing.end(span)
            if comments is not None:
                await comments.stop()

    async def _run_once(
        self, runtime: Runtime, exchange: Exchange, gated: GatedRequest, scope: Scope, send: Send
    ) -> bool:
        """Run it, and close its books on every way out; whether it has to be run again."""
        started_s = time.monotonic()
        try:
            refusal = await wait_for_turn(runtime, exchange, gated)
            if refusal is not None:
                if gated.span is not None:
                    gated.span.waited(refusal.status, refusal.headers)
                await self._say(refusal, scope, send)
                return False
            if runtime.offers.routes is not None and not gated.find_way(runtime.offers.routes):
                return self._moves(exchange, started_s)
            offer = gated.offer
            if offer is not None and offer.engine.in_doubt:
                await first(offer.look(), gated.mailbox)
            # Once: whatever is wrong with the pool, a request is not repeated for ever.
            if gated.is_stale and not gated.asked_again:
                return True
            priority = gated.engine_priority if runtime.sets_priority else None
            inner = scope_for_engine(scope, exchange.call, gated, priority)
            exchange.was_sent = True
            await self.app(inner, gated.mailbox, gated.send)
            while exchange.asks_less():
                gated.mailbox.play_again(exchange.call.body)
                inner = scope_for_engine(scope, exchange.call, gated, priority)
                await self.app(inner, gated.mailbox, gated.send)
            gated.finish(scope)
            if gated.delivery is not None:
                await gated.delivery.finish()
        except UnansweredError:
            gated.failed()
            return self._moves(exchange, started_s)
        except ClientLeftError:
            pass  # no client is left to answer
        except ClientStalledError:
            _log.warning("a client that reads nothing is disconnected: %s", exchange.id)
        except DecodingError as error:
            _log.warning("the engine's answer to %s cannot be decoded: %s", exchange.id, error)
            if not exchange.has_begun:
                gated.finish(scope)
                message = f"the server behind this one gave an answer that is damaged: {error}"
                await self._say(answers.bad_gateway(message, exchange.id), scope, send)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # The server may have cancelled the task, too.
            if not gated.revoked or task is None or task.uncancel():
                raise
            if gated.is_stale and not exchange.has_begun:
                return True  # its lease went with that engine, its client has not seen any of it
            if not exchange.has_begun:
                message = "the scheduler has ended this request"
                answer = answers.unavailable(message, Reason.LEASE_REVOKED, exchange.id)
                gated.finish(scope)
                await self._say(answer, scope, send)
        except Exception:
            exchange.broke = True
            await gated.send_held()  # then the client's connection breaks as the answer did
            raise
        finally:
            gated.finish(scope)
        return False

    @staticmethod
    def _moves(exchange: Exchange, started_s: float) -> bool:
        """Have it ask for another upstream: its limits go on counting from its arrival."""
        exchange.terms = exchange.terms.after(time.monotonic() - started_s)
        return True

    async def _refuse(
        self, error: BadRequestError, caller: Caller, scope: Scope, send: Send
    ) -> None:
        request_id = self._identifier.request_ids(caller)[0] if self._broken is None else "-"
        if error.status == 503:
            reason = Reason(error.code or Reason.KEYS_UNAVAILABLE)
            answer = answers.unavailable(error.message, reason, request_id)
        else:
            answer = answers.bad_request(error, request_id)
        await self._say(answer, scope, send)

    async def _say(self, answer: Answer, scope: Scope, send: Send) -> None:
        """Send an answer of its own, in its endpoint's form, and so that a browser shows it."""
        spoken = answer.spoken(_dialect(path_of(scope)))
        origins = self._settings.cors_origins if self._settings is not None else ()
        allowed = origins or self._engine_origins
        await spoken.readable_by(header(scope, b"origin"), allowed).send(send)

    # The server's start and end.

    def _begin(self, scope: Scope) -> None:
        if self._broken is None and self._runtime is None:
            self._start(scope)

    def _start(self, scope: Scope) -> None:
        """Connect, once. A failure is remembered: nothing is ever let through ungated."""
        if self._runtime is not None or self._settings is None or self._access is None:
            return
        engine = EngineView(scope, self.app)
        try:
            self._tracing = open_tracing(self._settings)
            self._runtime = Runtime(self._settings, engine, self._started_ns)
        except SettingsError as error:
            self._broken, self._access = error, None
            _log.error("the gate cannot work: %s", error)
            return
        self._engine_origins = engine.allowed_origins
        keys = {api_key_hash(key) for key in engine.api_keys}
        self._identifier.api_keys_sha256 |= keys
        if self._access.operator_keys_sha256 & keys:
            _log.error(
                "SCHEDSVC_OPERATOR_KEYS_FILE: holds a key of --api-key, with which tenants call;"
                " it opens nothing"
            )
            self._access.operator_keys_sha256 -= keys
        if self._settings.asks_for_keys:
            self._identifier.keys = SchedulerKeys(
                AsyncScheduler(
                    self._settings.target,
                    credentials=credentials_of(self._settings),
                    token=self._settings.token,
                    options=ClientOptions(call_deadline_s=ASK_S_MAX),
                    fence=self._runtime.fence,
                ),
                path=self._settings.known_keys_file,
            )
        self._identifier.start()
        _log.info("tenants: by %s", ", else by ".join(self._identifier.sources) or "nothing")
        self._runtime.counts.key_set = self._identifier.key_set
        if self._settings.tenant_headers and not self._settings.header_set_by:
            _log.warning(
                "SCHEDSVC_TENANT_HEADERS: any client that reaches this server can set %s; make a"
                " proxy overwrite it, and name that proxy in SCHEDSVC_HEADER_SET_BY",
                ", ".join(self._settings.tenant_headers),
            )

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_runtime(message: Message) -> None:
            kind = message["type"]
            if kind == "lifespan.startup.complete" and self._broken is None:
                bound_server(scope)
                self._broken = self._unseen(scope)
            if kind == "lifespan.startup.complete" and self._broken is None:
                self._start(scope)
            if kind == "lifespan.startup.complete" and self._broken is not None:
                text = f"schedsvc gate: {self._broken}"
                message = {"type": "lifespan.startup.failed", "message": text}
            elif kind.startswith("lifespan.shutdown."):
                await self._close()
            await send(message)

        try:
            await self.app(scope, receive, with_runtime)
        finally:
            await self._close()

    def _unseen(self, scope: Scope) -> SettingsError | None:
        """Return what is wrong where certificates are to name tenants, and none can be seen."""
        given = self._settings.certificates if self._settings is not None else None
        problem = certificates_unseen(scope, self.app) if given and not given.set_by else ""
        if not problem:
            return None
        return SettingsError(
            f"SCHEDSVC_CERTIFICATE_TENANTS: {problem}; or name the proxy that ends TLS and"
            f" overwrites {XFCC} in SCHEDSVC_XFCC_SET_BY"
        )

    async def _close(self) -> None:
        self._replays.close()
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await self._identifier.close()
            await runtime.close()
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            await tracing.close()


def _dialect(path: str) -> Dialect:
    route = ROUTES.get(path)
    return route.dialect if route is not None else Dialect.OPENAI
