"""Shows the result of an advice: as data for JSON, and as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from schedsvc.config import UNKNOWN_TENANT, Config
from schedsvc_lab.advise.draft import Change
from schedsvc_lab.advise.goals import Goal
from schedsvc_lab.advise.measure import Judged
from schedsvc_lab.sim.requests import Requests

__all__ = ["gains", "report_of", "show", "unlisted_notes"]

Rows = Mapping[str, Mapping[str, float | None]]

#: The table shows at most this many tenants and changes; the JSON has all.
ROWS_MAX = 40
#: A sentence names at most this many tenants.
NAMES_SHOWN = 5
#: A tenant gains or loses if its service in a second changes by this part.
CHANGES = 0.05
_COLUMNS = (
    ("refused", "refused", ".1%"),
    ("share of service", "share", ".1%"),
    ("tokens/s", "tokens_s", ",.0f"),
    ("first token p50 (s)", "first_token_p50_s", ",.2f"),
    ("p99 (s)", "first_token_p99_s", ",.2f"),
)


def report_of(
    goals: Sequence[Goal],
    judged: Sequence[tuple[Judged, Judged]],
    changes: Sequence[Change],
    rows: tuple[Rows, Rows],
    *,
    engine: str,
    simulations: int,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return all figures as plain data; each pair is today's and the draft's."""
    return {
        "engine": engine,
        "simulations": simulations,
        "notes": list(notes),
        "goals": [
            {
                "goal": goal.text,
                "limit": goal.limit,
                "today": _side(today),
                "draft": _side(draft),
            }
            for goal, (today, draft) in zip(goals, judged, strict=True)
        ],
        "changes": [change._asdict() for change in changes],
        "tenants": {
            name: {"today": dict(row), "draft": dict(rows[1][name])}
            for name, row in rows[0].items()
        },
    }


def unlisted_notes(requests: Requests, unlisted: Sequence[str], config: Config) -> list[str]:
    """Say what becomes of requests whose tenant no draft lists. O(requests)."""
    if not unlisted:
        return []
    numbers = {requests.clients.index(name) for name in unlisted}
    count = sum(client in numbers for client in requests.client)
    names = ", ".join(repr(name) for name in unlisted[:NAMES_SHOWN])
    if len(unlisted) > NAMES_SHOWN:
        names += f" and {len(unlisted) - NAMES_SHOWN:,} more"
    what = f"{count:,} request{'s'[: count != 1]} of {names}"
    if config.unknown_tenants == "refuse":
        return [
            f"{what}: refused and left out of the goals, because the configuration refuses tenants "
            "that it does not list"
        ]
    return [
        f"{what}: served with the unknown tenants, because no configuration can list that name; "
        f"requests with a wrong key are those of {UNKNOWN_TENANT!r}"
    ]


def _side(judged: Judged) -> dict[str, Any]:
    """Return a figure and whether it is within the bound; None stands for a wait for ever."""
    figure = None if judged.figure == float("inf") else judged.figure
    return {"figure": figure, "met": judged.badness <= 1.0}


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the goals, the keys that change, and each tenant's figures."""
    table = RichTable(title="goals", title_justify="left")
    table.add_column("goal", overflow="fold")
    table.add_column("today", justify="right")
    table.add_column("draft", justify="right")
    for goal in report["goals"]:
        table.add_row(goal["goal"], *(goal_cell(goal, side) for side in ("today", "draft")))
    console.print(table)
    if needed := report.get("engines_needed"):
        console.print(f"engines that the goals need: {_needed(needed)}", highlight=False)
    changes = report["changes"]
    table = RichTable(title="settings that change", title_justify="left")
    table.add_column("setting", overflow="fold")
    table.add_column("today", justify="right")
    table.add_column("draft", justify="right")
    for change in changes[:ROWS_MAX]:
        cells = (
            "-" if each is None else f"{each:,g}" for each in (change["today"], change["draft"])
        )
        table.add_row(change["path"], *cells)
    if changes:
        console.print(table)
    else:
        console.print("no setting changes: no candidate was better than today's configuration")
    _left_out(changes, "settings", console)
    _show_tenants(report["tenants"], console)


def _needed(needed: Mapping[str, Any]) -> str:
    """Write the least numbers of engines."""
    today, draft = (
        f"more than {needed['most']}" if needed[side] is None else f"{needed[side]}"
        for side in ("today", "draft")
    )
    return f"{today} with the settings of today, {draft} with the draft"


def goal_cell(goal: Mapping[str, Any], side: str) -> str:
    """Write a goal's figure in one of the configurations, and whether the goal is met."""
    figure, met = goal[side]["figure"], "met" if goal[side]["met"] else "missed"
    if figure is None:
        return f"refused, {met}"
    if goal["goal"].rstrip().endswith("%"):
        return f"{figure:.1%}, {met}"
    if goal["goal"].rstrip().endswith("tokens/s"):
        return f"{figure:,.0f} tokens/s, {met}"
    return f"{figure:,.2f} s, {met}"


def _show_tenants(tenants: Mapping[str, Any], console: Console) -> None:
    table = RichTable(title="tenants, today -> draft", title_justify="left")
    table.add_column("tenant", overflow="fold")
    table.add_column("requests", justify="right")
    for heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for name, both in list(tenants.items())[:ROWS_MAX]:
        cells = (_pair(both["today"][key], both["draft"][key], form) for _, key, form in _COLUMNS)
        table.add_row(name, f"{both['today']['requests']:,.0f}", *cells)
    console.print(table)
    _left_out(tenants, "tenants", console)
    for line in gains(tenants):
        console.print(line, highlight=False)


def gains(tenants: Mapping[str, Any]) -> list[str]:
    """Say which tenants are served at least a twentieth more, and less, in a second."""
    grows = {
        name: both["draft"]["tokens_s"] / both["today"]["tokens_s"] - 1
        for name, both in tenants.items()
        if both["today"]["tokens_s"]
    }
    more = sorted((name for name in grows if grows[name] >= CHANGES), key=lambda n: -grows[n])
    less = sorted((name for name in grows if grows[name] <= -CHANGES), key=lambda n: grows[n])
    lines = []
    for word, names in (("served more", more), ("served less", less)):
        if names:
            some = ", ".join(f"{name} ({grows[name]:+.0%})" for name in names[:NAMES_SHOWN])
            rest = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
            lines.append(f"{word} with the draft: {some}{rest}")
    return lines


def _pair(today: float | None, draft: float | None, form: str) -> str:
    one, two = ("-" if value is None else format(value, form) for value in (today, draft))
    return one if one == two else f"{one} -> {two}"


def _left_out(items: Mapping[str, Any] | Sequence[Any], what: str, console: Console) -> None:
    if len(items) > ROWS_MAX:
        console.print(f"{len(items) - ROWS_MAX:,} more {what} are in the JSON (--json, --out)")
