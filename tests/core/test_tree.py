"""Tests the tree of shares: groups with a weight share, and so do their members."""

import contextlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from schedsvc import _core as core
from tests.seeds import fresh

from .pool_world import PoolWorld
from .random_walk import FLOWS, RandomWalk
from .support import SECOND, admit, is_drained, vtc
from .test_quotas import MINUTE
from .test_restart import saved
from .tree_histories import TreeHistory, main


def make(**options: Any) -> core.Scheduler:
    """Return a scheduler with a pool for one request of 10 and 10 tokens at a time."""
    still = {"headroom_ppm": 0, "headroom_min_ppm": 0, "headroom_max_ppm": 0}
    given: dict[str, Any] = {"ledger": "sum", "dispatch": "strict", "credit_max_micro": 0}
    s = core.Scheduler(**(given | still | options))
    s.set_pool(0, b"p", 1, 20, 1)
    return s


def group(s: core.Scheduler, name: str, weight: int, parent: int = -1, **limits: int) -> int:
    return s.set_quota(0, b"group:" + name.encode(), parent, weight_milli=weight, **limits)


def member(s: core.Scheduler, name: str, group: int, weight: int = 1_000) -> int:
    flow = s.set_flow(name.encode(), weight)
    s.set_flow_quota(0, flow, group)
    return flow


def flood(s: core.Scheduler, now_ns: int, flows: dict[str, int], count: int = 200) -> None:
    for k in range(count):
        for name, flow in flows.items():
            admit(s, now_ns, f"{name}{k}", 10, 10, flow)


def serve(s: core.Scheduler, now_ns: int, count: int) -> list[int]:
    """Return flows in the order in which they are granted, one after the other."""
    found: list[int] = []
    while len(found) < count:
        (d,) = s.poll(now_ns)
        assert d.outcome == core.GRANTED
        found.append(d.flow)
        s.complete(now_ns, d.lease_id, 1, output_tokens=10)
    return found


def organisations(s: core.Scheduler, *sizes: int) -> dict[str, int]:
    """Make organisations of weight 1, 2, 4 and so on, with these numbers of users."""
    flows = {}
    for k, size in enumerate(sizes):
        node = group(s, f"org{k}", 1_000 << k)
        for user in range(size):
            flows[f"{k}.{user}."] = member(s, f"org{k}/u{user}", node)
    return flows


def test_organisations_share_by_weight_whatever_their_size() -> None:
    s = make()
    flows = organisations(s, 1, 5, 10)
    flood(s, 0, flows)
    served = Counter(serve(s, 0, 700))
    by_org = [sum(served[f] for n, f in flows.items() if n[0] == str(k)) for k in range(3)]
    assert by_org == pytest.approx([100, 200, 400], abs=1)
    for k in range(3):
        users = [served[f] for n, f in flows.items() if n[0] == str(k)]
        assert max(users) - min(users) <= 1
    s.check()


def shares_of_a_flood(grants: int) -> tuple[list[float], list[float], int]:
    """Return parts of organisations of weight 1, 2, 4 with 1, 10, 100 users over what they are due;
    how far the users of each differ, as a part of the most; the least grants of a user."""
    rnd = random.Random(3)
    s = core.Scheduler(queue_max=10_000)
    flows = organisations(s, 1, 10, 100)
    s.set_pool(0, b"p", 1, 40_000, 16, 64)
    name_of = {flow: name for name, flow in flows.items()}
    serial = now_ns = 0
    live: list[list[Any]] = []
    tokens: Counter[str] = Counter()
    served: Counter[str] = Counter()

    def ask(flow: int) -> None:
        nonlocal serial
        serial, output = serial + 1, rnd.randint(20, 200)
        admit(s, now_ns, f"{serial}", 100, output, flow, reports_progress=True, tag=output)

    for flow in list(flows.values()) * 8:
        ask(flow)
    while served.total() < grants:
        now_ns += SECOND // 50
        for d in s.poll(now_ns):
            if d.outcome == core.GRANTED:
                live.append([d, rnd.randint(1, d.tag), 0])
                served[name_of[d.flow]] += 1
            if d.outcome == core.GRANTED or d.outcome >= core.EVICTED_TTL:
                ask(d.flow)
        for entry in live:
            d, output, done = entry
            entry[2] = done = min(output, done + 20)
            if done < output:
                s.progress(now_ns, d.lease_id, 1, 100, 0, done)
            else:
                s.complete(now_ns, d.lease_id, 1, core.COMPLETED, 100, 0, output)
                tokens[name_of[d.flow]] += 100 + 2 * output
        live = [entry for entry in live if entry[2] < entry[1]]
    s.check()
    users = [[tokens[n] for n in flows if n[0] == str(k)] for k in range(3)]
    parts = [sum(mine) / tokens.total() * 7 / (1 << k) for k, mine in enumerate(users)]
    return parts, [1 - min(mine) / max(mine) for mine in users], min(served.values())


