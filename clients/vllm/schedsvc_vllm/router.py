"""Chooses among several servers behind the proxy: a table of upstreams, their models and health.

Each upstream is a pool. A request names the pools of its model, the scheduler's grant names one of
them, and the request goes there: fairness and placement are the scheduler's. The table only leaves
out upstreams that do not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from schedsvc_vllm import answers, metrics_page
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import App, Receive, Scope, Send, path_of
from schedsvc_vllm.paths import READ_METHODS
from schedsvc_vllm.refusals import Reason
from schedsvc_vllm.scrape import ScrapeError, within
from schedsvc_vllm.upstream_list import Named, UpstreamList
from schedsvc_vllm.upstream_probe import HEALTH_PATH, probes, send_page

#: The key of a scope that holds a request's `Way`.
WAY = "schedsvc.way"
MODELS_PATH = "/v1/models"
_ONE_MODEL = f"{MODELS_PATH}/"
#: Each upstream is asked for its health and its models this often, and the file is read again.
PERIOD_S = 2.0
_MODEL_CHARS_MAX = 200
_log = logging.getLogger("schedsvc_vllm")


class UnansweredError(Exception):
    """Reports that an upstream failed before its answer began; another one may be asked."""


class Server(Protocol):
    """Declares one upstream, which is an ASGI app: the proxy's."""

    state: Any
    #: The models that it lists, each as OpenAI's API writes it.
    models: list[Mapping[str, Any]]

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        """Forward one request."""

    async def greet(self) -> None:
        """Read its sizes. Raises ScrapeError if it does not answer."""

    async def check(self) -> bool:
        """Ask for its health, and for its models if it answers; return whether it does."""

    def give_up(self) -> None:
        """Fail the requests that may be asked elsewhere and have no answer yet."""

    def close(self) -> None:
        """Close the connections that no request uses."""


class Member:
    """Holds one upstream of the table."""

    def __init__(self, named: Named, server: Server) -> None:
        self.named = named
        self.server = server
        #: Its pool is offered to the scheduler: its sizes are known.
        self.is_offered = self.is_greeted = False
        #: It does not answer, so requests go elsewhere if they can.
        self.is_out = False
        #: Why its pool cannot be offered; "": nothing is known of that.
        self.problem = ""
        #: Requests that this process has sent there.
        self.running = 0
        #: Requests that it did not answer, and that were asked for again elsewhere.
        self.moved = 0
        self.tried = asyncio.Event()
        #: Set by a request that it did not answer: it is probed at once.
        self.in_doubt = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        #: The models that it serves, as configured or as it says.
        self.models = frozenset(named.models)

    def read_models(self) -> bool:
        """Take the models that it lists now; return whether they have changed."""
        told = self.named.models or (str(entry.get("id", "")) for entry in self.server.models)
        before, self.models = self.models, frozenset(told)
        return self.models != before

    def entries(self) -> list[Mapping[str, Any]]:
        """Return its part of the list of models."""
        if not self.named.models:
            return self.server.models
        told = {str(entry.get("id", "")): entry for entry in self.server.models}
        other = {"object": "model", "created": 0, "owned_by": self.named.name}
        return [told.get(model, {"id": model, **other}) for model in self.named.models]


class Way(NamedTuple):
    """Says where a request goes. `member` None: that upstream is none any more.

    `moves`: another one may be asked if it fails before the answer begins.
    """

    pool: str
    member: Member | None
    moves: bool


