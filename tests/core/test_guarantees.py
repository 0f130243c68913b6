"""Tests shares: they bind in saturation, lend idle parts, and give them back at once."""

import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .support import SECOND, admit, grant, is_drained, make, outcomes, pool

MS = 10**6
MINUTE = 60 * SECOND


class Line:
    """Queues tenants at a pool of 1,000 tokens; each request takes 100 of them for a second."""

    def __init__(self, weights: tuple[int, ...], **limits: Any) -> None:
        self.core = make(
            *((f"t{i}", weight) for i, weight in enumerate(weights)),
            answers_max=0, flow_queue_max=50, queue_ttl_ns=1_000 * SECOND, **limits,
        )  # fmt: skip
        self.now_ns = self.asked = 0
        self.ends: list[tuple[int, int]] = []
        #: Tokens granted to each flow, by second.
        self.granted: dict[tuple[int, int], int] = defaultdict(int)

    def share(self, flow: int, share: int, parent: int = -1, **limits: int) -> None:
        self.core.set_flow_quota(self.now_ns, flow, parent, share=share, **limits)

    def play(self, seconds: int, demand: dict[int, float | None]) -> None:
        """Return requests a second of each flow; None: always more than can run."""
        end_ns, owed = self.now_ns + seconds * SECOND, dict.fromkeys(demand, 0.0)
        while self.now_ns < end_ns:
            while self.ends and self.ends[0][0] <= self.now_ns:
                lease_id = self.ends.pop(0)[1]
                self.core.complete(self.now_ns, lease_id, 1, output_tokens=50)
            for flow, rate in demand.items():
                queued = self.core.flow_stats(self.now_ns, flow)["queued"]
                owed[flow] += 20 - queued if rate is None else rate / 10
                while owed[flow] >= 1:
                    owed[flow] -= 1
                    self.asked += 1
                    admit(self.core, self.now_ns, f"r{self.asked}", 50, 50, flow)
            for d in self.core.poll(self.now_ns):
                assert d.outcome == core.GRANTED
                self.ends.append((self.now_ns + SECOND, d.lease_id))
                self.granted[d.flow, self.now_ns // SECOND] += 100
            self.now_ns += 100 * MS

    def got(self, flow: int, first: int, last: int) -> int:
        return sum(self.granted[flow, second] for second in range(first, last))

    def row(self, flow: int) -> dict[str, Any]:
        return self.core.flow_stats(self.now_ns, flow)


def test_below_saturation_a_share_binds_no_flow() -> None:
    line = Line((1000,))
    line.share(0, 60)  # a token a second
    line.play(20, {0: 7})  # 700 of 1,000 tokens at once
    assert line.got(0, 0, 20) >= 20 * 700 - 100
    row = line.row(0)
    assert row["share_left_tokens"] == 0
    assert row["borrowed_tokens"] == line.got(0, 0, 20) - 100  # the first overdrew its own
    assert not row["held_to_share"]
    assert not pool(line.core, line.now_ns)["saturated"]


def test_beyond_its_share_no_flow_exceeds_the_threshold() -> None:
    line = Line((1000, 1000))
    line.share(0, 60)
    line.play(30, {0: None})
    assert line.row(0)["held_to_share"]
    stats = pool(line.core, line.now_ns)
    assert (stats["load_tokens"], stats["saturated"], stats["wait_reason"]) == (800, True, "SHARE")
    # A flow without a share is not held to one, and finds room at once.
    grant(line.core, line.now_ns, "light", 50, 50, 1)
    line.core.check()


def test_a_held_flow_returns_when_its_own_share_has_tokens() -> None:
    s = make(queue_ttl_ns=MINUTE, lease_ttl_ns=MINUTE)
    s.set_flow_quota(0, 0, share=600)  # 10 a second
    grant(s, 0, "r0", 300, 330)  # 30 more than there is
    admit(s, 0, "r1", 100, 100, tag=1)
    grant(s, 0, "r1", 100, 100)  # the load was below saturation
    admit(s, 0, "r2", 10, 10, tag=2)
    assert s.poll(0) == []
    assert s.flow_stats(0, 0)["held_to_share"]
    assert not s.flow_stats(0, 0)["waits_for_quota"]
    due_ns = s.next_deadline()
    assert due_ns == 3 * SECOND + 60_000  # the first tick above 0
    assert s.poll(due_ns - 1) == []
    assert outcomes(s.poll(due_ns)) == [core.GRANTED]
    s.check()


def test_unused_tokens_return_to_the_share() -> None:
    s = make(queue_ttl_ns=MINUTE, lease_ttl_ns=MINUTE)
    s.set_flow_quota(0, 0, share=600)
    first = grant(s, 0, "r0", 300, 330)
    second = grant(s, 0, "r1", 100, 100)
    admit(s, 0, "r2", 10, 10)
    assert s.poll(0) == []
    assert s.flow_stats(0, 0)["borrowed_tokens"] == 200
    s.complete(0, second.lease_id, 1, output_tokens=20)  # free: it pays nothing
    assert s.flow_stats(0, 0)["borrowed_tokens"] == 120
    s.set_pool(0, b"p", 1, 600, 1)  # still saturated
    s.complete(0, first.lease_id, 1, output_tokens=100)
    assert outcomes(s.poll(0)) == [core.GRANTED]
    assert s.flow_stats(0, 0)["share_left_tokens"] == 600 - 400 - 20
    s.check()


def full(s: core.Scheduler, now_ns: int) -> None:
    """Another tenant fills the pool to saturation."""
    filler = s.set_flow(b"filler", 1000)
    grant(s, now_ns, "fills", 400, 450, filler)


def spend(s: core.Scheduler, flow: int, share: int, **more: int) -> None:
    """Use up a tenant's own share exactly."""
    d = grant(s, 0, f"spends{flow}", share - 1, 1, flow, **more)
    s.complete(0, d.lease_id, 1, output_tokens=1)


def lending(borrows: int = -1, **owner: int) -> core.Scheduler:
    """Return a saturated pool: `owner` idles with a share of 900; of `borrower`, who lends nothing,
    300 are used up."""
    s = make(("owner", 1000), ("borrower", 1000), queue_ttl_ns=MINUTE, lease_ttl_ns=MINUTE)
    s.set_flow_quota(0, 0, share=900, **owner)
    s.set_flow_quota(0, 1, share=300, lends=0, borrows=borrows)
    spend(s, 1, 300)
    full(s, 0)
    return s


@pytest.mark.parametrize(("lends", "fit"), [(-1, 9), (900, 9), (350, 4), (1, 1), (0, 0)])
def test_idle_shares_are_lent_up_to_their_limit(lends: int, fit: int) -> None:
    s = lending(lends=lends)
    granted = 0
    for i in range(12):
        handle = admit(s, 0, f"r{i}", 50, 50, 1)
        for d in s.poll(0):
            assert d.handle == handle
            granted += 1
            s.complete(0, d.lease_id, 1, output_tokens=50)
    assert granted == fit
    borrower, owner = s.flow_stats(0, 1), s.flow_stats(0, 0)
    assert borrower["borrowed_tokens"] == fit * 100
    assert borrower["held_to_share"]
    assert owner["lent_tokens"] == (fit * 100 if abs(lends) > 1 or lends == -1 else 0)
    assert owner["share_left_tokens"] == 900  # as it left it
    s.check()


@pytest.mark.parametrize(("borrows", "fit"), [(-1, 9), (250, 3), (0, 0)])
def test_no_flow_borrows_more_than_its_limit(borrows: int, fit: int) -> None:
    s = lending(borrows)
    for i in range(12):
        admit(s, 0, f"r{i}", 50, 50, 1)
        for d in s.poll(0):
            s.complete(0, d.lease_id, 1, output_tokens=50)
    assert s.flow_stats(0, 1)["borrowed_tokens"] == fit * 100
    s.check()


def test_tenants_of_a_group_lend_to_each_other_and_the_group_to_others() -> None:
    s = make(*((f"t{i}", 1000) for i in range(3)), queue_ttl_ns=MINUTE, lease_ttl_ns=MINUTE)
    group = s.set_quota(0, b"group", share=1_000, lends=300)
    s.set_flow_quota(0, 0, group, share=600)
    s.set_flow_quota(0, 1, group, share=400)
    s.set_flow_quota(0, 2, share=100)
    spend(s, 1, 400)
    spend(s, 2, 100)
    full(s, 0)
    # The pool of all had 300 of the group and 100 of the stranger; what they used of their own,
    # 400 and 100, is missing there, in the part that they lend. The last loan overdraws it.
    for i in range(5):
        admit(s, 0, f"s{i}", 40, 40, 2)
        for d in s.poll(0):
            s.complete(0, d.lease_id, 1, output_tokens=40)
    assert s.flow_stats(0, 2)["borrowed_tokens"] == 240
    assert s.flow_stats(0, 2)["held_to_share"]
    # Its own member has all of them.
    for i in range(8):
        admit(s, 0, f"m{i}", 50, 50, 1)
        for d in s.poll(0):
            s.complete(0, d.lease_id, 1, output_tokens=50)
    assert s.flow_stats(0, 1)["borrowed_tokens"] == 600
    assert s.flow_stats(0, 1)["held_to_share"]
    assert s.flow_stats(0, 0)["lent_tokens"] == 600
    assert outcomes([grant(s, 0, "owner", 100, 10, 0)]) == [core.GRANTED]
    s.check()


@pytest.mark.parametrize("seed", fresh(4))
def test_borrowing_ends_within_a_window_of_its_owners_return(seed: int) -> None:
    # The borrower weighs more, so that its weight alone would give it nearly all.
    rnd = random.Random(seed)
    nominal = rnd.randrange(400, 600)  # tokens a second
    line = Line((1000, rnd.choice((2_000, 9_000))))
    line.share(0, nominal * 60)
    line.share(1, (1_000 - nominal) * 60, borrows=rnd.choice((-1, 40_000)))
    line.play(180, {1: None})
    assert line.row(1)["borrowed_tokens"] > 0
    alone = line.got(1, 120, 180)
    assert alone >= 0.75 * 60_000
    line.play(60, {0: None, 1: None})
    assert line.got(0, 180, 240) >= nominal * 60 - 1_000  # running requests were not stopped
    before = line.row(1)["borrowed_tokens"]
    line.play(60, {0: None, 1: None})
    # The owner's burst is over: each flow has its own share, and none has another's.
    assert line.got(0, 240, 300) >= 0.97 * nominal * 60
    assert line.row(1)["borrowed_tokens"] - before <= 0.05 * 60_000
    assert line.row(0)["lent_tokens"] > 0
    line.core.check()


def test_there_is_no_cliff_at_the_threshold() -> None:
    # The owner asks for more and more; the borrower gets the rest, without a jump.
    found = []
    for rate in range(7):
        line = Line((1000, 1000))
        line.share(0, 600 * 60)
        line.share(1, 60)
        line.play(90, {0: rate, 1: None})
        owner, borrower = (line.got(flow, 30, 90) / 60 for flow in (0, 1))
        assert owner == pytest.approx(rate * 100, rel=0.02, abs=2)
        assert owner + borrower >= 780
        found.append(borrower)
    falls = [one - other for one, other in pairwise(found)]
    assert min(falls) >= -5
    assert max(falls) <= 2 * 100 + 5  # the load itself falls short by less than one request


def test_held_flows_are_served_by_weight() -> None:
    line = Line((1000, 3000, 1000))
    line.share(0, 60)
    line.share(1, 60)
    line.play(120, {0: None, 1: None})
    one, three = line.got(0, 20, 120), line.got(1, 20, 120)
    assert three / one == pytest.approx(3, rel=0.05)
    # A later arrival does not wait for the service that they missed while they were held.
    line.play(60, {0: None, 1: None, 2: None})
    assert line.got(2, 120, 180) > line.got(1, 120, 180)


def beside() -> core.Scheduler:
    """Return `lending` with an idle pool more; `borrower` has nothing left, and no tenant lends."""
    s = lending(lends=0)
    s.set_pool(0, b"q", 1, 1_000, 1)
    return s


def test_a_flow_that_is_held_for_a_full_pool_goes_on_in_one_with_room() -> None:
    s = beside()
    admit(s, 0, "full", 50, 50, 1, pool=0)
    assert s.poll(0) == []
    assert s.flow_stats(0, 1)["held_to_share"]
    for i in range(3):
        admit(s, i, f"room{i}", 50, 50, 1, pool=1)
        assert [d.pool for d in s.poll(i)] == [1]
    s.check()


def test_held_for_two_pools_each_goes_when_its_own_has_room() -> None:
    s = beside()
    other = s.set_flow(b"other", 1000)
    filler = grant(s, 0, "fills q", 400, 450, other, pool=1)
    for i in (0, 1):
        admit(s, 0, f"r{i}", 50, 50, 1, pool=i)
    assert s.poll(0) == []
    # The flow's own tokens suffice for one of them, and the first to arrive gets it.
    s.set_flow_quota(0, 1, share=400, lends=0)
    assert [d.pool for d in s.poll(0)] == [0]
    assert s.flow_stats(0, 1)["held_to_share"]
    s.complete(0, filler.lease_id, 1, output_tokens=1)
    assert [d.pool for d in s.poll(0)] == [1]
    assert not s.flow_stats(0, 1)["held_to_share"]
    s.check()


def test_a_held_head_keeps_no_other_queue_from_its_quota() -> None:
    s = beside()
    s.set_flow_quota(0, 1, share=300, lends=0, borrows=-1, requests=10)
    admit(s, 0, "full", 50, 50, 1, pool=0)
    assert s.poll(0) == []
    # The flow waits for a quota with one head, and is held with another.
    for i in range(12):
        admit(s, 0, f"r{i}", 10, 10, 1, pool=1)
        s.poll(0)
    row = s.flow_stats(0, 1)
    assert (row["held_to_share"], row["waits_for_quota"]) == (True, True)
    assert row["live_leases"] == 10 - 1  # the held one has taken its quota
    s.check()


def test_a_withdrawn_request_gives_back_what_it_took() -> None:
    s = lending()
    s.set_pool(0, b"p", 1, 1_000, 1, 1)  # no further request can run
    handle = admit(s, 0, "r", 50, 50, 1)
    assert s.poll(0) == []
    assert s.flow_stats(0, 1)["borrowed_tokens"] == 100  # paid, it waits in the line
    assert s.cancel(0, handle)
    s.poll(0)
    assert s.flow_stats(0, 1)["borrowed_tokens"] == 0
    s.set_pool(0, b"p", 1, 1_000, 1)
    d = grant(s, 0, "r2", 50, 50, 1)
    assert s.flow_stats(0, 1)["borrowed_tokens"] == 100
    assert s.cancel(0, d.handle)  # its caller never heard of it
    assert s.flow_stats(0, 1)["borrowed_tokens"] == 0
    assert s.flow_stats(0, 0)["lent_tokens"] == 0
    s.check()


def test_shares_change_while_everything_runs() -> None:
    s = lending(lends=0)
    admit(s, 0, "r", 50, 50, 1)
    assert s.poll(0) == []
    s.set_flow_quota(SECOND, 0, share=900, lends=600)
    assert outcomes(s.poll(SECOND)) == [core.GRANTED]
    admit(s, SECOND, "r2", 300, 300, 1)
    assert outcomes(s.poll(SECOND)) == []  # larger than the rest of the engine's pool
    s.set_gone(2 * SECOND, b"owner")  # a tenant that is gone lends nothing
    s.complete(2 * SECOND, 2, 1, output_tokens=450)
    assert s.flow_stats(2 * SECOND, 0)["share_tokens_per_minute"] == 0
    s.set_options(2 * SECOND, saturation_ppm=1_000_000)
    assert outcomes(s.poll(3 * SECOND)) == [core.GRANTED]
    s.set_flow_quota(3 * SECOND, 1)
    assert s.flow_stats(3 * SECOND, 1)["share_tokens_per_minute"] == 0
    s.drain(3 * SECOND)
    for lease in (3, 4):
        s.complete(3 * SECOND, lease, 1, output_tokens=1)
    s.poll(1_000 * SECOND)
    assert is_drained(s, 1_000 * SECOND)


def test_groups_models_and_the_pool_of_all_show_what_they_have_left() -> None:
    s = make(*((f"t{i}", 1000) for i in range(3)), queue_ttl_ns=MINUTE, lease_ttl_ns=MINUTE)
    outer = s.set_quota(0, b"group:outer", concurrency=9)
    group = s.set_quota(0, b"group:g", outer, share=1_000, lends=70, requests=1)
    s.set_pool_quota(0, b"p", s.set_quota(0, b"model:m", input_tokens=1_500, concurrency=5))
    s.set_quota(0, b"group:empty")
    s.set_flow_quota(0, 0, group, share=600)
    s.set_flow_quota(0, 1, group)
    s.set_flow_quota(0, 2, share=100, lends=0)
    spend(s, 2, 100)
    full(s, 0)
    grant(s, 0, "borrows", 35, 35, 2)  # of the group
    for i in range(2):
        admit(s, 0, f"held{i}", 35, 35, 2)
    grant(s, 0, "takes", 10, 10, 1)
    admit(s, 0, "waits", 10, 10, 1)
    s.poll(0)
    rows = {row["name"]: row for row in s.stats(0)["quotas"]}
    parents = {"group:outer": "", "group:g": "group:outer", "": "", "model:m": ""}
    assert {name: row["parent"] for name, row in rows.items()} == parents
    left = {name: [limit["remaining"] for limit in row["limits"]] for name, row in rows.items()}
    # Its own limits, not those of its chain.
    assert left == {"group:outer": [8], "group:g": [0], "": [], "model:m": [956, 2]}
    keys = ("open_requests", "waiting", "held_flows", "share_tokens_per_minute")
    assert {name: [row[key] for key in keys] for name, row in rows.items()} == {
        "group:outer": [1, 0, 0, 0],
        "group:g": [1, 1, 0, 1_000],
        "": [0, 0, 1, 0],
        "model:m": [3, 0, 0, 0],
    }
    keys = ("share_left_tokens", "borrowed_tokens", "lent_tokens")
    assert [rows["group:g"][key] for key in keys] == [1_000 - 20, 0, 70]
    assert [rows[""][key] for key in keys] == [0, 0, 0]
    assert s.stats(MINUTE)["quotas"][1]["share_left_tokens"] == 1_000  # at that time
    s.check()


def test_an_audited_flow_learns_that_it_would_have_waited() -> None:
    s = lending(lends=0)
    s.set_flow_mode(0, 1, True)
    for i in range(2):
        admit(s, 0, f"r{i}", 10, 10, 1)
        assert outcomes(s.poll(0)) == [core.GRANTED]
    assert s.flow_stats(0, 1)["audited_waits"] == 2
    s.check()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"share": -1}, "share"),
        ({"share": 10, "lends": 11}, "lends"),
        ({"share": 10, "lends": -2}, "lends"),
        ({"share": 10, "borrows": -2}, "borrows"),
        ({"share": 10**12 + 1}, "share"),
    ],
)
def test_wrong_shares_are_refused_and_change_nothing(given: dict[str, int], field: str) -> None:
    s = make()
    for call in (lambda: s.set_flow_quota(0, 0, **given), lambda: s.set_quota(0, b"g", **given)):
        with pytest.raises(core.CallerError) as e:
            call()
        assert e.value.field == field
    assert s.flow_stats(0, 0)["share_tokens_per_minute"] == 0
    assert s.set_quota(0, b"other") == 0
