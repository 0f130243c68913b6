"""Prints `schedsvc cluster status`: one table of all members, of a set or without one."""

import dataclasses
import json
from typing import Any

import click
from rich.table import Table

from schedsvc.cluster.admin import MemberSeen, StoreStatus
from schedsvc.cluster.set_status import MemberNote, SetSeen
from schedsvc.text.printable import printable
from schedsvc.text.tables import table_console

__all__ = ["show_status"]

_HEADINGS = (
    "member", "set", "role", "term", "address", "followed since", "lag", "store", "configuration",
)  # fmt: skip


def show_status(store: str, found: StoreStatus, fingerprint: str, as_json: bool) -> None:
    """Print what a store knows of a cluster. O(members)."""
    if as_json:
        click.echo(json.dumps(_plain(store, found, fingerprint), indent=2))
        return
    click.echo(f"store {store}: change {found.change_number:,}, {found.rows:,} totals")
    sharing = {member.name: member for member in found.members}
    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, no_wrap=True)
    for each in found.sets:
        for note in each.members:
            known = sharing.pop(note.name, None)
            table.add_row(*map(printable, _of_set(each, note, known, fingerprint)))
    for member in sharing.values():
        state = "alive" if member.left_ms > 0 else "gone"
        row = member.name, "", "member", "", "", "", "", state, _same(member, fingerprint)
        table.add_row(*map(printable, row))
    table_console().print(table)


def _of_set(
    each: SetSeen, note: MemberNote, known: MemberSeen | None, fingerprint: str
) -> tuple[str, ...]:
    leads = note.name == each.leader
    role = "leader" if leads else note.role if note.role != "leader" else "led before"
    term = each.term if leads else note.term
    address = each.address if leads else note.address
    state = "alive" if note.alive else f"gone for {_span(note.age_ms)}"
    since = "" if leads or note.followed_ms is None else f"{_span(note.followed_ms)} ago"
    lag = "" if leads or note.lag_ms is None else _span(note.lag_ms)
    same = "" if known is None else _same(known, fingerprint)
    return note.name, each.name, role, f"{term:,}", address, since, lag, state, same


def _same(member: MemberSeen, fingerprint: str) -> str:
    return "as in this file" if member.fingerprint == fingerprint else "differs from this file"


def _span(duration_ms: int) -> str:
    seconds = duration_ms / 1_000
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.1f} s"


def _plain(store: str, found: StoreStatus, fingerprint: str) -> dict[str, Any]:
    members = [
        {
            "name": member.name,
            "incarnation": member.incarnation,
            "alive": member.left_ms > 0,
            "same_configuration": member.fingerprint == fingerprint,
        }
        for member in found.members
    ]
    sets = [
        {
            "name": each.name,
            "leader": each.leader,
            "term": each.term,
            "address": each.address,
            "problems": each.problems,
            "members": [{**dataclasses.asdict(n), "alive": n.alive} for n in each.members],
        }
        for each in found.sets
    ]
    shown = {"store": store, "change_number": found.change_number, "rows": found.rows}
    return {**shown, "members": members, "sets": sets}
