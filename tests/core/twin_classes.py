"""Keeps the twin's classes: who may name one, and how long each has waited in each line."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .twin_types import Flow, TwinError

if TYPE_CHECKING:
    from .twin_state import State

#: Whose turn is asked for: the requests for a target, or the flows that wait at a quota's node.
Line = tuple[str, int]
EXEMPT_PRIORITY = -1_001


@dataclass
class Class:
    name: bytes
    rank: int
    ageing_ns: int
    exempt: bool
    gone: bool = False
    brought: int = 0

    @property
    def priority(self) -> int:
        return EXEMPT_PRIORITY if self.exempt else self.rank


class Classes:
    """Scans for all of it: a class is in a line while a queue of it is."""

    def __init__(self, state: "State") -> None:
        self.state = state
        self.items = [Class(b"default", 0, 5 * 10**9, False)]
        self.default: dict[int, int] = {}  # by flow in the default class
        self.named: dict[int, tuple[int, ...]] = {}
        self.since: dict[tuple[Line, int], int] = {}
        self.brought: dict[Line, bool] = {}  # whom a node served last, came before better classes

    # Configuration.

    def set(self, name: bytes, rank: int, ageing_ns: int, exempt: bool) -> int:
        for c in self.items:
            if c.name == name and c.gone and c.exempt != exempt:
                c.name = b""
        names = [c.name for c in self.items]
        if name not in names:
            free = [i for i, c in enumerate(self.items) if c.gone and c.exempt == exempt]
            if free:
                self.items[free[0]].name = name
            else:
                self.items.append(Class(name, rank, ageing_ns, exempt))
            names = [c.name for c in self.items]
        c = self.items[names.index(name)]
        if c.exempt != exempt:
            raise TwinError(3, "exempt")
        c.rank, c.ageing_ns, c.gone = rank, ageing_ns, False
        return names.index(name)

    def set_gone(self, name: bytes) -> None:
        for c in self.items[1:]:
            c.gone = c.gone or c.name == name

    def find(self, name: bytes) -> int:
        return next((i for i, c in enumerate(self.items) if c.name == name and not c.gone), -1)

    def of(self, base: int, name: bytes) -> int:
        """Return the class of a request; raise if its tenant may not name that one."""
        mine = self.default.get(base, 0)
        if not name:
            return mine
        cls = self.find(name)
        if cls < 0:
            raise TwinError(3, "request_class")
        if not self.may_name(base, cls):
            raise TwinError(3, "request_class")
        return cls

    def may_name(self, base: int, cls: int) -> bool:
        return cls == self.default.get(base, 0) or cls in self.named.get(base, ())

    def replayed(self, base: int, name: bytes) -> int:
        cls = self.find(name)
        return cls if cls >= 0 and self.may_name(base, cls) else self.default.get(base, 0)

    def flow(self, base: int, cls: int) -> int:
        """Return the tenant's flow in a class; make it if there is none."""
        state = self.state
        for i, f in enumerate(state.flows):
            if (f.base, f.cls) == (base, cls):
                return i
        state.flows.append(Flow(state.flows[base].weight_milli, base=base, cls=cls))
        state.flow_names.append(state.flow_names[base])
        flow = len(state.flows) - 1
        state.quotas.copy(base, flow)
        state.audit.copy(base, flow)
        return flow

    def siblings(self, base: int) -> list[int]:
        return [i for i, f in enumerate(self.state.flows) if f.base == base]

    # Order.

    def place(self, cls: int) -> tuple[int, int]:
        return self.items[cls].priority, cls

    def order(self) -> list[int]:
        return sorted(range(len(self.items)), key=self.place)

    def of_flow(self, flow: int) -> int:
        return self.state.flows[flow].cls

    def is_exempt(self, flow: int) -> bool:
        return self.items[self.of_flow(flow)].exempt

    def priority(self, cls: int, brought: bool) -> int:
        if brought:
            return min(c.rank for c in self.items if not c.exempt)
        return self.items[cls].priority

    def present(self, line: Line) -> list[int]:
        return [cls for cls in self.order() if (line, cls) in self.since]

    def due_ns(self, line: Line, cls: int) -> int:
        return self.since[line, cls] + self.items[cls].ageing_ns

    def first(self, line: Line) -> int:
        """Return the class that a node serves next."""
        here = self.present(line)
        if self.brought.get(line) or self.items[here[0]].exempt:
            return here[0]
        now_ns = self.state.now_ns
        aged = [cls for cls in here[1:] if self.due_ns(line, cls) <= now_ns]
        return min(aged, key=lambda cls: self.due_ns(line, cls), default=here[0])

    def holds_up(self, line: Line, cls: int) -> bool:
        """Return whether others precede the only request of a class."""
        now_ns = self.state.now_ns
        return any(
            self.place(other) < self.place(cls)
            or (self.due_ns(line, other) <= now_ns and not self.brought.get(line))
            for other in self.present(line)
        )

    def served(self, line: Line, cls: int) -> None:
        here = self.present(line)
        if cls in here:
            self.since[line, cls] = self.state.now_ns
        self.brought[line] = bool(here) and self.place(here[0]) < self.place(cls)

    def next_due(self, line: Line) -> int:
        """Return when another class may become the first."""
        first = self.first(line)
        dues = [self.due_ns(line, cls) for cls in self.present(line) if cls != first]
        return min((due for due in dues if due > self.state.now_ns), default=-1)

    def note(self) -> None:
        """Record who is in which line now."""
        state = self.state
        here = {
            (("target", pool), self.of_flow(r.flow))
            for r in state.order.heads()
            if state.quotas.is_candidate(r)
            for pool in r.lines
        }
        here |= {
            (("node", wait.node), self.of_flow(flow)) for flow, wait in state.quotas.waits.items()
        }
        self.since = {key: self.since.get(key, state.now_ns) for key in here}

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for cls in self.order():
            c = self.items[cls]
            flows = [i for i, f in enumerate(self.state.flows) if f.cls == cls]
            queued = sum(r.flow in flows for r in self.state.queued())
            live = sum(r.flow in flows for r in self.state.leases())
            if not c.gone or queued or live:
                rows.append(
                    {
                        "name": c.name.decode(),
                        "rank": c.rank,
                        "ageing_ms": c.ageing_ns // 10**6,
                        "exempt": c.exempt,
                        "queued": queued,
                        "live_leases": live,
                        "granted": sum(self.state.flows[i].granted for i in flows)
                        + self.state.tenants.granted_by_forgotten[cls],
                        "brought_forward": c.brought,
                    }
                )
        return rows
