"""Runs a scheduler inside the process, for unit tests of code that asks one.

It answers as the test scripts it, and keeps what it was sent. It has no queue, no limits and no
fairness.
"""

from __future__ import annotations

import asyncio
import difflib
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from schedsvc_client.fake_books import (
    Answer,
    Book,
    Decide,
    Delayed,
    Failure,
    LeaseStates,
    Verdict,
    checked,
    grant,
    refusal,
)
from schedsvc_client.loop_thread import LoopThread
from schedsvc_client.v1 import explain_pb2, identity_pb2, leader_pb2, pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

__all__ = ["Book", "Delayed", "Failure", "FakeScheduler", "Verdict", "grant", "refusal"]

_UNARY: dict[str, Any] = {
    "Admit": pb.AdmitRequest,
    "Progress": pb.ProgressRequest,
    "Complete": pb.CompleteRequest,
    "Stats": pb.StatsRequest,
}


class FakeScheduler:
    """Grants what no script and no `decide` of the test answers otherwise.

    `async with` it in tests with an event loop; `with` it in others, where it runs in a thread.
    """

    def __init__(
        self, target: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None
    ) -> None:
        self.target = target
        self.credentials = credentials
        self.decide: Decide = lambda request: self.granted()
        self.token: str | None = None
        # Tenants by the SHA-256 of their keys.
        self.owners: dict[bytes, str] = {}
        # Under which it leads, in its Welcomes and the answers to Admit, Progress and Complete.
        self.leadership: leader_pb2.Leadership | None = None
        # The target that it names to every caller, as a scheduler that does not lead.
        self.leader: str | None = None
        # The value of `schedsvc-term` of each call; "" without one.
        self.terms: list[str] = []
        self.beats = False
        self.incarnation = 1
        self.lease_ttl_ms = 10_000
        self.open_requests_max = 1_000
        # Sent with the Welcome.
        self.prefix_use: pool_pb2.PrefixUse | None = None
        self.next_lease = 1
        self.admits: list[pb.AdmitRequest] = []
        self.answers: dict[str, pb.AdmitResponse] = {}
        self.books: dict[int, Book] = {}
        self.held: dict[str, Answer] = {}
        self.cancelled: list[str] = []
        self.hellos: list[pb.SessionHello] = []
        self.pools: list[pool_pb2.PoolRegistration] = []
        self.telemetry: list[pool_pb2.EngineTelemetry] = []
        self.replays: list[pb.LeaseReplay] = []
        self.goodbyes = 0
        self.messages: list[bytes] = []
        self.faults: list[pb.SessionFault] = []
        # It is each pool's, or that of the one named.
        self.pool_fault: pb.SessionFault | None = None
        self.faulty_pool = ""
        self.statuses = LeaseStates()
        self.swallow_acks = False
        # Calls of Stats that fail after they were done.
        self.stats_errors = 0
        self.complete_errors: list[tuple[grpc.StatusCode, str]] = []
        self.streams: list[_Stream] = []
        self._script: deque[Verdict] = deque()
        self._server: grpc.aio.Server | None = None
        self._thread: LoopThread[FakeScheduler] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        # The thread is the last one that it makes of its own.
        if hasattr(self, "_thread") and not hasattr(self, name):
            near = difflib.get_close_matches(name, dir(self), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}" if near else ""
            raise AttributeError(f"FakeScheduler has no {name}{hint}")
        super().__setattr__(name, value)

    # Running it.

    async def __aenter__(self) -> FakeScheduler:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    def __enter__(self) -> FakeScheduler:
        self._thread = LoopThread(lambda: self)
        self._thread.run(FakeScheduler.start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        self._thread.close(FakeScheduler.stop)

    async def start(self) -> None:
        """Listen at the target, whose port is kept over `stop()` and `start()`."""
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.max_receive_message_length", 65_536),
            )
        )
        unary = {
            name: grpc.unary_unary_rpc_method_handler(
                getattr(self, f"_on_{name.lower()}"),
                request_deserializer=request.FromString,
                response_serializer=lambda response: response.SerializeToString(),
            )
            for name, request in _UNARY.items()
        }
        # Messages are kept as they came, to look at their sizes.
        stream = grpc.stream_stream_rpc_method_handler(
            self._session, response_serializer=pb.SessionResponse.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler(
            "schedsvc.v1.SchedulerService", {**unary, "Session": stream}
        )
        who_is = grpc.unary_unary_rpc_method_handler(
            self._who_is,
            request_deserializer=identity_pb2.WhoIsRequest.FromString,
            response_serializer=identity_pb2.WhoIsResponse.SerializeToString,
        )
        explain = grpc.unary_unary_rpc_method_handler(
            self._explain,
            request_deserializer=explain_pb2.ExplainRequest.FromString,
            response_serializer=explain_pb2.ExplainResponse.SerializeToString,
        )
        others = {"IdentityService": {"WhoIs": who_is}, "ExplainService": {"Explain": explain}}
        handlers = [
            grpc.method_handlers_generic_handler(f"schedsvc.v1.{name}", methods)
            for name, methods in others.items()
        ]
        server.add_generic_rpc_handlers((handler, *handlers))
        if self.credentials is not None:
            port = server.add_secure_port(self.target, self.credentials)
        else:
            port = server.add_insecure_port(self.target)
        if self.target.endswith(":0"):
            self.target = f"{self.target[:-2]}:{port}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Break all calls, and listen no more."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def restart(self, *, downtime_s: float = 0.0) -> None:
        """Lose everything but the books, and restart as another incarnation."""
        await self.stop()
        self.incarnation += 1
        self.answers.clear()
        self.held.clear()
        await asyncio.sleep(downtime_s)
        await self.start()

    def hang_up(self) -> None:
        """Break every stream."""
        for stream in list(self.streams):
            stream.broken.set()

    # Verdicts and books.

    def script(self, *verdicts: Verdict) -> None:
        """Answer the next Admits so, one after the other. Raises TypeError for no verdict."""
        self._script.extend([checked(verdict) for verdict in verdicts])

    @property
    def live(self) -> set[int]:
        """The leases that have not ended."""
        return {lease_id for lease_id, book in self.books.items() if not book.completes}

    def granted(self) -> pb.AdmitResponse:
        """Make a grant of the next lease."""
        self.next_lease += 1
        epoch = self.pools[-1].epoch if self.pools else 1
        return grant(self.next_lease - 1, epoch=epoch, ttl_ms=self.lease_ttl_ms)

    def release(self, request_id: str, verdict: pb.AdmitResponse | Failure | None = None) -> None:
        """Answer an Admit that waits; None: with a grant. Raises KeyError if it does not wait."""
        checked(verdict)
        if request_id not in self.held:
            raise KeyError(f"no Admit of {request_id} waits; {list(self.held)} do")
        settle = self.held.pop(request_id)
        if self._thread is None:
            settle(verdict or self.granted())
        else:
            self._thread.soon(lambda: settle(verdict or self.granted()))

    def _judge(self, request: pb.AdmitRequest, answer: Answer) -> None:
        self.admits.append(request)
        stored = self.answers.get(request.request_id)
        if stored is not None:
            answer(stored)
            return

        def settle(response: pb.AdmitResponse | Failure) -> None:
            if isinstance(response, pb.AdmitResponse) and response.outcome == pb.OUTCOME_GRANTED:
                self.answers[request.request_id] = response
                book = Book(request.request_id, request.tenant)
                self.books[response.grant.lease_id] = book
            answer(response)

        verdict = self._script.popleft() if self._script else self._decided(request)
        if isinstance(verdict, pb.AdmitResponse | Failure):
            settle(verdict)
            return
        self.held[request.request_id] = settle
        if verdict is not None:

            def settle_late() -> None:
                if self.held.pop(request.request_id, None) is not None:
                    settle(verdict.verdict)

            asyncio.get_running_loop().call_later(verdict.seconds, settle_late)

    def _decided(self, request: pb.AdmitRequest) -> Verdict:
        try:
            return checked(self.decide(request))
        except Exception as error:
            text = f"FakeScheduler.decide: {type(error).__name__}: {error}"
            return Failure(grpc.StatusCode.INTERNAL, text)

    def _cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        settle = self.held.pop(request_id, None)
        if settle is not None:
            settle(pb.AdmitResponse(outcome=pb.OUTCOME_EVICTED_CANCELLED))

    # Unary.

    async def _authenticate(self, context: Any) -> None:
        metadata = dict(context.invocation_metadata() or ())
        self.terms.append(metadata.get("schedsvc-term", ""))
        if self.leader is not None:
            context.set_trailing_metadata((("schedsvc-leader", self.leader),))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "another scheduler leads")
        given = metadata.get("authorization")
        if self.token is not None and given != f"Bearer {self.token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the bearer token is wrong")

    async def _on_admit(self, request: pb.AdmitRequest, context: Any) -> pb.AdmitResponse:
        await self._authenticate(context)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[pb.AdmitResponse | Failure] = loop.create_future()
        self._judge(request, lambda r: None if future.done() else future.set_result(r))
        try:
            verdict = await future
            if isinstance(verdict, Failure):
                await context.abort(*verdict)
                raise AssertionError("abort() raises")
            response = pb.AdmitResponse.FromString(verdict.SerializeToString())
            response.MergeFrom(pb.AdmitResponse(leadership=self.leadership))
            return response
        except asyncio.CancelledError:
            self._cancel(request.request_id)
            raise

    async def _on_progress(self, request: pb.ProgressRequest, context: Any) -> pb.ProgressResponse:
        await self._authenticate(context)
        leases = [self._progress(report) for report in request.leases]
        return pb.ProgressResponse(leases=leases, leadership=self.leadership)

    def _progress(self, report: pb.LeaseProgress) -> pb.LeaseStatus:
        book = self.books.get(report.lease_id)
        if book is None:
            return pb.LeaseStatus(lease_id=report.lease_id, state=pb.LEASE_STATE_UNKNOWN)
        book.progress.append(report)
        state = self.statuses.get(report.lease_id, pb.LEASE_STATE_LIVE)
        return pb.LeaseStatus(lease_id=report.lease_id, state=state)

    async def _on_complete(self, request: pb.CompleteRequest, context: Any) -> pb.CompleteResponse:
        await self._authenticate(context)
        if self.complete_errors:
            await context.abort(*self.complete_errors.pop(0))
        book = self.books.get(request.lease_id)
        if book is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such lease")
            raise AssertionError("abort() raises")
        book.completes.append(request)
        return pb.CompleteResponse(outcome=request.outcome, leadership=self.leadership)

    async def _on_stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        await self._authenticate(context)
        if self.stats_errors:
            self.stats_errors -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it may have been done")
        return pb.StatsResponse(
            incarnation=self.incarnation,
            totals=pb.Totals(live_leases=len(self.live), received=len(self.admits)),
        )

    async def _who_is(
        self, request: identity_pb2.WhoIsRequest, context: Any
    ) -> identity_pb2.WhoIsResponse:
        await self._authenticate(context)
        tenant = self.owners.get(request.api_key_sha256)
        if tenant is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such key")
            raise AssertionError("abort() raises")
        return identity_pb2.WhoIsResponse(tenant=tenant)

    async def _explain(
        self, request: explain_pb2.ExplainRequest, context: Any
    ) -> explain_pb2.ExplainResponse:
        await self._authenticate(context)
        response = explain_pb2.ExplainResponse()
        for book in self.books.values():
            if book.request_id == request.request_id:
                ended = "ENDED" if book.completes else "LIVE"
                response.requests.add(state=f"REQUEST_STATE_{ended}", tenant=book.tenant)
        return response

    # Session.

    async def _session(
        self, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        await self._authenticate(context)
        stream = _Stream(self)
        self.streams.append(stream)
        reader = asyncio.ensure_future(stream.read(requests))
        broken = asyncio.ensure_future(stream.broken.wait())
        taken = None
        try:
            while True:
                taken = asyncio.ensure_future(stream.out.get())
                await asyncio.wait((taken, reader, broken), return_when=asyncio.FIRST_COMPLETED)
                if broken.done():
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "hung up")
                if taken.done():
                    merged = taken.result()
                    while not stream.out.empty():
                        merged.MergeFrom(stream.out.get_nowait())
                    yield merged
                else:
                    return
        finally:
            self.streams.remove(stream)
            for task in (reader, broken, taken):
                if task is not None:
                    task.cancel()
            for request_id in stream.tags.values():
                self.held.pop(request_id, None)


