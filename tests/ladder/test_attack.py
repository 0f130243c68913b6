"""Tests the measurements of overload and of attackers, as short as they can be."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench import attack, bulk, http2, overload, restart
from bench.attackers import MESSAGE_BYTES, Attack
from schedsvc.config.models import Limits
from schedsvc.driver import WORK_MAX


def test_a_call_by_hand_is_what_http2_says() -> None:
    written = bytearray(http2.call(3, "/path", b"x" * 20_000, (("k", "v" * 200),)))
    headers, *data = http2.frames(written)
    assert not written
    assert (headers.kind, headers.stream, headers.flags) == (1, 3, http2.END_HEADERS)
    assert headers.payload.endswith(b"\x00\x01k\x7f\x49" + b"v" * 200)
    assert [frame.ends for frame in data] == [False, True]
    body = b"".join(frame.payload for frame in data)
    assert body == b"\x00" + (20_000).to_bytes(4, "big") + b"x" * 20_000


def test_half_a_frame_waits_for_the_rest() -> None:
    whole = http2.reset(5)
    received = bytearray(whole[:7])
    assert not list(http2.frames(received))
    received += whole[7:] + whole[:2]
    [reset] = http2.frames(received)
    assert reset.ends
    assert received == whole[:2]


def test_every_call_of_a_flood_is_another_tenants_and_fits_the_window() -> None:
    flood = Attack("flood", seed=1)
    calls = [flood.call(2 * number + 1) for number in range(5)]
    assert len({call[-MESSAGE_BYTES:] for call in calls}) == 5
    assert flood.window_bytes == MESSAGE_BYTES + 5 <= http2.WINDOW


def test_the_bound_of_memory_is_that_of_the_limits() -> None:
    known, stranger = (attack.Case("flood", known=known) for known in (True, False))
    straight = attack.Case("flood", known=False, door="listener")
    ordinary = attack.growth_mb_max(stranger, "scheduler")
    assert ordinary < attack.growth_mb_max(stranger, "edge") < 400
    assert attack.growth_mb_max(known, "edge") < 1_100
    assert attack.growth_mb_max(known, "scheduler") < ordinary + 350
    few = Limits(connections_max=10, streams_max=10)
    bound = [attack.growth_mb_max(straight, "scheduler", limits) for limits in (few, Limits())]
    assert bound[0] < ordinary + 5 < 2_000 < bound[1]


@pytest.mark.slow
@pytest.mark.alone
def test_overload_is_measured(tmp_path: Path) -> None:
    command = ["--levels", "0.5,4", "--seconds", "3", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(overload.main, command)
    report: dict[str, Any] = json.loads(done.stdout)
    low, high = report["levels"]
    assert low["refused"] == low["errors"] == high["errors"] == 0
    assert high["refused"] > high["asked"] // 3
    assert high["goodput_tokens_per_s"] > low["goodput_tokens_per_s"] > 0
    for name in ("progress_ms", "complete_ms"):
        assert 0 < high[name]["p50"] <= high[name]["p99"]
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (tmp_path / "overload.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_are_of_turns_beside_those_of_nothing() -> None:
    of = [np.full(100, ms) for ms in (1.0, 2.0, 4.0, 8.0, 3.0, 6.0)]
    attacked = [np.full(100, ms) for ms in (4.0, 2.0, 8.0, 24.0, 12.0, 3.0)]
    paired, null = attack.paired_ratios(of, attacked)
    assert (paired.ratio, paired.low, paired.high) == pytest.approx((2.0, 2.0, 3.0), rel=0.02)
    assert null.ratio == 0.5


@pytest.mark.slow
@pytest.mark.alone
def test_an_attack_is_measured() -> None:
    [stranger, known] = attack.cases(["flood"], "edge", "unix")
    assert (stranger.known, known.known) == (False, True)
    measured = attack.measure(stranger, connections=20, seconds=1.0)
    assert measured["attackers"]["sent"] > 20
    assert measured["attackers"]["connected"] >= 20
    for when in ("alone_ms", "quiet_ms", "attacked_ms"):
        assert 0 < measured[when]["p50"] <= measured[when]["p99"]
    assert set(measured["processes"]) == {"scheduler", "edge"}
    for held in measured["processes"].values():
        assert held["peak_mb"] >= held["alone_mb"] > 0
    assert measured["processes"]["edge"]["files_max"] > 20


def test_many_expiries_are_done_in_parts() -> None:
    for running in (False, True):
        moment = bulk.of_core(1_000, running=running)
        assert moment["polls"] >= 1_000 / (2 * WORK_MAX)
        assert 0 < moment["stall_ms"] <= moment["all_ms"]
    assert bulk.of_loop(600)["polls"] >= 600 / (2 * WORK_MAX)


def test_a_restart_is_measured_until_every_lease_is_back() -> None:
    leases = 1_200
    core, server = restart.of_core(leases), restart.of_server(leases)
    assert 0 < core["longest_ms"] < core["all_ms"]
    assert server["cpu_s"] > 0
    assert server["wall_s"] > 0


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    held = bulk.memory_of(flows=10, queued=20_000)
    assert held["without_mb"] + 2 < held["resident_mb"] < 500
