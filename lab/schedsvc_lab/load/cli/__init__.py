"""`schedsvc load` drives a trace against an OpenAI-compatible endpoint."""

import asyncio
import json
import math
import resource
import signal
from collections import Counter
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.console import Console

from schedsvc.text.option_types import FiniteRange, WholeRange, make_folder
from schedsvc.text.tables import Output
from schedsvc_lab.load.cli import options as read
from schedsvc_lab.load.cli.show import show
from schedsvc_lab.load.files import write_report, write_requests
from schedsvc_lab.load.generator import LoadRun, Pace, RunResult, TargetError
from schedsvc_lab.load.history import with_history
from schedsvc_lab.load.prompts import PromptError
from schedsvc_lab.load.result import About, Result, Wanted, result_of
from schedsvc_lab.load.table import View, watch
from schedsvc_lab.load.target import TENANT_HEADER, Backend, OutputMode, Target
from schedsvc_lab.workload import TraceError, TraceRequest, read_trace, rescale

__all__ = ["load"]

_POSITIVE = FiniteRange(min=0, min_open=True)
_NOT_NEGATIVE = FiniteRange(min=0)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

EPILOG = """\b
Example:
  schedsvc load --url http://127.0.0.1:8000 --trace trace.csv --duration 60 \\
      --out out/load
  schedsvc load --url http://127.0.0.1:8000 --trace trace.csv \\
      --goodput ttft:200 tpot:50
  schedsvc load --url http://127.0.0.1:8000 --trace trace.csv --concurrency 32
  schedsvc load --url http://127.0.0.1:8000 --trace trace.csv \\
      --backend openai-chat --tokenizer models/tiny

The run is void, and the exit status 1, where the generator itself was late (more than 50 ms at the
99th percentile), where nothing was completed, where a request ended in an error, or where it was
interrupted; what was measured until then is written, and marked as interrupted.
"""


@click.command("load", cls=read.LoadCommand, epilog=EPILOG)
@click.option(
    "--url", required=True, metavar="URL", help="Base URL of the endpoint, with or without /v1."
)
@click.option(
    "--trace",
    "trace_file",
    required=True,
    type=_FILE,
    help="Trace with times and lengths, in any form that `schedsvc workload` knows.",
)
@click.option(
    "--backend",
    type=click.Choice([backend.value for backend in Backend]),
    default=Backend.OPENAI.value,
    show_default=True,
    help="Protocol: completions, chat completions, or LightLLM's and S-LoRA's generate_stream.",
)
@click.option(
    "--tenant",
    default="default",
    show_default=True,
    metavar="NAME",
    help="Tenant of requests that name none.",
)
@click.option(
    "--model", default="", metavar="NAME", help="Model name; default: the first that is served."
)
@click.option(
    "--tokenizer",
    metavar="DIR",
    help="Folder of the model's tokenizer, for backends that take text; `emulator` for the "
    "built-in one of `schedsvc emulate`.",
)
@click.option(
    "--tenant-header",
    default=TENANT_HEADER,
    show_default=True,
    metavar="NAME",
    help='Header that carries the tenant; "" for none.',
)
@click.option("--api-keys", type=_FILE, help="YAML file that maps tenants to API keys.")
@click.option("--headers-of", type=_FILE, help="YAML file that maps tenants to their headers.")
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="'NAME: VALUE'",
    help="Header of every request; repeat it for several.",
)
@click.option(
    "--extra-body",
    metavar="JSON",
    help="Object added to each body (generate_stream: to its parameters), as for sampling.",
)
@click.option(
    "--output",
    type=click.Choice([mode.value for mode in OutputMode]),
    default="forced",
    show_default=True,
    help="Output length: the trace's, by min_tokens and ignore_eos; the trace's, by the emulator's "
    "end of text; or the model's own.",
)
@click.option(
    "--max-tokens",
    type=WholeRange(min=1),
    default=1024,
    show_default=True,
    help="Output limit of a request, with --output emulated or free.",
)
@click.option(
    "--rate-scale",
    type=_POSITIVE,
    default=1.0,
    show_default=True,
    help="Multiply the rate of the trace by this factor; 2 is twice as fast.",
)
@click.option(
    "--concurrency",
    type=WholeRange(min=1, max=100_000),
    help="Closed loop: keep this many requests in flight, and ignore the times of the trace.",
)
@click.option(
    "--ramp",
    "ramp_s",
    type=_NOT_NEGATIVE,
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds to full load.",
)
@click.option(
    "--duration",
    "duration_s",
    type=_POSITIVE,
    metavar="SECONDS",
    help="Seconds to send. Default: no limit.",
)
@click.option("--requests", "count", type=WholeRange(min=1), help="Send only this many requests.")
@click.option(
    "--warmup",
    "warmup_requests",
    type=WholeRange(min=0, max=1_000),
    default=3,
    show_default=True,
    help="Small requests sent one by one before the clock starts; they appear in no figure.",
)
@click.option(
    "--drain",
    "drain_s",
    type=_NOT_NEGATIVE,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds to wait for answers after the last arrival.",
)
@click.option(
    "--goodput",
    multiple=True,
    metavar="NAME:MS ...",
    help="Goals that a good request meets: ttft, tpot, e2el, as in --goodput ttft:200 tpot:50.",
)
@click.option(
    "--percentiles",
    default="50,90,95,99",
    show_default=True,
    metavar="NUMBER,...",
    help="Percentiles that the result has, separated by commas.",
)
@click.option("--detail", is_flag=True, help="Add every request's times, lengths and error.")
@click.option("--label", metavar="NAME", help="Name of the run, for the result.")
@click.option(
    "--seed", type=WholeRange(min=0), default=0, show_default=True, help="Seed of the prompts."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for result.json, requests.csv and load.png.",
)
def load(trace_file: Path, as_json: bool, out: Path | None, **options: Any) -> None:
    """Send a trace's requests at its times, and report what each tenant got.

    Open loop: latencies count from the time at which the trace wants the request sent. Streams;
    never retries. The result has the keys of vLLM's `bench serve`, and the tenants beside them.
    """
    target, wanted = _target(options), _wanted(options)
    trace = _read(trace_file, options)
    about = About(
        # Local time, as vLLM writes it: a person looks for the run by it.
        date=datetime.now().strftime("%Y%m%d-%H%M%S"),
        backend=options["backend"],
        trace=trace_file.name,
        label=options["label"],
        tokenizer=options["tokenizer"],
    )
    pace = Pace(
        seed=options["seed"],
        warmup_requests=options["warmup_requests"],
        drain_s=options["drain_s"],
        concurrency=options["concurrency"],
        ramp_s=options["ramp_s"],
    )
    if out is not None:
        make_folder(out)
    console = Output(stderr=as_json)
    _allow_many_connections()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            run = runner.run(_drive(LoadRun(target, trace, pace), trace_file.name, console))
    except (TargetError, PromptError) as error:
        raise click.ClickException(str(error)) from None
    result = result_of(run, about, wanted)
    _tell(run, result, out, None if as_json else console)
    if as_json:
        click.echo(json.dumps(result, indent=2, allow_nan=False))
    if failure := _failure(result):
        raise click.ClickException(failure)


