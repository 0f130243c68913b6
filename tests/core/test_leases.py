"""Tests the life of a lease: times, totals, epochs and replays (invariants 3, 5, 6)."""

import pytest

from schedsvc import _core as core

from .stream import Stream, offering, replaying
from .support import SECOND, admit, grant, is_drained, make, outcomes, pool, totals

TTL, GRACE = 10 * SECOND, 20 * SECOND


def test_a_lease_is_suspect_after_its_ttl_and_expired_after_the_grace() -> None:
    s = make()
    d = grant(s, 0, "r")
    assert s.poll(TTL - 1) == []
    assert pool(s, TTL - 1)["suspect_leases"] == 0
    assert s.poll(TTL) == []
    assert pool(s, TTL)["suspect_leases"] == 1
    assert pool(s, TTL)["promised_tokens"] == 20  # it still counts
    assert s.poll(TTL + GRACE - 1) == []
    (expired,) = s.poll(TTL + GRACE)
    assert (expired.outcome, expired.lease_id) == (core.EXPIRED, d.lease_id)
    assert s.progress(TTL + GRACE, d.lease_id, 1) == core.LEASE_ENDED
    ended = s.complete(TTL + GRACE, d.lease_id, 1, output_tokens=9)
    assert ended == core.Ended(core.EXPIRED, 10, 0, 0, True)
    assert is_drained(s, TTL + GRACE)


def test_a_suspect_lease_that_reports_is_live_again() -> None:
    s = make()
    d = grant(s, 0, "r")
    s.poll(TTL)
    assert s.progress(TTL + 5, d.lease_id, 1) == core.LEASE_LIVE
    assert pool(s, TTL + 5)["suspect_leases"] == 0
    assert s.poll(2 * TTL + 4) == []
    assert pool(s, 2 * TTL + 4)["suspect_leases"] == 0
    s.poll(2 * TTL + 5)
    assert pool(s, 2 * TTL + 5)["suspect_leases"] == 1


def test_without_grace_the_ttl_ends_it() -> None:
    s = make(lease_grace_ns=0)
    grant(s, 0, "r")
    assert s.poll(TTL - 1) == []
    assert outcomes(s.poll(TTL)) == [core.EXPIRED]
    assert is_drained(s, TTL)


def test_a_live_lease_that_renews_never_expires() -> None:
    # A known bug elsewhere: a reaper frees leases of live requests after five minutes.
    s = make()
    d = grant(s, 0, "r")
    for i in range(1, 200):
        now_ns = i * (TTL - 1)
        assert s.progress(now_ns, d.lease_id, 1) == core.LEASE_LIVE
        assert s.poll(now_ns) == []
    assert pool(s, 200 * TTL)["live_leases"] == 1


def test_a_suspect_or_void_lease_of_an_old_epoch_ends_like_any_other() -> None:
    s = make()
    suspect, void = grant(s, 0, "r1"), grant(s, 0, "r2")
    s.poll(TTL)
    s.set_pool(TTL, b"p", 2, 1_000, 1)
    assert pool(s, TTL)["suspect_leases"] == 0
    assert s.complete(TTL, void.lease_id, 1, output_tokens=3)
    (expired,) = s.poll(TTL + GRACE)
    assert expired.lease_id == suspect.lease_id
    assert is_drained(s, TTL + GRACE)


def test_a_stale_epoch_charges_usage_and_does_not_renew() -> None:
    s = make()
    d = grant(s, 0, "r", reports_progress=True)
    assert s.progress(TTL - 1, d.lease_id, 0, 10, 0, 6) == core.LEASE_VOID
    assert s.flow_stats(TTL, 0)["output_tokens"] == 6
    assert pool(s, TTL)["posted_tokens"] == 0
    s.poll(TTL)
    assert pool(s, TTL)["suspect_leases"] == 1


def test_no_principal_touches_the_lease_of_another() -> None:
    s = make()
    d = grant(s, 0, "r", principal=5)
    for stranger in (0, 6, -1):
        assert s.progress(1, d.lease_id, 1, principal=stranger) == core.LEASE_UNKNOWN
        assert s.complete(1, d.lease_id, 1, principal=stranger) is None
        state = s.replay(1, 0, b"r", d.lease_id, 0, 1, 20, 10, 10, principal=stranger)
        assert state == core.LEASE_UNKNOWN
    assert s.progress(1, d.lease_id, 1, principal=5) == core.LEASE_LIVE
    assert totals(s, 1)["live_leases"] == 1


