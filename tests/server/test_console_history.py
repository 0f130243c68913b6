"""Tests what the console keeps of the last five minutes."""

import json
import random
from typing import Any

import pytest

from schedsvc.server.console_history import ConsoleHistory, quantile
from tests.core.test_histograms import MS, bounds_ns_of, first_tokens, quantile_ns, row
from tests.seeds import fresh
from tests.waiting import until

from .conftest import ask, calling, serving
from .test_console import METRICS, consoling, read

TENANTS: list[dict[str, Any]] = [{"name": f"t{number}"} for number in range(60)]


@pytest.mark.parametrize("ttl_ms", [2_000, 30_000])
@pytest.mark.parametrize("load", [1.2, 1.5, 3.0])
def test_p99_of_console_dashboard_and_alert_is_within_a_tenth_of_the_clients(
    ttl_ms: int, load: float
) -> None:
    """Judge loads whose first tokens come around the queue TTL; the three read one histogram."""
    for seed in fresh(2):
        s, exact = first_tokens(ttl_ms, load, seed)
        exact.sort()
        client_ms = exact[int(0.99 * len(exact))] / MS
        assert 28 / 30 <= client_ms / ttl_ms <= 32 / 30, "the load is around the queue TTL"
        counts = row(s)["time_to_first_token"][0]
        console_ms = quantile(0.99, counts, s.histogram_bounds_ms())
        alert_ms = quantile_ns(counts, 0.99, bounds_ns_of(s)) / MS
        for shown_ms in (console_ms, alert_ms):
            assert shown_ms is not None
            assert abs(shown_ms - client_ms) <= client_ms / 10, (seed, shown_ms, client_ms)


@pytest.mark.parametrize("seed", fresh(10))
def test_quantiles_are_those_of_prometheus(seed: int) -> None:
    rng = random.Random(seed)
    bounds_ms = sorted(rng.sample(range(1, 100_000), 31))
    counts = [rng.choice([0, 0, 1, 5, 90]) for _ in range(32)]
    for q in (0.01, 0.5, 0.99):
        found = quantile(q, counts, bounds_ms)
        if not sum(counts):
            assert found is None
            continue
        seen, wanted = 0, float(bounds_ms[-1])
        for at, count in enumerate(counts[:-1]):
            if count and seen + count >= q * sum(counts):
                low = bounds_ms[at - 1] if at else 0
                wanted = low + (bounds_ms[at] - low) * (q * sum(counts) - seen) / count
                break
            seen += count
        assert found == pytest.approx(wanted, abs=1)


async def test_history_is_bounded_and_begins_with_the_oldest() -> None:
    async with serving(tenants=TENANTS, metrics=METRICS) as server:
        history = ConsoleHistory(server.driver, server.metrics)
        for _ in range(170):
            await history.sample()
        points = json.loads(history.points)
    assert len(points) == 150
    times = [point["at_ms"] for point in points]
    assert times == sorted(times)
    assert len(points[-1]["of"]) == 51
    assert len(history.points) < 600_000


async def test_a_page_opens_with_what_happened_before() -> None:
    async with consoling(tenants=TENANTS) as (server, http), calling(server.targets[0]) as stub:
        await stub.Admit(ask(64, tenant="t1"))

        async def past() -> dict[str, Any]:
            return json.loads((await read(http, "console/history.json"))[0])

        async def is_seen() -> bool:
            points = (await past())["points"]
            return bool(points) and points[-1]["of"]["t1"][1] == 1

        await until(is_seen, "a point has the request that runs")
        assert (await past())["before"]["problem"] == ""