class Routes:
    """Holds the upstreams by the names of their pools."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        # The pools of models that were asked for, until an upstream or its models change.
        self._pools: dict[str, tuple[str, ...]] = {}
        self._offer: Callable[[str, App], str] | None = None
        self._withdraw: Callable[[str], None] | None = None

    def open(self, offer: Callable[[str, App], str], withdraw: Callable[[str], None]) -> None:
        """Offer the pools of all upstreams that are known, and of those that come later.

        `offer` returns what is wrong with an upstream, "": nothing.
        """
        self._offer, self._withdraw = offer, withdraw
        for member in self.members.values():
            self.offer(member)

    def close(self) -> None:
        """Offer no further upstream."""
        self._offer = self._withdraw = None

    def offer(self, member: Member) -> None:
        """Offer an upstream's pool once its sizes are known."""
        if self._offer is None or member.is_offered or not member.is_greeted:
            return
        problem = self._offer(member.named.name, member.server)
        member.is_offered = not problem
        self.changed()
        if problem and problem != member.problem:
            _log.error("upstream %s gets no requests: %s", member.named.name, problem)
        member.problem = problem

    def take_out(self, member: Member) -> None:
        """Forget an upstream; what runs there goes on."""
        member.is_out = True
        if self.members.get(member.named.name) is member:
            del self.members[member.named.name]
        if member.is_offered and self._withdraw is not None:
            self._withdraw(member.named.name)
        self.changed()

    def changed(self) -> None:
        """Take note that other upstreams may serve a model now."""
        self._pools.clear()

    def member(self, pool: str) -> Member | None:
        """Return the upstream of a pool."""
        return self.members.get(pool)

    def pools_for(self, model: object) -> tuple[str, ...]:
        """Return the pools that serve a model; None: the only one here. O(1), amortised.

        Raises BadRequestError: none serves it.
        """
        if model is None:
            return tuple(member.named.name for member in self._alike())
        if isinstance(model, str) and (known := self._pools.get(model)) is not None:
            return known
        pools = tuple(
            name
            for name, member in self.members.items()
            if member.is_offered and isinstance(model, str) and model in member.models
        )
        if not pools:
            told = str(model)[:_MODEL_CHARS_MAX]
            raise BadRequestError(
                f"the model {told!r} does not exist here", "model",
                status=404, code="model_not_found",
            )  # fmt: skip
        self._pools[str(model)] = pools
        return pools

    def usable(self, pools: tuple[str, ...], left: frozenset[str]) -> tuple[str, ...]:
        """Return those pools whose upstreams answer, without those it has left.

        Those that do not answer, too, if no other is left: the request then fails there. O(pools).
        """
        members = self.members
        found = [
            pool for pool in pools if (each := members.get(pool)) is not None and not each.is_out
        ]
        if len(found) == len(pools) and not left:
            return pools
        return tuple(pool for pool in found if pool not in left) or tuple(found) or pools

    def least(self, pools: tuple[str, ...]) -> str:
        """Return the pool where this process runs the least, for requests without a grant."""
        running = {pool: each.running for pool, each in self.members.items()}
        return min(pools, key=lambda pool: running.get(pool, 0))

    def listed(self) -> list[Mapping[str, Any]]:
        """Return the models of all upstreams; the first one that lists a model describes it."""
        merged: dict[str, Mapping[str, Any]] = {}
        for member in self.members.values():
            if member.is_offered:
                for entry in member.entries():
                    merged.setdefault(str(entry.get("id", "")), entry)
        return list(merged.values())

    def first_up(self, members: Iterable[Member]) -> Member | None:
        """Return the first upstream that answers, or any."""
        found = [member for member in members if member.is_offered]
        return next((each for each in found if not each.is_out), found[0] if found else None)

    def _alike(self) -> list[Member]:
        """Return all upstreams, if they serve the same models. Raises BadRequestError."""
        members = [member for member in self.members.values() if member.is_offered]
        if not members or any(each.models != members[0].models for each in members):
            raise BadRequestError(
                "model: is required here, because the servers behind this one serve different ones",
                "model",
            )
        return members


