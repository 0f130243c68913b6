"""Compares the peak of what runs with the load at every token to come."""

from hypothesis import given
from hypothesis import strategies as st

from . import many, probe


def lease(rnd):
    """Draw tokens held by each sequence, those to be made by each, sequences, reservation."""
    left = rnd.choice((rnd.randrange(12), rnd.randrange(400)))
    return rnd.randrange(400), left, rnd.randrange(1, 9), rnd.randrange(2_000)


def begun(each, tokens, block):
    """Return blocks that a sequence has begun some tokens later; one that holds nothing has one."""
    return (max(each, 1) + tokens + block - 1) // block


def load(leases, tokens, block):
    return sum(
        width * begun(each, tokens, block) for each, left, width, _ in leases if left >= tokens
    )


def peak_by_steps(leases, block, fixed):
    """Play every token: the greatest load just before some lease ends."""
    ends = {left for _, left, _, _ in leases}
    return max((load(leases, tokens, block) for tokens in ends), default=0) * block + fixed


def opened(leases, block, fixed):
    pool = probe().ProbePeak(block)
    pool.hold(fixed)
    return pool, [pool.open(*lease) for lease in leases]


@given(many(lease, 40), st.integers(1, 128), st.integers(0, 10_000))
def test_the_peak_is_the_greatest_load_to_come(leases, block, fixed):
    pool, _ = opened(leases, block, fixed)
    assert pool.peak() == peak_by_steps(leases, block, fixed)
    assert pool.peak() == peak_by_steps(leases, block, fixed)  # as it was counted before


@given(many(lease, 40), many(lease, 1).filter(bool), st.integers(1, 128), st.integers(0, 10_000))
def test_the_peak_with_one_more_is_that_of_all(leases, more, block, fixed):
    (one_more,) = more
    pool, _ = opened(leases, block, fixed)
    assert pool.peak(one_more) == peak_by_steps([*leases, one_more], block, fixed)
    assert pool.peak() == peak_by_steps(leases, block, fixed)


@given(many(lease, 40), st.integers(129, 5_000))
def test_with_large_blocks_the_peak_errs_on_the_safe_side(leases, block):
    pool, _ = opened(leases, block, 0)
    exact = peak_by_steps(leases, block, 0)
    assert exact <= pool.peak() <= exact + block * sum(width for _, _, width, _ in leases)


@given(
    many(lambda rnd: (rnd.randrange(20), rnd.choice((None, *[lease(rnd)] * 4))), 80),
    st.integers(1, 40),
)
def test_it_follows_reports_and_ends(changes, block):
    pool, model = probe().ProbePeak(block), {}
    for which, lease in changes:
        ids = sorted(model)
        if which < 6 and lease is not None:
            model[pool.open(*lease)] = lease
        elif ids and lease is not None:
            id = ids[which % len(ids)]
            pool.report(id, *lease)
            model[id] = lease
        elif ids:
            id = ids[which % len(ids)]
            pool.close(id)
            del model[id]
        assert pool.peak() == peak_by_steps(list(model.values()), block, 0)


@given(many(lease, 40), st.integers(0, 5_000), st.integers(0, 20_000))
def test_reservations_are_within_the_room_when_enough_has_ended(leases, fixed, room):
    pool, _ = opened(leases, 16, fixed)
    head = (10, 20, 1, 40)

    def reserved(tokens):
        return fixed + head[3] + sum(whole for _, left, _, whole in leases if left > tokens)

    times = sorted({0, *(left for _, left, _, _ in leases)})
    first = next((tokens for tokens in times if reserved(tokens) <= room), None)
    spare = 0 if first is None else room - reserved(first)
    assert pool.project(head, room, False) == (first, spare)


@given(many(lease, 20), st.integers(0, 5_000), st.integers(0, 20_000), st.integers(0, 1))
def test_head_fits_at_each_step_from_its_projected_start_on(leases, fixed, room, width):
    pool, _ = opened(leases, 16, fixed)
    head = (10, 20, width, 40)
    left, whole = head[1], head[3]

    def most(start):
        runs = [run for run in leases if run[1] > start]
        if width:
            runs.append((0, start + left, width, whole))
        steps = range(start + 1, max((run[1] for run in runs), default=start) + 1)
        loads = (
            sum(size - wide * (ends - at) for _, ends, wide, size in runs if ends >= at)
            for at in steps
        )
        return fixed + max(0, 0, *loads) + (0 if width else whole)

    start, spare = pool.project(head, room, True)
    last = max((run[1] for run in leases), default=0)
    if start is None:
        assert most(last) > room
    else:
        assert most(start) == room - spare
