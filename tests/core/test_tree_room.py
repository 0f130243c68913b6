"""Tests which request of a tree a pool grants if its next one by share fits another alone."""

from schedsvc import _core as core

from .support import admit
from .test_tree import group, make, member

LARGE = 30  # tokens: more than the pool of `make()` has


def test_a_pool_does_not_grant_what_only_another_pool_can_hold() -> None:
    """Two groups are level. In the first one, a request for any pool precedes one for the small
    pool, but is too large for it."""
    s = make(credit_max_micro=1 << 40)
    s.set_pool(0, b"large", 1, 20, 1, 1)
    a, b = group(s, "a", 1_000), group(s, "b", 1_000)
    own, anywhere = member(s, "own", a), member(s, "anywhere", a)
    beside, other = member(s, "beside", b), s.set_flow(b"other", 1_000)
    for k, flow in enumerate((own, beside)):
        admit(s, 0, f"served{k}", 10, 10, flow, pool=0)
        (d,) = s.poll(0)
        s.complete(0, d.lease_id, 1, output_tokens=10)
    for pool in (0, 1):
        admit(s, 0, f"runs{pool}", 10, 10, other, pool=pool)
    runs = {d.pool: d for d in s.poll(0)}
    s.set_pool(0, b"large", 1, 1_000, 1, 1)
    wanted = admit(s, 0, "own", 10, 10, own, pool=0)
    admit(s, 0, "beside", 10, 10, beside)
    admit(s, 0, "large", LARGE // 2, LARGE // 2, anywhere)
    assert s.poll(0) == []
    s.complete(0, runs[0].lease_id, 1, output_tokens=10)
    (d,) = s.poll(0)
    assert (d.handle, d.outcome) == (wanted, core.GRANTED)
    s.check()