class _Stream:
    """Serves one Session stream."""

    def __init__(self, fake: FakeScheduler) -> None:
        self.fake = fake
        self.out: asyncio.Queue[pb.SessionResponse] = asyncio.Queue()
        self.broken = asyncio.Event()
        self.tags: dict[int, str] = {}
        self.seq = 0

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        async for data in requests:
            self.fake.messages.append(data)
            message = pb.SessionRequest.FromString(data)
            assert message.seq == self.seq + 1
            assert 0 < len(message.events) <= 4_096
            self.seq = message.seq
            answer = pb.SessionResponse()
            for event in message.events:
                self.handle(event, answer)
            if not self.fake.swallow_acks:
                answer.ack_seq = self.seq
            self.out.put_nowait(answer)

    def handle(self, event: pb.SessionEvent, answer: pb.SessionResponse) -> None:
        fake, kind = self.fake, event.WhichOneof("event")
        assert (kind == "hello") == (self.seq == 1 and not answer.HasField("welcome"))
        if kind == "hello":
            fake.hellos.append(event.hello)
            answer.welcome.incarnation = fake.incarnation
            answer.welcome.lease_ttl_ms = fake.lease_ttl_ms
            answer.welcome.open_requests_max = fake.open_requests_max
            answer.welcome.beats = fake.beats
            if fake.leadership is not None:
                answer.welcome.leadership.CopyFrom(fake.leadership)
            if fake.prefix_use is not None:
                answer.prefix_use.CopyFrom(fake.prefix_use)
        elif kind == "pool":
            fake.pools.append(event.pool)
            if fake.pool_fault is not None and fake.faulty_pool in ("", event.pool.pool):
                answer.faults.append(fake.pool_fault)
        elif kind == "goodbye":
            fake.goodbyes += 1
        elif kind == "beat":
            assert fake.beats
        elif kind == "telemetry":
            fake.telemetry.append(event.telemetry)
        elif kind == "replay":
            self.replay(event.replay, answer)
        elif kind == "admit":
            self.admit(event.admit, answer)
        elif kind == "cancel":
            request_id = self.tags.get(event.cancel.tag)
            if request_id is not None:
                fake._cancel(request_id)
        elif kind == "progress":
            status = fake._progress(event.progress)
            if status.state != pb.LEASE_STATE_LIVE:
                answer.leases.append(status)
        elif event.complete.lease_id in fake.books:
            fake.books[event.complete.lease_id].completes.append(event.complete)
        else:
            answer.faults.add(code=5, field="lease_id", description="no such lease")

    def replay(self, replay: pb.LeaseReplay, answer: pb.SessionResponse) -> None:
        self.fake.replays.append(replay)
        book = self.fake.books.get(replay.lease_id)
        if book is not None and book.completes:
            answer.leases.add(lease_id=replay.lease_id, state=pb.LEASE_STATE_ENDED)
        state = self.fake.statuses.get(replay.lease_id)
        if state is not None:
            answer.leases.add(lease_id=replay.lease_id, state=state)

    def admit(self, admit: pb.SessionAdmit, answer: pb.SessionResponse) -> None:
        if self.fake.faults:
            fault = self.fake.faults.pop()
            fault.tag = admit.tag
            answer.faults.append(fault)
            return
        self.tags[admit.tag] = admit.request.request_id

        def give(response: pb.AdmitResponse | Failure) -> None:
            self.tags.pop(admit.tag, None)
            message = pb.SessionResponse()
            if isinstance(response, Failure):
                code = response.code.value[0]
                message.faults.add(tag=admit.tag, code=code, description=response.details)
            else:
                message.verdicts.add(tag=admit.tag, response=response)
            self.out.put_nowait(message)

        self.fake._judge(admit.request, give)
