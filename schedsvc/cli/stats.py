"""Prints what a running scheduler does: `schedsvc stats`."""

import json
import time
from collections.abc import Iterator
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from schedsvc_client.sync import Scheduler

from schedsvc.cli.complete import complete_tenants
from schedsvc.cli.connect import Connection, connects
from schedsvc.cli.mode import mode_text
from schedsvc.cli.stats_cluster import cluster_line, cluster_lines
from schedsvc.cli.stats_files import file_lines
from schedsvc.cli.stats_groups import GROUP_COLUMNS, group_rows
from schedsvc.cli.stats_judgement import judgement_line
from schedsvc.text.option_types import FiniteRange, WholeRange
from schedsvc.text.printable import printable_message
from schedsvc.text.reason_words import WAIT_WORDS
from schedsvc.text.tables import table_console

#: Kinds of schedsvc.v1.LimitKind, short.
LIMIT_UNITS = {
    3: "req/min",
    4: "in/min",
    5: "out/min",
    6: "tok/min",
    7: "at once",
    8: "tok/day",
    9: "tok/month",
}
#: schedsvc.v1.OverloadState, for people.
LOADS = ("", "under", "nearly over", "over")
#: More are in no answer.
_FLOWS_MAX = 10_000
_FLOWS_SHOWN = 20
_EPILOG = """\b
Example:
  schedsvc stats --target unix:/run/schedsvc/schedsvc.sock
  schedsvc stats --target 127.0.0.1:7600 --watch
  schedsvc stats --json | jq '.totals.queued'
"""


@click.command(epilog=_EPILOG)
@connects
@click.option(
    "--tenant",
    "tenants",
    multiple=True,
    shell_complete=complete_tenants,
    metavar="NAME",
    help="Only this tenant; may be repeated.",
)
@click.option(
    "--flows",
    show_default=str(_FLOWS_SHOWN),
    type=WholeRange(1, _FLOWS_MAX),
    help="Show at most this many tenants: first those that wait, then by service.",
)
@click.option("--all", "everything", is_flag=True, help="Show all tenants, and abandoned pools.")
@click.option("--cluster", is_flag=True, help="Show only how service is shared with other members.")
@click.option("--json", "as_json", is_flag=True, help="Print the snapshot as JSON.")
@click.option(
    "--watch",
    type=FiniteRange(min=0.1),
    is_flag=False,
    flag_value=1.0,
    metavar="[SECONDS]",
    help="Refresh every SECONDS; every second if none are given.",
)
def stats(
    connection: Connection,
    tenants: tuple[str, ...],
    flows: int | None,
    everything: bool,
    cluster: bool,
    as_json: bool,
    watch: float | None,
) -> None:
    """Show a scheduler's pools, tenants and totals."""
    _refuse_contradictions(tenants, flows, everything, cluster, watch)
    shown = _FLOWS_MAX if everything else flows or _FLOWS_SHOWN
    with Scheduler(connection.target, **connection.proof) as scheduler:
        if cluster:
            _print_cluster(scheduler, as_json)
            return
        _print(scheduler, tenants, shown, as_json, watch, everything)


def _refuse_contradictions(
    tenants: tuple[str, ...],
    flows: int | None,
    everything: bool,
    cluster: bool,
    watch: float | None,
) -> None:
    """Refuse options of which one would have no effect. Raises UsageError."""
    if everything and flows is not None:
        raise click.UsageError("--all and --flows exclude each other; give one of them")
    given = {"--tenant": tenants, "--flows": flows, "--all": everything, "--watch": watch}
    if cluster and (others := [name for name, value in given.items() if value]):
        raise click.UsageError(f"--cluster and {others[0]} exclude each other; give one of them")


def _look(scheduler: Scheduler, tenants: tuple[str, ...], flows: int) -> Any:
    """Ask once; a tenant that is asked for by name has to be there, and is shown in any case."""
    snapshot = scheduler.stats(tenants, _FLOWS_MAX if tenants else flows)
    missing = set(tenants).difference(flow.tenant for flow in snapshot.flows)
    if missing:
        raise click.ClickException(
            f"--tenant: no tenant of that name: {', '.join(sorted(missing))}"
        )
    return snapshot


def _print(
    scheduler: Scheduler,
    tenants: tuple[str, ...],
    flows: int,
    as_json: bool,
    watch_s: float | None,
    everything: bool,
) -> None:
    if as_json:
        while True:
            click.echo(json.dumps(plain(_look(scheduler, tenants, flows))))
            if watch_s is None:
                return
            time.sleep(watch_s)
    console = table_console()

    def look() -> RenderableType:
        return _view(printable_message(_look(scheduler, tenants, flows)), everything, bool(tenants))

    view = look()
    if watch_s is None:
        console.print(view)
        return
    with Live(view, console=console, auto_refresh=False) as live:
        while True:
            time.sleep(watch_s)
            live.update(look(), refresh=True)


