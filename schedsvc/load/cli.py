"""`schedsvc load`: drive a trace against an OpenAI-compatible endpoint."""

import asyncio
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import click
import uvloop
import yaml
from rich.console import Console
from rich.table import Table

from schedsvc.load.files import write_report, write_requests
from schedsvc.load.generator import LoadRun, Pace, RunResult, TargetError
from schedsvc.load.report import CLIENT_LAG_MS_MAX, full_report
from schedsvc.load.table import View, duration, watch
from schedsvc.load.target import TENANT_HEADER, OutputMode, Target
from schedsvc.workload import TraceError, TraceRequest, read_trace, rescale

_POSITIVE = click.FloatRange(min=0, min_open=True)

EPILOG = """\b
Example:
  schedsvc load --url http://127.0.0.1:8000 --trace trace.csv --duration 60 --out out/load

The run is void, and the exit status 1, where the generator itself was late (more than 50 ms at the
99th percentile), where nothing was completed, or where a request ended in an error.
"""


def _read_keys(path: Path) -> dict[str, str]:
    """Tenant to API key from a YAML mapping. The keys themselves appear in no message."""
    try:
        keys = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--api-keys") from None
    except yaml.YAMLError:
        raise click.BadParameter(f"{path}: not YAML", param_hint="--api-keys") from None
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys.values()):
        raise click.BadParameter(
            f"{path}: must map each tenant to its key, as in `tenant: sk-...`",
            param_hint="--api-keys",
        )
    return {str(tenant): key for tenant, key in keys.items()}


def _read(path: Path, tenant: str, rate_scale: float, duration_s: float) -> list[TraceRequest]:
    """Read the whole trace before anything is sent: an error in its last line is told first."""
    skipped: Counter[str] = Counter()
    try:
        requests = read_trace(path, tenant=tenant, skipped=skipped)
        trace = list(rescale(requests, rate_scale=rate_scale, duration_s=duration_s))
    except (TraceError, OSError) as error:
        raise click.ClickException(str(error)) from None
    for reason, count in skipped.items():
        click.echo(f"{path}: {count:,} records left out: {reason}", err=True)
    if not trace:
        raise click.ClickException(f"{path}: no request arrives within --duration")
    return trace


async def _drive(run: LoadRun, title: str, console: Console) -> RunResult:
    watcher = asyncio.create_task(watch(run, View(title), console))
    try:
        return await run.run()
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


def _show(report: dict[str, Any], console: Console) -> None:
    """Print a report for a person."""
    rows = Table()
    rows.add_column("tenant")
    for name in ("sent", "completed", "refused", "errors", "TTFT p50", "p99", "e2e p50", "p99"):
        rows.add_column(name, justify="right")
    rows.add_column("output tokens", justify="right")
    for name, tenant in report["tenants"].items():
        rows.add_row(
            name,
            *(str(tenant[key]) for key in ("sent", "completed", "refused", "errors")),
            *(duration(tenant[key][at]) for key in ("ttft_ms", "e2e_ms") for at in ("p50", "p99")),
            f"{tenant['output_tokens']:,}",
        )
    console.print(rows)
    console.print(
        f"{report['output_tokens_per_s']:,.0f} output tokens/s while load was offered, "
        f"{report['wall_s']:.1f} s in all, client lag p99 {report['client_lag_ms_p99']:.1f} ms"
    )
    for name, tenant in report["tenants"].items():
        for what, reasons in (
            ("refused", tenant["refusals"]["by_reason"]),
            ("errors", tenant["errors_by_reason"]),
        ):
            for reason, count in reasons.items():
                console.print(f"  {name} {what}: {count} x {reason}")


def _failure(report: dict[str, Any]) -> str:
    """Why the run does not count; "" where it does."""
    lag_ms = report["client_lag_ms_p99"]
    tenants = report["tenants"].values()
    if lag_ms > CLIENT_LAG_MS_MAX:
        return (
            f"void: the load generator was {lag_ms:.0f} ms late (p99; at most "
            f"{CLIENT_LAG_MS_MAX:.0f} ms); give it more CPU or a lower rate"
        )
    if not any(tenant["completed"] for tenant in tenants):
        return "nothing was completed"
    errors = sum(tenant["errors"] for tenant in tenants)
    return f"{errors} requests ended in an error" if errors else ""


@click.command("load", epilog=EPILOG)
@click.option("--url", required=True, help="Base URL of the endpoint, with or without /v1.")
@click.option(
    "--trace",
    "trace_file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Trace with times and lengths, in any form that `schedsvc workload` knows.",
)
@click.option("--tenant", default="default", show_default=True, help="For traces without tenants.")
@click.option("--model", default="", help="Model name; default: the first that is served.")
@click.option(
    "--tenant-header",
    default=TENANT_HEADER,
    show_default=True,
    help='Header that carries the tenant; "" for none.',
)
@click.option(
    "--api-keys",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML file that maps tenants to API keys.",
)
@click.option(
    "--output",
    type=click.Choice([mode.value for mode in OutputMode]),
    default="forced",
    show_default=True,
    help="Who sets the output length: the trace through min_tokens and ignore_eos, the trace "
    "through the emulator's end of text, or the model.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option(
    "--rate-scale", type=_POSITIVE, default=1.0, show_default=True, help="2: twice the rate."
)
@click.option("--duration", "duration_s", type=_POSITIVE, default=math.inf, help="Seconds to send.")
@click.option(
    "--warmup",
    "warmup_s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Seconds at the start that the throughput leaves out.",
)
@click.option(
    "--drain",
    "drain_s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds to wait for answers after the last arrival.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the prompts."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for report.json and requests.csv.",
)
def load(
    url: str,
    trace_file: Path,
    tenant: str,
    model: str,
    tenant_header: str,
    api_keys: Path | None,
    output: str,
    max_tokens: int,
    rate_scale: float,
    duration_s: float,
    warmup_s: float,
    drain_s: float,
    seed: int,
    as_json: bool,
    out: Path | None,
) -> None:
    """Send a trace's requests at its times, and report what each tenant got.

    Open loop: latencies count from the time at which the trace wants the request sent. Streams;
    never retries.
    """
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(
            f"must begin with http:// or https://, is {url!r}", param_hint="--url"
        )
    trace = _read(trace_file, tenant, rate_scale, duration_s)
    target = Target(
        url=url,
        model=model,
        tenant_header=tenant_header,
        api_keys=_read_keys(api_keys) if api_keys else {},
        output=OutputMode(output),
        max_tokens=max_tokens,
    )
    pace = Pace(seed=seed, warmup_requests=3, warmup_s=warmup_s, drain_s=drain_s)
    console = Console(stderr=as_json)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(_drive(LoadRun(target, trace, pace), trace_file.name, console))
    except TargetError as error:
        raise click.ClickException(str(error)) from None
    report = full_report(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_report(report, out / "report.json")
        write_requests(result, out / "requests.csv")
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show(report, console)
    if failure := _failure(report):
        raise click.ClickException(failure)
