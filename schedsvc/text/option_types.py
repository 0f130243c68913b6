"""Defines types of options that several commands have, and checks the paths that they write to."""

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import click

from schedsvc.text.numerals import numeral_advice, whole_number

__all__ = ["FiniteRange", "WholeRange", "check_file", "make_folder"]

#: Thirty years in seconds. Larger waits overflow the times of the system.
_MOST = 1e9


def _problem(value: object, kind: str) -> str:
    advice = numeral_advice(str(value))
    return f"{value!r} is not a {kind}{'; ' if advice else ''}{advice}."


class WholeRange(click.IntRange):
    """Reads whole numbers in a range, with `k` or `M` for thousands or millions.

    Click's own type says only "not a valid integer range".
    """

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; fail if it is outside the range or not a whole number."""
        short = whole_number(value) if isinstance(value, str) else None
        value = value if short is None else short
        try:
            int(value)
        except (ValueError, OverflowError):
            self.fail(_problem(value, "whole number"), param, ctx)
        number: int = super().convert(value, param, ctx)
        return number


class FiniteRange(click.FloatRange):
    """Reads numbers in a range; click's own takes `nan` and `inf`, which end in a traceback."""

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


def make_folder(folder: Path, option: str = "--out") -> None:
    """Make the folder of an option, with those above it, before the work whose result goes there.

    Raises click.BadParameter, which names option and folder, if nothing can be written into it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"the folder {folder} cannot be made: {_why(error)}; name another folder"
        raise click.BadParameter(text, param_hint=option) from None
    if why := _unwritable(folder):
        text = f"nothing can be written into {folder}: {why}; name another folder"
        raise click.BadParameter(text, param_hint=option)


def check_file(file: Path, option: str = "--out") -> None:
    """Check that the file of an option can be written, before the work whose result goes there.

    Raises click.BadParameter, which names option and file. Writes nothing.
    """
    folder = file.absolute().parent
    if file.is_dir():
        problem = f"{file} is a folder; name a file"
    elif file.exists():
        allowed = os.access(file, os.W_OK)
        problem = "" if allowed else f"{file} must not be written; name another file"
    elif not folder.is_dir():
        problem = f"the folder {folder} does not exist; make it"
    else:
        why = _unwritable(folder)
        problem = f"{file} cannot be written: {why}; name another file" if why else ""
    if problem:
        raise click.BadParameter(problem, param_hint=option)


def _unwritable(folder: Path) -> str:
    """Return why no file can be made in a folder; else nothing. Modes do not count for root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return _why(error)


def _why(error: OSError) -> str:
    return error.strerror or str(error)
