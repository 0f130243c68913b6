"""Helps rules that look at the plain data of a file, whatever is wrong with it elsewhere."""

from collections.abc import Iterator, Mapping
from typing import Any

from schedsvc.config.yaml_positions import Path, path_text

__all__ = [
    "Finding",
    "Once",
    "is_whole",
    "items",
    "mapping",
    "name_findings",
    "one_of",
    "with_terms",
]

#: The models refuse these.
_CONTROL = frozenset(map(chr, (*range(32), 127)))
#: Where something is wrong, and what to do.
Finding = tuple[Path, str]


def mapping(value: Any) -> dict[str, Any]:
    """Return a mapping, an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number; true and false are numbers to Python alone."""
    return isinstance(value, int) and not isinstance(value, bool)


def items(value: Any) -> list[tuple[int, dict[str, Any]]]:
    """Return the mappings of a list, with their positions."""
    if not isinstance(value, list):
        return []
    return [(i, entry) for i, entry in enumerate(value) if isinstance(entry, dict)]


def with_terms(data: Mapping[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield what has terms, with its place: tenants, rules, and all that are unknown as one."""
    for key in ("tenants", "tenant_rules"):
        for i, entry in items(data.get(key)):
            yield (key, i), entry
    yield ("unknown_tenants_limits",), mapping(data.get("unknown_tenants_limits"))


def name_findings(name: str, path: Path, bytes_max: int) -> Iterator[Finding]:
    """Find a name that no request can carry.

    The models find control characters and names with too many letters.
    """
    if len(name) <= bytes_max < len(name.encode(errors="replace")):
        yield path, f"is longer than {bytes_max} bytes; choose a shorter name"
    if name != name.strip():
        what = "begins" if name != name.lstrip() else "ends"
        yield path, f"{name[:80]!r} {what} with a space, which no HTTP header can carry; remove it"
    elif not name.isprintable() and _CONTROL.isdisjoint(name):
        found = next(letter for letter in name if not letter.isprintable())
        yield path, f"{name[:80]!r} holds the unprintable character U+{ord(found):04X}; remove it"


def one_of(entry: dict[str, Any], names: tuple[str, ...], path: Path) -> Iterator[Finding]:
    """Find an entry that has none of these keys, or more than one."""
    given = [name for name in names if entry.get(name) is not None]
    choice = ", ".join(names[:-1]) + " or " + names[-1]
    if not given:
        yield path, f"has to have one of {choice}"
    elif len(given) > 1:
        yield (*path, given[1]), f"stands beside {given[0]}; keep one of {choice}"


class Once:
    """Finds what stands twice."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._first: dict[Any, Path] = {}

    def see(self, key: Any, path: Path) -> Iterator[Finding]:
        """Find a key that was seen before."""
        first = self._first.setdefault(key, path)
        if first is not path:
            yield path, f"{self._what} stands twice, first at {path_text(first)}; remove one"