def test_the_final_totals_are_the_truth_also_where_they_are_smaller() -> None:
    s = make()
    d = grant(s, 0, "r", reports_progress=True)
    s.progress(1, d.lease_id, 1, 10, 8, 9)
    ended = s.complete(2, d.lease_id, 1, core.COMPLETED, 10, 4, 7)
    assert ended == core.Ended(core.COMPLETED, 10, 4, 7, False)
    flow = s.flow_stats(2, 0)
    told = (flow["input_tokens"], flow["cached_input_tokens"], flow["output_tokens"])
    assert told == (10, 4, 7)


@pytest.mark.parametrize(
    ("outcome", "reported", "final", "charged"),
    [
        (core.COMPLETED, (-1, -1, -1), (-1, -1, -1), (10, 0, 0)),  # no report counted the input
        (core.COMPLETED, (-1, -1, 5), (-1, -1, -1), (10, 0, 5)),
        (core.COMPLETED, (10, 20, 5), (-1, -1, -1), (10, 10, 5)),  # cached is part of the input
        (core.COMPLETED, (-1, 4, 5), (-1, -1, -1), (10, 4, 5)),  # part of an uncounted input
        (core.COMPLETED, (-1, -1, -1), (-1, 99, 5), (10, 10, 5)),
        (core.CANCELLED, (-1, 4, -1), (-1, -1, -1), (10, 4, 0)),
        (core.COMPLETED, (6, 0, 0), (0, 0, 0), (0, 0, 0)),
        (core.CANCELLED, (-1, -1, -1), (-1, -1, -1), (10, 0, 0)),  # it ran, how fast is not known
        (core.CANCELLED, (-1, -1, -1), (0, 0, 0), (0, 0, 0)),  # the engine never had it
        (core.CANCELLED, (-1, -1, 3), (-1, -1, -1), (10, 0, 3)),  # output: so the input was read
        (core.CANCELLED, (4, -1, -1), (-1, -1, -1), (4, 0, 0)),
        (core.CANCELLED, (10, 5, 3), (-1, -1, 4), (10, 5, 4)),
    ],
)
def test_usage_of_the_end(
    outcome: int,
    reported: tuple[int, int, int],
    final: tuple[int, int, int],
    charged: tuple[int, int, int],
) -> None:
    s = make()
    d = grant(s, 0, "r")
    s.progress(1, d.lease_id, 1, *reported)
    ended = s.complete(2, d.lease_id, 1, outcome, *final)
    assert ended == core.Ended(outcome, *charged, False)
    flow = s.flow_stats(2, 0)
    assert charged == tuple(
        flow[k] for k in ("input_tokens", "cached_input_tokens", "output_tokens")
    )
    inputs, cached, outputs = charged
    assert flow["vtc_micro"] == ((inputs - cached) * 10 + cached + outputs * 20) * 100_000


def test_cancelling_a_grant_takes_back_what_was_reported() -> None:
    s = make()
    handle = admit(s, 0, "r")
    (d,) = s.poll(0)
    s.progress(1, d.lease_id, 1, 10, 5, 3)
    assert s.cancel(2, handle)
    flow = s.flow_stats(2, 0)
    assert (flow["input_tokens"], flow["output_tokens"], flow["vtc_micro"]) == (0, 0, 0)
    assert flow["cancelled"] == 1
    assert s.progress(3, d.lease_id, 1) == core.LEASE_UNKNOWN  # forgotten: a retry is new
    assert not s.cancel(3, handle)
    assert admit(s, 3, "r") != handle
    assert outcomes(s.poll(3)) == [core.GRANTED]


@pytest.mark.parametrize("lease_id", [0, -1, -(1 << 63), (1 << 62) + 1, (1 << 63) - 1])
def test_a_replay_cannot_spoil_the_numbering(lease_id: int) -> None:
    s = make()
    assert s.replay(0, 0, b"r", lease_id, 0, 1, 10, 5, 5) == core.LEASE_UNKNOWN
    assert grant(s, 0, "next").lease_id == 1
    s.check()


def test_a_replay_moves_the_numbering_past_it() -> None:
    s = make()
    assert s.replay(0, 0, b"r", 500, 0, 1, 10, 5, 5) == core.LEASE_LIVE
    assert s.replay(0, 0, b"q", 400, 0, 1, 10, 5, 5) == core.LEASE_LIVE
    assert grant(s, 0, "next").lease_id == 501


