"""Prints why a request waits, and what it has waited for: `schedsvc why`."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from schedsvc_client.sync import Scheduler

from schedsvc.cli.complete import complete_request_ids, complete_tenants
from schedsvc.cli.connect import Connection, connects
from schedsvc.cli.stats import plain
from schedsvc.text.option_types import FiniteRange
from schedsvc.text.printable import printable_message
from schedsvc.text.reason_words import WAIT_WORDS
from schedsvc.text.request_ids import known_ids
from schedsvc.text.tables import table_console

#: schedsvc.v1.RequestState: ended, refused.
_OVER = (4, 5)
_EPILOG = """\b
Example:
  schedsvc why chatcmpl-7f3a
  schedsvc why --watch chatcmpl-7f3a --tenant acme
  schedsvc why chatcmpl-7f3a --json | jq '.requests[0].place'

REQUEST_ID is any id that the client has seen: `x-schedsvc-request-id` or `x-request-id` of the
answer, also one that the client chose itself, or the `id` in the answer's body. Several requests
may have the id that a client chose: the last 16 of them are shown, the latest first.

A request is known from its arrival until its stored answer is forgotten
(`scheduler.expert.answer_ttl_ms`); so is one that was refused or evicted, as long as it is among
the last 4,096 of these. Exit status 1 where nothing is known.
"""


class _WatchCommand(click.Command):
    """Reads `--watch ID` as `--watch` alone, then the ID: its value can be left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for at, (option, value) in enumerate(zip(args, [*args, ""][1:], strict=True)):
            if option == "--watch" and not re.fullmatch(r"[+-]?[\d.]+", value):
                args = [*args[:at], "--watch=1", *args[at + 1 :]]
                break
        return super().parse_args(ctx, args)


@click.command(cls=_WatchCommand, epilog=_EPILOG)
@connects
@click.argument("request_id", shell_complete=complete_request_ids)
@click.option(
    "--tenant",
    default="",
    shell_complete=complete_tenants,
    metavar="NAME",
    help="Tenant of the request; needed where the configuration does not list it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@click.option(
    "--watch",
    type=FiniteRange(min=0.1),
    is_flag=False,
    flag_value=1.0,
    metavar="[SECONDS]",
    help="Refresh every SECONDS (1) until the request has ended.",
)
def why(
    connection: Connection, request_id: str, tenant: str, as_json: bool, watch: float | None
) -> None:
    """Say why a request waits (for what, behind whom, for how long), or was refused."""
    with Scheduler(connection.target, **connection.proof) as scheduler:
        known = _known_id(scheduler, request_id, tenant)
        _follow(lambda: scheduler.explain(known, tenant), as_json, watch)


def _known_id(scheduler: Scheduler, request_id: str, tenant: str) -> str:
    """Return the id under which the scheduler knows a request. Raises ClickException if none."""
    for known in known_ids(request_id):
        if scheduler.explain(known, tenant).requests:
            return known
    raise click.ClickException(
        f"nothing is known of request {request_id!r}: no client has asked for it, or it has been"
        " forgotten; or its tenant is not in the configuration (give --tenant), or you may not see"
        " it"
    )


def _follow(ask: Callable[[], Any], as_json: bool, watch_s: float | None) -> None:
    answer = ask()
    if as_json:
        click.echo(json.dumps(plain(answer)))
        while watch_s is not None and _goes_on(answer):
            time.sleep(watch_s)
            answer = ask()
            click.echo(json.dumps(plain(answer)))
        return
    console = table_console()
    if watch_s is None:
        console.print(story_view(answer))
        return
    with Live(story_view(answer), console=console, auto_refresh=False) as live:
        while _goes_on(answer):
            time.sleep(watch_s)
            answer = ask()
            if answer.requests:
                live.update(story_view(answer), refresh=True)


def _goes_on(answer: Any) -> bool:
    return any(story.state not in _OVER for story in answer.requests)


def story_view(answer: Any) -> RenderableType:
    """Return what is known of a request, in sentences and tables."""
    answer = printable_message(answer)
    several = len(answer.requests)
    parts: list[RenderableType] = []
    for number, story in enumerate(answer.requests, start=1):
        if several > 1:
            parts += [*([""] if parts else []), f"{number} of {several} requests with this id:"]
        parts += _parts(story)
    return Group(*parts)


def _parts(story: Any) -> list[RenderableType]:
    asked = (
        f"tenant {story.tenant}, class {story.request_class},"
        f" {story.prompt_tokens:,} tokens of input, at most {story.max_output_tokens:,} of output"
    )
    if story.sequences > 1:
        asked += f" for each of {story.sequences}"
    parts: list[RenderableType] = [story.message, "", asked, _estimate(story)]
    if story.HasField("session"):
        parts.append(_session(story.session))
    if story.waited:
        parts.append(_waited(story))
    if story.pools:
        parts.append(_pools(story))
    return parts


def _estimate(story: Any) -> str:
    figures = {
        "expected at its arrival": story.ttft_told_ms,
        "expected now": story.ttft_expected_ms,
        "as it was": story.ttft_ms or -1,
    }
    known = [f"{value / 1e3:,.1f} s {name}" for name, value in figures.items() if value >= 0]
    if story.place.reason and story.place.work_ahead_tokens >= 0:
        before = f"{story.place.work_ahead_tokens:,} tokens of work before it; "
    else:
        before = ""
    return f"{before}time to first token: {', '.join(known) if known else 'not known'}"


def _session(session: Any) -> str:
    """Say what is known of the session of an agent that the request belongs to."""
    where = "active in no pool"
    if session.active_in:
        where = f"active in pool {session.active_in} with {session.footprint_tokens:,} tokens"
    known = f"session: requests that wait or run: {session.open_requests:,}; {where}"
    if session.shares_counter:
        known += "; its tenant has more than 1,024, and it shares a counter"
    return known


def _waited(story: Any) -> Table:
    table = _table("waited for", "time", "part")
    for row in story.waited:
        table.add_row(
            _name(row),
            f"{row.time_us / 1e6:,.3f} s",
            f"{row.time_us / max(1, story.queue_duration_us):.0%}",
        )
    return table


def _pools(story: Any) -> Table:
    table = _table("pool", "next", "waits for", "needs", "load with it", "allowed")
    for pool in story.pools:
        figures = (pool.need_tokens, pool.load_tokens, pool.load_max_tokens)
        table.add_row(
            pool.pool + ("" if pool.attached else " (detached)"),
            "this request" if pool.is_next else pool.next_tenant,
            _name(pool),
            *(f"{n:,}" if pool.need_tokens else "" for n in figures),
        )
    return table


def _name(row: Any) -> str:
    """Return the reason of a row in words."""
    names = row.DESCRIPTOR.fields_by_name["reason"].enum_type.values_by_number
    name = str(names[row.reason].name).removeprefix("WAIT_REASON_")
    return WAIT_WORDS.get(name, name)


def _table(name: str, *numbers: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(name, overflow="ellipsis", min_width=16)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table
