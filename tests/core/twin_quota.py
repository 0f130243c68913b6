"""Keeps the twin's quotas: dicts and scans; bisection finds when a bucket will do."""

from typing import TYPE_CHECKING, Any

from schedsvc import _core as core

from .twin_guarantees import Shares
from .twin_types import TICK_NS, Bill, Bucket, Node, Request, TwinError, Wait

if TYPE_CHECKING:
    from .twin_state import State

REQUESTS, INPUT, OUTPUT, TOTAL = range(4)
RETRY_MAX_NS = 109 * 10**9


def shares(inputs: int, outputs: int) -> tuple[int, int, int]:
    return inputs, outputs, inputs + outputs


class Quotas:
    """Holds quotas of the twin; every question is answered by reading all flows."""

    def __init__(self, state: "State") -> None:
        self.state = state
        self.nodes: list[Node] = []
        self.names: dict[bytes, int] = {}
        self.first: dict[int, int] = {}  # flow -> first node of its chain
        self.own: dict[int, int] = {}
        self.refusing: set[int] = set()
        self.models: dict[bytes, int] = {}  # pool -> node
        self.bills: dict[int, Bill] = {}  # by seq
        self.asked: dict[int, int] = {}  # seq -> output, as it asked for it
        self.waits: dict[int, Wait] = {}  # by flow
        self.is_new = False  # limits have changed since the last question
        self.shares = Shares(self)

    # Configuration.

    def _limit(self, node: int, limits: tuple[int, ...], concurrency: int) -> None:
        n, now_ns = self.nodes[node], self.state.now_ns
        for which, rate in enumerate(limits):
            old = n.buckets.pop(which, None)
            if rate and old:
                old.draw(now_ns, 0)
                level = old.level + (rate - old.rate) * 10**6
                n.buckets[which] = Bucket(rate, level, old.at_ns)
                self.cap_debt(node, which, 1, 0)
            elif rate:
                n.buckets[which] = Bucket(rate, rate * 10**6, now_ns)
        n.concurrency = concurrency
        self.is_new = True

    def set_named(self, name: bytes, parent: int, limits: tuple[int, ...], together: int) -> int:
        if not -1 <= parent < len(self.nodes):
            raise TwinError(3, "quota")
        if name not in self.names:
            if len(self.chain(parent)) + 2 > core.QUOTA_LEVELS_MAX:
                raise TwinError(3, "parent")
            self.names[name] = len(self.nodes)
            self.nodes.append(Node(parent))
        node = self.names[name]
        before, self.nodes[node].parent = self.nodes[node].parent, parent
        chains = [self.chain(n) for n in range(len(self.nodes))]
        most = core.QUOTA_LEVELS_MAX
        if len(self.chain(parent)) + 2 > most or any(len(chain) > most for chain in chains):
            self.nodes[node].parent = before
            raise TwinError(3, "parent")
        self._limit(node, limits, together)
        return node

    def set_flow(
        self,
        flow: int,
        parent: int,
        refuse: bool,
        limits: tuple[int, ...],
        together: int,
        share: tuple[int, int, int],
    ) -> None:
        if not -1 <= parent < len(self.nodes):
            raise TwinError(3, "quota")
        if len(self.chain(parent)) + 1 > core.QUOTA_LEVELS_MAX:
            raise TwinError(3, "parent")
        limited = any(limits) or together > 0 or share[0] > 0
        if limited and flow not in self.own:
            self.own[flow] = len(self.nodes)
            self.nodes.append(Node())
        if flow in self.own:
            self.nodes[self.own[flow]].parent = parent
            self._limit(self.own[flow], limits, together)
            self.shares.give(self.own[flow], *share)
        for sibling in self.state.classes.siblings(flow):
            self._come_back_whole(sibling)
            refused = sibling in self.refusing
            (self.refusing.add if refuse else self.refusing.discard)(sibling)
            if refused and not refuse:
                self.state.order.give_back(sibling)
            self.first[sibling] = self.own[flow] if limited else parent
            self.state.positions.look()
            self.state.classes.note()
        self.is_new = True

    def copy(self, base: int, flow: int) -> None:
        """Return a new flow of a tenant."""
        if base in self.first:
            self.first[flow] = self.first[base]
        if base in self.refusing:
            self.refusing.add(flow)

    # The nodes and their state.

    def chain(self, node: int) -> list[int]:
        found = []
        while node != -1 and len(found) <= core.QUOTA_LEVELS_MAX:
            found.append(node)
            node = self.nodes[node].parent
        return found

    def chain_of(self, flow: int) -> list[int]:
        if self.state.classes.is_exempt(flow):
            return []
        return self.chain(self.first.get(flow, -1))

    def live(self, node: int) -> int:
        return sum(bill.nodes.count(node) for bill in self.bills.values())

    def is_candidate(self, r: Request) -> bool:
        """Return whether it may be in the line, as the head of its queue."""
        return self._is_billed(r) and r.seq not in self.shares.holds

    def _is_billed(self, r: Request) -> bool:
        return r.seq in self.bills or not self.chain_of(r.flow)

    def heads(self, flow: int) -> list[Request]:
        return [r for r in self.state.order.heads() if r.flow == flow]

    def is_out(self, flow: int) -> bool:
        """No queue of it is in the line or asks: it does not count in the minimum."""
        if flow not in self.waits and not self.shares.holds_of(flow):
            return False
        asks = flow not in self.waits
        return not any(
            self.is_candidate(r) or (asks and not self._is_billed(r)) for r in self.heads(flow)
        )

    def take(self, r: Request) -> tuple[int, int]:
        """Return input and output tokens that it takes, or has taken."""
        if r.seq in self.bills:
            return self.bills[r.seq].inputs, self.bills[r.seq].outputs
        if r.seq in self.asked:
            return r.prompt_tokens, self.asked[r.seq]
        promised = self.state.predictor.promise(self.state.asked(r)).tokens
        each = min(promised or r.output_max_tokens, r.output_max_tokens)
        return r.prompt_tokens, each * r.sequences

    def needs(self, r: Request) -> dict[int, int]:
        amounts = (1, *shares(*self.take(r)))
        return {which: amount * 10**6 for which, amount in enumerate(amounts)}

    def due_ns(self, node: int, r: Request) -> int:
        """Return when the node holds enough for it; -1: when a request ends."""
        n, needs = self.nodes[node], self.needs(r)
        if n.concurrency and self.live(node) >= n.concurrency:
            return -1
        now_ns = self.state.now_ns
        short = [
            bucket.due_ns(needs[which])
            for which, bucket in n.buckets.items()
            if bucket.level_at(now_ns) < min(needs[which], bucket.size)
        ]
        return max(short, default=0)

    def fits(self, node: int, r: Request) -> bool:
        return 0 <= self.due_ns(node, r) <= self.state.now_ns

    def can_hold(self, node: int, r: Request) -> bool:
        needs = self.needs(r)
        return all(needs[which] <= b.size for which, b in self.nodes[node].buckets.items())

    # Events.

    def refusal(self, r: Request) -> int:
        """Return the outcome of a request at its arrival, or 0."""
        chain = self.chain_of(r.flow)
        if self.state.classes.is_exempt(r.flow):
            return 0
        if not all(self.can_hold(node, r) for node in chain):
            return core.REJECTED_QUOTA_SIZE
        refused = self._model_refusal(r)
        if refused or r.flow not in self.refusing:
            return refused
        fits = all(self.fits(node, r) and not self.waiters(node) for node in chain)
        return 0 if fits else core.REJECTED_QUOTA

    def _model_refusal(self, r: Request) -> int:
        names = self.state.pool_names
        pools = self.state.serving(r.target)
        nodes = [self.models.get(names[p], -1) for p in pools]
        if -1 in nodes:
            return 0
        holding = [node for node in nodes if self.can_hold(node, r)]
        if not holding:
            return core.REJECTED_QUOTA_SIZE
        waits = r.flow in self.refusing and not any(self.fits(node, r) for node in holding)
        return core.REJECTED_QUOTA if waits else 0

    def wait_ms(self, r: Request) -> int:
        """Return the least wait of a queued request for its quotas."""
        chain = [] if r.seq in self.bills else self.chain_of(r.flow)
        wait_ns = max((self.due_ns(n, r) for n in chain), default=0) - self.state.now_ns
        return -(-min(max(wait_ns, 10**9), RETRY_MAX_NS) // 10**6) if wait_ns > 0 else 0

    def bill(self, r: Request, nodes: list[int]) -> None:
        inputs, outputs = self.take(r)
        bill = self.bills.setdefault(r.seq, Bill([], inputs, outputs))
        for node in nodes:
            bill.nodes.append(node)
            self._draw(node, 1, bill.inputs, bill.outputs)

    def bill_chain(self, r: Request, *, with_model: bool = False) -> None:
        if chain := self.chain_of(r.flow):
            self.bill(r, chain)
        if with_model:
            self.shares.pay(r)
            self.bill_model(r)

    def model_of(self, r: Request, pool: int) -> int:
        """Return the node of a pool's model, -1: none that binds the request."""
        if self.state.classes.is_exempt(r.flow):
            return -1
        return self.models.get(self.state.pool_names[pool], -1)

    def bill_model(self, r: Request) -> None:
        if (node := self.model_of(r, r.pool)) != -1:
            self.bill(r, [node])

    def model_waits(self, r: Request, pool: int) -> bool:
        node = self.model_of(r, pool)
        if node == -1:
            return False
        if self.fits(node, r):
            self.asked[r.seq] = self.take(r)[1]
            return False
        self.state.pool_due[pool] = self.due_ns(node, r)
        return True

    def model_allows(self, r: Request, pool: int) -> bool:
        """Return whether it may pass the pool's next, as far as the model's quota goes."""
        node = self.model_of(r, pool)
        if node == -1:
            return True
        self.asked[r.seq] = self.take(r)[1]
        return self.fits(node, r)

    def _draw(self, node: int, requests: int, inputs: int, outputs: int) -> None:
        amounts = (requests, *shares(inputs, outputs))
        for which, bucket in self.nodes[node].buckets.items():
            bucket.draw(self.state.now_ns, amounts[which] * 10**6)

    def correct(self, r: Request, inputs: int, outputs: int) -> None:
        """Let a bill have about this amount."""
        if bill := self.bills.get(r.seq):
            for node in bill.nodes:
                self._draw(node, 0, inputs - bill.inputs, outputs - bill.outputs)
            bill.inputs, bill.outputs = inputs, outputs
            self.shares.follow(r)

    def report(self, r: Request) -> None:
        if bill := self.bills.get(r.seq):
            inputs = max(bill.inputs, r.input_tokens or 0)
            self.correct(r, inputs, max(bill.outputs, r.output_tokens))

    def close(self, r: Request, has_run: bool) -> None:
        if bill := self.bills.get(r.seq):
            if not has_run:
                self.correct(r, 0, 0)
                for node in bill.nodes:
                    self._draw(node, -1, 0, 0)
            del self.bills[r.seq]
            more = (1, *shares(bill.inputs, bill.outputs))
            for node in bill.nodes:
                for which in self.nodes[node].buckets:
                    self.cap_debt(node, which, 1, more[which])
            self.shares.paid.pop(r.seq, None)

    def cap_debt(self, node: int, which: int, windows: int, more: int) -> None:
        """Forgive its debt beyond its limit, `more` and the open amounts."""
        bills = [bill for bill in self.bills.values() for at in bill.nodes if at == node]
        sums = [(1, b.inputs, b.outputs) for b in bills]
        requests, inputs, outputs = map(sum, zip(self.nodes[node].owed, *sums, strict=True))
        open_now = (requests, *shares(inputs, outputs))[which]
        (bucket := self.nodes[node].buckets[which]).draw(self.state.now_ns, 0)
        bucket.level = max(bucket.level, -(bucket.rate * windows + more + open_now) * 10**6)

    def gone(self, r: Request) -> None:
        """It has left its queue."""
        was_held = self.shares.holds.pop(r.seq, None)
        self.state.positions.look()
        if r.flow in self.waits and self.waits[r.flow].request is r:
            self.come_back(r.flow)
        if was_held:
            self.note_out(r.flow)
        self.look(r.flow)  # the next of its queue may have taken at its arrival

    def look(self, flow: int) -> None:
        """See whether a flow that waits, or is held, is out."""
        if flow in self.waits or self.shares.holds_of(flow):
            self.note_out(flow)

    def note_out(self, flow: int) -> None:
        """One that is out leaves the minimum, and another one returns."""
        self.state.positions.wait(flow)
        if not self.is_out(flow):
            self._rejoin(flow)
        elif flow in self.state.in_minimum:
            self.state.in_minimum.remove(flow)
            self._note_lifts(flow)

    def _note_lifts(self, flow: int) -> None:
        if flow in self.waits:
            self.waits[flow].lift = self.lift_of(flow, self.waits[flow].node)
        if self.shares.holds_of(flow):
            self.shares.lifts[flow] = self.lift_of(flow, self.shares.root)

    def lift_of(self, flow: int, node: int) -> int:
        return self.nodes[node].lift[self.state.flows[flow].cls]

    def key(self, flow: int, r: Request, lift: int) -> tuple[int, int]:
        if self.state.policy in ("fcfs", "sif"):
            return (r.seq if self.state.policy == "fcfs" else r.prompt_tokens), flow
        return self.state.flows[flow].vtc - lift, flow

    def waiters(self, node: int) -> list[int]:
        """Return flows that wait at a node, those of the class served next first, by counter."""
        found = [flow for flow, wait in self.waits.items() if wait.node == node]
        classes = self.state.classes
        next_class = classes.first(("node", node)) if found else -1

        def place(flow: int) -> tuple[Any, ...]:
            cls, wait = classes.of_flow(flow), self.waits[flow]
            return cls != next_class, cls, self.key(flow, wait.request, wait.lift)

        return sorted(found, key=place)

    def _behind(self, flow: int, r: Request, node: int) -> bool:
        """Return whether a flow that precedes it waits at the node."""
        classes, cls = self.state.classes, self.state.flows[flow].cls
        first = self.waiters(node)[:1]
        if not first:
            return False
        if cls not in classes.present(("node", node)):
            return classes.holds_up(("node", node), cls)
        if classes.of_flow(first[0]) != cls:
            return True
        wait = self.waits[first[0]]
        mine = self.key(flow, r, self.lift_of(flow, node))
        return self.key(first[0], wait.request, wait.lift) < mine

    def run(self) -> None:
        """Let every head ask that has not, and serve waiters, until nothing changes."""
        if self.is_new:
            self.is_new = False
            for flow in range(len(self.state.flows)):
                self._come_back_whole(flow)
        while any(self.chain_of(flow) for flow in self.first):
            asking = [
                flow
                for flow in range(len(self.state.flows))
                if flow not in self.waits and not all(self._is_billed(r) for r in self.heads(flow))
            ]
            if asking:
                self._ask(asking[0], -1)
                continue
            for node in range(len(self.nodes)):
                first = self.waiters(node)[:1]
                if first and self.fits(node, self.waits[first[0]].request):
                    classes = self.state.classes
                    classes.served(("node", node), classes.of_flow(first[0]))
                    self.come_back(first[0])
                    self._ask(first[0], node)
                    break
            else:
                return

    def _ask(self, flow: int, served_by: int) -> None:
        while heads := [r for r in self.heads(flow) if not self._is_billed(r)]:
            r = heads[0]
            self.asked[r.seq] = self.take(r)[1]
            for node in self.chain_of(flow):
                behind = node != served_by and self._behind(flow, r, node)
                if behind or not self.fits(node, r):
                    self.waits[flow] = Wait(node, r, self.lift_of(flow, node))
                    self.state.classes.note()
                    self.note_out(flow)
                    return
            for node in self.chain_of(flow):
                if node != served_by and self.waiters(node):
                    self.state.classes.served(("node", node), self.state.flows[flow].cls)
            self.bill_chain(r)
            self.state.positions.look()
            self.state.classes.note()
            served_by = -1

    def come_back(self, flow: int) -> None:
        """It waits for no quota any more."""
        self._rejoin(flow)
        del self.waits[flow]
        self.state.classes.note()

    def _come_back_whole(self, flow: int) -> None:
        """None of it is held, either."""
        if flow in self.waits:
            self.come_back(flow)
        for hold in self.shares.holds_of(flow):
            self._rejoin(flow)
            del self.shares.holds[hold.request.seq]
        self.state.positions.look()
        self.state.classes.note()

    def _rejoin(self, flow: int) -> None:
        """It has something in the line again, or asks."""
        state, wait = self.state, self.waits.get(flow)
        if flow in state.in_minimum:
            return
        f = state.flows[flow]
        node = self.nodes[wait.node if wait else self.shares.root]
        least = state.raise_level(f.cls)
        f.vtc += node.lift[f.cls] - (wait.lift if wait else self.shares.lifts[flow])
        if f.vtc < least and state.policy != "lcf":
            node.lift[f.cls] += least - f.vtc
            f.vtc = least
        state.in_minimum.add(flow)
        self._note_lifts(flow)

    def next_due(self) -> int:
        """Return when a node holds enough for the first of its waiters."""
        firsts = [(node, self.waiters(node)[:1]) for node in range(len(self.nodes))]
        dues = [self.due_ns(node, self.waits[f[0]].request) for node, f in firsts if f]
        dues += [self.state.classes.next_due(("node", node)) for node, f in firsts if f]
        dues += self.shares.next_dues()
        return min((due for due in dues if due >= 0), default=-1)

    def fill_up(self) -> None:
        now_ns = self.state.now_ns
        for n in self.nodes:
            for bucket in n.buckets.values():
                bucket.level, bucket.at_ns = bucket.size, now_ns
        for bill in self.bills.values():
            for node in bill.nodes:
                self._draw(node, 1, bill.inputs, bill.outputs)
        self.shares.fill_up()

    def rows(self, flow: int, now_ns: int) -> list[dict[str, Any]]:
        """Return for each kind the limit with the least left."""
        return self.limits_of(self.chain_of(flow), now_ns)

    def limits_of(self, chain: list[int], now_ns: int) -> list[dict[str, Any]]:
        found = []
        for which in range(4):
            kept = [
                (bucket.level_at(now_ns), k, bucket)
                for k, node in enumerate(chain)
                if (bucket := self.nodes[node].buckets.get(which))
            ]
            if kept:
                level, _, bucket = min(kept, key=lambda e: (max(0, e[0] // 10**6), e[1]))
                ticks = -(-(bucket.size - level) // bucket.rate)
                reset_ms = -(-ticks * TICK_NS // 10**6)
                found.append((3 + which, bucket.rate, max(0, level // 10**6), reset_ms))
        together = [
            (max(0, n.concurrency - self.live(node)), k, n.concurrency)
            for k, node in enumerate(chain)
            if (n := self.nodes[node]).concurrency
        ]
        if together:
            left, _, limit = min(together)
            found.append((7, limit, left, 0))
        names = ("kind", "limit", "remaining", "reset_ms")
        return [dict(zip(names, row, strict=True)) for row in found]
