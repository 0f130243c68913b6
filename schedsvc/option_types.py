"""Types of options that several commands have."""

import math
from typing import Any

import click

from schedsvc.numerals import numeral_advice

__all__ = ["FiniteRange", "WholeRange"]

#: Thirty years in seconds. Larger waits overflow the times of the system.
_MOST = 1e9


def _problem(value: object, kind: str) -> str:
    advice = numeral_advice(str(value))
    return f"{value!r} is not a {kind}{'; ' if advice else ''}{advice}."


class WholeRange(click.IntRange):
    """A range of whole numbers, because click's own says only "not a valid integer range"."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; fail if it is outside the range or not a whole number."""
        try:
            int(value)
        except (ValueError, OverflowError):
            self.fail(_problem(value, "whole number"), param, ctx)
        number: int = super().convert(value, param, ctx)
        return number


class FiniteRange(click.FloatRange):
    """A range of numbers, because click's own takes `nan` and `inf`, which end in a traceback."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; fail if it is outside the range, not a number, or beyond 10^9."""
        try:
            number = float(value)
        except ValueError:
            self.fail(_problem(value, "number"), param, ctx)
        if math.isnan(number) or abs(number) > _MOST:
            self.fail(f"{value} is not a number up to {_MOST:.0f}.", param, ctx)
        found: float = super().convert(value, param, ctx)
        return found
