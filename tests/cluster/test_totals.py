"""Tests totals of service as books: growth is read once, whatever is lost or repeated."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsvc.cluster.rows import (
    Totals,
    pack_row,
    pack_totals,
    split_rows,
    unpack_row,
    unpack_totals,
)
from schedsvc.cluster.totals import (
    BATCH_MAX,
    OWN_KEPT_NS,
    SEEN_KEPT_NS,
    OwnTotals,
    SeenTotals,
)

KEY = (b"tenant", b"default", b"")
A = b"a/000000000000000a/"
names = st.binary(max_size=300)
near_62 = st.integers((1 << 62) - 1_000, (1 << 62) + 1_000)
amounts = st.one_of(st.integers(0, 1_000), near_62)


@given(names, names, names)
def test_a_row_is_read_as_written(tenant: bytes, cls: bytes, domain: bytes) -> None:
    assert unpack_row(pack_row(A, (tenant, cls, domain))) == (A, (tenant, cls, domain))


@given(amounts, amounts, amounts, amounts)
def test_totals_are_read_as_written(a: int, b: int, c: int, d: int) -> None:
    assert unpack_totals(pack_totals(Totals(a, b, c, d))) == (a, b, c, d)


@pytest.mark.parametrize(
    "data",
    [b"", b"1 2 3", b"1 2 3 4 5", b"-1 2 3 4", b"1 2 3 x", b"1  2 3", b"9" * 200 + b" 1 1 1"],
)
def test_bytes_that_are_no_totals_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="totals"):
        unpack_totals(data)


@given(st.binary(max_size=60))
def test_a_hostile_row_is_refused_or_read(data: bytes) -> None:
    for read in (unpack_row, split_rows):
        try:
            read(data)
        except ValueError:
            continue


@given(st.lists(st.tuples(amounts, amounts), max_size=20))
def test_growth_near_2_to_the_62_sums_to_the_total(steps: list[tuple[int, int]]) -> None:
    own, seen = OwnTotals(), SeenTotals()
    charged = refunded = 0
    for more, back in steps:
        own.add(KEY, more, back, 0)
        [(key, totals)] = own.batch()
        stored = unpack_totals(pack_totals(totals))
        for _ in range(2):  # the second time is a repeat
            grown = seen.take(A, key, stored, 0)
            charged, refunded = charged + grown[0], refunded + grown[1]
        own.acknowledge([(key, totals)])
    assert charged == sum(more for more, _ in steps)
    assert refunded == sum(back for _, back in steps)


# Seeds with which the reader sees each total's first report: others count from a later one.
@pytest.mark.parametrize("seed", range(20))
def test_lost_calls_and_a_lost_store_charge_nothing_twice(seed: int) -> None:
    rnd = random.Random(seed)
    own, seen, late = OwnTotals(), SeenTotals(), SeenTotals()
    store: dict[tuple[bytes, bytes, bytes], Totals] = {}
    served = read = from_join = at_join = 0
    for step in range(400):
        key = (b"t%d" % rnd.randrange(3), b"default", b"")
        more = rnd.randrange(1, 1_000)
        own.add(key, more, 0, 0)
        served += more
        if rnd.random() < 0.1:
            store.clear()
            own.send_all_again()
        batch = own.batch()
        if rnd.random() < 0.8:  # the call arrives
            store |= dict(batch)
            if rnd.random() < 0.8:  # and so does its answer
                own.acknowledge(batch)
        if rnd.random() < 0.8:
            for row, totals in store.items():
                read += seen.take(A, row, totals, 0)[0]
        if step >= 200:
            for row, totals in store.items():
                from_join += late.take(A, row, totals, 0)[0]
            if step == 200:
                at_join = served
        assert read <= served
    store |= dict(own.batch())
    for row, totals in store.items():
        read += seen.take(A, row, totals, 0)[0]
        from_join += late.take(A, row, totals, 0)[0]
    assert read == served
    # A total that is new to a reader counts from the value that its owner had sent before.
    assert from_join <= served - at_join + 12_000


def test_last_report_of_an_unseen_total_counts() -> None:
    seen = SeenTotals()
    assert seen.take(A, KEY, Totals(500, 20, 400, 20), 0) == (100, 0)
    assert seen.take(A, KEY, Totals(510, 21, 500, 20), 0) == (10, 1)


def test_a_total_that_falls_counts_as_nothing() -> None:
    seen = SeenTotals()
    seen.take(A, KEY, Totals(500, 20, 0, 0), 0)
    assert seen.take(A, KEY, Totals(300, 10, 0, 0), 0) == (0, 0)
    assert seen.take(A, KEY, Totals(510, 20, 0, 0), 0) == (10, 0)


def test_another_life_of_a_member_begins_at_0() -> None:
    seen = SeenTotals()
    seen.take(A, KEY, Totals(500, 20, 0, 0), 0)
    other = A.replace(b"a/", b"b/")
    assert seen.take(other, KEY, Totals(7, 0, 0, 0), 0) == (7, 0)


def test_totals_are_sent_in_batches_until_all_are() -> None:
    own = OwnTotals()
    for k in range(2 * BATCH_MAX + 1):
        own.add((b"%d" % k, b"default", b""), 1, 0, 0)
    sizes = []
    while batch := own.batch():
        sizes.append(len(batch))
        own.acknowledge(batch)
    assert sizes == [BATCH_MAX, BATCH_MAX, 1]
    own.add(KEY, 1, 0, 0)
    assert own.unsent == 1


def test_total_that_changes_while_it_is_sent_is_sent_again() -> None:
    own = OwnTotals()
    own.add(KEY, 1, 0, 0)
    batch = own.batch()
    own.add(KEY, 2, 0, 0)
    own.acknowledge(batch)
    assert own.batch() == [(KEY, Totals(3, 0, 1, 0))]


def test_more_totals_than_fit_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedsvc.cluster.totals.TOTALS_MAX", 3)
    own, seen = OwnTotals(), SeenTotals()
    for k in range(5):
        key = (b"%d" % k, b"default", b"")
        own.add(key, 1, 0, k)
        seen.take(A, key, Totals(1, 0, 0, 0), k)
        batch = own.batch()
        own.forget(k)
        seen.forget(k)
        own.acknowledge(batch)
        assert (len(own), len(seen)) == (min(k + 1, 3), min(k + 1, 3))
    assert own.unsent == 0


def test_idle_totals_are_forgotten_by_readers_first() -> None:
    own, seen = OwnTotals(), SeenTotals()
    own.add(KEY, 5, 0, 0)
    batch = own.batch()
    own.acknowledge(batch)
    seen.take(A, KEY, batch[0][1], 0)
    for now_ns, kept in ((SEEN_KEPT_NS, (1, 0)), (OWN_KEPT_NS, (0, 0))):
        own.forget(now_ns)
        seen.forget(now_ns)
        assert (len(own), len(seen)) == kept
