"""Finds the flow of a proved name that nothing lists: the twin's tenants at first sight."""

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .twin_state import State

FORGET_LOOKS = 32
FADE_NS = 3_600 * 10**9
LINGER_NS = 10 * 10**9


@dataclass(frozen=True)
class Rule:
    """Holds the settings of a tenant whose name fits the pattern."""

    pattern: bytes
    weight_milli: int = 1_000
    default_class: int = 0
    named: tuple[int, ...] = ()
    dry_run: bool = False
    parent: int = -1
    refuse: bool = False
    limits: tuple[int, ...] = (0, 0, 0, 0)
    concurrency: int = 0


class Tenants:
    """Holds the rules, and the flows that they have made."""

    def __init__(self, state: "State") -> None:
        self.state = state
        self.unknown, self.own = -1, False
        self.rules: list[Rule] = []
        self.default = Rule(b"*")
        self.born: set[int] = set()
        self.gone: set[bytes] = set()
        self.shared_requests = self.forgotten = self.forget_at = 0
        self.granted_by_forgotten: Counter[int] = Counter()  # by class

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
            if len(set(state.flow_names)) < state.limits["flows_max"]:
                state.set_flow(name, 1_000)
            elif not self._reclaim(name):
                self.shared_requests += 1
                return self.unknown
        self.gone.discard(name)
        flow = state.flow_names.index(name)
        self.born.add(flow)
        self._apply(flow, is_new=not known)
        return flow

    def _reclaim(self, name: bytes) -> bool:
        """Give a name the flow of a tenant that can be forgotten, if one of the next few can."""
        for _ in range(min(FORGET_LOOKS, len(self.state.flows))):
            flow = self.forget_at % len(self.state.flows)
            self.forget_at = flow + 1
            if flow in self.born and self._may_forget(flow):
                self._forget(flow, name)
                return True
        return False

    def _may_forget(self, base: int) -> bool:
        state, quotas = self.state, self.state.quotas
        flows = state.classes.siblings(base)
        if base in quotas.own:
            node = quotas.nodes[quotas.own[base]]
            if quotas.live(quotas.own[base]) or node.owed != (0, 0, 0):
                return False
            if any(b.level_at(state.now_ns) < b.size for b in node.buckets.values()):
                return False
        return all(self._may_forget_flow(flow) for flow in flows)

    def _may_forget_flow(self, flow: int) -> bool:
        state, f = self.state, self.state.flows[flow]
        if any(r.flow == flow for r in state.known()) or flow in state.restart.returning:
            return False
        if f.idle_at_ns is not None and state.now_ns < f.idle_at_ns + LINGER_NS:
            return False
        level = state.levels[f.cls] if state.positions.lifted else 0
        if f.owed or f.vtc > max(0, level - state.credit):
            return False
        newcomer = {at: state.positions._newcomer(f.cls, at[1]) for at in state.positions.items}
        if any(p.key > newcomer[at] for at, p in state.positions.items.items() if at[0] == flow):
            return False
        if self._has_faded(flow):
            return True
        if state.policy == "vtc-predict" and f.average_milli:
            return False
        return state.predictor.knows_little(flow)

    def _has_faded(self, flow: int) -> bool:
        f = self.state.flows[flow]
        if f.base not in self.born or self.state.is_active(flow):
            return False
        return f.granted_at_ns is not None and self.state.now_ns >= f.granted_at_ns + FADE_NS

    def fade(self, flow: int) -> None:
        """Predict a flow as a newcomer if its last grant is long ago."""
        if self._has_faded(flow):
            self.state.predictor.forget_flow(flow)
            self.state.flows[flow].average_milli = 0

    def _forget(self, base: int, name: bytes) -> None:
        state = self.state
        for flow in state.classes.siblings(base):
            f = state.flows[flow]
            self.granted_by_forgotten[f.cls] += f.granted
            state.flows[flow] = type(f)(f.weight_milli, base=f.base, cls=f.cls)
            state.flow_names[flow] = name
            for at in [at for at in state.positions.items if at[0] == flow]:
                del state.positions.items[at]
            state.predictor.forget_flow(flow)
            state.audit.refusals.pop(flow, None)
            state.audit.waits.pop(flow, None)
            state.audit.flows.discard(flow)
        self.born.discard(base)
        self.forgotten += 1

    def _apply(self, flow: int, *, is_new: bool = False) -> None:
        state, name = self.state, self.state.flow_names[flow].decode("latin-1")
        # Only * is special in the core's patterns, and no test uses fnmatch's other signs.
        fits = [rule for rule in self.rules if fnmatchcase(name, rule.pattern.decode("latin-1"))]
        rule = fits[0] if fits else self.default
        for sibling in state.classes.siblings(flow):
            state.flows[sibling].weight_milli = rule.weight_milli
        was_new = state.quotas.is_new
        state.quotas.set_flow(
            flow, rule.parent, rule.refuse, rule.limits, rule.concurrency, (0, -1, -1)
        )
        if is_new:  # no other flow has to ask again
            state.quotas.is_new = was_new
        state.set_flow_class(flow, rule.default_class, rule.named)
        if (flow in state.audit.flows) != rule.dry_run:
            for sibling in state.classes.siblings(flow):
                state.audit.set_mode(sibling, rule.dry_run)
