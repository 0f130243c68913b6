"""`schedsvc prefix` measures the sharing of prompts, and a prefix cache's hits."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from schedsvc.text.option_types import make_folder
from schedsvc.text.tables import table_console
from schedsvc_lab.options import trace_option
from schedsvc_lab.workload.cli.common import FROM, SORT, open_trace, progress, told
from schedsvc_lab.workload.cli.prefix_show import show
from schedsvc_lab.workload.cli.prompts import TOKENIZER, load_tokenizer
from schedsvc_lab.workload.cli.talk import talk_options, timing_and_limits
from schedsvc_lab.workload.conversations import (
    TURNS_CUT,
    Chats,
    Limits,
    Simulation,
    Timing,
    conversations,
)
from schedsvc_lab.workload.prefix.analysis import analyse
from schedsvc_lab.workload.prefix.capacity import POLICIES, CachePoint, curve, default_capacities
from schedsvc_lab.workload.prefix.files import write_blocks, write_points
from schedsvc_lab.workload.prefix.requests import Asked, asked
from schedsvc_lab.workload.prefix.sharing import Sharing
from schedsvc_lab.workload.reader import TraceReader
from schedsvc_lab.workload.record import Bad, Record, TraceError
from schedsvc_lab.workload.tokenizers import ModelTokenizer

Found = dict[str, dict[int, Sharing]]

EPILOG = """\b
Example:
  schedsvc prefix --trace mooncake_conversation_trace.jsonl --out out/mooncake
  schedsvc prefix --trace sharegpt.json --tokenizer models/llama \\
      --block-size 16,8,32 --out out/sharegpt

