"""Runs histories of a tree of shares beside a plain model of hierarchical fair queuing.

    python -m tests.core.tree_histories --count 100000 --seed 7
    python -m tests.core.tree_histories --count 1000000 --pools --totals trees.json
    python -m tests.core.tree_histories --count 1000000 --pools --flat

Two things are held. Every grant is the one that the model picks: at each level the child with the
least counter, ties by arrival. And at each level the promise of bounded credit holds among
siblings: in any interval in which g waits all the time, f is served, by weight, at most the bound
of VTC and the credit more than g.

With several pools every node has a counter in each of them, and each tenant may use some of them.
The promise then holds in each pool: while g waits all the time in a pool, f is served there at most
the bound, the credit and the lead more than g is served in all pools.

A flat history has tenants alone. It also draws the credit that follows a tenant's charges: that one
is bounded by the dearest request, and the model does not know it, so the promise alone is held.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import click

from schedsvc import _core as core

INPUT, OUTPUT = 1_000_000, 2_000_000
PROMPT_MAX, OUTPUT_MAX, CAPACITY = 2, 4, 30
PHASES, EVENTS = 3, 40
HELD = (0, 1, 1, 3, 20)  # requests that a flow keeps open in a phase
CREDITS = (0, 3 * INPUT, 200 * INPUT)
AUTOMATIC = -1
LEADS = (0, 20 * INPUT, 100 * INPUT)
WEIGHTS = (500, 1_000, 1_000, 3_000)
Target = tuple[int, ...]  # the pools that a request names
ANY: Target = ()
NEVER = 1 << 62
PACES = (10, 3, 1)  # of several pools
POOLS = len(PACES)
SAVED_EVERY = 10  # histories
WAITING = 4  # requests that a flow keeps waiting for each of its targets


def is_for(target: Target, pool: int) -> bool:
    """Return whether a request for a target may run in a pool."""
    return target == ANY or pool in target


class BrokenError(Exception):
    """The grant of a request, or the service of a node, breaks a promise."""


@dataclass
class Place:
    """Says where a node stands in a pool."""

    key: int
    foreign: int = 0  # the part of it served in other pools since it stood there


@dataclass(eq=False)
class Node:
    """Holds what the model knows of a group or a tenant."""

    weight: int
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)  # by pool
    levels: Counter[int] = field(default_factory=Counter)  # levels of its children, by pool
    served: list[int] = field(default_factory=lambda: [0] * POOLS)  # by pool
    served_in_all: int = 0
    #: The least that each sibling was served more while this one waits in a pool, by pool.
    least: dict[int, list[int]] = field(default_factory=dict)
    moved: bool = True  # something changed here or below since the promise was checked
    path: list["Node"] = field(init=False)  # this node and those above it, without the root
    queued: dict[int, tuple[Target, int]] = field(default_factory=dict)  # target by seq, and handle
    #: With several pools the heads of a tenant in a group enter the line at the next dispatch.
    asks: bool = False
    asked: set[int] = field(default_factory=set)  # heads that have done so
    #: `heads()` and `waits()` keep here their findings since the last change here or below.
    found: dict[int, tuple[int, int]] = field(default_factory=dict)
    waiting: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path = [] if self.parent is None else [self, *self.parent.path]

    def changed(self) -> None:
        """Forget the results here and above."""
        node: Node | None = self
        while node is not None:
            node.found.clear()
            node.waiting.clear()
            node.moved = True
            node = node.parent

    def waits(self, pool: int) -> bool:
        """Return whether something waits here or below that may run in a pool."""
        if pool not in self.waiting:
            self.waiting[pool] = (
                any(child.waits(pool) for child in self.children)
                if self.children
                else any(is_for(target, pool) for target, _ in self.queued.values())
            )
        return self.waiting[pool]

    def ask(self) -> None:
        """Put the heads of a tenant into the line."""
        if not self.asks:
            return
        heads: dict[Target, int] = {}
        for seq, (target, _) in self.queued.items():  # in the order of arrival
            heads.setdefault(target, seq)
        if not self.asked.issuperset(heads.values()):
            self.asked.update(heads.values())
            self.changed()

    def standing(self, pool: int) -> list[int]:
        """Return the counters of the children that stand in a pool."""
        return [child.places[pool].key for child in self.children if child.stands(pool)]

    def stands(self, pool: int) -> bool:
        """Return whether a head of a tenant here or below is in the line of a pool."""
        return self.heads(pool) != (NEVER, NEVER)

    def raise_level(self, pool: int) -> None:
        """Let the level in a pool follow the least counter of the children there."""
        self.levels[pool] = max(self.levels[pool], min(self.standing(pool), default=0))

    def lift(self, pool: int, credit: int) -> None:
        """Begin to wait in a pool."""
        assert self.parent is not None
        self.parent.raise_level(pool)
        place = self.places.setdefault(pool, Place(0))
        place.key = max(place.key, self.parent.levels[pool] - credit)
        self.changed()

    def charge(self, served_in: int, more: int) -> None:
        """Count service in a pool, in all pools: the order above may be another now."""
        assert self.parent is not None
        self.parent.found.clear()
        self.parent.moved = True
        self.served[served_in] += more
        self.served_in_all += more
        for pool, place in self.places.items():
            place.key += more
            place.foreign += more * (pool != served_in)

    def bring_back(self, lead: int) -> None:
        """Forgive in each pool what service elsewhere put this one too far ahead there."""
        assert self.parent is not None
        for pool, place in self.places.items():
            if place.foreign and self.stands(pool):
                first = min(self.parent.standing(pool))
                ahead = max(0, min(place.key - first - lead, place.foreign))
                place.foreign = 0
                if ahead:
                    place.key -= ahead
                    self.parent.changed()

    def heads(self, pool: int) -> tuple[int, int]:
        """Return the arrivals of the first heads in the order of a pool: of those for any pool, and
        of those that name this one; NEVER: no head."""
        found = self.found.get(pool)
        if found is None:
            found = self.found[pool] = self._below(pool) if self.children else self._own(pool)
        return found

    def _own(self, pool: int) -> tuple[int, int]:
        first: dict[Target, int] = {}
        for seq, (target, _) in self.queued.items():  # in the order of arrival
            first.setdefault(target, seq)
        asked = {to: seq for to, seq in first.items() if not self.asks or seq in self.asked}
        here = min((seq for to, seq in asked.items() if pool in to), default=NEVER)
        return asked.get(ANY, NEVER), here

    def _below(self, pool: int) -> tuple[int, int]:
        first_any = first_here = NEVER, NEVER  # counter and arrival
        for child in self.children:
            at_any, at_here = child.heads(pool)
            if at_any != NEVER:
                first_any = min(first_any, (child.places[pool].key, at_any))
            if at_here != NEVER:
                first_here = min(first_here, (child.places[pool].key, at_here))
        return first_any[1], first_here[1]

    def pick(self, pool: int) -> "Node":
        """Return the tenant that goes next in a pool."""
        if not self.children:
            return self
        found = [
            (child.places[pool].key, at, i)
            for i, child in enumerate(self.children)
            if (at := min(child.heads(pool))) != NEVER
        ]
        return self.children[min(found)[2]].pick(pool)


class TreeHistory:
    """Runs one scheduler with a random tree and one pool or several, and the model."""

    def __init__(self, seed: int, pools: int = 1, *, flat: bool = False) -> None:
        self.random = random.Random(seed)
        self.credit = self.random.choice((AUTOMATIC, *CREDITS) if flat else CREDITS)
        self.lead = self.random.choice(LEADS) if pools > 1 else 0
        self.pools = range(pools)
        self.core = core.Scheduler(
            ledger="sum", dispatch="strict", headroom_ppm=0, headroom_min_ppm=0,
            headroom_max_ppm=0, credit_max_micro=self.credit,
        )  # fmt: skip
        self.root = Node(1)
        self.nodes: list[Node] = []
        self.leaves: list[Node] = []
        self.flow_of: list[int] = []
        if not flat:
            self._grow(self.root, -1, 0)
        while len(self.leaves) < (3 if flat else 1):
            self._leaf(self.root, -1)
        for pool in self.pools:
            self.core.set_pool(0, b"p%d" % pool, 1, CAPACITY, 1)
        if pools > 1:
            self.core.set_options(0, lead_max_micro=self.lead)
        self.core.poll(0)  # tenants take their places in the tree at a dispatch
        self.now_ns = self.serial = 0
        self.waiting: dict[int, tuple[int, int, int, int]] = {}  # leaf, prompt, output, seq
        #: Leaf, prompt, output, charged, produced, pool, by lease id.
        self.live: dict[int, list[int]] = {}
        # A stream of its own, so that histories without sets stay as they are.
        self.set_draws = random.Random(seed ^ 0x5E7)
        self.names_sets = pools > 2 and self.set_draws.random() < 0.5
        self.longest = self.dearest = self.granted = 0

    def _grow(self, parent: Node, quota: int, groups: int) -> None:
        for _ in range(self.random.randint(1, 3)):
            if groups < 4 and self.random.random() < 0.5:
                node = Node(self.random.choice(WEIGHTS), parent)
                name = b"group:%d" % len(self.nodes)
                self.nodes.append(node)
                parent.children.append(node)
                below = self.core.set_quota(0, name, quota, weight_milli=node.weight)
                more = groups + 1
                if more < 4 and self.random.random() < 0.3:  # without a weight it changes nothing
                    below, more = self.core.set_quota(0, name + b"/plain", below), more + 1
                self._grow(node, below, more)
            else:
                self._leaf(parent, quota)

    def _leaf(self, parent: Node, quota: int) -> None:
        leaf = Node(self.random.choice(WEIGHTS), parent, asks=quota >= 0 and len(self.pools) > 1)
        parent.children.append(leaf)
        self.nodes.append(leaf)
        flow = self.core.set_flow(b"f%d" % len(self.leaves), leaf.weight)
        self.core.set_flow_quota(0, flow, quota)
        self.leaves.append(leaf)
        self.flow_of.append(flow)

    def play(self) -> None:
        """Play the history. Raises BrokenError."""
        for at in range(PHASES * EVENTS):
            self.now_ns += 1
            if len(self.pools) > 1:
                self._ask_for_pools(at)
            else:
                self._ask_for_one(at)
            dice = self.random.random()
            if dice > 0.3:
                self._step(self.random.choices(self.pools, PACES[: len(self.pools)])[0])
            elif dice > 0.27 and self.waiting:
                self._cancel(self.random.choice(list(self.waiting)))
            self._poll()
            self._hold()
        self.core.check()

    def _ask_for_one(self, at: int) -> None:
        if at % EVENTS == 0:
            self.held = [self.random.choice(HELD) for _ in self.leaves]
        opened = Counter(entry[0] for entry in (*self.waiting.values(), *self.live.values()))
        for n in range(len(self.leaves)):
            if opened[n] < self.held[n]:
                self._ask(n, self.random.choice((ANY, (0,))))

    def _ask_for_pools(self, at: int) -> None:
        """Let each flow wait for the pools that it may use in this phase."""
        if at % EVENTS == 0:
            wishes = (ANY, *((pool,) for pool in self.pools))
            self.wishes = [
                set(self.random.choices(wishes, k=self.random.choice((0, 1, 2, 2))))
                for _ in self.leaves
            ]
            for wish in self.wishes if self.names_sets else ():
                wish.update(self._draw_sets())
            for handle in [h for h, entry in self.waiting.items() if self._is_barred(entry)]:
                self._cancel(handle)
        for n, leaf in enumerate(self.leaves):
            count = Counter(target for target, _ in leaf.queued.values())
            for target in sorted(self.wishes[n]):
                if count[target] < WAITING and self.random.random() < 0.7:
                    self._ask(n, target)

    def _draw_sets(self) -> Iterable[Target]:
        for _ in range(self.set_draws.choice((0, 1, 1, 2))):
            count = self.set_draws.randint(2, len(self.pools))
            yield tuple(sorted(self.set_draws.sample(self.pools, count)))

    def _is_barred(self, entry: tuple[int, int, int, int]) -> bool:
        n, _, _, seq = entry
        return self.leaves[n].queued[seq][0] not in self.wishes[n]

    def _cancel(self, handle: int) -> None:
        self.core.cancel(self.now_ns, handle)
        n, *_, seq = self.waiting.pop(handle)
        self._leave(n, seq)

    def _leave(self, n: int, seq: int) -> None:
        del self.leaves[n].queued[seq]
        self.leaves[n].changed()

    def _ask(self, n: int, target: Target) -> None:
        leaf, self.serial = self.leaves[n], self.serial + 1
        prompt, output = self.random.randint(1, PROMPT_MAX), self.random.randint(1, OUTPUT_MAX)
        handle = self.core.admit(
            self.now_ns, self.flow_of[n], b"%d" % self.serial, prompt, output, pools=target,
            reports_progress=True,
        )  # fmt: skip
        for node in leaf.path:
            for pool in target or self.pools:
                if not node.waits(pool):
                    node.lift(pool, self.credit)
        leaf.queued[self.serial] = target, handle
        leaf.changed()
        self._bring_back(leaf.path)
        self.waiting[handle] = n, prompt, output, self.serial
        self.longest = max(self.longest, prompt)
        self.dearest = max(self.dearest, prompt * INPUT + output * OUTPUT)

    def _bring_back(self, nodes: Iterable[Node]) -> None:
        if len(self.pools) > 1:  # with one there is no service elsewhere
            for node in nodes:
                node.bring_back(self.lead)

    def _poll(self) -> None:
        for decision in self.core.poll(self.now_ns):
            if decision.handle not in self.waiting:
                continue
            pool = decision.pool
            n, prompt, output, seq = self.waiting.pop(decision.handle)
            for leaf in self.leaves:
                leaf.ask()
            if self.credit != AUTOMATIC:
                self._judge(self.leaves[n], seq, pool)
            self.granted += 1
            self._leave(n, seq)
            lease = [n, prompt, self.random.randint(1, output), 0, 0, pool]
            self.live[decision.lease_id] = lease
            self._charge(lease)
        for leaf in self.leaves:
            leaf.ask()

    def _judge(self, granted: Node, seq: int, pool: int) -> None:
        """Compare a grant with the model's pick, and let the levels follow it."""
        picked = self.root.pick(pool)
        first = min(s for s, (to, _) in picked.queued.items() if is_for(to, pool))
        if picked is not granted or seq != first:
            raise BrokenError(f"request {seq} was granted out of turn in pool {pool}")
        for node in picked.path:
            assert node.parent is not None
            node.parent.raise_level(pool)

    def _step(self, pool: int) -> None:
        """Produce a token of every running request of a pool; complete ones end."""
        for lease_id, lease in [entry for entry in self.live.items() if entry[1][5] == pool]:
            lease[4] += 1
            self._charge(lease)
            if lease[4] < lease[2]:
                self.core.progress(self.now_ns, lease_id, 1, lease[1], 0, lease[4])
            else:
                del self.live[lease_id]
                self.core.complete(self.now_ns, lease_id, 1, core.COMPLETED, lease[1], 0, lease[4])

    def _charge(self, lease: list[int]) -> None:
        leaf, pool = self.leaves[lease[0]], lease[5]
        before, after = lease[3], (lease[1] * INPUT + lease[4] * OUTPUT) * 1000 // leaf.weight
        lease[3] = after
        for node in leaf.path:
            more = after * leaf.weight // node.weight - before * leaf.weight // node.weight
            node.charge(pool, more)
        self._bring_back(leaf.path)

    def _hold(self) -> None:
        for line in (self.root, *self.nodes):
            if line.moved and len(line.children) > 1:
                weight = min(child.weight for child in line.children)
                bound = 2 * max(self.longest * INPUT, CAPACITY * OUTPUT) * 1000 // weight
                automatic = self.dearest * 1000 // weight
                credit = automatic if self.credit == AUTOMATIC else self.credit
                for pool in self.pools:
                    self._hold_in(pool, line.children, bound + credit + self.lead)
            line.moved = False

    def _hold_in(self, pool: int, siblings: list[Node], allowed: int) -> None:
        served = [f.served[pool] for f in siblings]
        for g in siblings:
            if not g.waits(pool):
                g.least.pop(pool, None)
                continue
            its = g.served_in_all
            more = [other - its for other in served]
            least = g.least[pool] = list(map(min, more, g.least.get(pool, more)))
            most = max(lead - before for lead, before in zip(more, least, strict=True))
            if most > allowed:
                raise BrokenError(
                    f"a sibling got {most} micro-tokens more in pool {pool} than one that waited"
                    f" there got in all: allowed {allowed}"
                )