def _print_cluster(scheduler: Scheduler, as_json: bool) -> None:
    snapshot = scheduler.stats((), 1)
    if not snapshot.HasField("cluster"):
        raise click.ClickException(
            "this scheduler is no member of a cluster; see docs/operate/cluster.md"
        )
    if as_json:
        click.echo(json.dumps(plain(snapshot.cluster)))
        return
    for line in cluster_lines(printable_message(snapshot.cluster)):
        click.echo(line)


def plain(message: Any) -> dict[str, Any]:
    """Return a message as plain data: every field, 64-bit integers as numbers."""
    values = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None:
            value = [plain(entry) for entry in value] if field.is_repeated else plain(value)
        elif field.enum_type is not None:
            value = field.enum_type.values_by_number[value].name
        elif field.is_repeated:
            value = list(value)
        values[field.name] = value
    return values


def _view(snapshot: Any, everything: bool, named: bool) -> RenderableType:
    shared = [cluster_line(snapshot.cluster)] if snapshot.HasField("cluster") else []
    notes = *shared, *_config(snapshot.config), *file_lines(snapshot)
    judged = judgement_line(snapshot)
    if shared and not snapshot.cluster.cluster:
        return Group(judged, *notes)  # a standby serves nothing
    pools = _table(
        "pool", "promised", "posted", "capacity", "leases", "queued", "load", "waits for"
    )
    shown = [pool for pool in snapshot.pools if everything or not is_abandoned(pool)]
    for pool in shown:
        state = "" if pool.attached else f" (detached{_ago(pool.detached_ms)})"
        state += " (draining)" if pool.draining else ""
        state += " (named only)" if pool.named_only else ""
        pools.add_row(
            pool.name + state,
            f"{pool.promised_tokens:,}",
            f"{pool.posted_tokens:,}",
            f"{pool.capacity_tokens:,}",
            f"{pool.live_leases:,}",
            f"{pool.queued:,}",
            LOADS[pool.overload_state],
            WAIT_WORDS.get(pool.wait_reason, pool.wait_reason),
        )
    flows = _table(
        "tenant", "weight", "queued", "leases", "input", "cached", "output", "refused", "quota left"
    )
    # Those that wait, the longest first; sorted() keeps the order by service among the others.
    for flow in sorted(snapshot.flows, key=lambda flow: (not flow.queued, -flow.oldest_queued_ms)):
        numbers = (
            flow.queued,
            flow.live_leases,
            flow.input_tokens,
            flow.cached_input_tokens,
            flow.output_tokens,
            sum(entry.count for entry in flow.refusals),
        )
        flows.add_row(
            flow_name(flow),
            f"{flow.weight_milli / 1_000:g}",
            *(f"{number:,}" for number in numbers),
            _quota_left(flow.quotas, flow.waits_for_quota),
        )
    classes = _table("class", "rank", "queued", "leases", "granted", "brought forward")
    for entry in snapshot.classes:
        counts = (entry.queued, entry.live_leases, entry.granted, entry.brought_forward)
        rank = "exempt" if entry.exempt else str(entry.rank)
        classes.add_row(entry.name, rank, *(f"{count:,}" for count in counts))
    line = (
        f"policy {snapshot.policy}{', in flows by deadline' * (snapshot.flow_order == 'deadline')}"
        f"{', draining' if snapshot.draining else ''}{modes_in_force(snapshot)}; {_sums(snapshot)}"
    )
    tables = [pools, *([classes] if len(snapshot.classes) > 1 else []), flows]
    left_out = _left_out(snapshot, len(shown), named)
    return Group(
        judged, line, *notes, *tables, *_groups(snapshot.groups), *_quotas(snapshot), *left_out
    )


def _sums(snapshot: Any) -> str:
    """Return what all tenants together do, or that this caller may not see it."""
    totals = snapshot.totals
    if not snapshot.HasField("totals"):
        return "only the pools and tenants of this caller (`stats: own` of its principal)"
    return (
        f"{totals.received:,} received, {totals.queued:,} queued, {totals.live_leases:,} running,"
        f" {totals.completed:,} completed, {totals.rejected + totals.evicted:,} refused;"
        f" fairness gap {totals.fairness_gap_micro / 1e6:,.0f}"
        f" of {totals.fairness_bound_micro / 1e6:,.0f} tokens"
        + (f"; {totals.replays_refused:,} lease replays rejected" if totals.replays_refused else "")
        + (f"; {totals.reports_limited:,} reports limited" if totals.reports_limited else "")
        + _unlisted(snapshot.tenants)
    )


