"""Inserts lines, known bugs, into a copy of the core's source.

An insertion names a file, a text that occurs in it exactly once, and the lines to insert above it;
in them BUG stands for "this bug is switched on".
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """Describes one bug."""

    name: str
    what: str
    insertions: tuple[tuple[str, str, str], ...]
    seeds: int  # seeds of the simulator, among which one at least catches it
    only: frozenset[str] | None = None  # faults that may happen; None: those that a seed draws
    # A seed; those from SECOND on have quotas, from THIRD on state files.
    first: int = 0
    tests: tuple[str, ...] = ()  # the tests that catch it, if the simulator does not try it