def test_flood_of_organisations_is_shared_by_weight() -> None:
    parts, spreads, _ = shares_of_a_flood(12_000)
    assert parts == pytest.approx([1, 1, 1], rel=0.01)
    assert max(spreads) <= 0.05


@pytest.mark.slow
def test_long_flood_of_organisations_is_shared_within_bounds() -> None:
    parts, spreads, least = shares_of_a_flood(190_000)
    assert least >= 1_000
    assert parts == pytest.approx([1, 1, 1], rel=0.01)
    assert max(spreads) <= 0.02


def test_tree_of_four_levels_shares_at_each() -> None:
    s = make()
    org = group(s, "org", 1_000)
    other = member(s, "other", -1)
    team, small = group(s, "team", 3_000, org), group(s, "small", 1_000, org)
    unit = group(s, "unit", 1_000, team)
    flows = {
        "a": member(s, "a", unit, 2_000), "b": member(s, "b", unit), "c": member(s, "c", team),
        "d": member(s, "d", small), "e": other,
    }  # fmt: skip
    flood(s, 0, flows)
    served = Counter(serve(s, 0, 320))
    assert [served[f] for f in flows.values()] == pytest.approx([40, 20, 60, 40, 160], abs=2)


def test_group_without_a_weight_changes_nothing() -> None:
    def order(weight: int) -> list[int]:
        s = make()
        inner = group(s, "inner", 0, group(s, "outer", weight))
        flows = {"a": member(s, "a", inner), "b": member(s, "b", inner), "c": member(s, "c", -1)}
        flood(s, 0, flows)
        return serve(s, 0, 90)

    assert Counter(order(0)).most_common() == [(0, 30), (1, 30), (2, 30)]
    assert Counter(order(1_000)).most_common() == [(2, 45), (0, 23), (1, 22)]


@pytest.mark.parametrize("pools", [1, 3])
@pytest.mark.parametrize("policy", ["vtc", "vtc-predict", "lcf", "dlpm", "fcfs", "sif"])
def test_all_in_one_weighted_group_decide_as_without_it(policy: str, pools: int) -> None:
    digests = []
    for weight in (0, 1_000, 7_000):
        walk = RandomWalk(11, policy, pools=pools)
        node = walk.core.set_quota(0, b"group:all", weight_milli=weight)
        for flow in range(FLOWS):
            walk.core.set_flow_quota(0, flow, node)
        walk.run(events=5_000, check_every=1_000)
        digests.append(walk.core.digest())
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize("pools", [1, 3])
@pytest.mark.parametrize("policy", ["fcfs", "sif"])
def test_tree_changes_nothing_under_orders_without_counters(policy: str, pools: int) -> None:
    digests = set()
    for weight in (0, 1_000):
        # Shares may affect only the order.
        walk = RandomWalk(12, policy, pools=pools)
        nodes = [walk.core.set_quota(0, b"g%d" % k, weight_milli=weight * k) for k in range(4)]
        for flow in range(FLOWS):
            walk.core.set_flow_quota(0, flow, nodes[flow % 4])
        walk.run(events=10_000, check_every=1_000)
        digests.add(walk.core.digest())
    assert len(digests) == 1