def _unlisted(tenants: Any) -> str:
    """Return how many unlisted tenants have flows, and how many requests shared for want of one."""
    text = f"; {tenants.first_sight:,} unlisted tenants" if tenants.first_sight else ""
    if tenants.shared_requests:
        text += f"; {tenants.shared_requests:,} requests shared a flow (flows_max)"
    return text


def _config(config: Any) -> Iterator[str]:
    """Yield what an operator has to know of the last reload; nothing if all of it is in force."""
    if config.problem:
        yield f"the last reload changed nothing: {config.problem}"
    if config.needs_restart:
        yield f"waits for a restart: {', '.join(config.needs_restart)}"


def is_abandoned(pool: Any) -> bool:
    """Return whether nothing is left of a pool: no shim or owner, no lease or request, no drain."""
    return not (pool.attached or pool.owned_ms or pool.live_leases or pool.queued or pool.draining)


def _ago(detached_ms: int) -> str:
    """Return for how long a pool has been without a shim, if that is known."""
    if not detached_ms:
        return ""
    seconds = detached_ms // 1_000
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f" for {seconds // size} {unit}"
    return f" for {seconds} s"


def _left_out(snapshot: Any, pools_shown: int, named: bool) -> Iterator[str]:
    """Yield a line for what is not shown, with the option that shows it."""
    parts = []
    if (flows := snapshot.totals.flows - len(snapshot.flows)) > 0 and not named:
        parts.append(f"{flows:,} more tenant{'s' if flows > 1 else ''} (--flows N or --all)")
    if pools := len(snapshot.pools) - pools_shown:
        parts.append(f"{pools:,} abandoned pool{'s' if pools > 1 else ''} (--all)")
    if parts:
        yield f"not shown: {', '.join(parts)}"


def _groups(groups: Any) -> Iterator[Table]:
    """Yield groups with a weight as a tree, if there are any."""
    if groups:
        table = _table(*GROUP_COLUMNS)
        for row in group_rows(groups):
            table.add_row(*row)
        yield table


def _quotas(snapshot: Any) -> Iterator[Table]:
    """Yield groups and models with what is left of their own limits, then all shares."""
    if limited := [entry for entry in snapshot.quotas if entry.limits]:
        quotas = _table("group or model", "below", "open", "waiting", "quota left")
        for entry in limited:
            counts = f"{entry.open_requests:,}", f"{entry.waiting:,}"
            quotas.add_row(entry.name, entry.parent, *counts, _quota_left(entry.limits, False))
        yield quotas
    shares = _table("share of", "a minute", "left", "borrowed", "lent", "held")
    for flow in snapshot.flows:
        if flow.share_tokens_per_minute:
            shares.add_row(flow_name(flow), *_share(flow), "yes" if flow.held_to_share else "")
    for entry in snapshot.quotas:
        if entry.share_tokens_per_minute or not entry.name:
            held = f"{entry.held_flows:,}" if entry.held_flows else ""
            shares.add_row(entry.name or "all", *_share(entry), held)
    if shares.row_count:
        yield shares


def modes_in_force(snapshot: Any) -> str:
    """Return the mode where it is no usual one: an operator's word, or dry run."""
    modes = snapshot.mode
    # MODE_AUDIT
    is_said = modes.overlay or modes.tenants_overlaid or modes.configured == 2
    return f"; {mode_text(modes)}" if is_said else ""


def flow_name(flow: Any) -> str:
    """Return what a flow is called: its tenant, its class unless default, and dry run."""
    name = str(flow.tenant)
    if flow.request_class not in ("", "default"):
        name += f", {flow.request_class}"
    return f"{name} (dry)" if flow.audit else name


def _quota_left(limits: Any, waits: bool) -> str:
    """Return how much is left of the tightest of some quotas."""
    if not limits:
        return ""
    tightest = min(limits, key=lambda limit: limit.remaining / limit.limit)
    unit = LIMIT_UNITS.get(tightest.kind, "")
    return f"{tightest.remaining:,} of {tightest.limit:,} {unit}{', waits' if waits else ''}"


def _share(row: Any) -> tuple[str, ...]:
    """Return a share, what is left of it, and what was borrowed and lent beside it."""
    share = f"{row.share_tokens_per_minute:,}" if row.share_tokens_per_minute else ""
    numbers = row.share_left_tokens, row.borrowed_tokens, row.lent_tokens
    return share, *(f"{number:,}" for number in numbers)


def _table(name: str, *numbers: str) -> Table:
    # On 80 columns no column is left out: long names end in an ellipsis, the last column wraps.
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(name, overflow="ellipsis", min_width=10)
    for number in numbers[:-1]:
        table.add_column(number, justify="right", no_wrap=True)
    table.add_column(numbers[-1], justify="right", overflow="fold", min_width=6)
    return table
