"""Tests that a drain outlives a restart, even of an absent pool, until an operator ends it."""

import pytest

from schedsvc import _core as core

from .support import admit, grant, make, pool
from .test_restart import saved


def without_pools(rows: dict[bytes, bytes]) -> core.Scheduler:
    """Return another process, to which no shim has come yet."""
    new = core.Scheduler()
    new.set_flow(b"f", 1000)
    assert new.set_saved(0, [(key, value, 0) for key, value in rows.items()]) == len(rows)
    new.check()
    return new


def test_a_drained_pool_stays_drained_before_and_after_it_is_back() -> None:
    s = make(("f", 1000))
    s.set_draining(0, b"p", True)
    new = without_pools(saved(s, 0))
    row = pool(new, 0)
    assert (row["name"], row["draining"], row["attached"]) == ("p", True, False)
    assert admit(new, 0, "early") == -core.REJECTED_NO_POOL
    new = without_pools(saved(new, 0))  # also with a process in between that it never joined
    new.set_pool(0, b"p", 2, 1_000, 16)
    assert pool(new, 0)["draining"]
    assert admit(new, 0, "r", pool=0) == -core.REJECTED_DRAINING
    new.set_draining(0, b"p", False)
    grant(new, 0, "r")
    again = without_pools(saved(new, 0))
    assert again.stats(0)["pools"] == []
    again.set_pool(0, b"p", 2, 1_000, 16)
    assert not pool(again, 0)["draining"]


def test_a_drain_is_undone_and_begun_while_the_pool_is_away() -> None:
    s = make(("f", 1000))
    s.set_draining(0, b"p", True)
    undone = without_pools(saved(s, 0))
    undone.set_draining(0, b"p", False)
    assert not pool(undone, 0)["draining"]
    rows = saved(undone, 0)
    for new in (undone, without_pools(rows)):
        new.set_pool(0, b"p", 1, 1_000, 16)
        assert not pool(new, 0)["draining"]
    begun = without_pools(rows)
    begun.set_draining(0, b"p", True)
    assert pool(begun, 0)["draining"]
    rows = saved(begun, 0)
    for new in (begun, without_pools(rows)):
        new.set_pool(0, b"p", 1, 1_000, 16)
        assert pool(new, 0)["draining"]
        new.check()
    with pytest.raises(core.CallerError, match="no pool of that name"):
        begun.set_draining(0, b"other", True)


def test_a_drain_of_all_outlives_the_process_and_its_stop_does_not() -> None:
    s = make(("f", 1000))
    s.set_draining(0, b"", True)
    new = without_pools(saved(s, 0))
    assert new.stats(0)["draining"]
    new.set_pool(0, b"p", 1, 1_000, 16)
    assert admit(new, 0, "r") == -core.REJECTED_DRAINING
    new.set_draining(0, b"", False)
    new.drain(0)  # SIGTERM
    again = without_pools(saved(new, 0))
    assert not again.stats(0)["draining"]
    again.set_pool(0, b"p", 1, 1_000, 16)
    grant(again, 0, "r")


def test_more_drained_pools_than_there_is_room_for_are_drained_when_they_come() -> None:
    rows = {b"pgone%d" % k: b"\x28\x01" for k in range(64)}
    s = core.Scheduler()
    s.set_flow(b"f", 1000)
    s.set_pool(0, b"mine", 1, 1_000, 16)
    assert s.set_saved(0, [(key, value, 0) for key, value in rows.items()]) == 64
    assert sum(row["draining"] for row in s.stats(0)["pools"]) == 63
    with pytest.raises(core.CallerError, match="at most 64 pools"):
        s.set_draining(0, b"gone63", True)
    s.set_draining(0, b"gone0", False)
    s.set_pool(0, b"gone63", 1, 1_000, 16)
    (last,) = [row for row in s.stats(0)["pools"] if row["name"] == "gone63"]
    assert last["draining"]
    told = saved(s, 0)
    assert told[b"pgone0"] == b""
    s.check()
