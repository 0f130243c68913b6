"""Draws the screens of `schedsvc top`: all tenants, one tenant, and one request.

Each screen asks the scheduler by itself while it is in front. Text from the scheduler is made
printable, and reaches Textual as plain text, never as its markup.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from rich.console import RenderableType
from rich.text import Text
from schedsvc_client import SchedulerError
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.v1 import judgement_pb2
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, Static

from schedsvc.cli.connect import Connection
from schedsvc.cli.stats import LIMIT_UNITS, LOADS, is_abandoned, modes_in_force
from schedsvc.cli.stats_judgement import judgement_line
from schedsvc.cli.top_figures import COLUMNS, FLOWS_MAX, Column, Figures, Row, duration, short
from schedsvc.cli.why import story_view
from schedsvc.text.printable import printable, printable_message
from schedsvc.text.reason_words import OUTCOME_WORDS, WAIT_WORDS
from schedsvc.text.request_ids import known_ids

__all__ = ["Top"]

_POOLS_SHOWN = 6
_POOL_WIDTH = 16
_BAR_WIDTH = 16
#: The one colour beside those of the theme.
_ACCENT = "#4c9be8"
#: schedsvc.v1.OverloadState
_OVERLOADED = 3
OLD = judgement_pb2.Judgement(text="The figures are old: nothing is known of the time since.")


class Top(App[None]):
    """Runs the application: a connection, the figures of all screens, and the first screen."""

    TITLE = "schedsvc top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    #head, #pools, #problem { height: auto; padding: 0 1; }
    #problem { color: $text-error; display: none; }
    #problem.shown { display: block; }
    #pools { margin-top: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    FlowTable { height: 1fr; margin-top: 1; background: $background; scrollbar-size-vertical: 1; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.shown { display: block; }
    #body { padding: 0 1; }
    AskId { align: center middle; }
    AskId > VerticalScroll { width: 64; height: auto; border: solid $primary; padding: 0 1; }
    """

    def __init__(self, connection: Connection, *, every_s: float = 1.0, wanted: str = "") -> None:
        """Show the scheduler at a connection, asked every `every_s` seconds."""
        super().__init__()
        self.target = connection.target
        self.every_s = every_s
        self.wanted = wanted
        self.figures = Figures()
        self.client = AsyncScheduler(connection.target, **connection.proof)

    def on_mount(self) -> None:
        """Begin with all tenants."""
        self.push_screen(Tenants())

    async def on_unmount(self) -> None:
        """Close the connection."""
        await self.client.close()


class Asking(Screen[None]):
    """Asks the scheduler again and again, and says if there is no answer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "pause"),
        Binding("w", "why", "why"),
        Binding("q", "app.quit", "quit"),
    ]

    @property
    def top(self) -> Top:
        """Return the application."""
        assert isinstance(self.app, Top)
        return self.app

    def on_mount(self) -> None:
        """Ask at once, and then in turn."""
        self.paused = False
        self.set_interval(self.top.every_s, self.look)
        self.look()

    def on_screen_resume(self) -> None:
        """Ask at once: what is shown may be old."""
        self.look()

    @work(exclusive=True, group="look")
    async def look(self) -> None:
        """Ask and show, unless this screen is paused or behind another one."""
        if self.paused or self.app.screen is not self:
            return
        try:
            await self.ask()
            problem = ""
        except SchedulerError as error:
            problem = f"no answer: {printable(str(error))}; what is below is old"
            self.show_old()
        except NoMatches:
            # The screen was closed while the answer was on its way: its parts are gone.
            if self.query("#problem"):
                raise
            return
        if self.query("#problem"):
            self.say(problem)

    async def ask(self) -> None:
        """Ask and show. Raises SchedulerError."""
        raise NotImplementedError

    def show_old(self) -> None:
        """Show that the judged figures are old."""

    def say(self, problem: str) -> None:
        """Show a problem, or none."""
        line = self.query_one("#problem", Static)
        line.update(Text(problem))
        line.set_class(bool(problem), "shown")

    def action_pause(self) -> None:
        """Stop or go on."""
        self.paused = not self.paused
        self.say("paused; p goes on" if self.paused else "")
        self.look()

    @work
    async def action_why(self) -> None:
        """Ask for a request's id, and show the request."""
        request_id = await self.app.push_screen_wait(AskId())
        if request_id:
            await self.app.push_screen(Request(request_id, self.tenant_meant()))

    def tenant_meant(self) -> str:
        """Return the tenant that the screen shows; empty: any."""
        return ""


