"""Random histories of a tree of shares, beside a plain model of hierarchical fair queuing.

    python -m tests.core.tree_histories --count 100000 --seed 7

Two things are held. Every grant is the one that the model picks: at each level the child with the
least counter, ties by arrival. And at each level the promise of bounded credit holds among
siblings: in any interval in which g waits all the time, f is served, by weight, at most the bound
of VTC and the credit more than g.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import click

from schedsvc import _core as core

INPUT, OUTPUT = 1_000_000, 2_000_000
PROMPT_MAX, OUTPUT_MAX, CAPACITY = 2, 4, 30
PHASES, EVENTS = 3, 40
HELD = (0, 1, 1, 3, 20)  # requests that a flow keeps open in a phase
CREDITS = (0, 3 * INPUT, 200 * INPUT)
WEIGHTS = (500, 1_000, 1_000, 3_000)


class BrokenError(Exception):
    """A history in which a grant, or what a node was served, is not as promised."""


@dataclass(eq=False)
class Node:
    """A group or a tenant: what the model knows of it."""

    weight: int
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list)
    counter: int = 0
    level: int = 0  # of its children
    served: int = 0
    queued: dict[int, tuple[int, int]] = field(default_factory=dict)  # target by seq, and handle

    def requests(self) -> int:
        """How many wait here and below."""
        return len(self.queued) + sum(child.requests() for child in self.children)

    def path(self) -> Iterator["Node"]:
        """This one and those above it, the root left out."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def raise_level(self) -> None:
        """Let the level follow the least counter of the children that wait."""
        waiting = [child.counter for child in self.children if child.requests()]
        self.level = max([self.level, min(waiting, default=0)])

    def arrival(self, target: int) -> int | None:
        """The arrival of the first head for a target; None: there is none."""
        if not self.children:
            return min((seq for seq, (to, _) in self.queued.items() if to == target), default=None)
        found = self.first(target)
        return None if found is None else found[1]

    def first(self, target: int) -> tuple[int, int] | None:
        """Counter and arrival of the child that goes first for a target."""
        found = [(child.counter, child.arrival(target)) for child in self.children]
        return min(((key, at) for key, at in found if at is not None), default=None)

    def pick(self) -> "Node":
        """The tenant that goes next."""
        if not self.children:
            return self
        found = [
            (child.counter, at, i)
            for i, child in enumerate(self.children)
            for target in (-1, 0)
            if (at := child.arrival(target)) is not None
        ]
        return self.children[min(found)[2]].pick()