class TreeWalk(RandomWalk):
    """Walks at random while groups come, go, and change their weights and parents."""

    def __init__(self, seed: int, policies: tuple[str, ...], pools: int = 1) -> None:
        super().__init__(seed, policies[0], pools=pools)
        self.policies = policies
        self.groups = [-1] + [self.core.set_quota(0, b"g%d" % k) for k in range(8)]
        self.events.append(self.reload)
        self.weights.append(1)

    def reload(self) -> None:
        for k in range(1, len(self.groups)):
            parent = self.random.choice(self.groups[max(0, k - 3) : k])
            weight = self.random.choice((0, 500, 1_000, 3_000))
            with contextlib.suppress(core.CallerError):  # there may be too many levels
                self.core.set_quota(self.now_ns, b"g%d" % (k - 1), parent, weight_milli=weight)
        self.core.set_options(self.now_ns, policy=self.random.choice(self.policies))
        for flow in range(FLOWS):
            if self.random.random() < 0.3:
                limits = {"requests": 600} if self.random.random() < 0.2 else {}
                with contextlib.suppress(core.CallerError):  # there may be too many levels
                    self.core.set_flow_quota(
                        self.now_ns, flow, self.random.choice(self.groups), **limits
                    )


@pytest.mark.parametrize(
    ("seed", "policies"),
    [(1, ("vtc",)), (2, ("lcf",)), (3, ("dlpm",)), (4, ("fcfs", "vtc")), (5, ("sif", "dlpm"))],
)
@pytest.mark.parametrize("pools", [1, 3])
def test_books_balance_while_the_tree_changes(
    seed: int, policies: tuple[str, ...], pools: int
) -> None:
    walk = TreeWalk(seed, policies, pools)
    walk.run(events=8_000, check_every=100)
    walk.drain()
    assert is_drained(walk.core, walk.now_ns)


def test_random_trees_grant_what_the_model_picks() -> None:
    for seed in fresh(60):
        TreeHistory(seed).play()


def test_random_trees_over_pools_grant_what_the_model_picks() -> None:
    for seed in fresh(25):
        TreeHistory(seed, pools=3).play()


def test_histories_go_on_from_their_totals(tmp_path: Path) -> None:
    totals = tmp_path / "new" / "totals.json"

    def run(*options: str) -> str:
        given = ["--pools", "--totals", str(totals), *options]
        return CliRunner().invoke(main, given).output

    first = run("--count", "10")
    kept = json.loads(totals.read_text())
    assert (kept["histories"], kept["seed"]) == (10, 0)
    assert run("--count", "10") == first  # none is left to play
    totals.write_text(json.dumps(kept | {"granted": 10**9}))
    assert "11 histories hold, 1,000,0" in run("--count", "11")
    assert "holds other histories" in run("--count", "11", "--seed", "1")


def test_tenant_that_moves_keeps_its_distance() -> None:
    s = make()
    a, b = group(s, "a", 1_000), group(s, "b", 1_000)
    flows = {name: member(s, name, a) for name in "uvw"} | {"x": member(s, "x", b)}
    flood(s, 0, flows)
    serve(s, 0, 31)
    moved = flows["u"]
    s.set_flow_quota(0, moved, b)
    s.check()
    served = Counter(serve(s, 0, 120))
    assert [served[f] for f in flows.values()] == pytest.approx([30, 30, 30, 30], abs=2)
    s.check()


def test_group_that_loses_its_weight_leaves_its_members_to_the_root() -> None:
    s = make()
    node = group(s, "a", 1_000)
    flows = {"u": member(s, "u", node), "v": member(s, "v", node), "w": member(s, "w", -1)}
    flood(s, 0, flows)
    serve(s, 0, 40)
    group(s, "a", 0)
    served = Counter(serve(s, 0, 90))
    assert [served[f] for f in flows.values()] == pytest.approx([30, 30, 30], abs=2)
    s.check()


def test_members_share_the_quota_of_their_group_by_weight() -> None:
    s = make()
    node = group(s, "a", 1_000, requests=60)
    flows = {"u": member(s, "u", node, 3_000), "v": member(s, "v", node)}
    flood(s, 0, flows)
    served: Counter[int] = Counter()
    for second in range(1, 101):
        now_ns = MINUTE + second * SECOND
        for d in s.poll(now_ns):
            if d.outcome == core.GRANTED:
                served[d.flow] += 1
                s.complete(now_ns, d.lease_id, 1, output_tokens=10)
        for name, flow in flows.items():  # the queues expire meanwhile
            for k in range(4):
                admit(s, now_ns, f"{name}{second}-{k}", 10, 10, flow)
        s.check()
    assert served[flows["u"]] == pytest.approx(3 * served[flows["v"]], rel=0.05)


