"""`schedsvc emulate --trace` reads a person's options, and prints the result."""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
import uvloop

from schedsvc_lab.emulator.replay import Replay
from schedsvc_lab.emulator.settings import EmulatorSettings
from schedsvc_lab.workload import TraceError, TraceRequest, read_trace

_TENANTS_SHOWN = 20


def replay(settings: EmulatorSettings, path: Path, as_json: bool) -> None:
    """Replay a trace, show the progress, and print the result. Raises ClickException."""
    trace = _read(path)
    run = Replay(settings, trace)
    # The bar is for a terminal: click hides it elsewhere.
    with click.progressbar(length=len(trace), label=path.name, file=sys.stderr) as bar:

        def tick() -> None:
            bar.update(run.ended + sum(run.refused.values()) - bar.pos)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result = runner.run(run.run(tick))
        except KeyboardInterrupt:
            raise click.ClickException("interrupted; nothing came of it") from None
    result = {"trace": path.name, "speed": settings.speed, **result}
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        _show(result)
    if not result["completed"]:
        raise click.ClickException("nothing was completed")


def _read(path: Path) -> list[TraceRequest]:
    skipped: Counter[str] = Counter()
    try:
        trace = list(read_trace(path, skipped=skipped, keep_records=True))
    except (TraceError, OSError) as error:
        raise click.ClickException(str(error)) from None
    for reason, count in skipped.items():
        click.echo(f"{path}: {count:,} records left out: {reason}", err=True)
    return trace


def _show(result: dict[str, Any]) -> None:
    refused = sum(result["refused"].values())
    click.echo(
        f"{result['completed']:,} of {result['requests']:,} requests completed in "
        f"{result['duration_s']:,.1f} s of the engine's time, "
        f"{result['output_tokens_per_s']:,.0f} output tokens/s, "
        f"{result['preemptions']:,} preemptions"
    )
    if refused:
        fields = ", ".join(f"{name} {count:,}" for name, count in result["refused"].items())
        click.echo(f"{refused:,} could never run: {fields}")
    for name, key in (("TTFT", "ttft_ms"), ("E2E", "e2e_ms")):
        if (spread := result[key]) is not None:
            parts = ", ".join(f"{at} {value:,.0f} ms" for at, value in spread.items())
            click.echo(f"{name}: {parts}")
    cache = result["prefix_cache"]
    if cache["enabled"]:
        click.echo(
            f"prefix cache: {cache['hit_rate']:.1%} of {cache['query_tokens']:,} prompt tokens "
            f"found, {cache['evictions']:,} blocks given up"
        )
    if len(result["tenants"]) > 1:
        shown = sorted(result["tenants"].items(), key=lambda item: -item[1]["completed"])
        for tenant, own in shown[:_TENANTS_SHOWN]:
            ttft = own["ttft_ms"]
            click.echo(
                f"  {tenant}: {own['completed']:,}, TTFT p50 {ttft['p50']:,.0f} ms, "
                f"p99 {ttft['p99']:,.0f} ms"
            )
        if len(shown) > _TENANTS_SHOWN:
            click.echo(f"  and {len(shown) - _TENANTS_SHOWN:,} more tenants")
