"""Says which tenants and groups share below which, as the configuration does."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["NO_TREE", "Tree"]


@dataclass(frozen=True)
class Tree:
    """Groups with a weight: nodes of the tree of shares, above flows of tenants.

    A name is that of a group or a flow. A name without a parent is a child of the root, "".
    """

    weights: Mapping[str, int] = field(default_factory=dict)  # weights of groups, in thousandths
    parents: Mapping[str, str] = field(default_factory=dict)

    def parent(self, name: str) -> str:
        """Return the group above a name; empty: it stands at the root. O(1)."""
        return self.parents.get(name, "")

    def above(self, flow: str) -> tuple[str, ...]:
        """Return the groups above a flow, the lowest first. O(levels)."""
        found = []
        while flow := self.parent(flow):
            found.append(flow)
        return tuple(found)

    def path(self, flow: str) -> tuple[str, ...]:
        """Return a flow and the groups above it, the lowest first. O(levels)."""
        return (flow, *self.above(flow)) if self.parents else (flow,)

    def least_weights(self, tenants: Mapping[str, int]) -> dict[str, int]:
        """Return the least weight among the children of each group and of the root. O(names)."""
        found: dict[str, int] = {}
        for name, weight in (*self.weights.items(), *tenants.items()):
            above = self.parent(name)
            found[above] = min(weight, found.get(above, weight))
        return found

    def heights(self) -> dict[str, int]:
        """Return how many groups are above each name that has any. O(names * levels)."""
        return {name: len(self.above(name)) for name in self.parents}

    def names(self) -> Iterable[str]:
        """Return the groups, each after the one above it. O(groups * levels)."""
        return sorted(self.weights, key=lambda name: (len(self.above(name)), name))


NO_TREE = Tree()
