"""Chooses the groups with a weight that have series in a scrape, and sums up the rest.

As with tenants, the first ones have series of their own, and all others are summed up as `other`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from schedsvc.metrics.rows import GROUP_ROWS

__all__ = ["GroupSeries"]

#: Figures that no sum of several groups has: below 0 they are left out of the page.
_NO_SUM = {"weight_milli": -1, "entitled_ppm": -1}
_COUNTERS = tuple(row.key for row in GROUP_ROWS if row.is_counter)
_LEVELS = tuple(row.key for row in GROUP_ROWS if not row.is_counter and row.key not in _NO_SUM)


class GroupSeries:
    """Chooses, at each scrape, the groups with series of their own. Their counters never fall."""

    def __init__(self, groups_max: int, other: str) -> None:
        """Show at most `groups_max` groups, in the order in which they came; then `other`."""
        self._max, self._other = groups_max, other
        #: A group that has gone keeps its place, so that no other group leaves the sum for it.
        self._shown: set[str] = set()
        #: Counters of those in the sum, as they were when last seen.
        self._summed: dict[str, dict[str, int]] = {}

    def rows(self, groups: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
        """Return the figures by group, all classes together. O(rows of groups).

        A group in the sum whose parent is in it too is not counted twice.
        """
        found: dict[str, dict[str, int]] = {}
        parents: dict[str, str] = {}
        for group in groups:
            row, parents[group["name"]] = found.get(group["name"]), group["parent"]
            found[group["name"]] = _together(row, group)
        for name in found:
            if name not in self._summed and len(self._shown) < self._max:
                self._shown.add(name)
        rest = {name: row for name, row in found.items() if name not in self._shown}
        for name, row in rest.items():
            if parents[name] not in rest:
                self._summed[name] = {key: row[key] for key in _COUNTERS}
        shown = {name: row for name, row in found.items() if name in self._shown}
        if self._summed:
            outer = [row for name, row in rest.items() if parents[name] not in rest]
            shown[self._other] = {
                **_NO_SUM,
                **{key: sum(row[key] for row in outer) for key in _LEVELS},
                **{key: sum(row[key] for row in self._summed.values()) for key in _COUNTERS},
            }
        return shown


def _together(row: dict[str, int] | None, group: Mapping[str, Any]) -> dict[str, int]:
    """Add a group's row in one class to those in others; its parts of all service add up, too."""
    if row is None:
        return {each.key: group[each.key] for each in GROUP_ROWS}
    return {
        each.key: group[each.key] if each.key == "weight_milli" else row[each.key] + group[each.key]
        for each in GROUP_ROWS
    }
