"""Tests the parts of the bench: comparisons, messages, states, targets, the command."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console
from schedsvc_client.v1 import scheduler_pb2 as pb

from bench import chart, cli, show
from bench.compare import abba, compare
from bench.cores import Overload, Picks, Wire
from bench.machine import cpu_ns
from bench.messages import INPUT_TOKENS, Traffic, admits, tenant, zipf
from bench.scan import DictScan
from bench.targets import judge


def test_slices_are_interleaved() -> None:
    order: list[str] = []

    def a() -> list[float]:
        order.append("a")
        return [len(order), 1.0]

    def b() -> list[float]:
        order.append("b")
        return [len(order), 2.0]

    pairs = abba(a, b, rounds=2)
    assert "".join(order) == "abba" * 3
    assert pairs.shape == (2, 2, 2)
    # A steady drift affects both alike.
    assert pairs[:, 0, 0] == pytest.approx(pairs[:, 1, 0])
    assert pairs[:, :, 1].tolist() == [[1.0, 2.0], [1.0, 2.0]]


def test_the_same_thing_compares_as_one_and_a_slower_one_does_not() -> None:
    noise = np.random.default_rng(7).lognormal(sigma=0.1, size=(60, 2))
    same = compare(100 * noise)
    assert same.contains_one
    slower = compare(noise * [120, 100])
    assert not slower.contains_one
    assert slower.low < 1.2 < slower.high
    assert slower.ratio == pytest.approx(1.2 * same.ratio)
    assert slower.a == pytest.approx(120, rel=0.1)


def test_an_outlier_does_not_move_the_ratio() -> None:
    pairs = np.ones((60, 2))
    pairs[7, 0] = 1e6
    assert compare(pairs).ratio == 1.0


def granted(count: int, first_lease: int) -> bytes:
    answer = pb.SessionResponse()
    for k in range(count):
        answer.verdicts.add(tag=k + 1).response.grant.lease_id = first_lease + k
    return answer.SerializeToString()


@pytest.mark.parametrize("events", [1, 2, 16, 128])
def test_traffic_is_what_protobuf_would_send(events: int) -> None:
    traffic = Traffic(events, zipf(1_000), series=3)
    raw = [traffic.hello(), traffic.asks()]
    traffic.learn(granted(max(1, events // 2), first_lease=1 << 60))
    raw += traffic.take(8)
    messages = [pb.SessionRequest.FromString(data) for data in raw]
    assert [message.SerializeToString() for message in messages] == raw
    assert [message.seq for message in messages] == list(range(1, 11))
    assert messages[0].events[0].hello.client_id
    assert [len(message.events) for message in messages[2:]] == [events] * 8
    asks = [e.admit for m in messages for e in m.events if e.HasField("admit")]
    ends = [e.complete for m in messages for e in m.events if e.HasField("complete")]
    assert len({ask.tag for ask in asks}) == len({a.request.request_id for a in asks}) == len(asks)
    assert [end.lease_id - (1 << 60) for end in ends] == list(range(len(ends)))
    assert [ask.request.tenant for ask in asks] == [tenant(flow) for flow in zipf(1_000)][
        : len(asks)
    ]


def test_traffic_ends_the_leases_that_it_began() -> None:
    world, traffic = Wire(), Traffic(16, zipf(Wire.FLOWS))
    world.open(traffic)
    for message in traffic.take(50):
        answer = pb.SessionResponse.FromString(world.exchange(message))
        assert len(answer.verdicts) == 8
        assert not answer.leases
        assert not answer.faults
    totals = world.core.stats(world.now_ns, 0)["totals"]
    assert (totals["completed"], totals["live_leases"], totals["rejected"]) == (400, 8, 0)


def test_traffic_refuses_what_was_not_granted() -> None:
    traffic = Traffic(4, [0])
    with pytest.raises(ValueError, match="not all granted"):
        traffic.learn(granted(1, first_lease=5))
    with pytest.raises(ValueError, match="events"):
        Traffic(3, [0])


def test_unary_requests_differ() -> None:
    requests = admits(100)
    first, second = (pb.AdmitRequest.FromString(next(requests)) for _ in range(2))
    assert first.request_id != second.request_id
    assert first.input_tokens == [INPUT_TOKENS]


def test_few_flows_ask_most() -> None:
    draws = np.bincount(zipf(100), minlength=100)
    assert draws[0] / draws[9] == pytest.approx(10**1.1, rel=0.1)
    assert draws[99] > 0


def test_the_queue_stays_as_long_as_it_is() -> None:
    world = Overload(flows=20, queued=100)
    for _ in range(3):
        assert world.slice_of_admits(7)[0] > 0
        totals = world.core.stats(world.tick(), 0)["totals"]
        assert (totals["queued"], totals["live_leases"]) == (100, Overload.RUNNING)
    world.complete_and_grant(world.tick(), world.leases.popleft())
    world.refill()
    assert world.core.stats(world.tick(), 0)["totals"]["queued"] == 100
    world.core.check()


def test_heap_and_scan_pick_the_same_flows() -> None:
    flows = 100
    world = Picks(flows)
    world.slice(times=9)
    verdicts = [v for data in world.answers for v in pb.SessionResponse.FromString(data).verdicts]
    first_tag = verdicts[0].tag
    picked = [(verdict.tag - first_tag) % flows for verdict in verdicts]
    scan = DictScan([tenant(flow) for flow in range(flows)], INPUT_TOKENS)
    assert len(picked) == 640
    assert [tenant(flow) for flow in picked] == [scan.pick() for _ in picked]


def test_cpu_time_of_a_process_grows_as_it_works() -> None:
    def own_ns() -> int:
        used = os.times()
        return round((used.user + used.system) * 1e9)

    began_ns = own_ns()
    while own_ns() - began_ns < 50_000_000:
        pass
    before_ns, read_ns, after_ns = own_ns(), cpu_ns(os.getpid()), own_ns()
    tick_ns = 2_000_000_000 // os.sysconf("SC_CLK_TCK")
    assert before_ns - tick_ns <= read_ns <= after_ns + tick_ns


def rung(name: str, **figures: Any) -> dict[str, Any]:
    made = {"name": name, "sizes": {}, "median_ns": 1.0, "p99_ns": 1.0, "ratio": None, **figures}
    return {**made, **judge(made)}


MANY = {"flows": 100_000, "queued": 100_000}


@pytest.mark.parametrize(
    ("judged", "verdict"),
    [
        (rung("inside.admit", sizes=MANY, median_ns=450.0, p99_ns=1_400.0), "met"),
        (rung("inside.admit", sizes=MANY, median_ns=450.0, p99_ns=1_600.0), "missed"),
        (rung("inside.admit", sizes=MANY, median_ns=2_100.0), "MUST missed"),
        (rung("inside.admit", sizes={"flows": 100, "queued": 100_000}, median_ns=9e9), ""),
        (rung("inside.pick", sizes={"flows": 1_000}, ratio=99.0), "missed"),
        (rung("inside.pick", sizes={"flows": 1_000}, ratio=101.0), "met"),
        (rung("unary.tcp", ratio=1.2), "missed"),
        (rung("unary.tcp", ratio=1.3), "MUST missed"),
        (rung("stream", sizes={"events_per_message": 128}, ratio=0.71), "met"),
        (rung("stream", sizes={"events_per_message": 16}, ratio=0.1), ""),
    ],
)
def test_targets_are_judged(judged: dict[str, Any], verdict: str) -> None:
    assert show.verdict(judged) == verdict


def test_a_missed_target_is_shown(tmp_path: Path) -> None:
    entry = rung("unary.tcp", ratio=1.3, ratio_ci95=[1.2, 1.4], reference="empty echo")
    entry |= {"label": "Admit, TCP", "level": "unary", "reference_ns": 2.0, "events_per_s": 5.0}
    control = {"name": "it", "ratio": 1.2, "ratio_ci95": [1.1, 1.3], "contains_one": False}
    machine = {"cpu": "x", "cores": 2, "load_1_min": 0.1, "python": "3", "grpcio": "1"}
    report = {"machine": machine, "commit": "abc", "sizes": "full", "controls": [control]}
    report["rungs"], report["features"] = [entry], []
    console = Console(record=True, width=140, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(show.ladder(report))
    text = console.export_text()
    assert "T5 MUST missed" in text
    assert "1.30 (1.20-1.40)" in text
    assert "noisy" in text
    chart.draw(report, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("ns", "text"),
    [(None, ""), (1.234, "1.23 ns"), (999.0, "999 ns"), (1_500.0, "1.50 µs"), (2e9, "2.00 s")],
)
def test_times_have_three_digits(ns: float | None, text: str) -> None:
    assert show.duration(ns) == text


def test_help_has_an_example() -> None:
    shown = CliRunner().invoke(cli.main, ["--help"])
    assert shown.exit_code == 0
    assert "python -m bench --out" in shown.output


def test_an_unknown_level_is_named() -> None:
    refused = CliRunner().invoke(cli.main, ["--only", "nonsense"])
    assert refused.exit_code == 2
    assert "nonsense" in refused.output


@pytest.mark.alone  # pytest-benchmark is off below a worker of xdist
def test_measurements_that_fail_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli._FILES, "core", "bench/test_no_such_file.py")
    failed = CliRunner().invoke(cli.main, ["--smoke", "--only", "core", "--out", str(tmp_path)])
    assert failed.exit_code == 1
    assert "test_no_such_file.py" in failed.output
    assert not (tmp_path / "report.json").exists()
