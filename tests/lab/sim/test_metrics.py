"""Tests the service difference, by hand-made cases and by the measured files."""

import csv
from pathlib import Path

import numpy as np
import pytest

from schedsvc_lab.sim import metrics
from schedsvc_lab.sim.metrics import Service, cumulative_gap, service_difference, throughput
from tests.seeds import fresh

REFERENCE = Path(__file__).parents[4] / "shared" / "data" / "reference" / "vtc_a10g"


def service(rows, clients=2):
    """Make rows of (arrival, first token, end, client, cost)."""
    columns = [np.array(column, dtype=float) for column in zip(*rows, strict=True)]
    return Service(*columns[:3], columns[3].astype(int), columns[4], clients)


def test_points_leave_out_the_warmup_and_both_ends():
    at_s = metrics.points(630.0)
    assert len(at_s) == 19
    assert at_s[0] == 60.0
    assert at_s[-1] == 600.0


def test_service_is_spread_from_first_token_to_end():
    one = service([(0, 10, 30, 0, 200), (0, 10, 10, 1, 7)])
    assert list(metrics.served(one, 0, 10)) == [0, 0]
    assert list(metrics.served(one, 10, 15)) == [50, 7]
    assert list(metrics.served(one, 25, 99)) == [50, 0]
    assert list(metrics.served(one, 0, 99)) == [200, 7]


def test_unserved_requests_are_demand_and_no_service():
    one = service([(5, np.nan, np.nan, 0, 100), (5, 6, 8, 1, 40)])
    assert list(metrics.served(one, 0, 99)) == [0, 40]
    assert list(metrics.demanded(one, 0, 99)) == [100, 40]
    assert list(metrics.demanded(one, 6, 99)) == [0, 0]


def steady(rates, duration_s=660, demand=None):
    """Each client is served its rate all along, in requests of one second."""
    rows = [
        (t, t, t + 1, client, rate)
        for client, rate in enumerate(rates)
        for t in range(-60, duration_s + 60)
    ]
    for client, extra in enumerate(demand or ()):
        rows += [(t, np.nan, np.nan, client, extra) for t in range(-60, duration_s + 60) if extra]
    return service(rows, len(rates))


def test_a_client_that_gets_all_it_asks_for_is_not_wronged():
    difference = service_difference(steady([100, 30]), 630)
    assert difference.max == pytest.approx(0)


def test_a_backlogged_client_is_wronged_by_what_it_lags_or_lacks():
    # Client 1 lags by 70 and lacks 500: it is wronged by 70. Client 2 lags by 90, lacks 5.
    difference = service_difference(steady([100, 30, 10], demand=[900, 500, 5]), 630)
    assert difference.mean == pytest.approx(75)
    assert difference.max == pytest.approx(75)
    assert difference.var == pytest.approx(0, abs=1e-12)


def test_the_cumulative_gap_grows_from_the_end_of_the_warmup():
    # The last point is 570 s after the warm-up.
    assert cumulative_gap(steady([100, 30, 60]), 630) == pytest.approx(70 * 570)


@pytest.mark.parametrize(
    ("name", "greatest", "mean", "gap"),
    [
        ("fcfs_overload.csv", 447, 439, 237_738),
        ("fcfs_poisson_short_long.csv", 355, 209, 204_786),
        ("vtc_poisson_short_long.csv", 133, 34, 5_235),
    ],
)
def test_measured_files_give_the_published_figures(name, greatest, mean, gap):
    path = REFERENCE / name
    if not path.exists():
        pytest.skip(f"needs {path}, which is not on this machine")
    with path.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    measured = service(
        [
            (
                arrival := float(row["arrival_s"]),
                arrival + float(row["first_token_latency_s"]),
                arrival + float(row["request_latency_s"]),
                int(row["client"].removeprefix("client-")),
                int(row["prompt_tokens"]) + 2 * int(row["output_tokens"]),
            )
            for row in rows
        ]
    )
    difference = service_difference(measured, 600.0)
    assert difference.max == pytest.approx(greatest, abs=0.5)
    assert difference.mean == pytest.approx(mean, abs=0.5)
    assert cumulative_gap(measured, 600.0) == pytest.approx(gap, abs=1)


def test_throughput_by_hand():
    """The rows are 10 tokens over [0, 2], 4 at once at 1.5, one that was not served."""
    rates = throughput(
        np.array([10.0, 4.0, 99.0]),
        np.array([0.0, 1.5, np.nan]),
        np.array([2.0, 1.5, np.nan]),
        np.array([0.0, 1.0, 2.0, 4.0]),
    )
    assert rates.tolist() == pytest.approx([5, 9, 0])
    assert throughput(*[np.array([])] * 3, np.array([0.0, 1.0])).tolist() == [0]


@pytest.mark.parametrize("seed", fresh(5))
def test_throughput_adds_up_to_the_tokens(seed):
    draws = np.random.default_rng(seed)
    begin = draws.uniform(0, 100, 200)
    end = begin + draws.choice([0, 1], 200) * draws.uniform(0, 50, 200)
    tokens = draws.integers(1, 1_000, 200).astype(float)
    edges = np.sort(np.append(draws.uniform(0, 151, 30), [0, 151]))
    rates = throughput(tokens, begin, end, edges)
    assert (rates * np.diff(edges)).sum() == pytest.approx(tokens.sum())
    assert rates.min() >= -1e-9
