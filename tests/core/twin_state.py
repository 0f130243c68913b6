"""Holds the state of the twin: its flows, pools and requests, and questions about them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .twin_classes import Classes
from .twin_defaults import DEFAULTS
from .twin_dry_run import Audit
from .twin_edf_queue import Order
from .twin_lengths import Asked, Predictor
from .twin_positions import Positions
from .twin_prices import kv_steps, price_of, weighted_by
from .twin_quota import Quotas
from .twin_restart import Restart
from .twin_tenants import Rule, Tenants
from .twin_types import (
    LEASED,
    QUEUED,
    Flow,
    Pool,
    Request,
    Target,
    TwinError,
    Verdict,
    may_run,
    names,
)


class State:
    """Holds flows, pools and requests; anything else is found by looking at them all."""

    def __init__(
        self,
        policy: str = "vtc",
        ledger: str = "peak",
        dispatch: str = "backfill",
        flow_order: str = "arrival",
        **limits: int,
    ) -> None:
        self.limits = DEFAULTS | limits
        self.policy, self.form = policy, ledger
        self.backfills = dispatch == "backfill"
        self.predictor = Predictor(self.limits["quantile_ppm"], self.limits["samples_min"])
        self.flows: list[Flow] = []
        self.flow_names: list[bytes] = []
        self.pools: list[Pool] = []
        self.pool_names: list[bytes] = []
        self.requests: list[Request] = []  # those that wait or run
        self.answers: list[Request] = []  # those that ended, oldest first
        self.verdicts: list[Verdict] = []
        self.totals: Counter[str] = Counter()
        self.in_minimum: set[int] = set()  # active flows that their quotas do not block
        self.order = Order(self, flow_order == "deadline")  # type: ignore[arg-type]
        self.classes = Classes(self)
        self.quotas = Quotas(self)
        self.audit = Audit(self)
        self.restart = Restart(self)
        self.positions = Positions(self)
        self.tenants = Tenants(self)
        self.pool_limits: dict[bytes, dict[str, int]] = {}
        self.adapter_weights: dict[bytes, int] = {}
        self.pool_due: dict[int, int] = {}  # when a pool's wait ends
        self.arrivals: Counter[tuple[int, Target]] = Counter()  # by flow and target
        self.now_ns = self.seq = self.prompt_seen = self.output_seen = self.lead_given = 0
        self.levels: Counter[int] = Counter()  # by class
        self.average_charge = self.largest_charge = 0
        self.lease_next, self.draining = 1, False
        self.closed = False  # an operator drains all pools
        self.sweeps = False  # something was drained since the last poll
        self.core_says: Any = None  # its answer to this event, where the twin has none of its own

    def enter(self, now_ns: int) -> None:
        if now_ns < self.now_ns:
            raise TwinError(3, "now_ns")
        self.note_heads()  # at the time of the event before
        self.positions.look()
        self.now_ns = now_ns
        if self.quotas.shares.stale_ns != now_ns:
            self.quotas.shares.know()
        self.restart.enter()

    # Configuration.

    def set_flow(self, name: bytes, weight_milli: int) -> int:
        self.tenants.listed(name)
        if name in self.flow_names:
            for flow in self.classes.siblings(self.flow_names.index(name)):
                self.flows[flow].weight_milli = weight_milli
        else:
            self.flow_names.append(name)
            self.flows.append(Flow(weight_milli, base=len(self.flows)))
        return self.flow_names.index(name)

    def set_unknown(self, flow: int, refused: bool = False, own: bool = False) -> None:
        self.tenants.set_unknown(flow, refused, own)

    def set_gone(self, now_ns: int, name: bytes) -> None:
        self.enter(now_ns)
        self.tenants.let_go(name)

    def set_tenant_rule(
        self, now_ns: int, pattern: bytes, weight_milli: int = 1_000, default_class: int = 0,
        named: tuple[int, ...] = (), dry_run: bool = False, parent: int = -1, refuse: bool = False,
        requests: int = 0, input_tokens: int = 0, output_tokens: int = 0, total_tokens: int = 0,
        concurrency: int = 0,
    ) -> None:  # fmt: skip
        self.enter(now_ns)
        limits = (requests, input_tokens, output_tokens, total_tokens)
        given = (pattern, weight_milli, default_class, named, dry_run, parent, refuse)
        self.tenants.set_rule(Rule(*given, limits, concurrency))

    def set_no_tenant_rules(self, now_ns: int, dry_run: bool = False) -> None:
        self.enter(now_ns)
        self.tenants.set_no_rules(dry_run)

    def set_rules_followed(self, now_ns: int) -> None:
        self.enter(now_ns)
        self.tenants.follow_rules()

    def first_sight(self, now_ns: int, name: bytes) -> int:
        self.enter(now_ns)
        return self.tenants.first_sight(name)

    def set_flow_class(
        self, flow: int, default_class: int = 0, named: tuple[int, ...] = ()
    ) -> None:
        self.classes.default[flow], self.classes.named[flow] = default_class, named

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
        new = Pool(
            epoch,
            capacity_tokens,
            self.limits["headroom_ppm"],
            block_size_tokens,
            max_running,
            max_model_tokens,
            self.limits_of(name),
        )
        if name not in self.pool_names:
            self.pool_names.append(name)
            self.pools.append(new)
            new.replays_until_ns = self.replays_until()
            self.positions.pool_comes(len(self.pools) - 1)
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
        restarted = (
            {}
            if epoch == old.epoch
            else {"told_at_ns": None, "foreign_tokens": 0, "owed_tokens": 0, "blocks": {}}
        )
        if epoch != old.epoch:
            restarted["replayed"] = (0, 0)
        kept = ("headroom_ppm", "reason", "probes", "pressed", "told_at_ns", "preemptions")
        kept += ("replays_until_ns", "replayed")
        kept += ("served", "foreign_tokens", "owed_tokens", "light", "brought", "saturated")
        kept += ("drain", "draining", "output_above_limit")
        kept += ("blocks", "asked_tokens", "matched_tokens")
        for name in kept:
            setattr(new, name, getattr(old, name))
        self.pools[index] = replace(new, **restarted)
        return index

    def replays_until(self) -> int:
        """Until then replays are accepted in a pool that is first offered now."""
        return self.now_ns + self.limits["lease_ttl_ns"] + self.limits["lease_grace_ns"]

    def set_pool_limits(self, now_ns: int, pool: bytes = b"", **limits: int) -> None:
        self.enter(now_ns)
        self.pool_limits[pool] = limits
        self._limit_pools()

    def set_no_pool_limits(self, now_ns: int) -> None:
        self.enter(now_ns)
        self.pool_limits = {}
        self._limit_pools()

    def set_adapter(self, now_ns: int, name: bytes, tokens: int) -> None:
        self.enter(now_ns)
        self.adapter_weights.pop(name, None)
        if tokens >= 0:
            self.adapter_weights[name] = tokens

    def _limit_pools(self) -> None:
        for name, p in zip(self.pool_names, self.pools, strict=True):
            p.limits = self.limits_of(name)

    def limits_of(self, pool: bytes) -> dict[str, int]:
        return self.pool_limits.get(pool, self.pool_limits.get(b"", {}))

    def set_quota(
        self, now_ns: int, name: bytes, parent: int = -1, requests: int = 0, input_tokens: int = 0,
        output_tokens: int = 0, total_tokens: int = 0, concurrency: int = 0, share: int = 0,
        lends: int = -1, borrows: int = -1,
    ) -> int:  # fmt: skip
        """Set it as the core does, without weights of groups, as in `tree_histories.py`."""
        self.enter(now_ns)
        limits = (requests, input_tokens, output_tokens, total_tokens)
        node = self.quotas.set_named(name, parent, limits, concurrency)
        self.quotas.shares.give(node, share, lends, borrows)
        return node

    def set_flow_quota(
        self, now_ns: int, flow: int, parent: int = -1, refuse: bool = False, requests: int = 0,
        input_tokens: int = 0, output_tokens: int = 0, total_tokens: int = 0, concurrency: int = 0,
        share: int = 0, lends: int = -1, borrows: int = -1,
    ) -> None:  # fmt: skip
        self.enter(now_ns)
        limits = (requests, input_tokens, output_tokens, total_tokens)
        self.quotas.set_flow(flow, parent, refuse, limits, concurrency, (share, lends, borrows))

    def set_flow_mode(self, now_ns: int, flow: int, audit: bool) -> None:
        self.enter(now_ns)
        for sibling in self.classes.siblings(flow):
            self.audit.set_mode(sibling, audit)

    def set_options(
        self, now_ns: int, *, policy: str | None = None, flow_order: str = "", **limits: int
    ) -> None:
        self.enter(now_ns)
        self.order.change(flow_order == "deadline" if flow_order else self.order.by_deadline)
        if policy is not None and policy != self.policy:
            self.policy = policy
            self.quotas.is_new = True
        self.limits |= limits
        while len(self.answers) > self.limits["answers_max"]:
            self.answers.pop(0)

    def set_pool_quota(self, now_ns: int, pool: bytes, quota: int) -> None:
        self.enter(now_ns)
        self.quotas.models[pool] = quota

    # Questions about the state, answered by reading everything.

    def note_heads(self) -> None:
        """Record when each queue's first request became that, and when it joined the line."""
        for r in self.order.heads():
            r.head_ns = self.now_ns if r.head_ns is None else r.head_ns
            if r.lined_ns is None and self.quotas.is_candidate(r):
                r.lined_ns = self.now_ns

    def queued(self, keep: Callable[[Request], bool] | None = None) -> list[Request]:
        return list(filter(keep, [r for r in self.requests if r.state == QUEUED]))

    def leases(self, keep: Callable[[Request], bool] | None = None) -> list[Request]:
        return list(filter(keep, [r for r in self.requests if r.state in LEASED]))

    def leases_of(self, pool: int) -> list[Request]:
        """Return leases that hold a reservation in the pool."""
        return self.leases(lambda r: r.pool == pool and not r.is_void)

    def serving(self, target: Target = -1) -> list[int]:
        """Return the pools that a request with this target may be granted in."""
        pools = [i for i, p in enumerate(self.pools) if may_run(target, i) and not p.draining]
        return [] if self.closed else pools

    def is_full(self, flow: int) -> bool:
        exempt = self.classes.is_exempt(flow)
        held = self.leases(lambda r: self.classes.is_exempt(r.flow) == exempt)
        return len(held) >= self.limits["leases_max"]

    def asked(self, r: Request) -> Asked:
        return Asked(r.flow, r.adapter, self.live(r.flow), len(self.leases()))

    def live(self, flow: int) -> int:
        return len(self.leases(lambda r: r.flow == flow))

    def is_active(self, flow: int) -> bool:
        return flow in self.active()

    def active(self) -> set[int]:
        """Return the flows with a request that waits or runs."""
        return {r.flow for r in self.requests}

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
        if 0 < p.limits.get("max_request_input_tokens", 0) < r.prompt_tokens:
            return False
        total = r.prompt_tokens + r.output_max_tokens * r.sequences
        if 0 < p.limits.get("max_request_total_tokens", 0) < total:
            return False
        tokens = r.prompt_tokens * r.n + r.output_max_tokens * r.sequences
        whole = self.blocks(pool, tokens, r.sequences) * p.block_size
        if r.adapter:
            whole += self.adapter_weight(pool, r.adapter)
        return whole <= p.capacity_blocks * p.block_size

    def adapter_weight(self, pool: int, adapter: bytes) -> int:
        usual = self.pools[pool].limits.get("adapter_tokens", 0)
        return self.adapter_weights.get(adapter, usual)

    def active_adapters(self, pool: int) -> set[bytes]:
        return {r.adapter for r in self.leases_of(pool) if r.adapter}

    def adapter_tokens(self, pool: int, extra: bytes = b"") -> int:
        """Return tokens of the pool that the active adapters take, with one more if it is given."""
        active = self.active_adapters(pool) | ({extra} if extra else set())
        return sum(self.adapter_weight(pool, adapter) for adapter in active)

    def has_room(self, adapter: bytes) -> bool:
        """Return whether a request may name one adapter more, or one that is in use."""
        used = {r.adapter for r in self.requests if r.adapter}
        return len(used | {adapter or next(iter(used), b"")}) <= self.limits["adapters_max"]

    def known(self) -> list[Request]:
        return self.requests + self.answers

    def find(self, handle: int) -> Request | None:
        return next((r for r in self.known() if r.seq == handle), None)

    def limited(
        self, r: Request, input_tokens: int, output_tokens: int, *, is_final: bool = False
    ) -> tuple[int, int]:
        """Return a report as far as the request can use it, a final output up to the context."""
        p = self.pools[r.pool]
        whole = (p.max_model_tokens or p.capacity_blocks * p.block_size) * r.sequences
        usable = r.output_max_tokens * r.sequences
        inputs = -(-r.prompt_tokens * 21 // 20)
        if not r.has_exact_input:
            inputs = max(inputs, whole)
        left = whole - max(0, min(input_tokens, inputs)) * r.n
        if not r.has_exact_input and r.prompt_tokens * r.n + usable >= whole:
            usable = max(usable, left)
        outputs = max(usable, left) if is_final else usable
        if (input_tokens > inputs or output_tokens > outputs) and not r.was_limited:
            r.was_limited = True
            self.totals["reports_limited"] += 1
        if is_final:
            p.output_above_limit += max(0, min(output_tokens, outputs) - usable)
        return min(input_tokens, inputs), min(output_tokens, outputs)

    def find_lease(self, lease_id: int, principal: int) -> Request | None:
        wanted = (lease_id, principal)
        return next(
            (r for r in self.known() if r.lease_id and (r.lease_id, r.principal) == wanted), None
        )

    def lift(self, flow: int) -> None:
        waits = flow in self.quotas.waits or self.quotas.shares.holds_of(flow)
        if flow not in self.in_minimum and not waits:
            if self.policy != "lcf":
                least = self.raise_level(self.flows[flow].cls) - self.credit
                self.flows[flow].vtc = max(self.flows[flow].vtc, least)
            self.in_minimum.add(flow)

    @property
    def credit(self) -> int:
        """Return how far below its class's level a flow may begin."""
        most = self.limits["credit_max_micro"]
        return self.average_charge if most == -1 else most

    def raise_level(self, cls: int) -> int:
        least = min(self._active_counters(cls), default=0)
        self.levels[cls] = max(self.levels[cls], least)
        return self.levels[cls]

    def _active_counters(self, cls: int) -> list[int]:
        return [self.flows[i].vtc for i in self.in_minimum if self.flows[i].cls == cls]

    def note_charge(self, r: Request) -> None:
        most = price_of(self.limits, r, r.prompt_tokens, 0, r.output_max_tokens * r.sequences)
        charge = min(r.charged, weighted_by(most, r.weight_milli))
        unweighted = charge * r.weight_milli // 1000
        self.largest_charge = max(unweighted, self.largest_charge - unweighted // 256)
        known = self.average_charge
        self.average_charge = known - known // 32 + charge // 32 if known else charge

    def settle(self, flow: int) -> None:
        if flow not in self.restart.returning:
            self.settle_returned(flow)
        if not self.is_active(flow):
            self.flows[flow].idle_at_ns = self.now_ns

    def settle_returned(self, flow: int) -> None:
        """It does not stay active for having been it before a restart any more."""
        if not self.queued(lambda r: r.flow == flow):
            self.in_minimum.discard(flow)

    def recharge(self, r: Request, inputs: int, cached: int, outputs: int) -> None:
        """Take back the flow's charge for the request, and charge this instead."""
        micro = price_of(self.limits, r, inputs, cached, outputs)
        f, before = self.flows[r.flow], r.charged
        r.charged = weighted_by(micro, r.weight_milli)
        r.charged -= r.charged * r.discount_ppm // 1_000_000
        f.vtc += r.charged - before
        held, r.kv_steps = r.kv_steps, kv_steps(r, inputs, outputs)
        f.kv_token_steps += r.kv_steps - held
        assert f.vtc >= 0
        self.positions.charge(r.flow, r.pool, r.charged - before)

    def share(self, pool: int) -> int:
        return self.promised(pool) * 1_000_000 // self.pools[pool].capacity_blocks

    def least(self, target: int, cls: int, pool: int) -> Request | None:
        """Return the least (counter, seq) of a class's heads for a target, as a pool sees them."""
        return min(self.heads(target, cls), key=lambda r: self.rank(r, pool), default=None)

    def heads(self, target: int, cls: int | None = None) -> list[Request]:
        """Return the first requests of each flow in the line of a pool, -1: in that for any, or of
        each that has this class."""
        heads = [r for r in self.order.heads() if names(r.target, target)]
        if cls is not None:
            heads = [r for r in heads if self.flows[r.flow].cls == cls]
        return [r for r in heads if self.quotas.is_candidate(r)]

    def rank(self, r: Request, pool: int) -> tuple[int, int]:
        """Return the key of heads in a pool; -1: in all, for those that may run anywhere."""
        if self.policy == "sif":
            return r.prompt_tokens, r.seq
        counter = self.positions.counter_at(r.flow, r.lines[0] if r.names_one else pool)
        return (0 if self.policy == "fcfs" else counter // self.grain), r.seq

    @property
    def grain(self) -> int:
        """Return the least difference of counters that orders flows."""
        return self.limits["quantum_tokens"] * 10**6 if self.policy == "dlpm" else 1

    def limits_told(self, target: Target) -> tuple[int, int]:
        if target == -1 and len(self.pools) == 1:
            target = 0
        if target == -1 or isinstance(target, tuple):
            return 0, 0
        p = self.pools[target]
        free = p.capacity_blocks - p.headroom_blocks - self.promised(target)
        told = max(0, min(free, p.capacity_blocks))
        return p.capacity_blocks * p.block_size, told * p.block_size
