"""Tests the gate's own lines on the engine's page of metrics."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.metrics_page import Counts
from schedsvc_vllm.settings import Settings

from .asgi import Exchange, ask, owner, start
from .bench import gives_up_soon

PAGE = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n"


class Serving:
    """Answers its page in two pieces, and any other path with an empty body."""

    def __init__(self) -> None:
        self.kind = b"text/plain; version=0.0.4"
        self.encoding: bytes | None = None
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/metrics":
            await receive()
            await send(start(200, b"application/json"))
            await send({"type": "http.response.body", "body": b"{}"})
            return
        self.headers = dict(scope["headers"])
        message = start(200, self.kind)
        message["headers"].append((b"Content-Length", str(len(PAGE)).encode()))
        if self.encoding:
            message["headers"].append((b"content-encoding", self.encoding))
        await send(message)
        await send({"type": "http.response.body", "body": PAGE[:9], "more_body": True})
        await send({"type": "http.response.body", "body": PAGE[9:]})


async def page(gate: Gate) -> Exchange:
    headers = {"accept": "application/openmetrics-text", "accept-encoding": "gzip"}
    return await Exchange(gate, b"", "/metrics", headers, method="GET", owner=owner()).run()


async def test_the_page_shows_whether_the_gate_enforces(fake: FakeScheduler) -> None:
    app = Serving()
    gate = Gate(app, Settings(target=fake.target))
    for _ in range(2):
        await Exchange(gate, ask(), owner=owner()).run()
    gives_up_soon(gate)
    await fake.stop()
    await Exchange(gate, ask(), owner=owner()).run()
    shown = await page(gate)
    assert {b"accept", b"accept-encoding"}.isdisjoint(app.headers)
    assert shown.answer.startswith(PAGE)
    assert shown.answer_headers["content-length"] == str(len(shown.answer))
    families = {
        family.name: family.samples[0]
        for family in text_string_to_metric_families(shown.answer.decode())
    }
    told = {name: sample.value for name, sample in families.items() if "gate_" in name}
    del told["schedsvc_gate_overhead_seconds"]
    assert told == {
        "schedsvc_gate_connected": 0,
        "schedsvc_gate_running": 0,
        "schedsvc_gate_enforced": 2,
        "schedsvc_gate_fail_open": 1,
    }
    waits = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(shown.answer.decode())
        for sample in family.samples
        if family.name == "schedsvc_gate_overhead_seconds"
    }
    buckets = [value for (name, _), value in waits.items() if name.endswith("_bucket")]
    assert len(buckets) == 14
    assert buckets == sorted(buckets)
    # Requests that ran without the scheduler had no grant.
    assert buckets[-1] == waits["schedsvc_gate_overhead_seconds_count", None] == 2
    assert 0 < waits["schedsvc_gate_overhead_seconds_sum", None] < 60
    await gate._close()


def test_gate_histogram_begins_at_0_and_counts_by_bucket() -> None:
    counts = Counts(lambda: True, lambda: 0)
    assert 'le="+Inf"} 0\n' in counts.text()
    for seconds in (-1.0, 0.0005, 0.0006, 7.0):
        counts.observe(seconds, "")
    lines = counts.text().splitlines()
    found = {
        line.split('le="')[1].split('"')[0]: int(line.split()[-1])
        for line in lines
        if "_bucket" in line
    }
    assert [found[le] for le in ("0.0005", "0.001", "5.0", "+Inf")] == [2, 3, 3, 4]
    [total] = [line for line in lines if line.startswith("schedsvc_gate_overhead_seconds_sum")]
    assert float(total.split()[-1]) == pytest.approx(7.0011)


def test_gate_histogram_has_no_more_tenants_than_allowed() -> None:
    counts = Counts(lambda: True, lambda: 0, tenants_max=2)
    for tenant in ('a"\n', "b", "c", "", "other", "b", "d"):
        counts.observe(0.1, tenant)
    (family,) = [
        family
        for family in text_string_to_metric_families(counts.text())
        if family.name == "schedsvc_gate_overhead_seconds"
    ]
    found = {s.labels["tenant"]: s.value for s in family.samples if s.name.endswith("_count")}
    assert found == {'a"\n': 1, "b": 2, "other": 4}


@pytest.mark.parametrize(("kind", "encoding"), [(b"text/html", None), (b"text/plain", b"gzip")])
async def test_a_page_of_another_form_passes(
    fake: FakeScheduler, kind: bytes, encoding: bytes | None
) -> None:
    app = Serving()
    gate = Gate(app, Settings(target=fake.target))
    await Exchange(gate, ask(), owner=owner()).run()
    app.kind, app.encoding = kind, encoding
    assert (await page(gate)).answer == PAGE
    await gate._close()
