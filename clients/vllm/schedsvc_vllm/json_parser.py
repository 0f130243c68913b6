"""Offers `loads()` and `dumps()` of orjson, or of Python if orjson is missing.

The gate's folder on PYTHONPATH has only the packages that the engine's environment has. That of
vLLM has orjson from 0.33 on.
"""

from __future__ import annotations

__all__ = ["dumps", "loads"]

try:
    from orjson import dumps, loads
except ModuleNotFoundError:
    from json import dumps as _dumps
    from json import loads  # type: ignore[assignment] # it takes more options

    def dumps(value: object) -> bytes:  # type: ignore[misc] # it takes more options
        """Write JSON."""
        return _dumps(value).encode()
