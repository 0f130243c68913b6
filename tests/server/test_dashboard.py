"""Tests the Grafana dashboard: generated from its table, valid, about existing metrics."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from deploy.dashboard import DASHBOARD, PANELS, text
from deploy.panels import Line, draw, lines_of

from .conftest import ask, calling, serving
from .prometheus import scraping
from .test_alerts import needs_promtool, page, promtool, unknown_metrics

#: As Grafana fills them in.
VARIABLES = {"$__rate_interval": "2m", "$tenant": "acme|beta|other"}


def queries() -> list[str]:
    found = [
        target["expr"]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel["targets"]
    ]
    for name, value in VARIABLES.items():
        found = [query.replace(name, value) for query in found]
    return found


def test_dashboard_is_what_the_table_generates() -> None:
    assert DASHBOARD.read_text() == text(), "run: python deploy/dashboard.py"
    assert len({panel.title for panel in PANELS}) == len(PANELS)


async def test_panels_name_metrics_that_exist() -> None:
    found = queries()
    assert len(found) >= len(PANELS)
    assert unknown_metrics(found, (await page()).decode()) == set()
    for query in found:
        assert "$" not in query
        assert "absent(" not in query
        assert "or vector(" not in query


def test_every_panel_explains_itself_and_stats_fill_the_first_row() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels:
        assert panel["description"].endswith((".", ").")), panel["title"]
        assert len(panel["description"]) > 25
    stats = [panel for panel in panels if panel["type"] == "stat"]
    assert len(stats) >= 6
    assert sum(panel["gridPos"]["w"] for panel in stats) == 24
    assert {panel["gridPos"]["y"] for panel in stats} == {0}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y) for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }  # fmt: skip
        assert not taken & cells, panel["title"]
        taken |= cells
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
        values = [step["value"] for step in steps[1:]]
        assert values == sorted(values)
        assert [step["color"] for step in steps] in (
            [], ["green", "orange", "red"], ["red", "orange", "green"]
        )  # fmt: skip


def test_series_have_the_legend_of_their_labels_and_no_nan() -> None:
    rows = [
        {"metric": {"tenant": "b"}, "values": [[1, "NaN"], [2, "0.5"], [3, "+Inf"]]},
        {"metric": {"tenant": "a"}, "values": [[1, "2"]]},
        {"metric": {"tenant": "c"}, "values": [[1, "NaN"]]},
    ]
    found = lines_of({"status": "success", "data": {"result": rows}}, "{{tenant}} p99{{x}}")
    assert found == [Line("a p99", [1], [2.0]), Line("b p99", [2], [0.5])]
    with pytest.raises(ValueError, match="parse error"):
        lines_of({"status": "error", "error": "parse error"}, "")


def test_panels_are_drawn_with_and_without_data(tmp_path: Path) -> None:
    lines = [Line(f"t{at}", [0.0, 60.0], [1.0, at]) for at in range(9)]
    draw([(panel, lines if at % 2 else []) for at, panel in enumerate(PANELS)], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@needs_promtool
def test_queries_of_panels_are_valid(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    for more, status in [([], 0), (["sum by ("], 1)]:
        rows = [{"record": f"q{at}", "expr": q} for at, q in enumerate([*queries(), *more])]
        file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rows}]}))
        assert promtool("check", "rules", file).returncode == status


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is missing; install prometheus"
)
async def test_panels_show_real_traffic(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "metrics": {"listen": "127.0.0.1:0"},
        "scheduler": {"headroom": 0, "queue_ttl_ms": 400},
        "tenants": [
            {
                "name": name,
                "quota": {"requests_per_minute": 10_000},
                "share": {"tokens_per_minute": share},
            }
            for name, share in (("acme", 1_000), ("beta", 1_000_000))
        ],
    }
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        assert server.metrics_url is not None
        async with scraping(tmp_path, [server.metrics_url]) as prometheus:
            moving = asyncio.ensure_future(traffic(stub))
            waiting = [query.replace("[2m]", "[8s]") for query in queries()]
            for _ in range(200):
                answers = [await prometheus.values(query) for query in waiting]
                waiting = [
                    query
                    for query, values in zip(waiting, answers, strict=True)
                    if not any(value > 0 for value in values)
                ]
                # No engine preempts here, and the gap may be 0.
                if all("preemptions" in query or "_gap_" in query for query in waiting):
                    break
                await asyncio.sleep(0.2)
            else:
                pytest.fail(f"these show nothing: {waiting}")
            moving.cancel()


async def traffic(stub: SchedulerServiceStub) -> None:
    """Make traffic of two tenants: requests that run, that wait, and that are evicted."""
    while True:
        for tenant in ("acme", "beta"):
            request = ask(1_000, tenant=tenant, reports_progress=True)
            lease = (await stub.Admit(request)).grant
            told = {"lease_id": lease.lease_id, "pool_epoch": 1}
            others = [
                asyncio.ensure_future(stub.Admit(ask(1_000, tenant=tenant, queue_ttl_ms=ms)))
                for ms in (20, 400)
            ]
            await asyncio.sleep(0.1)
            await stub.Progress(pb.ProgressRequest(leases=[{**told, "output_tokens": 1}]))
            await asyncio.sleep(0.2)
            await stub.Complete(pb.CompleteRequest(**told, output_tokens=4))
            for answer in await asyncio.gather(*others):
                if answer.grant.lease_id:
                    told = {"lease_id": answer.grant.lease_id, "pool_epoch": 1}
                    await stub.Complete(pb.CompleteRequest(**told, output_tokens=4))