@click.command()
@click.option(
    "--count", default=10_000, show_default=True, type=click.IntRange(min=1), help="Histories."
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="First seed."
)
@click.option("--pools", is_flag=True, help="Let each have three pools.")
@click.option("--flat", is_flag=True, help="Let each have tenants alone, and no groups.")
@click.option(
    "--totals", type=click.Path(path_type=Path), help="Keep sums here, and go on from them."
)
def main(count: int, seed: int, pools: bool, flat: bool, totals: Path | None) -> None:
    """Play random histories; exit with status 1 and the seed if one breaks the promise."""
    done = granted = 0
    if totals is not None and totals.exists():
        kept = json.loads(totals.read_text())
        if [kept[name] for name in ("seed", "pools", "flat")] != [seed, pools, flat]:
            raise click.BadParameter(f"{totals} holds other histories", param_hint="--totals")
        done, granted = kept["histories"], kept["granted"]
    for number in range(done, count):
        history = TreeHistory(seed + number, POOLS if pools else 1, flat=flat)
        try:
            history.play()
        except BrokenError as broken:
            sys.exit(f"seed {seed + number}: {broken}")
        granted += history.granted
        if totals is not None and (number + 1) % SAVED_EVERY == 0:
            totals.parent.mkdir(parents=True, exist_ok=True)
            sums = {"seed": seed, "pools": pools, "flat": flat}
            sums |= {"histories": number + 1, "granted": granted}
            totals.with_suffix(".new").write_text(json.dumps(sums))
            totals.with_suffix(".new").replace(totals)
    click.echo(f"{count:,} histories hold, {granted:,} grants as the model picks them")


if __name__ == "__main__":
    main()