Conversations are analysed twice: their first turns alone (single_turn), and all turns (multi_turn).
So is a trace whose requests name their turn; any other is analysed as_recorded. In the folder of
--out are then, for each of these, NAME_stats.json, NAME_request_metrics.csv,
NAME_block_metrics.csv and NAME_trace.jsonl, and for all sharing.png, caches.csv and caches.png.
"""


class _Numbers(click.ParamType[list[int]]):
    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """Read whole numbers, separated by commas; a repeated one counts once."""
        parts = str(value).split(",")
        if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} must be whole numbers of 1 or more, as in 8,16,32", param, ctx)
        return list(dict.fromkeys(map(int, parts)))


class _Names(click.ParamType[list[str]]):
    name = "names"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        """Read names of policies, separated by commas."""
        names = [name.strip() for name in str(value).split(",") if name.strip()]
        for name in names:
            if name not in POLICIES:
                self.fail(f"{name!r} is none of {', '.join(POLICIES)}", param, ctx)
        return list(dict.fromkeys(names))


@dataclass(frozen=True)
class _Source:
    """Names the source of the requests: a file, read from the start in each pass."""

    trace: Path
    form: str
    sort: bool
    tokenizer: ModelTokenizer | None
    timing: Timing
    limits: Limits

    def first(self) -> Record:
        """Read the first request."""
        return next(iter(TraceReader(self.trace, form=self._form, in_order=False)))

    @property
    def _form(self) -> str | None:
        return None if self.form == "auto" else self.form

    def talked(self, limits: Limits, notes: Counter[str]) -> Iterator[tuple[TraceReader, Asked]]:
        """Hold the conversations of the file."""
        if self.tokenizer is None:
            load_tokenizer(None)
        assert self.tokenizer is not None
        # Their own times do not count, so their order does not.
        reader = TraceReader(self.trace, form=self._form, in_order=False)
        chats = Chats(self.tokenizer)
        simulation = Simulation(chats, self.timing, limits)
        with progress(reader, False) as records:
            for ask in simulation.asks(conversations(records, reader.skipped)):
                yield (
                    reader,
                    Asked(
                        arrival_s=round(ask.arrival_s, 6),
                        tenant=ask.tenant,
                        conversation=ask.conversation,
                        turn=ask.turn,
                        input_tokens=len(ask.token_ids),
                        output_tokens=ask.output_tokens,
                        token_ids=ask.token_ids,
                    ),
                )
        notes.update(reader.skipped)
        notes.update(simulation.cut)
        for reason, count in chats.plain.items():
            notes[f"prompts without the chat template: {reason}"] += count

    def recorded(
        self, turn_max: int | None, notes: Counter[str]
    ) -> Iterator[tuple[TraceReader, Asked]]:
        """Take the requests as they were recorded, up to a turn."""
        reader = open_trace(self.trace, self.form, self.sort)
        with progress(reader, self.sort) as records:
            for request in asked(records, self.tokenizer):
                if turn_max is None or (request.turn or 1) <= turn_max:
                    yield reader, request
        notes.update(reader.skipped)


@click.command(epilog=EPILOG)
@trace_option
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for everything.",
)
@TOKENIZER
@click.option(
    "--block-size",
    "sizes",
    type=_Numbers(),
    metavar="TOKENS,...",
    default=None,
    help="Tokens of a block; NAME_trace.jsonl has blocks of the first size.  [default: 16,8,32, or "
    "the trace's own]",
)
@click.option(
    "--policy",
    "policies",
    type=_Names(),
    metavar="NAME,...",
    default=",".join(POLICIES),
    show_default=True,
    help="Policies of finite caches; '' for none.",
)
@click.option(
    "--capacity",
    "capacities",
    type=_Numbers(),
    metavar="TOKENS,...",
    default=None,
    help="Capacities of finite caches.  [default: what all blocks take, halved again and again]",
)
@talk_options
@FROM
@SORT
@click.option("--json", "as_json", is_flag=True, help="Print the statistics as JSON.")
def prefix(
    trace: Path,
    out: Path,
    tokenizer_path: Path | None,
    sizes: list[int] | None,
    policies: list[str],
    capacities: list[int] | None,
    form: str,
    sort: bool,
    as_json: bool,
    **talk: Any,
) -> None:
    """Show what the prompts of a trace share: requests, blocks, and caches of any capacity.

    Takes block hashes, token ids, and, with a tokenizer, text and conversations. Conversations
    without times are laid out in time by --rate, --think and --output-speed.
    """
    make_folder(out)
    tokenizer = None if tokenizer_path is None else load_tokenizer(tokenizer_path)
    source = _Source(trace, form, sort, tokenizer, *timing_and_limits(**talk))
    for old in out.glob("*_stats.json"):
        # If this run fails, files of an earlier run beside its own would mislead.
        old.unlink()
    notes: dict[str, Counter[str]] = {}
    try:
        found = _analyse(source, sizes or [], out, notes)
        points = _caches(found, policies, capacities)
        statistics = _write(found, points, notes, trace.name, out)
    except (TraceError, OSError) as error:
        raise told(error) from None
    except KeyboardInterrupt:
        what = "interrupted; requests that were not all read are in files that end in .partial"
        raise click.ClickException(f"{what}, and no NAME_stats.json was written to {out}") from None
    if as_json:
        click.echo(json.dumps(statistics, indent=2))
        return
    show(statistics, table_console(markup=True))
    for name, reasons in notes.items():
        for reason, count in reasons.most_common():
            click.echo(f"{name}: {count:,} times: {reason}", err=True)
    click.echo(f"written to {out}")


def _analyse(
    source: _Source, sizes: Sequence[int], out: Path, notes: dict[str, Counter[str]]
) -> Found:
    """Analyse the trace once for each name. Raises TraceError and click.UsageError."""
    first = source.first()
    several = {"single_turn": 1, "multi_turn": source.limits.turns_max}
    names = several if first.messages or first.turn else {"as_recorded": None}
    found: Found = {}
    for name, turns in names.items():
        notes[name] = Counter()
        if first.messages:
            pairs = source.talked(replace(source.limits, turns_max=turns), notes[name])
        else:
            pairs = source.recorded(turns, notes[name])
        reader: TraceReader | None = None

        def requests(pairs: Iterator[tuple[TraceReader, Asked]] = pairs) -> Iterator[Asked]:
            nonlocal reader
            for reader, request in pairs:  # noqa: B007 - the error below names its line
                yield request

        try:
            found[name] = analyse(requests(), sizes, out, name)
        except Bad as bad:
            where = reader or TraceReader(source.trace)
            raise where.wrong(bad.column, str(bad)) from None
        except TraceError:
            raise
        except ValueError as error:
            raise click.UsageError(f"--block-size: {error}") from None
        if name == "single_turn":
            # This name means that they are left out.
            del notes[name][TURNS_CUT]
        if not found[name]:
            raise click.ClickException(f"{source.trace}: no request is left ({name})")
    return found


def _caches(
    found: Found, policies: Sequence[str], capacities: Sequence[int] | None
) -> dict[str, list[CachePoint]]:
    """Serve the requests from finite caches."""
    jobs = [
        (name, sharing, sorted(capacities or default_capacities(sharing)))
        for name, by_size in found.items()
        for sharing in by_size.values()
    ]
    total = sum(len(tokens) * len(sharing.fractions) for _, sharing, tokens in jobs)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    points: dict[str, list[CachePoint]] = {name: [] for name in found}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("caches", total=total * len(policies))
        for name, sharing, tokens in jobs:
            served = curve(sharing, policies, tokens, lambda count: bar.advance(task, count))
            points[name] += served
    return points


def _write(
    found: Found,
    points: dict[str, list[CachePoint]],
    notes: dict[str, Counter[str]],
    title: str,
    out: Path,
) -> dict[str, Any]:
    """Write what is not written yet, and return the statistics by name."""
    # It takes a second to import, and earlier code does not need it.
    from schedsvc_lab.workload.prefix.figures import draw_caches, draw_sharing

    statistics: dict[str, Any] = {}
    for name, by_size in found.items():
        sharing = next(iter(by_size.values()))
        statistics[name] = {
            "requests": len(sharing.fractions),
            "input_tokens": sum(sharing.uses.tokens),
            "notes": dict(notes[name]),
            "block_sizes": {str(size): one.summary() for size, one in by_size.items()},
            "caches": [
                {
                    "block_tokens": point.block_tokens,
                    "policy": point.policy,
                    "capacity_tokens": point.capacity_tokens,
                    "block_hit_rate": point.block_hit_rate,
                    "token_hit_rate": point.token_hit_rate,
                }
                for point in points[name]
            ],
        }
        text = json.dumps(statistics[name], indent=2)
        (out / f"{name}_stats.json").write_text(text + "\n")
        write_blocks(out, name, by_size.values())
    named = ((name, point) for name, own in points.items() for point in own)
    write_points(out / "caches.csv", named)
    draw_sharing(found, title, out / "sharing.png")
    if any(points.values()):
        draw_caches(points, title, out / "caches.png")
    return statistics
