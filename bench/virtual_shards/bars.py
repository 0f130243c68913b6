"""States the bars that a run has to reach, and whether each holds."""

from typing import Any

__all__ = ["Bar", "bars"]

#: The targets of the design for this run.
MEMORY_MAX_MB, MINUTES_MAX = 16_000, 20.0
#: Parts of the fair part, and the longest time until members have caught up.
ERROR_MAX, CATCH_UP_MAX_S = 0.02, 60.0

#: The name of a figure, its value, its bound as a text, and whether it holds.
Bar = tuple[str, float | None, str, bool]


def bars(found: dict[str, Any]) -> list[Bar]:
    """Judge the figures of a run."""
    passing, quiet = found["passing"], found["quiet"]
    rows: list[Bar] = [
        (
            "tenants served at both of their shards",
            passing["served_at_both"],
            f"= {passing['of_tenants']:,}",
            passing["served_at_both"] == passing["of_tenants"],
        ),
        _most("share error of a kind of tenants", quiet["kinds_error_max"], ERROR_MAX),
        _most("share error of the run, median", found["all"]["error_median"], ERROR_MAX),
        _most("share error, p99, of U + rate * interval", quiet["of_bound_p99"], 1.0),
    ]
    for outage in found["outages"]:
        name, took_s = f"catch-up, store away {outage['name']} (s)", outage["catch_up_s"]
        if took_s is None:
            rows.append((name, None, f"<= {CATCH_UP_MAX_S:g}", False))
        else:
            rows.append(_most(name, took_s, CATCH_UP_MAX_S))
    rows.append(_most("memory (MB)", found["memory_mb"], MEMORY_MAX_MB))
    rows.append(_most("minutes", found["wall_minutes"], MINUTES_MAX))
    return rows


def _most(name: str, value: float, bound: float) -> Bar:
    return name, value, f"<= {bound:,g}", value <= bound
