"""Types of options that several commands have."""

from typing import Any

import click

__all__ = ["FiniteRange"]

#: Thirty years in seconds. Larger waits overflow the times of the system.
_MOST = 1e9


class FiniteRange(click.FloatRange):
    """A range of numbers, because click's own takes `nan` and `inf`, which end in a traceback."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; fail if it is outside the range, not a number, or beyond 10^9."""
        number: float = super().convert(value, param, ctx)
        if not abs(number) <= _MOST:
            self.fail(f"{value} is not a number up to {_MOST:.0f}.", param, ctx)
        return number
