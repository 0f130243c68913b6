"""Holds what people use around the service. Serving imports none of it."""

from importlib import import_module
from typing import Any

__all__ = ["simulate"]


def __getattr__(name: str) -> Any:
    """Import `simulate` at its first use: else every command of the laboratory would start later.

    Nothing else of the laboratory depends on it, which is why no import names its module.
    """
    if name != "simulate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.sim.notebook").simulate
