"""Tests that a lease which passed a head keeps its discount in a restart and a recording."""

from pathlib import Path
from typing import Any

import pytest

from schedsvc import _core as core
from schedsvc.config import Config
from schedsvc.records.recording.start import Recording
from schedsvc_lab.sim.replay.exact import Exact
from schedsvc_lab.sim.replay.reader import Recording as Played

from .stream import Stream, completing, offering, replaying
from .support import SECOND, admit, vtc
from .test_backfill import FLOWS, backfilling, blocked
from .test_restart import saved

HALF = 500_000
#: Input and output of a lease, once at half price.
CHARGED = 10_000_000
TTL_NS, GRACE_NS = 10 * SECOND, 20 * SECOND


def passed(surplus_ppm: int = HALF) -> tuple[core.Scheduler, core.Decision]:
    """Return a core with a lease of flow b that passed a head, and one of flow a that did not."""
    s = backfilling(200, backfill_surplus_ppm=surplus_ppm)
    blocked(s)
    admit(s, 0, "brief", 10, 5, flow=2, reports_progress=True)
    (d,) = s.poll(0)
    return s, d


def reborn(rows: dict[bytes, bytes], **options: Any) -> core.Scheduler:
    s = backfilling(200, lease_id_base=1_000, **options)
    assert s.set_saved(0, [(key, value, 0) for key, value in rows.items()]) == len(rows)
    s.check()
    return s


def served(s: core.Scheduler, d: core.Decision, now_ns: int = 0) -> int:
    """Replay the lease that passed, end it, and return its flow's charge."""
    args = (b"brief", d.lease_id, 0, 1, d.reserved_tokens, 10, 5, 10)
    assert s.replay(now_ns, 2, *args) == core.LEASE_LIVE
    s.check()
    s.complete(now_ns, d.lease_id, 1, output_tokens=5)
    s.check()
    return vtc(s, now_ns, flow=2)


@pytest.mark.parametrize("surplus_ppm", [0, HALF])
def test_lease_that_passed_is_charged_as_without_a_restart(surplus_ppm: int) -> None:
    s, d = passed(surplus_ppm)
    rows = saved(s, 0)
    s.complete(0, d.lease_id, 1, output_tokens=5)
    # The setting may change over the restart; granted leases keep their discount.
    assert served(reborn(rows), d) == vtc(s, 0, flow=2) == (20 - 20 * surplus_ppm // 10**6) * 10**6


def test_lease_that_did_not_pass_is_charged_in_full_after_a_restart() -> None:
    s, _ = passed()
    new = reborn(saved(s, 0))
    new.replay(0, 1, b"runs", 1, 0, 1, 60, 10, 50, 10)
    new.complete(0, 1, 1, output_tokens=5)
    assert vtc(new, 0, flow=1) == 20_000_000


@pytest.mark.parametrize("offered", [True, False])
def test_discount_outlives_a_second_restart_before_the_replay(offered: bool) -> None:
    s, d = passed()
    rows = saved(s, 0)
    if offered:
        rows = saved(reborn(rows), 0)
    else:
        away = core.Scheduler()
        for name, weight in FLOWS:
            away.set_flow(name.encode(), weight)
        assert away.set_saved(0, [(key, value, 0) for key, value in rows.items()])
        rows = saved(away, 0)
    assert served(reborn(rows), d) == CHARGED


def test_discount_is_saved_no_more_when_replays_are_awaited_no_more() -> None:
    s, d = passed()
    new = reborn(saved(s, 0))
    new.poll(TTL_NS + GRACE_NS)
    rows = saved(new, TTL_NS + GRACE_NS)
    assert served(reborn(rows), d) == vtc(s, 0, flow=2) + 2 * CHARGED


def test_discount_of_a_revoked_lease_outlives_a_restart_until_it_has_ended() -> None:
    s, d = passed()
    s.revoke(0, d.lease_id)
    assert served(reborn(saved(s, 0)), d) == CHARGED
    s.complete(0, d.lease_id, 1, output_tokens=5)
    assert served(reborn(saved(s, 0)), d) == vtc(s, 0, flow=2) + 2 * CHARGED


def test_discount_of_an_ended_lease_is_saved_no_more() -> None:
    s, d = passed()
    rows = saved(s, 0)
    s.complete(0, d.lease_id, 1, output_tokens=5)
    after = rows | saved(s, 0)
    assert after[b"pp"] != rows[b"pp"]
    assert served(reborn(after), d) == 2 * CHARGED + CHARGED


@pytest.mark.parametrize(
    "passes",
    [
        b"\x3a\x02\x10\x01",  # a lease without its id
        b"\x3a\x02\x08\x07",  # without its discount
        b"\x3a\x06\x08\x07\x10\xc1\x84\x3d",  # with one of more than the whole
    ],
)
def test_wrong_passes_in_a_row_are_refused(passes: bytes) -> None:
    s = backfilling(200)
    with pytest.raises(core.CallerError, match=r"lease_id|discount_ppm"):
        s.set_saved(0, [(b"pp", b"\x08\x01" + passes, 0)])
    s.check()


def test_discount_of_before_a_restart_is_in_a_recording(tmp_path: Path) -> None:
    s, d = passed()
    config = Config.model_validate(
        {
            "listeners": [{"unix": "unused.sock"}],
            "record": str(tmp_path / "recording"),
            "tenants": [{"name": name} for name, _ in FLOWS],
            "pools": [{"name": "p", "capacity_tokens": 200, "block_size_tokens": 1}],
        }
    )
    made = Recording(config, 0)
    made.begin()
    recorded = made.core
    rows = [(key, value, 0) for key, value in saved(s, 0).items()]
    assert recorded.set_saved(0, rows) == len(rows)
    stream = Stream(recorded)
    told = {"tenant": "b", "reserved_tokens": d.reserved_tokens, "max_output_tokens": 5}
    stream.push(1, offering("p", capacity=200))
    stream.push(2, replaying(d.lease_id, "brief", **told))
    stream.push(3, completing(d.lease_id, output_tokens=5))
    recorded.poll(4)
    flow = recorded.flow_index(b"b")
    charged = recorded.flow_stats(4, flow)["vtc_micro"]
    made.close()
    replay = Exact(Played(tmp_path / "recording"))
    assert replay.run().checks > 0
    assert replay.core.flow_stats(4, flow)["vtc_micro"] == charged == CHARGED
