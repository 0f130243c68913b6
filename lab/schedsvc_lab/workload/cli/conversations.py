"""`schedsvc workload conversations` makes conversations a trace, `schedsvc converse` holds them.

Both place them in time by the same options and seed.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from schedsvc.text.option_types import check_file, make_folder
from schedsvc.text.tables import table_console
from schedsvc_lab.options import trace_option
from schedsvc_lab.workload.cli.common import (
    FROM,
    tell_skipped,
    told,
    write_lines,
)
from schedsvc_lab.workload.cli.prompts import TOKENIZER, load_tokenizer
from schedsvc_lab.workload.cli.talk import talk_options, timing_and_limits
from schedsvc_lab.workload.conversations import Chats, Conversation, Simulation
from schedsvc_lab.workload.conversations import conversations as put_together
from schedsvc_lab.workload.json_forms import own_line
from schedsvc_lab.workload.reader import TraceReader
from schedsvc_lab.workload.record import Record, TraceError

if TYPE_CHECKING:
    from schedsvc_lab.workload.conversations_client import Talks

_WATCH_S = 0.5

TRACE_EPILOG = """\b
Example:
  schedsvc workload conversations --trace sharegpt.json \\
      --tokenizer models/llama --rate 2 --context-tokens 4096 \\
      --out sharegpt.jsonl
  schedsvc load --url http://127.0.0.1:8000 --trace sharegpt.jsonl
"""

CONVERSE_EPILOG = """\b
Example:
  schedsvc converse --trace sharegpt.json --url http://127.0.0.1:8000 \\
      --tokenizer models/llama --rate 2 --conversations 100 \\
      --context-tokens 4096 --out out/converse