class FlowTable(DataTable[Text]):
    """Shows a table whose Enter is in the footer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "tenant")]


class Tenants(Asking):
    """Sums, pools, and a row for each flow."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", "reverse"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("escape", "no_filter", "", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.sorted_by = 1
        self.reversed = True
        self.columns: list[Column] = []
        self.rows: list[Row] = []

    def compose(self) -> ComposeResult:
        """Make the parts, from above."""
        yield Static(id="head", markup=False)
        yield Static(id="problem", markup=False)
        yield Static(id="pools", markup=False)
        yield FlowTable(cursor_type="row", cell_padding=1)
        yield Input(self.top.wanted, placeholder="part of a name", id="filter", compact=True)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Put the focus on the table."""
        super().on_mount()
        self.table.focus()
        self.query_one("#filter").set_class(bool(self.top.wanted), "shown")

    @property
    def table(self) -> FlowTable:
        """Return the table of flows."""
        return self.query_one(FlowTable)

    async def ask(self) -> None:
        """Ask for a snapshot."""
        # A little less than the time between two questions, so that none gets the same one twice.
        max_age_ms = round(900 * self.top.every_s)
        snapshot = await self.top.client.stats(flow_limit=FLOWS_MAX, max_age_ms=max_age_ms)
        self.top.figures.add(printable_message(snapshot))
        self.show_all()

    def show_old(self) -> None:
        """Take the judgement of the last snapshot back: nothing is known of the time since."""
        snapshot = self.top.figures.snapshot
        if snapshot is not None:
            snapshot.judgement.CopyFrom(OLD)
            self.query_one("#head", Static).update(head(self.top.figures, self.top.target))

    def show_all(self) -> None:
        """Show the last snapshot."""
        figures = self.top.figures
        if figures.snapshot is None:
            return
        self.query_one("#head", Static).update(head(figures, self.top.target))
        pools = [pool for pool in figures.snapshot.pools if not is_abandoned(pool)]
        width = min(_POOL_WIDTH, max((len(pool.name) for pool in pools), default=0))
        lines = [pool_line(pool, width) for pool in pools[:_POOLS_SHOWN]]
        if len(pools) > _POOLS_SHOWN:
            lines.append(Text(f"{len(pools) - _POOLS_SHOWN} more pools: schedsvc stats", "dim"))
        self.query_one("#pools", Static).update(Text("\n").join(lines))
        self.show_rows()

    def show_rows(self) -> None:
        """Fill the table; the cursor stays on its flow."""
        table, width = self.table, self.size.width
        columns = [column for column in COLUMNS if width >= column.from_width]
        order = COLUMNS[self.sorted_by].order
        kept = self.rows[table.cursor_row].name if table.cursor_row < len(self.rows) else ""
        rows = sorted(self.top.figures.rows(self.top.wanted), key=lambda row: row.name)
        self.rows = sorted(rows, key=order, reverse=self.reversed)
        scroll = table.scroll_y
        table.clear(columns=True)
        for column in columns:
            mark = ("▼" if self.reversed else "▲") if column is COLUMNS[self.sorted_by] else ""
            title = Text(f"{column.title}{mark}", justify=_side(column))
            table.add_column(title, width=self.width_of(column, columns), key=column.title)
        for row in self.rows:
            table.add_row(*(_cell(column, row) for column in columns))
        places = (at for at, row in enumerate(self.rows) if row.name == kept)
        table.move_cursor(row=next(places, 0), animate=False, scroll=False)
        table.scroll_to(y=scroll, animate=False)

    def width_of(self, column: Column, shown: list[Column]) -> int:
        """Return a column's width: the last one and the names share what is left over."""
        rest = self.size.width - sum(other.width + 2 for other in shown) - 2
        if column is shown[-1]:
            return column.width + max(0, rest - rest // 2)
        return column.width + (max(0, rest // 2) if column is shown[0] else 0)

    def on_resize(self, _: events.Resize) -> None:
        """Show more columns, or fewer."""
        self.show_all()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the column, or the other way round."""
        titles = [column.title for column in COLUMNS]
        found = titles.index(str(event.column_key.value))
        self.reversed = not self.reversed if found == self.sorted_by else True
        self.sorted_by = found
        self.show_rows()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the tenant of the row."""
        self.app.push_screen(Tenant(self.rows[event.cursor_row].flow.tenant))

    def action_sort(self) -> None:
        """Sort by the next column that is shown."""
        shown = [at for at, column in enumerate(COLUMNS) if self.size.width >= column.from_width]
        later = [at for at in shown if at > self.sorted_by]
        self.sorted_by = later[0] if later else shown[0]
        self.show_rows()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self.reversed = not self.reversed
        self.show_rows()

    def action_filter(self) -> None:
        """Let the person type."""
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the tenants with that text at once."""
        self.top.wanted = event.value
        self.show_rows()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        """Go back to the table, filtered."""
        self.table.focus()

    def action_no_filter(self) -> None:
        """Show all tenants."""
        field = self.query_one("#filter", Input)
        field.value = ""
        field.remove_class("shown")
        self.table.focus()


class Tenant(Asking):
    """Shows all flows of one tenant, with quotas and refusals."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "back")]

    def __init__(self, tenant: str) -> None:
        super().__init__()
        self.tenant = tenant

    def compose(self) -> ComposeResult:
        """Make the parts, from above."""
        yield Static(Text(f"tenant {self.tenant}", "bold"), id="head", markup=False)
        yield Static(id="problem", markup=False)
        with VerticalScroll():
            yield Static(id="body", markup=False)
        yield Footer(show_command_palette=False)

    async def ask(self) -> None:
        """Ask for the tenant's flows."""
        snapshot = printable_message(await self.top.client.stats([self.tenant]))
        lines = [line for flow in snapshot.flows for line in flow_lines(flow)]
        text = Text("\n").join(lines or [Text("no tenant of this name is known any more")])
        self.query_one("#body", Static).update(text)

    def tenant_meant(self) -> str:
        """Return the tenant."""
        return self.tenant


class Request(Asking):
    """Shows why one request waits, or what became of it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "back")]

    def __init__(self, request_id: str, tenant: str) -> None:
        super().__init__()
        self.request_id, self.tenant = request_id, tenant

    def compose(self) -> ComposeResult:
        """Make the parts, from above."""
        yield Static(Text(f"request {printable(self.request_id)}", "bold"), id="head")
        yield Static(id="problem", markup=False)
        with VerticalScroll():
            yield Static(id="body", markup=False)
        yield Footer(show_command_palette=False)

    async def ask(self) -> None:
        """Ask for the request, also without the prefix of a body's id."""
        shown: RenderableType = Text(
            "Nothing is known of it: no client has asked for it, or it has been forgotten, or you"
            " may not see it."
        )
        for known in known_ids(self.request_id):
            answer = await self.top.client.explain(known, self.tenant)
            if answer.requests:
                shown = story_view(answer)
                break
        self.query_one("#body", Static).update(shown)


class AskId(ModalScreen[str]):
    """Asks for a request id in one line."""

    AUTO_FOCUS = "Input"

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss('')", "back")]

    def compose(self) -> ComposeResult:
        """Make the parts, from above."""
        with VerticalScroll():
            yield Static("Request id: any that the client has seen")
            yield Input(id="id", compact=True, max_length=256)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close with what was typed."""
        self.dismiss(event.value.strip())


def head(figures: Figures, target: str) -> Text:
    """Return the lines about the whole scheduler."""
    snapshot = figures.snapshot
    state = "draining" if snapshot.draining else "serving"
    line = f"{target}  {state}  policy {snapshot.policy}{modes_in_force(snapshot)}"
    judged = judgement_line(snapshot)
    parts = [judged, Text(line, "bold yellow" if snapshot.draining else "bold")]
    if snapshot.config.problem:
        parts.append(Text(f"the last reload changed nothing: {snapshot.config.problem}", "red"))
    if not snapshot.HasField("totals"):
        return Text("\n").join([*parts, Text("only what this caller may see (`stats: own`)")])
    totals = snapshot.totals
    refused = figures.rate(lambda found: found.totals.rejected + found.totals.evicted)
    tokens = figures.rate(
        lambda found: sum(flow.input_tokens + flow.output_tokens for flow in found.flows)
    )
    said = {
        "waiting": f"{totals.queued:,}",
        "running": f"{totals.live_leases:,}",
        "granted/s": short(figures.rate(lambda found: found.totals.granted)),
        "refused/s": short(refused),
        "tokens/s": short(tokens),
    }
    parts.append(Text("  ").join(Text.assemble((f"{k} ", "dim"), v) for k, v in said.items()))
    return Text("\n").join(parts)


def pool_line(pool: Any, width: int = _POOL_WIDTH) -> Text:
    """Return a pool as a line: its name in `width`, how full, and what its next request needs."""
    part = pool.promised_tokens / max(1, pool.capacity_tokens)
    filled = min(_BAR_WIDTH, round(part * _BAR_WIDTH))
    state = "draining" if pool.draining else LOADS[pool.overload_state]
    if not pool.attached:
        state = "detached"
    bad = not pool.attached or pool.draining or pool.overload_state == _OVERLOADED
    needs = WAIT_WORDS.get(pool.wait_reason, pool.wait_reason)
    wait = f", waits for {needs}" if needs else ""
    return Text.assemble(
        f"{pool.name[:width]:<{width}}  ",
        ("━" * filled, _ACCENT),
        ("─" * (_BAR_WIDTH - filled), "dim"),
        f" {part:4.0%} of {short(pool.capacity_tokens)} KV",
        f"  {pool.live_leases:,} run  ",
        (state, "yellow" if bad else "dim"),
        wait,
    )


def flow_lines(flow: Any) -> Iterable[Text]:
    """Yield what is known of a flow."""

    def line(name: str, text: str) -> Text:
        return Text.assemble((f"  {name:<18}", "dim"), text)

    dry = ", dry run: decisions are only counted" if flow.audit else ""
    yield Text(f"class {flow.request_class}, weight {flow.weight_milli / 1_000:g}{dry}", "bold")
    yield line("waiting", f"{flow.queued:,} ({flow.queued_input_tokens:,} tokens of input)")
    if flow.queued:
        yield line("oldest", duration(flow.oldest_queued_ms))
        if flow.waits_for_quota:
            yield line("waits for", "a quota, its own or of a group above")
        elif flow.held_to_share:
            yield line("waits for", "its share: it is beyond it while shares bind")
    yield line("one more waits", duration(flow.wait_expected_ms))
    yield line("running", f"{flow.live_leases:,} ({flow.promised_tokens:,} KV tokens promised)")
    yield line(
        "tokens",
        f"{flow.input_tokens:,} input ({flow.cached_input_tokens:,} cached),"
        f" {flow.output_tokens:,} output",
    )
    yield line(
        "requests",
        f"{flow.received:,} received, {flow.granted:,} granted, {flow.completed:,} completed",
    )
    if flow.cancelled or flow.expired:
        yield line("", f"{flow.cancelled:,} cancelled, {flow.expired:,} expired")
    for entry in flow.refusals:
        names = entry.DESCRIPTOR.fields_by_name["outcome"].enum_type.values_by_number
        name = str(names[entry.outcome].name).removeprefix("OUTCOME_").lower()
        yield line("refused", f"{entry.count:,}: {OUTCOME_WORDS.get(name, name)}")
    for limit in flow.quotas:
        unit = LIMIT_UNITS.get(limit.kind, "")
        yield line("quota left", f"{limit.remaining:,} of {limit.limit:,} {unit}")
    yield Text("")


def _side(column: Column) -> Any:
    return "right" if column.is_number else "left"


def _cell(column: Column, row: Row) -> Text:
    text = column.text(row)
    style = "yellow" if column.title == "why" and text else ""
    return Text(text, style, justify=_side(column), overflow="ellipsis", no_wrap=True)
