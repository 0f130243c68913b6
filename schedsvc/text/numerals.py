"""Reads numbers as people write them, and says how they have to be written instead."""

import re

__all__ = ["numeral_advice", "whole_number"]

_SHORT = re.compile(r"([0-9]{1,12})([kM])")
_TIMES = {"k": 1_000, "M": 1_000_000}
_EXPONENT = re.compile(r"[+-]?\d{1,15}(?:\.\d{1,15})?[eE]\+?(\d{1,3})")
_PLAIN = re.compile(r"[+-]?\d+(?:\.\d+)?")
#: With a unit, or with separators: 10k, 30s, 5 m, 1,000. Short, so that it is no secret.
_UNIT = re.compile(r"[+-]?(?=.{1,12}$)\d+(?:[.,' ]\d+)*\s?[A-Za-zµ%]{0,3}")


def whole_number(text: str) -> int | None:
    """Return 100000 for 100k, and so for M, a million; None if the text ends otherwise. O(text)."""
    short = _SHORT.fullmatch(text)
    return int(short[1]) * _TIMES[short[2]] if short else None


def numeral_advice(text: str) -> str:
    """Return how to write a number that was given as text; empty if it is like no number. O(text).

    The advice for 1e6 is "write 1000000".
    """
    if exponent := _EXPONENT.fullmatch(text):
        return f"write {float(text):.0f}" if int(exponent[1]) <= 15 else "write all its digits"
    if _UNIT.fullmatch(text) and not _PLAIN.fullmatch(text):
        return "write all its digits, without a unit or separators"
    return ""
