"""Holds what people use around the service. Serving imports none of it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedsvc_lab.sim.notebook import simulate

__all__ = ["simulate"]


def __getattr__(name: str) -> Any:
    # Imported at its first use: the commands of the laboratory would all start later.
    if name != "simulate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from schedsvc_lab.sim.notebook import simulate

    return simulate