The exit status is 1 where a turn ended in an error, or none was answered. Interrupted, it writes
what there is; "complete" is then false.
"""


def _reader(file: Path, form: str) -> TraceReader:
    # Conversations get new times, so the order of the file does not matter.
    return TraceReader(file, form=None if form == "auto" else form, in_order=False)


@click.command("conversations", epilog=TRACE_EPILOG)
@trace_option
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File to write, in the project's own form.",
)
@TOKENIZER
@click.option(
    "--write",
    "written",
    type=click.Choice(["token-ids", "messages"]),
    default="token-ids",
    show_default=True,
    help="Prompts as the ids of all that was said, or as what each turn adds.",
)
@talk_options
@FROM
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def conversations(
    trace: Path,
    out: Path,
    tokenizer_path: Path | None,
    written: str,
    form: str,
    as_json: bool,
    **talk: Any,
) -> None:
    """Write the conversations of a file (ShareGPT, WildChat) as a trace of requests.

    They start as a Poisson process; a turn's prompt is the whole conversation before it, by the
    tokenizer's chat template, or plainly if it has none or refuses. --turns 1 is single-turn.
    """
    check_file(out)
    chats = Chats(load_tokenizer(tokenizer_path))
    simulation = Simulation(chats, *timing_and_limits(**talk))
    reader = _reader(trace, form)
    tokens: Counter[str] = Counter()

    def requests(records: Iterator[Record]) -> Iterator[Record]:
        for ask in simulation.asks(put_together(records, reader.skipped)):
            tokens["input_tokens"] += len(ask.token_ids)
            tokens["output_tokens"] += ask.output_tokens
            yield ask.as_ids() if written == "token-ids" else ask.as_messages()

    count = write_lines(reader, False, out, own_line, requests)
    if count == 0:
        raise click.ClickException(f"{trace}: no request is left; {_told(simulation.cut)}")
    if as_json:
        counts = {"requests": count, **tokens, "skipped": dict(reader.skipped)}
        more = {"cut": dict(simulation.cut), "without_template": dict(chats.plain)}
        click.echo(json.dumps({**counts, **more, "out": str(out)}, indent=2))
        return
    click.echo(
        f"{count:,} requests of {tokens['input_tokens']:,} input and "
        f"{tokens['output_tokens']:,} output tokens written to {out}"
    )
    tell_skipped(reader)
    if simulation.cut:
        click.echo(_told(simulation.cut), err=True)
    if chats.plain:
        click.echo(f"prompts without the chat template: {_told(chats.plain)}", err=True)


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common()) or "none"


@click.command(epilog=CONVERSE_EPILOG)
@trace_option
@click.option("--url", required=True, metavar="URL", help="An OpenAI-compatible server.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for report.json and turns.csv.",
)
@TOKENIZER
@click.option(
    "--model", default="", metavar="NAME", help="Model to ask for.  [default: the first it serves]"
)
@click.option(
    "--backend",
    type=click.Choice(["openai-chat", "openai"]),
    default="openai-chat",
    show_default=True,
    help="Send messages, or prompts as token ids, which needs --tokenizer.",
)
@click.option(
    "--answers",
    type=click.Choice(["served", "recorded"]),
    default="served",
    show_default=True,
    help="Answers that later turns contain.",
)
@click.option(
    "--tenant-header",
    default="x-tenant-id",
    show_default=True,
    metavar="NAME",
    help="Header for the tenant, if the file names one; '' for none.",
)
@click.option(
    "--api-key",
    envvar="OPENAI_API_KEY",
    default="",
    metavar="KEY",
    help="Bearer token.  [env: OPENAI_API_KEY]",
)
@talk_options
@FROM
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def converse(
    trace: Path,
    url: str,
    out: Path | None,
    tokenizer_path: Path | None,
    model: str,
    backend: str,
    answers: str,
    tenant_header: str,
    api_key: str,
    form: str,
    as_json: bool,
    **talk: Any,
) -> None:
    """Hold the conversations of a file (ShareGPT, WildChat) with a server, as people do.

    They start as a Poisson process, independently of each other; the next turn comes --think
    seconds after an answer. With --tokenizer each answer gets the recorded length, without it the
    model ends it, at --output-tokens-max.
    """
    # It loads an HTTP client, which only this command needs.
    from schedsvc_lab.workload.conversations_client import Server, ServerError, Talks
    from schedsvc_lab.workload.conversations_report import report, write_turns

    if out is not None:
        make_folder(out)
    if backend == "openai" or tokenizer_path is not None:
        chats = Chats(load_tokenizer(tokenizer_path))
    else:
        chats = None
    timing, limits = timing_and_limits(**talk)
    server = Server(
        url=url,
        model=model,
        as_chat=backend == "openai-chat",
        served=answers == "served",
        tenant_header=tenant_header,
        api_key=api_key,
    )
    reader = _reader(trace, form)
    talks = Talks(server, chats, timing, limits)
    complete = False
    try:
        asyncio.run(_watched(talks, put_together(reader, reader.skipped), url))
        complete = True
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
    except (ServerError, TraceError, OSError) as error:
        raise told(error) from None
    result = report(talks, reader.skipped, complete=complete)
    if out is not None:
        (out / "report.json").write_text(json.dumps(result, indent=2) + "\n")
        write_turns(talks.turns, out / "turns.csv")
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        _show(result, table_console(markup=True))
    if not complete or result["error"] or not result["completed"]:
        raise click.exceptions.Exit(1)


async def _watched(talks: "Talks", held: Iterator[Conversation], title: str) -> None:
    """Hold the conversations, and show a person how far they are."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title)

        async def watch() -> None:
            while True:
                bar.update(
                    task,
                    description=f"{title}: {talks.started:,} conversations started, "
                    f"{talks.ended:,} ended, {len(talks.turns):,} turns",
                )
                await asyncio.sleep(_WATCH_S)

        watcher = asyncio.create_task(watch())
        try:
            await talks.run(held)
        finally:
            watcher.cancel()


def _show(result: dict[str, Any], console: Console) -> None:
    counts = ("completed", "refused", "error")
    console.print(
        f"{result['conversations']:,} conversations, {result['turns']:,} turns: "
        + ", ".join(f"{result[name]:,} {name}" for name in counts)
        + f"; {result['input_tokens']:,} input and {result['output_tokens']:,} output tokens "
        f"in {result['duration_s']:,.1f} s",
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("turn", "answered", "prompt tokens", "TTFT p50", "p99", "answer p50", "p99"):
        table.add_column(name, justify="right")
    for name, row in (*result["by_turn"].items(), ("all", result)):
        if row["answered"]:
            times = (row[kind][at] for kind in ("ttft_ms", "e2e_ms") for at in ("p50", "p99"))
            tokens = f"{row['prompt_tokens_mean']:,.0f}"
            shown = (f"{time_ms:,.0f} ms" for time_ms in times)
            table.add_row(name, f"{row['answered']:,}", tokens, *shown)
    console.print(table)
    for what in ("reasons", "cut", "skipped"):
        for reason, count in result[what].items():
            console.print(f"{count:,} times: {reason}", highlight=False, markup=False)
    late = result["sent_late_ms"]
    if late:
        console.print(f"sent after their time: p99 {late['p99']:,.1f} ms", highlight=False)
