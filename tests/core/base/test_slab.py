"""Records that keep their place."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from . import many, probe


@given(
    st.sampled_from((8, 16, 24, 104)),
    many(lambda rnd: rnd.choice((None, rnd.randrange(1_000), None)), 1_500),
)
def test_records_are_zeroed_and_keep_what_is_written_until_they_are_freed(size, changes):
    slab = probe().ProbeSlab(size)
    held = []  # (address, bytes written)
    for n, free in enumerate(changes):
        if free is not None and held:
            at, byte = held.pop(free % len(held))
            assert slab.read(at) == bytes([byte]) * size
            slab.free(at)
        else:
            at = slab.alloc()
            assert slab.read(at) == bytes(size)
            assert at % 8 == 0
            slab.write(at, n % 255 + 1)
            held.append((at, n % 255 + 1))
    assert all(slab.read(at) == bytes([byte]) * size for at, byte in held)
    places = sorted(at for at, _ in held)
    assert all(b - a >= size for a, b in pairwise(places))


def test_freed_index_is_given_out_again_first():
    slab = probe().ProbeSlab(16)
    records = [slab.alloc() for _ in range(300)]
    for record in records:
        slab.free(record)
    assert [slab.alloc() for _ in range(300)] == records[::-1]
