"""Samples and exports the gate's spans by the OpenTelemetry SDK (extra `otel`).

Only `connect` of this module is called, and only if `OTEL_TRACES_EXPORTER` is `otlp`. The SDK reads
its other `OTEL_*` variables itself: endpoint, protocol, headers, sampler, resource, batches. The
gate has a provider of its own, so that an engine that traces too keeps the global one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import (
    Decision,
    ParentBased,
    Sampler,
    StaticSampler,
    TraceIdRatioBased,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from schedsvc_vllm.settings import SettingsError
from schedsvc_vllm.tracing import QueueSpan, Tracing

SPAN_NAME = "queue"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def connect(environment: Mapping[str, str] = os.environ) -> Tracing:
    """Start the thread that exports spans. Raises SettingsError for a wrong variable."""
    exporter = _exporter(environment)
    own = {} if environment.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "schedsvc-gate"}
    named = "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(
        resource=Resource.create({} if named else own), shutdown_on_exit=False
    )
    try:
        batches = BatchSpanProcessor(exporter)
    except ValueError as error:
        raise SettingsError(f"OTEL_BSP_...: {error}") from None
    scope = InstrumentationScope("schedsvc_vllm")
    is_parent_based, root = _root_of(provider.sampler)

    def export(span: QueueSpan) -> None:
        batches.on_end(_readable(span, provider.resource, scope))

    return Tracing(
        _decision(root), follows_parent=is_parent_based, export=export, shutdown=batches.shutdown
    )


def _exporter(environment: Mapping[str, str]) -> SpanExporter:
    name = next((name for name in _PROTOCOLS if environment.get(name)), _PROTOCOLS[1])
    protocol = environment.get(name, "").strip().lower() or "grpc"
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter

        return grpc_exporter.OTLPSpanExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_exporter

        return http_exporter.OTLPSpanExporter()
    raise SettingsError(f"{name}: must be grpc or http/protobuf, not {protocol}")


def _root_of(sampler: Sampler) -> tuple[bool, Sampler]:
    """Return whether a parent's decision holds, and what decides where there is no parent."""
    if isinstance(sampler, ParentBased):
        return True, sampler._root
    return False, sampler


def _decision(sampler: Sampler) -> Callable[[int], bool]:
    """Return what says by a trace's id whether it is sampled, as cheap as its kind allows."""

    def asked(trace_id: int) -> bool:
        decision = sampler.should_sample(None, trace_id, SPAN_NAME).decision
        return decision is Decision.RECORD_AND_SAMPLE

    if isinstance(sampler, StaticSampler):
        always = asked(1)
        return lambda _: always
    if isinstance(sampler, TraceIdRatioBased):
        limit, bound = sampler.TRACE_ID_LIMIT, sampler.bound
        return lambda trace_id: trace_id & limit < bound
    return asked


def _readable(span: QueueSpan, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    flags, state = TraceFlags(TraceFlags.SAMPLED), TraceState.from_header([span.state])
    caller, parent = span.parent, None
    if caller is not None:
        parent = SpanContext(caller.trace_id, caller.span_id, True, flags, state)
    return ReadableSpan(
        name=SPAN_NAME,
        context=SpanContext(span.trace_id, span.span_id, False, flags, state),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
        start_time=span.started_ns,
        end_time=span.ended_ns,
        instrumentation_scope=scope,
    )
