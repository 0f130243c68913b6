"""Collects spans for tests: a real OTLP server over gRPC that keeps the spans it gets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from tests.waiting import wait_until

WITHIN_S = 30


@dataclass(frozen=True)
class Span:
    """Holds one span, as it came over the wire."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    is_error: bool
    seconds: float
    attributes: dict[str, Any]


class Collector(TraceServiceServicer):
    """Listens on a free port of this host. While `held` is clear, its answers wait."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.asked = Event()
        self.held = Event()
        self.held.set()
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        """Take spans."""
        self.take(request)
        self.asked.set()
        self.held.wait(WITHIN_S)
        return pb.ExportTraceServiceResponse()

    def take(self, request: Any) -> None:
        """Keep the spans of one message."""
        for group in request.resource_spans:
            service = _values(group.resource.attributes)["service.name"]
            self.spans += [
                _read(span, service) for scope in group.scope_spans for span in scope.spans
            ]

    def find(self, wanted: Callable[[Span], bool]) -> Span:
        """Wait for the one span that fits."""
        (span,) = wait_until(
            lambda: [span for span in self.spans if wanted(span)], lambda: self.spans
        )
        return span

    def of(self, trace_id: str) -> Span:
        """Wait for the one span of a trace."""
        return self.find(lambda span: span.trace_id == trace_id)

    def stop(self) -> None:
        """End it."""
        self.held.set()
        self._server.stop(None).wait()


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def _read(span: Any, service: str) -> Span:
    return Span(
        span.name,
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_state,
        span.status.code == span.status.STATUS_CODE_ERROR,
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        _values(span.attributes),
    )
