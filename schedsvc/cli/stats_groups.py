"""The part of `schedsvc stats` about groups with a weight."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

__all__ = ["GROUP_COLUMNS", "group_rows"]

#: The group, then numbers.
GROUP_COLUMNS = ("group", "weight", "due", "queued", "running", "input", "cached", "output")


def group_rows(groups: Any) -> Iterator[tuple[str, ...]]:
    """Yield a row of cells for each group, below that of its parent and further in. O(groups)."""
    below: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for group in groups:
        below[group.parent, group.request_class].append(group)
    several = len({group.request_class for group in groups}) > 1
    for name, of_class in list(below):
        if not name:
            yield from _rows(below, below[name, of_class], several)


def _rows(below: Any, siblings: list[Any], several: bool) -> Iterator[tuple[str, ...]]:
    for group in siblings:
        name = "  " * (group.level - 1) + group.name.removeprefix("group:")
        numbers = (
            group.queued,
            group.live_leases,
            group.input_tokens,
            group.cached_input_tokens,
            group.output_tokens,
        )
        yield (
            f"{name}, {group.request_class}" if several else name,
            f"{group.weight_milli / 1_000:g}",
            f"{group.entitled_ppm / 1e6:.1%}" if group.entitled_ppm else "",
            *(f"{number:,}" for number in numbers),
        )
        yield from _rows(below, below.get((group.name, group.request_class), []), several)
