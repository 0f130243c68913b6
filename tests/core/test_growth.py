"""The cost of an event does not grow with the number of requests: work is counted, not timed."""

import random

from schedsvc import _core as core

from .support import admit, grant, make

STEP = 8  # places that one insertion or removal moves
TABLES = 2  # request ids and lease ids; an event inserts or removes one in each


def moved_by(s: core.Scheduler, before: int) -> int:
    return core.moved_entries(s) - before


def test_no_event_pays_for_a_table_that_doubles() -> None:
    s = make(capacity=1 << 26, leases_max=1 << 20)
    most = 0
    for serial in range(14_000):
        before = core.moved_entries(s)
        grant(s, serial, f"r{serial}")
        most = max(most, moved_by(s, before))
    # From 64 places to 32,768, at seven in ten: all entries moved each time.
    assert core.moved_entries(s) == TABLES * sum(64 * 2**k * 7 // 10 for k in range(9))
    assert 0 < most <= TABLES * STEP
    s.check()


def test_while_a_table_grows_everything_in_it_is_found() -> None:
    s = make(capacity=1 << 26, leases_max=1 << 20, answers_max=0)
    rnd = random.Random(3)
    live: dict[int, core.Decision] = {}
    growing = lost = 0
    for serial in range(9_000):
        before = core.moved_entries(s)
        live[serial] = grant(s, serial, f"r{serial}")
        other = rnd.choice(list(live)[-200:] + list(live)[:200])
        if serial % 3 == 2:
            gone = live.pop(other)
            assert s.complete(serial, gone.lease_id, 1) is not None
            assert s.complete(serial, gone.lease_id, 1) is None
            lost += 1
        else:
            d = live[other]
            assert admit(s, serial, f"r{other}") == d.handle
            assert s.progress(serial, d.lease_id, 1, output_tokens=1) == core.LEASE_LIVE
        growing += moved_by(s, before) > 0
        if serial % 1_500 == 0:
            s.check()
    for number, d in live.items():
        assert admit(s, 9_000, f"r{number}") == d.handle
    assert growing > 500
    assert lost == 3_000
    s.check()


def test_no_peak_is_counted_if_the_sum_of_reservations_fits() -> None:
    s = make(capacity=20_000, ledger="peak", leases_max=1_000)
    for serial in range(50):
        grant(s, serial, f"r{serial}", 100, 300, reports_progress=True)
        s.poll(serial)
    assert core.counted_peaks(s) == 0
    admit(s, 50, "one-more", 100, 300, reports_progress=True)
    s.poll(50)
    assert core.counted_peaks(s) > 0
    s.check()


def test_a_peak_is_counted_once_while_nothing_moves() -> None:
    s = make(capacity=20_000, ledger="peak", leases_max=1_000)
    leases = [grant(s, n, f"r{n}", 100, 300, reports_progress=True) for n in range(50)]
    s.stats(50)
    before = core.counted_peaks(s)
    for _ in range(10):
        s.stats(50)
    assert core.counted_peaks(s) == before
    s.progress(50, leases[0].lease_id, 1, output_tokens=100)
    told = s.stats(50)["pools"][0]["load_tokens"]
    assert core.counted_peaks(s) == before + 1
    assert told == 49 * 400  # it will have ended when the others are at their longest
    s.check()
