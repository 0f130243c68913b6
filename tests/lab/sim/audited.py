"""Compares what tenants were served with Stats' bound at every report, in virtual time.

The books count service from grants and reports alone, by the configured prices: the prompt at the
grant, output and the cache that it held as they are reported, all over the weight. While a tenant
or a group waits, none of its siblings may gain more
than the bound over its lead.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedsvc._core import CANCELLED, GRANTED, Scheduler
from schedsvc.config import Config, configure
from schedsvc.config.settings import Prices
from schedsvc_lab.engine import Engine, Profile
from schedsvc_lab.sim.requests import NEVER, Requests
from schedsvc_lab.sim.runner import EngineRunner, Report
from schedsvc_lab.sim.scheduler_adapter import CoreAdapter, Verdict
from schedsvc_lab.sim.world import Settings, World

SECOND = 10**9
_MICRO = 10**6
_ROOT = ""


@dataclass(frozen=True, slots=True)
class Tree:
    """Holds the path of each tenant to the root, itself first, and the weight of each node."""

    paths: Mapping[str, Sequence[str]]
    weights: Mapping[str, float]

    @classmethod
    def of(cls, config: Config) -> "Tree":
        """Read it from a configuration in which every group has a weight. O(tenants * levels)."""
        groups = {group.name: group for group in config.groups}
        weights = {f"group {name}": (g.weight_milli or 1_000) / 1_000 for name, g in groups.items()}
        paths = {}
        for tenant in config.tenants:
            path, above = [tenant.name], tenant.group
            while above is not None:
                path.append(f"group {above}")
                above = groups[above].parent
            paths[tenant.name] = path
            weights[tenant.name] = tenant.weight_milli / 1_000
        return cls(paths, weights)

    def families(self) -> list[set[str]]:
        """Return all sets of siblings."""
        found: dict[str, set[str]] = defaultdict(set)
        for path in self.paths.values():
            for node, above in zip(path, [*path[1:], _ROOT], strict=True):
                found[above].add(node)
        return list(found.values())


class Gaps:
    """Compares the service of siblings while one of them waits."""

    def __init__(self, tree: Tree) -> None:
        self.of_bound = 0.0  # the widest gap over the bound at that time
        self.broken = ""
        self._tree, self._families = tree, tree.families()
        self._served: Counter[str] = Counter()
        self._waits: Counter[str] = Counter()
        self._least: dict[tuple[str, str], float] = {}  # lead of one since the other began to wait

    def charge(self, tenant: str, service: float) -> None:
        """Count service of a tenant; negative: a refund. O(levels)."""
        for node in self._tree.paths[tenant]:
            self._served[node] += service / self._tree.weights[node]

    def waits(self, tenant: str, more: int) -> None:
        """Count a request that waits, or does not any more. O(levels * nodes^2)."""
        for node in self._tree.paths[tenant]:
            self._waits[node] += more
            if not self._waits[node]:
                self._least = {pair: at for pair, at in self._least.items() if pair[1] != node}

    def hold(self, now_ns: int, bound: float) -> None:
        """Compare each node that waits with its siblings. O(nodes^2)."""
        served = self._served
        for siblings in self._families:
            for node in siblings:
                if not self._waits[node]:
                    continue
                for other in siblings - {node}:
                    lead = served[other] - served[node]
                    least = self._least[other, node] = min(
                        lead, self._least.get((other, node), lead)
                    )
                    self.of_bound = max(self.of_bound, (lead - least) / bound)
                    if lead - least > bound:
                        self.broken = self.broken or (
                            f"at {now_ns / SECOND:.1f} s {other} was served {lead - least:,.0f}"
                            f" more than {node}, which waits; bound {bound:,.0f}"
                        )


class Books(CoreAdapter):
    """Drives the core, and keeps the books of service."""

    def __init__(
        self, core: Scheduler, requests: Requests, tree: Tree, asks: int, prices: Prices
    ) -> None:
        flows = [core.flow_index(name.encode()) for name in requests.clients]
        super().__init__(core, requests, flows, asks)
        self.gaps = Gaps(tree)
        self._prices = prices
        #: The books of all cores that share one fairness.
        self.sharing: Sequence[Books] = (self,)
        self.stats_broken = ""
        self.queued: dict[int, int] = {}  # handles
        self._counted: dict[int, float] = {}  # service of running requests

    def tenant(self, index: int) -> str:
        """Return whose a request is."""
        return self._requests.clients[self._requests.client[index]]

    def _admit(self, now_ns: int, flow: int, index: int, request_class: bytes) -> int:
        handle = super()._admit(now_ns, flow, index, request_class)
        if handle < 0:
            raise ValueError(f"request {index} was refused")
        self.queued[index] = handle
        self.gaps.waits(self.tenant(index), 1)
        return handle

    def poll(self, now_ns: int) -> list[Verdict]:
        """Let the core decide, and count the prompts that it grants."""
        verdicts = super().poll(now_ns)
        for verdict in verdicts:
            index = verdict.request
            del self.queued[index]
            self.gaps.waits(self.tenant(index), -1)
            if verdict.outcome == GRANTED:
                self._counted[index] = 0
                self._count(index, 0)
        return verdicts

    def progress(self, now_ns: int, report: Report) -> None:
        """Report, count it, and compare."""
        super().progress(now_ns, report)
        for index, output in zip(report.requests, report.outputs(), strict=True):
            self._count(index, output)
        figures = [each.core.stats(now_ns, 0, pools=False)["totals"] for each in self.sharing]
        bounds = [each["fairness_bound_micro"] for each in figures]
        self.gaps.hold(now_ns, sum(bounds) / _MICRO)
        gap, bound = max(
            zip((each["fairness_gap_micro"] for each in figures), bounds, strict=True),
            key=lambda of_one: of_one[0] - of_one[1],
        )
        if gap > bound:
            self.stats_broken = f"at {now_ns / SECOND:.1f} s Stats' gap {gap} is beyond {bound}"

    def complete(
        self, now_ns: int, index: int, served: bool = True, cached_tokens: int = 0
    ) -> None:
        """Report the end, and count it."""
        super().complete(now_ns, index, served, cached_tokens)
        self._count(index, self._requests.output_tokens[index])
        del self._counted[index]

    def leave(self, now_ns: int, index: int, output: int) -> None:
        """End the lease of a client that has left after this much output."""
        lease_id, epoch, _ = self._leases.pop(index)
        prompt = self._requests.prompt_tokens[index]
        self.core.complete(now_ns, lease_id, epoch, CANCELLED, prompt, 0, output)
        self._count(index, output)
        del self._counted[index]

    def _count(self, index: int, output: int) -> None:
        service = service_of(self._prices, self._requests.prompt_tokens[index], output)
        self.gaps.charge(self.tenant(index), service - self._counted[index])
        self._counted[index] = service


def service_of(prices: Prices, prompt: int, output: int) -> float:
    """Return what a request of one sequence is charged at weight 1, in tokens of service."""
    micro = prompt * prices.input_micro + output * prices.output_micro
    return (micro + output * (prompt + output / 2) * prices.kv_micro) / _MICRO


class Leavable(EngineRunner):
    """Runs an engine whose clients may leave while it works."""

    __slots__ = ()

    def leave(self, now_ns: int, index: int) -> int:
        """End a request whose client has left, and return its output so far. O(running)."""
        self._cut(now_ns)
        report = self.report(now_ns)
        self.engine.abort(index)
        del self.live[index]
        self._indices = None
        return report.outputs()[report.requests.index(index)]


class Audited(World):
    """Runs a world in which clients may leave: `leaves` has when, and which request, in order."""

    def __init__(
        self, profile: Profile, config: Config, requests: Requests, *, engines: int = 1,
        drained: int = 0, asks: int = 0, progress_ns: int = SECOND // 5,
        leaves: Iterable[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        engine = profile.config()
        core = Scheduler(**config.core_options())
        configure(core, config, 0)
        sizes: Any = (engine.capacity_tokens, engine.block_size_tokens, engine.sequences_max)
        for number in range(engines + drained):
            name = f"engine-{number}".encode()
            core.set_pool(0, name, 1, *sizes, engine.context_tokens_max)
            if number >= engines:
                core.set_draining(0, name, True)
        self.books = Books(core, requests, Tree.of(config), asks, config.scheduler.prices)
        self._leaves = sorted(leaves, reverse=True)
        cost = profile.step_cost(engine.sequences_max)
        self._engines = [Leavable(Engine(engine, cost)) for _ in range(engines)]
        super().__init__(
            requests, self.books, self._engines, Settings(progress_ns=progress_ns, check_samples=64)
        )

    def run_until(self, ends_ns: int) -> None:
        """Serve until a time; the queued and running requests then stay."""
        while self.now_ns < ends_ns:
            self._step(min(self._next_ns(), ends_ns))

    def next_ns(self) -> int:
        """Return when something happens next. O(engines)."""
        return self._next_ns()

    def step(self, now_ns: int) -> None:
        """Do everything due at one moment, for a world beside others."""
        self._step(now_ns)

    def _next_ns(self) -> int:
        next_ns = super()._next_ns()
        return min(next_ns, self._leaves[-1][0]) if self._leaves else next_ns

    def _step(self, now_ns: int) -> None:
        while self._leaves and self._leaves[-1][0] <= now_ns:
            self._leave(now_ns, self._leaves.pop()[1])
        super()._step(now_ns)

    def _leave(self, now_ns: int, index: int) -> None:
        """Let a client leave its request, queued or running."""
        if index in self.books.queued:
            self.books.core.cancel(now_ns, self.books.queued[index])
            return
        if self.outcomes.outcome[index] != GRANTED or self.outcomes.end_ns[index] != NEVER:
            return
        runner = self._engines[self.outcomes.pool[index]]
        if runner.end_ns == now_ns:
            self._leaves.append((now_ns + 1, index))  # first the output of the step
            return
        output = runner.leave(now_ns, index)
        self._end(index)
        self.books.leave(now_ns, index, output)