def test_replay_from_another_principal_than_the_owner_is_unknown() -> None:
    """Any caller could promise 192,416 tokens of another caller's pool of 10,000."""
    s = make(capacity=10_000)
    owner, stranger = Stream(s, principal=1), Stream(s, principal=2)
    owner.send(0, offering("gpu", capacity=10_000))
    said = stranger.send(0, replaying(7, "r", pool="gpu", reserved_tokens=1_000))
    assert [(n.lease_id, n.state) for n in said.leases] == [(7, core.LEASE_UNKNOWN)]
    assert totals(s, 0)["promised_tokens"] == 0
    assert totals(s, 0)["replays_refused"] == 1
    assert not owner.send(0, replaying(7, "r", pool="gpu", reserved_tokens=1_000)).leases
    assert totals(s, 0)["promised_tokens"] == 1_000
    owner.session.close(0)  # the last one that offered it still owns it
    said = stranger.send(0, replaying(8, "q", pool="gpu"))
    assert [(n.lease_id, n.state) for n in said.leases] == [(8, core.LEASE_UNKNOWN)]
    s.check()


@pytest.mark.parametrize(("at_ns", "state"), [(14, core.LEASE_LIVE), (15, core.LEASE_UNKNOWN)])
def test_replay_after_the_ttl_and_grace_of_the_pool_is_unknown(at_ns: int, state: int) -> None:
    s = core.Scheduler(lease_ttl_ns=10 * SECOND, lease_grace_ns=5 * SECOND)
    s.set_flow(b"f", 1_000)
    s.set_pool(0, b"p", 1, 1_000, 1)
    assert s.replay(at_ns * SECOND, 0, b"r", 9, 0, 1, 10, 5, 5) == state
    assert totals(s, at_ns * SECOND)["replays_refused"] == (state == core.LEASE_UNKNOWN)
    s.set_pool(at_ns * SECOND, b"q", 1, 1_000, 1)  # offered first now: its leases are awaited
    assert s.replay(at_ns * SECOND, 0, b"q", 10, 1, 1, 10, 5, 5) == core.LEASE_LIVE
    s.check()


def test_seeded_lease_ids_are_random_and_no_replay_moves_them() -> None:
    def ids(seed: str, *replayed: int) -> list[int]:
        s = make(capacity=1_000, lease_seed=seed)
        for lease_id in replayed:
            assert s.replay(0, 0, b"%d" % lease_id, lease_id, 0, 1, 10, 5, 5) == core.LEASE_LIVE
        return [grant(s, 0, f"r{i}").lease_id for i in range(20)]

    drawn = ids("00" * 16)
    assert drawn == ids("00" * 16)  # so a recording can be replayed
    assert drawn == ids("00" * 16, 1, 1 << 62)
    assert set(drawn).isdisjoint(ids("01" * 16))
    assert len(set(drawn)) == 20
    assert all(0 < lease_id < 1 << 62 for lease_id in drawn)
    assert sum(lease_id < 1 << 61 for lease_id in drawn) in range(2, 19)
    taken = ids("00" * 16, drawn[0])  # an id in use is not drawn
    assert taken == [*drawn[1:], taken[-1]]


@pytest.mark.parametrize("seed", ["0", "00" * 15, "x" * 32])
def test_seed_of_lease_ids_has_32_digits(seed: str) -> None:
    with pytest.raises(core.CallerError, match="must be 32 hexadecimal digits"):
        make(lease_seed=seed)


def test_a_replay_of_an_unknown_lease_needs_the_pools_epoch() -> None:
    s = make()
    s.set_pool(0, b"p", 5, 1_000, 1)
    for epoch in (4, 6):
        assert s.replay(0, 0, b"r", 9, 0, epoch, 10, 5, 5) == core.LEASE_VOID
    assert totals(s, 0)["live_leases"] == 0
    assert s.replay(0, 0, b"r", 9, 0, 5, 10, 5, 5) == core.LEASE_LIVE


def test_a_replay_of_a_request_id_that_is_queued_is_refused() -> None:
    s = make(capacity=20)
    grant(s, 0, "runs")
    admit(s, 0, "waits")
    assert s.replay(0, 0, b"waits", 9, 0, 1, 20, 10, 10) == core.LEASE_UNKNOWN
    s.check()


def test_restored_leases_are_bounded() -> None:
    s = make(leases_max=3)
    states = [s.replay(0, 0, b"r%d" % i, 10 + i, 0, 1, 20, 10, 10) for i in range(5)]
    assert states == [core.LEASE_LIVE] * 3 + [core.LEASE_UNKNOWN] * 2