class TreeHistory:
    """One scheduler with a random tree, and the model."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.credit = self.random.choice(CREDITS)
        self.core = core.Scheduler(
            ledger="sum", dispatch="strict", headroom_ppm=0, headroom_min_ppm=0,
            headroom_max_ppm=0, credit_max_micro=self.credit, grant_pacing=0,
        )  # fmt: skip
        self.root = Node(1)
        self.nodes: list[Node] = []
        self.leaves: list[Node] = []
        self.flow_of: list[int] = []
        self._grow(self.root, -1, 0)
        if not self.leaves:
            self._leaf(self.root, -1)
        self.core.set_pool(0, b"p", 1, CAPACITY, 1)
        self.now_ns = self.serial = 0
        self.waiting: dict[int, tuple[int, int, int, int]] = {}  # leaf, prompt, output, seq
        self.live: dict[int, list[int]] = {}  # leaf, prompt, output, charged, produced
        self.least: dict[tuple[int, int], int] = {}
        self.longest = self.granted = 0

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
        leaf = Node(self.random.choice(WEIGHTS), parent)
        parent.children.append(leaf)
        self.nodes.append(leaf)
        flow = self.core.set_flow(b"f%d" % len(self.leaves), leaf.weight)
        self.core.set_flow_quota(0, flow, quota)
        self.leaves.append(leaf)
        self.flow_of.append(flow)

    def play(self) -> None:
        """Play the history. Raises BrokenError."""
        for at in range(PHASES * EVENTS):
            if at % EVENTS == 0:
                held = [self.random.choice(HELD) for _ in self.leaves]
            self.now_ns += 1
            dice = self.random.random()
            for n in range(len(self.leaves)):
                open_now = sum(entry[0] == n for entry in self.waiting.values())
                open_now += sum(lease[0] == n for lease in self.live.values())
                if open_now < held[n]:
                    self._ask(n)
            if dice > 0.3:
                self._step()
            elif dice > 0.27 and self.waiting:
                handle = self.random.choice(list(self.waiting))
                self.core.cancel(self.now_ns, handle)
                n, *_, seq = self.waiting.pop(handle)
                del self.leaves[n].queued[seq]
            self._poll()
            self._hold()
        self.core.check()

    def _ask(self, n: int) -> None:
        leaf, self.serial = self.leaves[n], self.serial + 1
        prompt, output = self.random.randint(1, PROMPT_MAX), self.random.randint(1, OUTPUT_MAX)
        target = self.random.choice((-1, 0))
        handle = self.core.admit(
            self.now_ns, self.flow_of[n], b"%d" % self.serial, prompt, output, target,
            reports_progress=True,
        )  # fmt: skip
        for node in leaf.path():
            if node.requests() == 0:
                assert node.parent is not None
                node.parent.raise_level()
                node.counter = max(node.counter, node.parent.level - self.credit)
        leaf.queued[self.serial] = target, handle
        self.waiting[handle] = n, prompt, output, self.serial
        self.longest = max(self.longest, prompt)

    def _poll(self) -> None:
        for decision in self.core.poll(self.now_ns):
            if decision.handle not in self.waiting:
                continue
            n, prompt, output, seq = self.waiting.pop(decision.handle)
            picked = self.root.pick()
            if picked is not self.leaves[n] or seq != min(picked.queued):
                raise BrokenError(f"request {seq} of f{n} was granted out of turn")
            self.granted += 1
            for node in picked.path():
                assert node.parent is not None
                node.parent.raise_level()
            del picked.queued[seq]
            lease = [n, prompt, self.random.randint(1, output), 0, 0]
            self.live[decision.lease_id] = lease
            self._charge(lease)

    def _step(self) -> None:
        for lease_id, lease in list(self.live.items()):
            lease[4] += 1
            self._charge(lease)
            if lease[4] < lease[2]:
                self.core.progress(self.now_ns, lease_id, 1, lease[1], 0, lease[4])
            else:
                del self.live[lease_id]
                self.core.complete(self.now_ns, lease_id, 1, core.COMPLETED, lease[1], 0, lease[4])

    def _charge(self, lease: list[int]) -> None:
        leaf = self.leaves[lease[0]]
        before, after = lease[3], (lease[1] * INPUT + lease[4] * OUTPUT) * 1000 // leaf.weight
        lease[3] = after
        for node in leaf.path():
            more = after * leaf.weight // node.weight - before * leaf.weight // node.weight
            node.counter += more
            node.served += more

    def _hold(self) -> None:
        for line in (self.root, *self.nodes):
            weight = min((child.weight for child in line.children), default=1_000)
            bound = 2 * max(self.longest * INPUT, CAPACITY * OUTPUT) * 1000 // weight
            for g in line.children:
                for f in line.children:
                    pair, lead = (id(f), id(g)), f.served - g.served
                    if not g.requests():
                        self.least.pop(pair, None)
                        continue
                    self.least[pair] = min(lead, self.least.get(pair, lead))
                    if lead - self.least[pair] > bound + self.credit:
                        raise BrokenError(
                            f"a sibling got {lead - self.least[pair]} micro-tokens more than one"
                            f" that waited: allowed {bound + self.credit}"
                        )


@click.command()
@click.option(
    "--count", default=10_000, show_default=True, type=click.IntRange(min=1), help="Histories."
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="First seed."
)
def main(count: int, seed: int) -> None:
    """Play random histories; exit with status 1 and the seed if one breaks the promise."""
    granted = 0
    for number in range(seed, seed + count):
        history = TreeHistory(number)
        try:
            history.play()
        except BrokenError as broken:
            sys.exit(f"seed {number}: {broken}")
        granted += history.granted
    click.echo(f"{count:,} histories hold, {granted:,} grants as the model picks them")


if __name__ == "__main__":
    main()
