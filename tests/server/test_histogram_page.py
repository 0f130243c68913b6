"""Tests histograms on the Prometheus page: series, caps, reloads, and how the page is cut."""

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc._core import Scheduler
from schedsvc.metrics.page import written
from schedsvc.metrics.rows import HISTOGRAM_ROWS
from schedsvc.server import Server
from tests.seeds import fresh

from .conftest import ask, calling, config_of, serving, totals
from .test_metrics import Samples, of, scrape, use

KINDS = [row.name for row in HISTOGRAM_ROWS]
LE = [str(bound / 1e3) for bound in Scheduler().histogram_bounds_ms()] + ["+Inf"]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def named_by_all(classes: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the classes of a tenant that may name each of them."""
    return {"classes": ["default", *(entry["name"] for entry in classes)]} if classes else {}


def counting(tenants: int, shown: int, histograms: int, **keys: Any) -> dict[str, Any]:
    """Return a configuration with tenants t0, t1, and so on, which may name all classes."""
    caps = {"tenants_max": shown, "histogram_tenants_max": histograms}
    named = named_by_all(keys.get("classes", []))
    names = [{"name": f"t{number}", **named} for number in range(tenants)]
    return {"metrics": {"listen": "127.0.0.1:0", **caps}, "tenants": names, **keys}


async def test_every_histogram_exists_with_0_from_the_start() -> None:
    keys = counting(2, 2, 2, classes=[{"name": "batch", "rank": 5}])
    async with serving(**keys) as server:
        samples = await scrape(server)
    for kind in KINDS:
        for tenant in ("t0", "t1", "other"):
            for name in ("default", "batch"):
                labels = {"tenant": tenant, "class": name}
                for le in LE:
                    assert of(samples, f"{kind}_bucket", le=le, **labels) == 0
                assert of(samples, f"{kind}_count", **labels) == 0
                assert of(samples, f"{kind}_sum", **labels) == 0
    assert len(LE) == 32
    for tenant in ("t0", "t1", ""):
        assert of(samples, "refusals_total", tenant=tenant, reason="evicted_ttl") == 0
    for method in ("Admit", "Explain", "ListLeases"):
        assert of(samples, "rpc_failures_total", method=method, code="UNAVAILABLE") == 0


async def test_histograms_count_by_tenant_and_class() -> None:
    keys = counting(2, 2, 1, classes=[{"name": "batch", "rank": 5}])
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        for tenant, name in [("t0", "batch"), ("t0", "batch"), ("t0", ""), ("t1", "batch")]:
            request = ask(64, tenant=tenant, request_class=name, reports_progress=True)
            lease = (await stub.Admit(request)).grant
            told = {"lease_id": lease.lease_id, "pool_epoch": 1}
            await stub.Progress(pb.ProgressRequest(leases=[{**told, "output_tokens": 1}]))
            await stub.Complete(pb.CompleteRequest(**told, output_tokens=2))
        samples = await scrape(server)
    for kind in ("queue_wait_seconds", "time_to_first_token_seconds"):
        for tenant, name, count in [
            ("t0", "batch", 2),
            ("t0", "default", 1),
            ("other", "batch", 1),
            ("other", "default", 0),
        ]:
            labels = {"tenant": tenant, "class": name}
            assert of(samples, f"{kind}_count", **labels) == count
            assert of(samples, f"{kind}_bucket", le="+Inf", **labels) == count
            buckets = [of(samples, f"{kind}_bucket", le=le, **labels) for le in LE]
            assert buckets == sorted(buckets)
        sum_s = of(samples, f"{kind}_sum", tenant="t0", **{"class": "batch"})
        assert 0 <= sum_s < 60
    first_s = of(samples, "time_to_first_token_seconds_sum", tenant="t0", **{"class": "batch"})
    assert first_s > of(samples, "queue_wait_seconds_sum", tenant="t0", **{"class": "batch"})


async def test_tenants_beyond_the_cap_share_one_histogram() -> None:
    async with serving(**counting(60, 60, 50)) as server, calling(server.targets[0]) as stub:
        for number in range(45, 60):
            await use(stub, f"t{number}", 1)
        samples = await scrape(server)
    counts = {
        dict(labels)["tenant"]: value
        for (name, labels), value in samples.items()
        if name == "queue_wait_seconds_count"
    }
    assert len(counts) == 51
    assert [counts[f"t{number}"] for number in (44, 45, 49)] == [0, 1, 1]
    assert counts["other"] == 10


def growing(samples: Samples) -> Samples:
    """Return counters, and the series of histograms."""
    ends = ("_total", "_bucket", "_count", "_sum")
    return {key: value for key, value in samples.items() if key[0].endswith(ends)}


def changed(rng: random.Random) -> dict[str, Any]:
    """Return a file with some of the tenants and classes, in some order."""
    names = rng.sample([f"t{number}" for number in range(6)], rng.randint(0, 6))
    drawn = rng.sample(["x", "y", "z"], rng.randint(0, 3))
    classes = [{"name": name, "rank": 1 + "xyz".index(name)} for name in drawn]
    return {
        "tenants": [{"name": name, **named_by_all(classes)} for name in names],
        "classes": classes,
        "metrics": {"listen": "127.0.0.1:0", "tenants_max": 3, "histogram_tenants_max": 2},
    }


async def serve_some(stub: SchedulerServiceStub, rng: random.Random, keys: dict[str, Any]) -> None:
    for tenant in keys["tenants"]:
        name = rng.choice(["", *(entry["name"] for entry in keys["classes"])])
        request = ask(64, tenant=tenant["name"], request_class=name, reports_progress=True)
        lease = (await stub.Admit(request)).grant
        told = {"lease_id": lease.lease_id, "pool_epoch": 1}
        if rng.random() < 0.5:
            await stub.Progress(pb.ProgressRequest(leases=[{**told, "output_tokens": 1}]))
        if rng.random() < 0.9:
            await stub.Complete(pb.CompleteRequest(**told, output_tokens=2))
        await stub.Admit(ask(1_000_000, tenant=tenant["name"]))


# In the first, a class returned in a file in which a new one had its place.
@pytest.mark.parametrize("seed", [10_227_429_564_795, *fresh(1)])
async def test_no_series_goes_down_in_random_chains_of_reloads(seed: int) -> None:
    rng = random.Random(seed)
    keys = changed(rng)
    pool = {"name": "pool", "capacity_tokens": 160_000, "block_size_tokens": 16}
    fixed = {"pools": [pool], "unknown_tenants": "refuse"}
    before: Samples = {}
    latest: Samples = {}
    left_out: set[str] = set()
    async with serving(**keys, **fixed) as server, calling(server.targets[0]) as stub:
        for step in range(30):
            await serve_some(stub, rng, keys)
            for reload in (False, True):
                if reload:
                    keys = changed(rng)
                    left_out |= {*"xyz"} - {entry["name"] for entry in keys["classes"]}
                    server.reconfigure(config_of(**keys, **fixed))
                after = growing(await scrape(server))
                for key in before.keys() & after.keys():
                    # A class that a file left out begins again if another one has its place.
                    begins = reload and dict(key[1]).get("class") in left_out and after[key] == 0
                    assert after[key] >= before[key] or begins, (seed, step, key)
                # A tenant's series go on where they ended; those of a class may begin again.
                for key, value in after.items():
                    if dict(key[1]).get("class") in (None, "default"):
                        assert value >= latest.get(key, 0), (seed, step, key)
                before = after
                latest |= after
            # Every event is in one histogram.
            waits = [v for (name, _), v in after.items() if name == "queue_wait_seconds_count"]
            assert sum(waits) <= totals(server)["granted"]
    assert of(latest, "queue_wait_seconds_count", tenant="other", **{"class": "default"}) > 0


async def test_restart_is_a_reset_to_0() -> None:
    for _ in range(2):
        async with serving(**counting(1, 1, 1)) as server, calling(server.targets[0]) as stub:
            samples = await scrape(server)
            labels = {"tenant": "t0", "class": "default"}
            assert of(samples, "queue_wait_seconds_count", **labels) == 0
            await use(stub, "t0", 1)
            samples = await scrape(server)
            assert of(samples, "queue_wait_seconds_count", **labels) == 1


async def test_page_is_read_and_written_in_slices() -> None:
    classes = [{"name": f"c{number}", "rank": number} for number in range(1, 8)]
    keys = counting(3_000, 2_000, 50, classes=classes)
    async with serving(**keys) as server:
        turns = 0
        done = False

        async def count_turns() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        counter = asyncio.ensure_future(count_turns())
        _, parts = server.metrics.parts(openmetrics=False)
        series = [part.count(b"\n") async for part in parts]
        done = True
        await counter
    # A series takes about 6 us to build and write, a tenant about 20 us to read.
    assert max(series) <= 400
    assert sum(series) > 70_000
    assert turns > len(series) + 3_000 // 64


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
async def test_parts_of_a_family_have_one_heading(accept: str) -> None:
    async with serving(**counting(600, 600, 40)) as server, calling(server.targets[0]) as stub:
        await use(stub, "t3", 4)
        taken = await server.metrics.take()
        encoder = generate_openmetrics if accept else generate_latest
        page = b"".join(written(taken, server.metrics.counts, encoder)).decode()
    headings = [line for line in page.splitlines() if line.startswith("# HELP ")]
    assert len(headings) == len(set(headings)) > 80
    if accept:
        assert page.count("# EOF") == 1
        assert page.endswith("# EOF\n")
        families = {family.name: family for family in openmetrics_families(page)}
        assert len(families["schedsvc_output_tokens"].samples) == 601
        assert families["schedsvc_queue_wait_seconds"].type == "histogram"
    else:
        assert page.count("\nschedsvc_output_tokens_total{") == 601
        assert page.count("\nschedsvc_queue_wait_seconds_bucket{") == 41 * 32


async def page_lines(server: Server, start: str) -> list[str]:
    page = (await server.metrics.page()).decode()
    return [line for line in page.splitlines() if line.startswith(start)]


async def test_names_and_help_texts_follow_prometheus_conventions() -> None:
    async with serving(**counting(1, 1, 1)) as server:
        types = [line.split() for line in await page_lines(server, "# TYPE ")]
        helps = {
            line.split()[2]: line.split(" ", 3)[3]
            for line in await page_lines(server, "# HELP schedsvc_")
        }
    for _, _, name, kind in types:
        if not name.endswith("_created"):
            assert name.endswith("_total") == (kind == "counter"), name
        if kind == "histogram":
            assert name.endswith("_seconds"), name
    units = ("_ms", "_us", "_minutes", "_hours", "_ppm", "_milli", "_percent", "_per_minute")
    assert [name for name in helps if name.endswith(units)] == []
    for name, text in helps.items():
        if name.endswith("_seconds") and "timestamp" not in name:
            assert "in seconds" in text, name


async def test_operations_page_names_metrics_that_exist(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "operate" / "operations.md").read_text()
    section = text[text.index("## Metrics") : text.index("## Health")]
    named = set(re.findall(r"`(schedsvc_\w+)`", section)) - {"schedsvc_gate_overhead_seconds"}
    keys = counting(1, 1, 1) | {"groups": [{"name": "org", "weight": 2}]}
    async with serving(**keys, usage={"path": str(tmp_path / "usage.db")}) as server:
        found = {line.split()[2] for line in await page_lines(server, "# TYPE ")}
    assert len(named) > 15
    assert named <= found