class Router:
    """Is the ASGI app behind the gate: sends each request to the upstream of its grant.

    `make` makes an upstream of its URL. `wait_s`: how long its start waits for the first upstream.
    """

    def __init__(
        self, listed: UpstreamList, make: Callable[[str], Server], *, wait_s: float = 600.0
    ) -> None:
        self.routes = Routes()
        self.state = _State(self.routes)
        #: Whether the server has to stop; it does not check that itself while it starts.
        self.stopping: Callable[[], bool] = lambda: False
        self._listed, self._make, self._wait_s = listed, make, wait_s
        self._reading: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one scope."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        way: Way | None = scope.get(WAY)
        if way is not None:
            await self._send_to(way.member, scope, receive, send)
        elif scope["type"] == "http" and probes(scope):
            await self._answer_probe(scope, receive, send)
        else:
            await self._ungated(scope, receive, send)

    async def _send_to(
        self, member: Member | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if member is None:
            message = "no server behind this one can be reached"
            await answers.unavailable(message, Reason.UPSTREAM_UNREACHABLE, "-").send(send)
            return
        member.running += 1
        try:
            await member.server(scope, receive, send)
        except UnansweredError:
            member.moved += 1
            member.in_doubt.set()  # one request alone takes no upstream away from all others
            raise
        finally:
            member.running -= 1

    async def _ungated(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve what costs no engine anything. One upstream stands for all that serve the same."""
        path = path_of(scope)
        if path == MODELS_PATH and scope["method"] in READ_METHODS:
            await _send_json({"object": "list", "data": self.routes.listed()}, scope, send)
            return
        named = path.removeprefix(_ONE_MODEL) if path.startswith(_ONE_MODEL) else None
        try:
            pools = self.routes.pools_for(named)
        except BadRequestError as error:
            told = error
            if named is None:
                message = f"{path}: the servers behind this one serve different models"
                told = BadRequestError(message, status=501, code="not_routed")
            await answers.bad_request(told, "-").send(send)
            return
        member = self.routes.first_up(self.routes.members[pool] for pool in pools)
        await self._send_to(member, scope, receive, send)

    async def _answer_probe(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer for all upstreams: up while one of them is. Their own metrics are not merged."""
        member = self.routes.first_up(self.routes.members.values())
        if scope["path"] == metrics_page.PATH:
            await send_page(send, upstreams_page(self.routes.members.values()))
        elif member is None or member.is_out:
            message = "no server behind this one answers its probe"
            await answers.unavailable(message, Reason.UPSTREAM_UNREACHABLE, "-").send(send)
        elif scope["path"] == HEALTH_PATH and scope["method"] != "OPTIONS":
            await send_page(send)
        else:
            await self._send_to(member, scope, receive, send)

    # The upstreams' health.

    def _fail(self, member: Member, why: str) -> None:
        """Send no more requests to an upstream until it answers its probe."""
        if not member.is_out:
            _log.warning("upstream %s is out: %s", member.named.name, why)
        member.is_out = True
        member.server.give_up()

    async def _watch(self, member: Member) -> None:
        """Probe an upstream, and learn its sizes as soon as it answers."""
        while True:
            try:
                await self._look(member)
            except Exception:  # of any kind: the next look may succeed
                _log.exception("upstream %s cannot be looked at", member.named.name)
            member.tried.set()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(member.in_doubt.wait(), PERIOD_S)
            member.in_doubt.clear()

    async def _look(self, member: Member) -> None:
        if not await member.server.check():
            self._fail(member, "it does not answer its probe")
            return
        if not member.is_greeted:
            try:
                await member.server.greet()
            except ScrapeError as error:
                self._fail(member, str(error))
                return
            member.is_greeted = True
            if not member.server.models and not member.named.models:
                _log.warning("upstream %s lists no model; state `models`", member.named.name)
        if member.read_models():
            self.routes.changed()
        self.routes.offer(member)
        if member.is_out:
            _log.warning("upstream %s is back", member.named.name)
        member.is_out = False

    # The list of upstreams.

    def _compare(self, listed: Iterable[Named]) -> None:
        """Take upstreams that are new in the list, and drop those that left it."""
        wanted = {named.name: named for named in listed}
        for name, member in list(self.routes.members.items()):
            if wanted.get(name) != member.named:
                _log.info("upstream %s leaves; what runs there ends", name)
                if member.task is not None:
                    member.task.cancel()
                self.routes.take_out(member)
        for name, named in wanted.items():
            if name not in self.routes.members:
                member = Member(named, self._make(named.url))
                self.routes.members[name] = member
                member.task = asyncio.ensure_future(self._watch(member))

    async def _read_again(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                listed = self._listed.changed()
                if listed is not None:
                    self._compare(listed)
            except Exception:  # of any kind: the file may be mended
                _log.exception("the file of upstreams cannot be taken over")

    # The start, and the end.

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            self._compare(self._listed.first)
            problem = await self._wait()
            if problem:
                await send({"type": "lifespan.startup.failed", "message": problem})
                return
            self._reading = asyncio.ensure_future(self._read_again())
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        finally:
            self._close()

    async def _wait(self) -> str:
        """Wait until each upstream was tried, and one has answered; return what is wrong."""
        deadline_s = time.monotonic() + self._wait_s
        members = list(self.routes.members.values())
        for member in members:
            await member.tried.wait()
        while not any(member.is_greeted for member in members):
            if time.monotonic() > deadline_s:
                return f"--upstream: after {self._wait_s:g} s still none of the upstreams answers"
            if self.stopping():
                return "stopped while waiting: none of the upstreams answers"
            _log.info("waiting for the upstreams: none answers")
            await asyncio.sleep(min(PERIOD_S, 1.0))
        return ""

    def _close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        for member in self.routes.members.values():
            if member.task is not None:
                member.task.cancel()
            member.server.close()


class _State(SimpleNamespace):
    """Shows the gate what it asks of the app behind it."""

    def __init__(self, routes: Routes) -> None:
        super().__init__(routes=routes, upstream_up=self._is_up)

    @property
    def upstream_is_vllm(self) -> bool:
        """Return whether all upstreams are vLLM."""
        members = self.routes.members.values()
        return all(getattr(each.server.state, "upstream_is_vllm", False) for each in members)

    def _is_up(self) -> bool:
        member = self.routes.first_up(self.routes.members.values())
        return member is not None and not member.is_out


def upstreams_page(members: Iterable[Member]) -> bytes:
    """Write what this process knows of each upstream, as Prometheus reads it."""
    rows: list[tuple[str, str, str, Callable[[Member], int]]] = [
        ("up", "gauge", "1 while the upstream answers.", lambda each: int(not each.is_out)),
        ("running", "gauge", "Requests at the upstream.", lambda each: each.running),
        (
            "moved_total",
            "counter",
            "Requests that it did not answer, and that were asked for again elsewhere.",
            lambda each: each.moved,
        ),
    ]
    told = list(members)
    lines = []
    for name, kind, meaning, value in rows:
        full = f"schedsvc_router_{name}"
        lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}"]
        for each in told:
            label = metrics_page.escaped(each.named.name)
            lines.append(f'{full}{{upstream="{label}"}} {value(each)}')
    return "".join(f"{line}\n" for line in lines).encode()


async def _send_json(told: object, scope: Scope, send: Send) -> None:
    body = json.dumps(told, separators=(",", ":")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    sent = b"" if scope["method"] == "HEAD" else body
    await send({"type": "http.response.body", "body": sent, "more_body": False})
