"""Places tenants: one engine or several, alone or in a tree of groups, by which policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schedsvc.config import Config

__all__ = ["PATIENT", "SETUPS", "Setup", "config_of"]

#: Settings of a scheduler that refuses no request.
PATIENT = {"queue_ttl_ms": 3_600_000, "flow_queue_max": 10**6, "queue_max": 10**6}

_LINE = 64  # pools; above it requests for any pool stand in one line


@dataclass(frozen=True)
class Setup:
    """The difference from one engine, tenants without groups, and the default policy."""

    policy: str = "vtc"
    engines: int = 1
    drained: int = 0  # further pools, which are idle
    levels: int = 0  # levels of groups


SETUPS = {
    "plain": Setup(),
    "tree": Setup(levels=2),
    "engines": Setup(engines=2),
    "dlpm": Setup(policy="dlpm"),
    "line": Setup(engines=2, drained=_LINE),
}


def config_of(
    names: Sequence[str],
    weights: Sequence[float],
    levels: int,
    policy: str = "vtc",
    **sections: Any,
) -> Config:
    """Configure a scheduler that refuses nothing; all tenants get the same parts at any level.

    A group has the weight of the tenants below it. Each is divided in two, so often. `sections`:
    further ones of the configuration.
    """
    tenants: list[dict[str, Any]] = [
        {"name": name, "weight": weight} for name, weight in zip(names, weights, strict=True)
    ]
    groups: list[dict[str, Any]] = []

    def divide(part: range, above: str, left: int) -> None:
        if not left:
            for at in part:
                tenants[at] |= {"group": above} if above else {}
            return
        middle = max(1, len(part) // 2)
        for half in filter(None, (part[:middle], part[middle:])):
            name = f"level{left}-{half[0]}"
            groups.append({"name": name, "weight": sum(weights[at] for at in half)})
            groups[-1] |= {"parent": above} if above else {}
            divide(half, name, left - 1)

    divide(range(len(names)), "", levels)
    return Config.model_validate(
        {
            "listeners": [{"unix": "unused.sock"}],
            "scheduler": PATIENT | {"policy": policy},
            "unknown_tenants": "refuse",
            "groups": groups,
            "tenants": tenants,
            **sections,
        }
    )
