"""States which figure of which rung has a target, and whether it is met."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["TARGETS", "Limit", "Target", "judge", "judge_growth"]

Rung = Mapping[str, Any]


@dataclass(frozen=True)
class Limit:
    """Bounds one figure of a rung: `most` or `least`."""

    figure: str
    most: float | None = None
    least: float | None = None

    def holds(self, rung: Rung) -> bool:
        """Return whether the rung keeps it."""
        value = float(rung[self.figure])
        return (self.most is None or value <= self.most) and (
            self.least is None or value >= self.least
        )

    def text(self) -> str:
        """Write it for a person."""
        what = {"median_ns": "p50", "p99_ns": "p99"}.get(self.figure, "ratio")
        sign, bound = ("≤", self.most) if self.most is not None else ("≥", self.least)
        unit = "" if what == "ratio" else " ns"
        return f"{what} {sign} {bound:,g}{unit}"


@dataclass(frozen=True)
class Target:
    """Holds the limits of a rung of this name and sizes: what to reach, and what to keep."""

    id: str
    rung: str
    limits: tuple[Limit, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    must: tuple[Limit, ...] = ()

    def applies(self, rung: Rung) -> bool:
        """Return whether it is meant for the rung."""
        sizes: Mapping[str, int] = rung["sizes"]
        is_same = all(sizes.get(name) == size for name, size in self.sizes.items())
        return bool(rung["name"] == self.rung) and is_same

    def text(self) -> str:
        """Write it for a person."""
        return f"{self.id}: " + ", ".join(limit.text() for limit in self.limits)


# T1, T2 and T4 are of the core itself: its loops in C. The report also shows the time of the same
# events when called from Python.
_UNARY = (Limit("ratio", most=1.10),)
_UNARY_MUST = (Limit("ratio", most=1.25),)
_MANY = {"flows": 100_000, "queued": 100_000}

TARGETS = (
    Target(
        "T1",
        "inside.admit",
        (Limit("median_ns", most=500), Limit("p99_ns", most=1_500)),
        _MANY,
        must=(Limit("median_ns", most=2_000),),
    ),
    Target("T2", "inside.pair", (Limit("median_ns", most=1_000),)),
    Target("T3", "core.admit_by_flows", (Limit("ratio", most=3),), _MANY),
    Target("T4", "inside.pick", (Limit("ratio", least=100),), {"flows": 1_000}),
    Target("T4", "inside.pick", (Limit("ratio", least=5_000),), {"flows": 100_000}),
    Target("T5", "unary.unix", _UNARY, must=_UNARY_MUST),
    Target("T5", "unary.tcp", _UNARY, must=_UNARY_MUST),
    Target("T5", "unary.unix.cpu", _UNARY),
    Target("T5", "unary.tcp.cpu", _UNARY),
    Target("T6", "stream", (Limit("ratio", least=0.7),), {"events_per_message": 128}),
)


def judge(rung: Rung) -> dict[str, Any]:
    """Return the target that applies to a rung, as text, and the verdicts; None if none is."""
    for target in TARGETS:
        if target.applies(rung):
            return {
                "target": target.text(),
                "meets_target": all(limit.holds(rung) for limit in target.limits),
                "must": ", ".join(limit.text() for limit in target.must) or None,
                "meets_must": all(limit.holds(rung) for limit in target.must),
            }
    return {"target": None, "meets_target": None, "must": None, "meets_must": None}


# At a hundred times as many a logarithm is at most twice as large; the rest is caches, as in T3.
_LOGARITHMIC_MOST = 3.0
_LINEAR_SPARE = 1.25


def judge_growth(growth: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by how much a cost may grow for each pair of sizes, and whether it keeps to that.

    With flows and queued requests no worse than O(log n), with running ones no worse than O(n).
    """
    judged = {}
    for name, found in growth.items():
        less, more = found["sizes"]
        is_linear = name.startswith("running")
        most = _LINEAR_SPARE * more / less if is_linear else _LOGARITHMIC_MOST
        judged[name] = {**found, "most": most, "holds": found["ratio"] <= most}
    return judged
