"""What the twin knows: its flows, pools and requests, and questions about them."""

from collections import Counter
from collections.abc import Callable

from .twin_lengths import Predictor
from .twin_types import ENDED, QUEUED, Flow, Pool, Request, TwinError, Verdict


class State:
    """Flows, pools and requests; whatever else there is to know is found by looking at them all."""

    def __init__(self, policy: str = "vtc", **limits: int) -> None:
        defaults = {
            "queue_ttl_ns": 30 * 10**9,
            "lease_ttl_ns": 10 * 10**9,
            "lease_grace_ns": 20 * 10**9,
            "flow_queue_max": 1_000,
            "queue_max": 10_000,
            "leases_max": 65_536,
            "answers_max": 100_000,
            "answer_ttl_ns": 300 * 10**9,
            "input_price_micro": 1_000_000,
            "output_price_micro": 2_000_000,
            "cached_price_ppm": 100_000,
            "headroom_ppm": 20_000,
            "quantile_ppm": 900_000,
            "samples_min": 10,
        }
        self.limits = defaults | limits
        self.fcfs = policy == "fcfs"
        self.predictor = Predictor(self.limits["quantile_ppm"], self.limits["samples_min"])
        self.flows: list[Flow] = []
        self.flow_names: list[bytes] = []
        self.pools: list[Pool] = []
        self.pool_names: list[bytes] = []
        self.requests: list[Request] = []  # queued, leases and stored answers
        self.answers: list[Request] = []  # those that ended, oldest first
        self.verdicts: list[Verdict] = []
        self.totals: Counter[str] = Counter()
        self.arrivals: Counter[tuple[int, int]] = Counter()  # by flow and target
        self.now_ns = self.seq = self.idle_vtc = 0
        self.lease_next = 1
        self.prompt_seen = 0
        self.draining = False

    def enter(self, now_ns: int) -> None:
        if now_ns < self.now_ns:
            raise TwinError(3, "now_ns")
        self.now_ns = now_ns

    # Configuration.

    def set_flow(self, name: bytes, weight_milli: int) -> int:
        if name in self.flow_names:
            self.flows[self.flow_names.index(name)].weight_milli = weight_milli
        else:
            self.flow_names.append(name)
            self.flows.append(Flow(weight_milli))
        return self.flow_names.index(name)

    def set_pool(
        self,
        now_ns: int,
        name: bytes,
        epoch: int,
        capacity_tokens: int,
        block_size_tokens: int,
        max_running: int = 0,
        max_model_tokens: int = 0,
    ) -> int:
        self.enter(now_ns)
        capacity = capacity_tokens // block_size_tokens
        headroom = capacity * self.limits["headroom_ppm"] // 1_000_000
        new = Pool(epoch, capacity, headroom, block_size_tokens, max_running, max_model_tokens)
        if name not in self.pool_names:
            self.pool_names.append(name)
            self.pools.append(new)
            return len(self.pools) - 1
        index = self.pool_names.index(name)
        old = self.pools[index]
        if epoch < old.epoch:
            raise TwinError(9, "epoch")
        if epoch > old.epoch:
            for r in self.leases_of(index):
                r.is_void = True
                r.reserved_blocks = r.posted_blocks = 0
        elif block_size_tokens != old.block_size and self.leases_of(index):
            raise TwinError(3, "block_size_tokens")
        new.reason = old.reason
        self.pools[index] = new
        return index

    # What the state is, by looking at everything.

    def queued(self, keep: Callable[[Request], bool] = lambda r: True) -> list[Request]:
        return [r for r in self.requests if r.state == QUEUED and keep(r)]

    def leases(self, keep: Callable[[Request], bool] = lambda r: True) -> list[Request]:
        return [r for r in self.requests if r.lives and keep(r)]

    def leases_of(self, pool: int) -> list[Request]:
        """Leases that hold a reservation in the pool."""
        return self.leases(lambda r: r.pool == pool and not r.is_void)

    def is_active(self, flow: int) -> bool:
        return any(r.flow == flow and r.state != ENDED for r in self.requests)

    def promised(self, pool: int) -> int:
        return sum(r.reserved_blocks for r in self.leases_of(pool))

    def blocks(self, pool: int, tokens: int, sequences: int) -> int:
        """Whole blocks; each sequence may leave its last one partly filled."""
        return -(-tokens // self.pools[pool].block_size) + sequences - 1

    def can_hold(self, pool: int, r: Request) -> bool:
        p = self.pools[pool]
        if p.max_model_tokens and r.prompt_max_tokens + r.output_max_tokens > p.max_model_tokens:
            return False
        if p.max_running and r.sequences > p.max_running:
            return False
        tokens = r.prompt_tokens * r.n + r.output_max_tokens * r.sequences
        return self.blocks(pool, tokens, r.sequences) <= p.capacity_blocks

    def find(self, handle: int) -> Request | None:
        return next((r for r in self.requests if r.seq == handle), None)

    def find_lease(self, lease_id: int, principal: int) -> Request | None:
        wanted = (lease_id, principal)
        return next(
            (r for r in self.requests if r.lease_id and (r.lease_id, r.principal) == wanted), None
        )

    def lift(self, flow: int) -> None:
        if not self.is_active(flow):
            others = [f.vtc for i, f in enumerate(self.flows) if self.is_active(i)]
            f = self.flows[flow]
            f.vtc = max(f.vtc, min(others) if others else self.idle_vtc)

    def settle(self, flow: int) -> None:
        if not self.is_active(flow):
            self.idle_vtc = self.flows[flow].vtc

    def recharge(self, r: Request, inputs: int, cached: int, outputs: int) -> None:
        """Take back what the flow was charged for the request, and charge this instead."""
        price = self.limits["input_price_micro"]
        micro = (
            (inputs - cached) * price
            + cached * (price * self.limits["cached_price_ppm"] // 1_000_000)
            + outputs * self.limits["output_price_micro"]
        )
        f = self.flows[r.flow]
        f.vtc -= r.charged
        r.charged = micro * 1000 // r.weight_milli
        f.vtc += r.charged
        assert f.vtc >= 0

    def share(self, pool: int) -> int:
        return self.promised(pool) * 1_000_000 // self.pools[pool].capacity_blocks

    def least(self, target: int) -> Request | None:
        """Head of the line for one target: the least (counter, seq) of the flows' heads."""
        heads: dict[int, Request] = {}
        for r in self.queued(lambda r: r.target == target):
            heads.setdefault(r.flow, r)
        return min(heads.values(), key=self.rank, default=None)

    def rank(self, r: Request) -> tuple[int, int]:
        return (0 if self.fcfs else self.flows[r.flow].vtc), r.seq

    def limits_told(self, target: int) -> tuple[int, int]:
        if target == -1 and len(self.pools) == 1:
            target = 0
        if target == -1:
            return 0, 0
        p = self.pools[target]
        free = p.capacity_blocks - p.headroom_blocks - self.promised(target)
        return p.capacity_blocks * p.block_size, max(0, free * p.block_size)