def test_newcomer_group_begins_at_the_level_of_its_siblings() -> None:
    s = make()
    flows = organisations(s, 1, 1)
    late = group(s, "late", 1_000)
    flood(s, 0, flows)
    serve(s, 0, 90)
    new = member(s, "late/u", late)
    flood(s, 0, {"n": new})
    served = Counter(serve(s, 0, 80))
    assert [served[f] for f in (*flows.values(), new)] == pytest.approx([20, 40, 20], abs=2)


def test_counters_and_levels_of_nodes_outlive_a_restart() -> None:
    def tree() -> tuple[core.Scheduler, dict[str, int]]:
        s = make(lease_id_base=1_000)
        return s, organisations(s, 2, 1, 1)

    s, flows = tree()
    flood(s, 0, {name: flows[name] for name in ("0.0.", "1.0.")}, 60)
    serve(s, 0, 70)
    s.evict_queued(0)
    s.poll(0)
    new, _ = tree()
    rows = [(key, value, 0) for key, value in saved(s, 0).items()]
    assert {key[:1] for key, *_ in rows} >= {b"n", b"f"}
    assert new.set_saved(0, rows) == len(rows)
    new.check()
    assert [vtc(new, 0, f) for f in flows.values()] == [vtc(s, 0, f) for f in flows.values()]
    for whom in (s, new):
        flood(whom, SECOND, {f"new{name}": flow for name, flow in reversed(flows.items())})
    assert serve(s, SECOND, 100) == serve(new, SECOND, 100)


def test_saved_node_that_is_damaged_is_refused() -> None:
    s = make()
    organisations(s, 1)
    s.poll(0)
    for row in ((b"n\0\0group:org0", b"\x08"), (b"n\0\xffgroup:org0", b"\x08\x01"), (b"n", b"")):
        with pytest.raises(core.CallerError, match="rows"):
            s.set_saved(0, [(*row, 0)])
    assert s.set_saved(0, [(b"n\0\0group:gone", b"\x08\x01", 0)]) == 0


def test_organisations_share_the_pools_that_they_may_use() -> None:
    """One is for a slow pool, one of two users is for a quick one, a tenant is for both; at 400 s
    the first may use the quick one too."""
    world = PoolWorld("ABCD", [1_000, 10_000])
    slow, quick = group(world.scheduler, "slow", 1_000), group(world.scheduler, "quick", 1_000)
    for flow, node in enumerate((slow, quick, quick)):
        world.scheduler.set_flow_quota(0, flow, node)
    for name, pool in (("A", 0), ("B", 1), ("C", 1), ("D", 0), ("D", 1)):
        world.flood(name, pool)
    world.at(400, lambda: world.flood("A", 1))
    world.run(600)
    world.scheduler.check()
    for begin in range(60, 330, 30):
        rates = [world.rate(name, begin, begin + 60) for name in "ABCD"]
        assert rates == pytest.approx([1_000, 2_500, 2_500, 5_000], rel=0.03)
    for begin in range(430, 540, 10):  # at once
        rates = [world.rate(name, begin, begin + 60) for name in "ABCD"]
        assert rates == pytest.approx([11_000 / 3, 11_000 / 6, 11_000 / 6, 11_000 / 3], rel=0.03)
    assert max(world.longest_wait(name, 1, 400, 600) for name in "BCD") < 2


def test_positions_of_nodes_outlive_a_restart() -> None:
    def tree() -> tuple[core.Scheduler, dict[str, int]]:
        s = make(lease_id_base=1_000)
        return s, organisations(s, 2, 1, 1)

    def pools_of(s: core.Scheduler) -> None:
        for name in (b"q", b"r"):
            s.set_pool(0, name, 1, 20, 1)

    s, flows = tree()
    pools_of(s)
    for k in range(60):
        for name in ("0.0.", "1.0."):
            admit(s, 0, f"{name}{k}", 10, 10, flows[name], pool=k % 4 - 1)
    for _ in range(70):
        for d in s.poll(0):
            s.complete(0, d.lease_id, 1, output_tokens=10)
    s.evict_queued(0)
    s.poll(0)
    rows = saved(s, 0)
    new, _ = tree()
    assert new.set_saved(0, [(key, value, 0) for key, value in rows.items()]) == len(rows)
    pools_of(new)
    new.check()
    nodes = [key for key in rows if key[:1] == b"n"]
    assert len(nodes) == 3
    again = saved(new, 0)
    assert [fields(again[key]) for key in nodes] == [fields(rows[key]) for key in nodes]


