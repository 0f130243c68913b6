"""Tests the gate's part of W3C's Trace Context, and how tracing is turned on."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from schedsvc_vllm import otel
from schedsvc_vllm.asgi import Headers
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import Settings, SettingsError
from schedsvc_vllm.tracing import Parent, Tracing, parent_of

from .otlp import Collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"
PARENT = Parent(int(TRACE, 16), int(SPAN, 16), sampled=True)


def headers(*pairs: tuple[str, str]) -> Headers:
    return [(name.encode(), value.encode()) for name, value in pairs]


@pytest.mark.parametrize(
    "text",
    [
        *("", "00", VALID.upper(), f"{VALID}-x", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-1"),
        *(f"00{TRACE}---{SPAN}01", f"00-{TRACE[:-1]}-{SPAN}0-01", f"cc-{TRACE}-{SPAN}-01more"),
        *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f" {VALID}", f"{VALID}\n"),
    ],
)
def test_invalid_traceparent_is_no_parent(text: str) -> None:
    told = headers(("traceparent", text), ("tracestate", "a=1"))
    assert parent_of(told) == (None, "")


def test_traceparent_is_read() -> None:
    state = (("tracestate", "a=1"), ("tracestate", "b=2"))
    assert parent_of(headers(("traceparent", VALID), *state)) == (PARENT, "a=1,b=2")
    later = headers(("traceparent", f"cc-{TRACE}-{SPAN}-01-more"))
    assert parent_of(later) == (PARENT, "")
    unsampled = headers(("traceparent", f"00-{TRACE}-{SPAN}-00"))
    assert parent_of(unsampled) == (Parent(PARENT.trace_id, PARENT.span_id, False), "")
    twice = headers(("traceparent", VALID), ("traceparent", VALID))
    assert parent_of(twice) == (None, "")


def connected(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Tracing:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return otel.connect()


@pytest.mark.parametrize(
    ("sampler", "told", "sampled"),
    [
        ("parentbased_always_on", "01", True),
        ("parentbased_always_on", "00", False),
        ("parentbased_always_on", "", True),
        ("parentbased_always_off", "", False),
        ("parentbased_always_off", "01", True),
        ("always_off", "01", False),
        ("always_on", "00", True),
    ],
)
async def test_engine_gets_the_decision_of_the_sampler(
    monkeypatch: pytest.MonkeyPatch, sampler: str, told: str, sampled: bool
) -> None:
    tracing = connected(monkeypatch, OTEL_TRACES_SAMPLER=sampler)
    try:
        given = headers(("traceparent", f"00-{TRACE}-{SPAN}-{told}")) if told else []
        scope, added, span = tracing.begin({"headers": given}, 0.0)
        assert (span is not None) is sampled
        (sent,) = [value for _, value in scope["headers"]] + ([added] if added else [])
        assert parent_of(headers(("traceparent", sent.decode())))[0] is not None
        assert sent.endswith(b"-01") is sampled
        assert not told or sent.split(b"-")[1].decode() == TRACE
    finally:
        await tracing.close()


class _Receiver(BaseHTTPRequestHandler):
    asked: pb.ExportTraceServiceRequest | None = None
    path_asked = ""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        type(self).path_asked = self.path
        type(self).asked = pb.ExportTraceServiceRequest.FromString(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def over_http() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


async def test_http_protobuf_is_exported(monkeypatch: pytest.MonkeyPatch, over_http: str) -> None:
    tracing = connected(
        monkeypatch,
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        OTEL_EXPORTER_OTLP_ENDPOINT=over_http,
        OTEL_EXPORTER_OTLP_COMPRESSION="none",
        OTEL_SERVICE_NAME="mine",
    )
    _, _, span = tracing.begin({"headers": headers(("traceparent", VALID))}, 0.0)
    assert span is not None
    tracing.end(span)
    await tracing.close()
    assert _Receiver.path_asked == "/v1/traces"
    assert _Receiver.asked is not None
    (group,) = _Receiver.asked.resource_spans
    assert [
        one.value.string_value for one in group.resource.attributes if one.key == "service.name"
    ] == ["mine"]
    assert group.scope_spans[0].spans[0].parent_span_id.hex() == SPAN


async def test_queue_of_spans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector()
    collector.held.clear()
    sizes = {"OTEL_BSP_MAX_QUEUE_SIZE": "8", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1"}
    tracing = connected(monkeypatch, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, **sizes)
    try:
        for _ in range(100):
            _, _, span = tracing.begin({"headers": []}, 0.0)
            assert span is not None
            tracing.end(span)
        collector.held.set()
        await tracing.close()
        assert 1 <= len(collector.spans) <= 10
    finally:
        collector.stop()


async def test_closing_is_cancelled_at_any_moment() -> None:
    """It is cancelled also in the turn of the loop in which all is sent."""
    cancelled = 0
    for turns in range(8):
        sends = threading.Event()
        tracing = Tracing(
            lambda _: True, follows_parent=True, export=lambda _: None, shutdown=sends.wait
        )
        before = set(threading.enumerate())
        closing = asyncio.ensure_future(tracing.close())
        await asyncio.sleep(0)
        (sender,) = set(threading.enumerate()) - before
        sends.set()
        sender.join()
        for _ in range(turns):
            await asyncio.sleep(0)
        is_asked = closing.cancel()
        await asyncio.wait({closing})
        assert closing.cancelled() == is_asked, f"lost after {turns} turns of the loop"
        cancelled += is_asked
    assert cancelled, "every call was over before its cancellation"


def test_wrong_protocol_names_its_variable() -> None:
    with pytest.raises(SettingsError, match=r"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: .*not http/json"):
        otel.connect({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"})


def test_only_otlp_turns_traces_on(caplog: pytest.LogCaptureFixture) -> None:
    def on(**environment: str) -> bool:
        told = {"SCHEDSVC_TARGET": "unix:/s", **environment}
        return Settings.from_environment(told).traces

    assert on(OTEL_TRACES_EXPORTER="otlp")
    assert not on()
    assert not on(OTEL_EXPORTER_OTLP_ENDPOINT="http://collector:4317")
    assert not on(OTEL_TRACES_EXPORTER="none")
    assert not on(OTEL_TRACES_EXPORTER="otlp", OTEL_SDK_DISABLED="true")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert not on(OTEL_TRACES_EXPORTER="zipkin")
    assert "not zipkin" in caplog.text


async def test_missing_package_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "schedsvc_vllm.otel", None)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.complete"})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    gate = Gate(app, Settings(target="unix:/s", traces=True))
    await gate({"type": "lifespan", "app": None, "state": {}}, receive, send)
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "pip install 'schedsvc-vllm[otel]'" in sent[0]["message"]


def test_gate_without_traces_imports_no_opentelemetry() -> None:
    code = "import sys, schedsvc_vllm.gate, schedsvc_vllm.proxy_cli, schedsvc_vllm.proxy\n"
    code += "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
