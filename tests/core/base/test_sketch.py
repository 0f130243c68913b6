"""Compares the sketch of lengths with counts in a dictionary, and with the lengths themselves."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import many, probe

LENGTH_MAX = (1 << 17) - 1
WINDOW = 512


def length(rnd):
    return rnd.choice((rnd.randrange(300), rnd.randrange(LENGTH_MAX + 1), 1 << 40))


LENGTHS = many(length, 1_500)
LEVELS = st.integers(1, 1_000_000)


def test_the_middle_of_a_bucket_is_within_a_hundredth_of_its_lengths():
    last = -1
    for length in range(LENGTH_MAX + 1):
        bucket, middle = probe().bucket_and_middle(length)
        assert last <= bucket <= last + 1
        last = bucket
        assert middle == length if length < 128 else abs(middle - length) <= 0.008 * length
    assert probe().bucket_and_middle(1 << 50)[0] == last < 768
    assert probe().bucket_and_middle(-5) == (0, 0)


def halved(counts):
    carry, kept = 0, {}
    for bucket in sorted(set(counts)):
        carry += counts[bucket]
        if carry >> 1:
            kept[bucket] = carry >> 1
        # The remainder goes to the next bucket, whether anything is in it or not.
        if carry & 1:
            counts.setdefault(bucket + 1, 0)
        carry &= 1
    return kept


def reference(lengths):
    counts = {}
    for length in lengths:
        bucket = probe().bucket_and_middle(length)[0]
        counts[bucket] = counts.get(bucket, 0) + 1
        if sum(counts.values()) >= WINDOW:
            dense = {k: counts.get(k, 0) for k in range(768)}
            counts = halved(dense)
    return counts


def quantile(counts, level_ppm, first=0):
    mass = sum(count for bucket, count in counts.items() if bucket >= first)
    want = min(level_ppm * (mass + 1), 1_000_000 * mass)
    seen = 0
    for bucket in sorted(bucket for bucket in counts if bucket >= first):
        seen += counts[bucket]
        if seen * 1_000_000 >= want:
            return bucket
    return None


@cache
def middles():
    return dict(map(probe().bucket_and_middle, range(LENGTH_MAX + 1)))


@given(LENGTHS, LEVELS, LEVELS)
def test_quantiles_are_those_of_the_counts(lengths, ledger_ppm, median_ppm):
    sketch = probe().ProbeSketch(ledger_ppm, median_ppm)
    for length in lengths:
        sketch.add(length)
    counts = reference(lengths)
    assert sketch.counts == counts
    assert sketch.mass == sum(counts.values())
    if counts:
        assert sketch.buckets() == tuple(quantile(counts, p) for p in (ledger_ppm, median_ppm))


@given(LENGTHS.filter(bool), LEVELS, LEVELS)
def test_a_level_that_is_steered_leads_where_one_of_the_beginning_does(lengths, first, then):
    steered, straight = probe().ProbeSketch(first, 1), probe().ProbeSketch(then, 1)
    for length in lengths:
        steered.add(length)
        straight.add(length)
    steered.steer(then)
    assert steered.buckets() == straight.buckets()


@given(LENGTHS, LEVELS, st.integers(0, 400) | st.integers(0, LENGTH_MAX))
def test_beyond_what_is_produced_the_quantile_is_that_of_the_longer_ones(lengths, ppm, produced):
    sketch = probe().ProbeSketch(ppm, ppm)
    for length in lengths:
        sketch.add(length)
    first = probe().bucket_and_middle(produced)[0] + 1
    bucket = quantile(reference(lengths), ppm, first)
    assert sketch.beyond(produced) == (-1 if bucket is None else middles()[bucket])


@pytest.mark.parametrize("count", [5, 20, 100, 400])
@pytest.mark.parametrize("percent", [50, 75, 90])
def test_the_next_length_is_covered_as_often_as_the_level_says(count, percent):
    # If distinct lengths come in random order, each rank is equally likely to be the last's.
    lengths = [n if n < 128 else 127 + 300 * (n - 127) for n in range(count + 1)]
    covered = 0
    for last in lengths:
        sketch = probe().ProbeSketch(percent * 10_000, 500_000)
        for length in lengths:
            if length != last:
                sketch.add(length)
        covered += probe().bucket_and_middle(last)[0] <= sketch.buckets()[0]
    assert covered * 100 >= min(percent * (count + 1), count * 100)
