"""The twin's tenants at first sight: which flow a proved name that nothing lists gets."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .twin_state import State


@dataclass(frozen=True)
class Rule:
    """What a tenant gets whose name fits the pattern."""

    pattern: bytes
    weight_milli: int = 1_000
    default_class: int = 0
    named: tuple[int, ...] = ()
    dry_run: bool = False
    parent: int = -1
    refuse: bool = False
    limits: tuple[int, ...] = (0, 0, 0, 0)
    concurrency: int = 0

    @property
    def is_limiting(self) -> bool:
        return any(self.limits) or self.concurrency > 0


class Tenants:
    """The rules, and the flows that they have made."""

    def __init__(self, state: "State") -> None:
        self.state = state
        self.unknown, self.own = -1, False
        self.rules: list[Rule] = []
        self.default = Rule(b"*")
        self.born: set[int] = set()
        self.gone: set[bytes] = set()
        self.shared_requests = 0

    def set_unknown(self, flow: int, refused: bool = False, own: bool = False) -> None:
        assert not refused
        self.unknown, self.own = flow, own and flow >= 0

    def set_rule(self, rule: Rule) -> None:
        self.rules.append(rule)

    def set_no_rules(self, dry_run: bool = False) -> None:
        self.rules, self.default = [], Rule(b"*", dry_run=dry_run)

    def follow_rules(self) -> None:
        for flow in sorted(self.born):
            if self.own:
                self._apply(flow)
            else:
                self.let_go(self.state.flow_names[flow])

    def let_go(self, name: bytes) -> None:
        """Let a name be unknown."""
        self.gone.add(name)
        if name in self.state.flow_names:
            self.born.discard(self.state.flow_names.index(name))

    def listed(self, name: bytes) -> None:
        """The configuration lists a tenant."""
        self.gone.discard(name)
        if name in self.state.flow_names:
            self.born.discard(self.state.flow_names.index(name))

    def first_sight(self, name: bytes) -> int:
        state = self.state
        known = name in state.flow_names
        if known and name not in self.gone:
            return state.flow_names.index(name)
        if not self.own or name == b"other":
            return self.unknown
        if not known:
            if len(state.flows) >= state.limits["flows_max"]:
                self.shared_requests += 1
                return self.unknown
            state.set_flow(name, 1_000)
        self.gone.discard(name)
        flow = state.flow_names.index(name)
        self.born.add(flow)
        self._apply(flow)
        return flow

    def _apply(self, flow: int) -> None:
        state, name = self.state, self.state.flow_names[flow].decode("latin-1")
        # Only * is special in the core's patterns, and no test uses what else fnmatch knows.
        fits = [rule for rule in self.rules if fnmatchcase(name, rule.pattern.decode("latin-1"))]
        rule = fits[0] if fits else self.default
        for sibling in state.classes.siblings(flow):
            state.flows[sibling].weight_milli = rule.weight_milli
        if flow in state.quotas.own or rule.parent != -1 or rule.is_limiting:
            state.quotas.set_flow(
                flow, rule.parent, rule.refuse, rule.limits, rule.concurrency, (0, -1, -1)
            )
        state.set_flow_class(flow, rule.default_class, rule.named)
        if (flow in state.audit.flows) != rule.dry_run:
            for sibling in state.classes.siblings(flow):
                state.audit.set_mode(sibling, rule.dry_run)