def fields(row: bytes) -> list[bytes]:
    """Return a node's row without regard to the order of its pools."""
    return sorted(row.split(b"\x42"))


def test_weighted_groups_share_at_most_64_pools() -> None:
    s = make(pools_max=80)
    organisations(s, 1)
    for k in range(63):
        s.set_pool(0, b"q%d" % k, 1, 20, 1)
    with pytest.raises(core.CallerError, match="share at most 64 pools"):
        s.set_pool(0, b"one too many", 1, 20, 1)
    flat = make(pools_max=80)
    for k in range(64):
        flat.set_pool(0, b"q%d" % k, 1, 20, 1)
    with pytest.raises(core.CallerError, match="65 are registered"):
        organisations(flat, 1)


def test_weights_that_are_removed_make_room_for_more_pools() -> None:
    s = make(pools_max=80)
    flows = organisations(s, 2)
    s.poll(0)
    for k in range(63):
        s.set_pool(0, b"q%d" % k, 1, 20, 1)
    flood(s, 0, flows, 40)
    for name, flow in flows.items():
        admit(s, 0, f"any {name}", 10, 10, flow, pool=-1)
    group(s, "org0", 0)
    s.set_pool(0, b"one more", 1, 20, 1)
    s.check()
    assert sum(d.outcome == core.GRANTED for d in s.poll(0)) > 1
    s.check()


def test_each_class_has_a_tree_of_its_own() -> None:
    s = make()
    low, probe = s.set_class(b"low", 5, SECOND), s.set_class(b"probe", 0, SECOND, True)
    flows = organisations(s, 1, 2)
    for flow in flows.values():
        s.set_flow_class(flow, 0, (0, low, probe))
    for k in range(100):
        for name, flow in flows.items():
            for cls in (b"", b"low", b"probe"):
                admit(s, 0, f"{name}{k}{cls.decode()}", 10, 10, flow, request_class=cls)
    s.check()
    organisation = {f"org{name[0]}/u{name[2]}": name[0] for name in flows}
    for _ in range(3):  # the exempt class first, then the better one
        served = Counter(organisation[s.flow_stats(0, flow)["tenant"]] for flow in serve(s, 0, 90))
        assert served == {"0": 30, "1": 60}
        s.check()
        serve(s, 0, 210)
    assert s.stats(0)["totals"]["queued"] == 0


def test_backfill_and_estimates_hold_their_books_in_a_tree() -> None:
    rnd = random.Random(5)
    s = make(dispatch="backfill", delay_factor_milli=500)
    s.set_pool(0, b"p", 2, 400, 1)
    flows = list(organisations(s, 2, 3, 4).values())
    live: list[core.Decision] = []
    for k in range(2_000):
        now_ns = k * SECOND // 20
        admit(s, now_ns, f"r{k}", rnd.choice((5, 20, 150)), rnd.choice((5, 40)), rnd.choice(flows))
        live += [d for d in s.poll(now_ns) if d.outcome == core.GRANTED]
        while live and rnd.random() < 0.45:
            d = live.pop(rnd.randrange(len(live)))
            s.complete(now_ns, d.lease_id, 2, output_tokens=rnd.randint(1, 5))
        if k % 50 == 0:
            s.check()
            waiting = s.explain(now_ns, f"r{k}".encode())
            assert waiting
    assert s.stats(now_ns)["totals"]["granted"] > 500


def test_first_request_below_a_group_may_be_in_audit() -> None:
    s = make()
    audited = member(s, "audited", group(s, "unit", 1_000, group(s, "org", 1_000)))
    s.set_flow_mode(0, audited, True)
    flood(s, 0, {name: member(s, name, -1) for name in ("a", "b")}, 1)
    serve(s, 0, 2)
    admit(s, 0, "x", 10, 10, audited)  # no other of its groups was active: it divided by 0
    assert [(d.flow, d.outcome) for d in s.poll(0)] == [(audited, core.GRANTED)]
    s.check()
