"""Keeps the twin's shares: pools, members and held heads, found by looking at all nodes."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .twin_types import Bucket, Hold, Node, Request, Target, names

if TYPE_CHECKING:
    from .twin_quota import Quotas

LENDERS_SEEN = 8
LOOKAHEAD = 8
MICRO = 10**6
RATE_MAX = 10**12


@dataclass
class Share:
    nominal: int = 0
    lends: int = 0
    borrows: int = -1
    borrowed: int = 0
    lent: int = 0
    unused: Bucket = field(default_factory=lambda: Bucket(0, 0, 0))
    credit: Bucket = field(default_factory=lambda: Bucket(0, 0, 0))


@dataclass
class Paid:
    """Names the part of a request that a share pays: own (0), the k-th pool, freely (None)."""

    node: int
    source: int | None
    lender: int | None
    tokens: int = 0


@dataclass
class Purse:
    source: int | None
    limited: bool
    due_ns: int | None


def part(micro: int, share: Share) -> int:
    """Return the part of it that the share lends, towards zero."""
    whole = abs(micro) * share.lends // share.nominal
    return whole if micro > 0 else -whole


class Shares:
    """Keeps nodes of the quotas with a share, and the heads that are held."""

    def __init__(self, quotas: "Quotas") -> None:
        self.quotas = quotas
        self.state = quotas.state
        self.items: dict[int, Share] = {}
        self.root = -1
        self.paid: dict[int, Paid] = {}  # by seq
        self.holds: dict[int, Hold] = {}  # by seq
        self.lifts: dict[int, int] = {}  # the root's lift when the flow began to be held
        self.last_lender: dict[int, int] = {}  # by pool
        self.stale_ns: int | None = None

    def begin_anew(self) -> None:
        """Drop the state of shares that does not outlive the process: all but the shares."""
        self.paid, self.holds, self.lifts = {}, {}, {}
        for node, n in self.items.items():
            self.items[node] = Share(n.nominal, n.lends, n.borrows)
        self.stale_ns = self.state.now_ns if self.items else None

    def has(self, node: int) -> bool:
        return node in self.items and self.items[node].nominal > 0

    def give(self, node: int, share: int, lends: int, borrows: int) -> None:
        if not share and not self.has(node):
            return
        if self.stale_ns != self.state.now_ns:
            self.know()
        nodes = self.quotas.nodes
        if self.root == -1:
            self.root = len(nodes)
            nodes.append(Node())
            self.items[self.root] = Share()
        n = self.items.setdefault(node, Share())
        n.nominal, n.borrows = share, borrows
        n.lends = share if lends == -1 else lends
        self.stale_ns = self.state.now_ns

    def pool_of(self, node: int) -> int:
        """Return the pool that a node with a share lends to; -1: it is the root, or has none."""
        if not self.has(node):
            return -1
        above = self.quotas.chain(self.quotas.nodes[node].parent)
        return next((n for n in above if self.has(n)), self.root)

    def members(self, pool: int) -> list[int]:
        return [n for n in sorted(self.items) if self.pool_of(n) == pool]

    def know(self) -> None:
        """Let the sizes of all buckets follow a change, from its time on."""
        if self.stale_ns is None:
            return
        now_ns, self.stale_ns = self.stale_ns, None
        self.last_lender = {}
        for node, n in self.items.items():
            members = [self.items[m] for m in self.members(node)]
            rate = n.nominal + sum(
                m.lends - (0 if node == self.root else m.nominal) for m in members
            )
            self._limit(n.unused, min(max(0, rate), RATE_MAX), now_ns)
            self._limit(n.credit, max(0, n.borrows), now_ns)
            if members:
                self.last_lender[node] = self.members(node)[-1]

    @staticmethod
    def _limit(b: Bucket, rate: int, now_ns: int) -> None:
        if b.rate:
            b.draw(now_ns, 0)
            b.level += (rate - b.rate) * MICRO
        else:
            b.level, b.at_ns = rate * MICRO, now_ns
        b.rate = rate
        b.level = max(b.level, -rate * MICRO)

    def share_of(self, flow: int) -> int:
        return next((n for n in self.quotas.chain_of(flow) if self.has(n)), -1)

    def purse(self, flow: int) -> Purse:
        self.know()
        now_ns = self.state.now_ns
        if self.share_of(flow) == -1:  # since a reload
            return Purse(0, False, None)
        n = self.items[self.share_of(flow)]
        node, source, dues = self.share_of(flow), 0, []
        while n.unused.level_at(now_ns) <= 0:
            pool = self.pool_of(node)
            if pool == -1:
                return Purse(None, False, min(dues, default=None))
            if n.unused.rate:
                dues.append(n.unused.due_ns(1))
            if n.borrows != -1 and n.credit.level_at(now_ns) <= 0:
                if n.credit.rate:
                    dues.append(n.credit.due_ns(1))
                return Purse(None, True, min(dues, default=None))
            node, n, source = pool, self.items[pool], source + 1
        return Purse(source, False, min(dues, default=None))

    # Payment.

    def pay(self, r: Request) -> None:
        """Let the share pay for a request with a bill, unless it has."""
        self.know()
        node = self.share_of(r.flow)
        if r.seq in self.paid or r.seq not in self.quotas.bills or node == -1:
            return
        source, lender = self.purse(r.flow).source, None
        if source:
            pool = node
            for _ in range(source):
                pool = self.pool_of(pool)
            lender = self._next_lender(pool, sum(self.quotas.take(r)) * MICRO)
        self.paid[r.seq] = Paid(node, source, lender)
        self.book(r, sum(self.quotas.take(r)))

    def _next_lender(self, pool: int, micro: int) -> int | None:
        members = self.members(pool)
        for _ in range(LENDERS_SEEN if members else 0):
            turn = (members.index(self.last_lender[pool]) + 1) % len(members)
            self.last_lender[pool] = members[turn]
            n = self.items[members[turn]]
            level = n.unused.level_at(self.state.now_ns)
            if level > 0 and part(level, n) >= micro:
                return members[turn]
        return None

    def follow(self, r: Request) -> None:
        """Pay the amount of its bill."""
        if r.seq in self.quotas.bills:
            bill = self.quotas.bills[r.seq]
            self.book(r, bill.inputs + bill.outputs)

    def book(self, r: Request, tokens: int) -> None:
        self.know()
        if r.seq not in self.paid or tokens == self.paid[r.seq].tokens:
            return
        paid = self.paid[r.seq]
        more, paid.tokens = tokens - paid.tokens, tokens
        for borrower in self._borrowers(paid):
            self.items[borrower].borrowed += more
        if paid.lender is not None:
            self.items[paid.lender].lent += more
        self._draw(paid, more)
        if more < 0:
            self._look_again(r.flow)

    def holds_of(self, flow: int) -> list[Hold]:
        return [hold for hold in self.holds.values() if hold.request.flow == flow]

    def _look_again(self, flow: int) -> None:
        for hold in self.holds_of(flow):
            purse = self.purse(flow)
            hold.limited = purse.limited
            hold.due_ns = self.state.now_ns if purse.source == 0 else purse.due_ns

    def _borrowers(self, paid: Paid) -> list[int]:
        """Yield those that took it from the pool above them."""
        found, node = [], paid.node
        while self.pool_of(node) != -1 and len(found) != paid.source:
            found.append(node)
            node = self.pool_of(node)
        return found

    def _draw(self, paid: Paid, tokens: int) -> None:
        now_ns, micro = self.state.now_ns, tokens * MICRO
        if paid.source is None:
            return
        node = paid.node
        for borrower in self._borrowers(paid):
            if self.items[borrower].borrows != -1:
                self.items[borrower].credit.draw(now_ns, micro)
            node = self.pool_of(borrower)
        while node != -1:
            n = self.items[node]
            n.unused.draw(now_ns, micro)
            if not n.nominal:
                break
            micro = part(micro, n)
            node = self.pool_of(node)

    # Holding.

    def is_saturated(self, target: Target) -> bool:
        pools = self.state.serving(target)
        return bool(pools) and all(self.state.pools[p].saturated for p in pools)

    def has_to_be_held(self, r: Request) -> bool:
        if self.share_of(r.flow) == -1 or r.seq in self.paid:
            return False
        cls = self.state.flows[r.flow].cls
        alone = any(len(self.state.heads(line, cls)) < 2 for line in r.lines)
        if r.seq not in self.quotas.bills or (alone and not self.is_saturated(r.target)):
            return False
        self.know()
        return self.items[self.share_of(r.flow)].unused.level_at(self.state.now_ns) <= 0

    def held(self, r: Request) -> bool:
        """Hold it, if that has to be."""
        if not self.has_to_be_held(r):
            return False
        if not self.holds_of(r.flow):
            self.lifts[r.flow] = self.quotas.lift_of(r.flow, self.root)
        self.holds[r.seq] = Hold(r)
        r.lined_ns = None
        self.quotas.note_out(r.flow)
        self._look_again(r.flow)
        self.state.classes.note()
        return True

    def _let_go(self, r: Request) -> None:
        del self.holds[r.seq]
        self.state.positions.look()
        self.quotas.note_out(r.flow)
        self.state.classes.note()

    def _pay_and_let_go(self, r: Request) -> None:
        self._let_go(r)
        self.pay(r)

    def run_dues(self) -> None:
        """Look at the heads whose time has come."""
        now_ns = self.state.now_ns
        while due := [
            (hold.due_ns, seq)
            for seq, hold in self.holds.items()
            if hold.due_ns is not None and hold.due_ns <= now_ns
        ]:
            r = self.holds[min(due)[1]].request
            if self.purse(r.flow).source == 0:
                self._pay_and_let_go(r)
            else:
                self._look_again(r.flow)

    def holds_for(self, pool: int) -> bool:
        return bool(self.held_for(-1) or self.held_for(pool))

    def let_one_go(self, pool: int) -> bool:
        """Release the first that shares do not bind, or that can borrow, of the first few held for
        this pool or any; return whether there was one."""
        first = sorted(self.held_for(-1) + self.held_for(pool), key=self.held_key)
        for r in [hold.request for hold in first[:LOOKAHEAD]]:
            if not self.is_saturated(r.target):
                self._let_go(r)
                return True
            if self.purse(r.flow).source is not None:
                self._pay_and_let_go(r)
                return True
            self._look_again(r.flow)
        return False

    def note_saturation(self) -> None:
        if self.root == -1:
            return
        self.know()
        for i, p in enumerate(self.state.pools):
            load, size = self.state.load(i) * MICRO, p.capacity_blocks * p.block_size
            limits = self.state.limits
            threshold = limits["saturation_ppm"]
            if load >= size * threshold:
                p.saturated = True
            elif load < size * (threshold - limits["saturation_band_ppm"]):
                p.saturated = False

    def held_key(self, hold: Hold) -> tuple[Any, ...]:
        r = hold.request
        place = self.state.classes.place(self.state.flows[r.flow].cls)
        return place, hold.limited, self.quotas.key(r.flow, r, self.lifts[r.flow])[0], r.seq

    def held_for(self, target: int) -> list[Hold]:
        return [hold for hold in self.holds.values() if names(hold.request.target, target)]

    def next_dues(self) -> list[int]:
        """Return when held heads, or the pool of all that they wait for, have something."""
        dues = [hold.due_ns for hold in self.holds.values() if hold.due_ns is not None]
        self.know()
        if self.holds:
            root = self.items[self.root].unused
            if root.rate and root.level_at(self.state.now_ns) <= 0:
                dues.append(root.due_ns(1))
        return dues

    def fill_up(self) -> None:
        self.know()
        for n in self.items.values():
            for bucket in (n.unused, n.credit):
                bucket.level, bucket.at_ns = bucket.size, self.state.now_ns
        for paid in self.paid.values():
            self._draw(paid, paid.tokens)

    def row(self, flow: int, now_ns: int) -> dict[str, Any]:
        figures = self.figures(self.share_of(flow), now_ns)
        return figures | {"held_to_share": bool(self.holds_of(flow))}

    def above(self, node: int) -> list[int]:
        """Return a node with a share, and the pools above it."""
        found = []
        while node != -1:
            found.append(node)
            node = self.pool_of(node)
        return found

    def figures(self, node: int, now_ns: int) -> dict[str, int]:
        self.know()
        bound = node != -1 and (self.has(node) or node == self.root)
        n = self.items[node] if bound else Share()
        return {
            "share_tokens_per_minute": n.nominal,
            "share_left_tokens": max(0, n.unused.level_at(now_ns) // MICRO),
            "borrowed_tokens": n.borrowed,
            "lent_tokens": n.lent,
        }