def _target(options: dict[str, Any]) -> Target:
    url = options["url"]
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(
            f"must begin with http:// or https://, is {url!r}", param_hint="--url"
        )
    return Target(
        url=url,
        model=options["model"],
        tenant_header=options["tenant_header"],
        api_keys=read.read_keys(options["api_keys"]),
        output=OutputMode(options["output"]),
        max_tokens=options["max_tokens"],
        backend=Backend(options["backend"]),
        headers_for_all=read.read_headers(options["headers"]),
        headers_of=read.read_tenant_headers(options["headers_of"]),
        extra=read.read_extra(options["extra_body"]),
        texts=read.text_maker(options["tokenizer"], options["seed"]),
    )


def _wanted(options: dict[str, Any]) -> Wanted:
    return Wanted(
        percentiles=read.read_percentiles(options["percentiles"]),
        goals_ms=read.read_goals(options["goodput"]),
        detail=options["detail"],
    )


def _read(path: Path, options: dict[str, Any]) -> list[TraceRequest]:
    """Read the whole trace first, so that an error in its last line shows up before the run."""
    skipped: Counter[str] = Counter()
    ramp_s = 0.0 if options["concurrency"] else options["ramp_s"]
    trace: list[TraceRequest] = []
    try:
        requests = read_trace(path, tenant=options["tenant"], skipped=skipped, keep_records=True)
        for request in rescale(
            with_history(requests),
            rate_scale=options["rate_scale"],
            ramp_s=ramp_s,
            duration_s=options["duration_s"] or math.inf,
        ):
            trace.append(request)
            if len(trace) == options["count"]:
                break
    except (TraceError, OSError) as error:
        raise click.ClickException(str(error)) from None
    for reason, count in skipped.items():
        click.echo(f"{path}: {count:,} records left out: {reason}", err=True)
    if not trace:
        raise click.ClickException(f"{path}: no request arrives within --duration")
    return trace


async def _drive(run: LoadRun, title: str, console: Console) -> RunResult:
    """Run it, watched; SIGINT and SIGTERM end it, and a second one ends the process."""
    loop = asyncio.get_running_loop()

    def interrupt(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        run.interrupt()

    for number in (signal.SIGINT, signal.SIGTERM):
        # Not if the command runs in another thread than the main one, as in a test.
        with suppress(RuntimeError, ValueError):
            loop.add_signal_handler(number, interrupt, number)
    watcher = asyncio.create_task(watch(run, View(title), console))
    try:
        return await run.run()
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


def _allow_many_connections() -> None:
    """Raise the limit of open files: an open loop has as many connections as requests wait."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tell(run: RunResult, result: Result, out: Path | None, console: Console | None) -> None:
    """Write the files of a run, and show its figures to a person."""
    if out is not None:
        write_report(result, out / "result.json")
        write_requests(run, out / "requests.csv")
        # Takes a second to import, which only this needs.
        from schedsvc_lab.load.plot import draw

        draw(run, result, out / "load.png")
    if console is not None:
        show(result, console)
        if out is not None:
            names = ("result.json", "requests.csv", "load.png")
            console.print(", ".join(str(out / name) for name in names), highlight=False)


def _failure(result: Result) -> str:
    """Return why the run does not count; "" where it does."""
    generator = result["generator"]
    if result["interrupted"]:
        return (
            f"interrupted: {result['sent']:,} of {result['num_prompts']:,} requests were sent, "
            f"{result['unfinished']:,} of them are unfinished; the result is partial"
        )
    if not generator["kept_up"]:
        return (
            f"void: the load generator could not keep up, it was {generator['lag_ms_p99']:.0f} ms "
            f"late (p99; at most {generator['lag_ms_max_allowed']:.0f} ms); give it more CPU or a "
            "lower rate"
        )
    if not result["completed"]:
        return "nothing was completed"
    errors = sum(result["errors_by_reason"].values())
    return f"{errors} requests ended in an error" if errors else ""
