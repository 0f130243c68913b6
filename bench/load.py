"""`python -m bench.load` measures what the load generator itself adds to a latency.

Method: open-loop Poisson arrivals against a server that answers at once, the generator pinned to
one core and the server to another. The scheduling lag is how much later than its intended time a
request goes out.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from bench.machine import describe, generator_cores, pinned, server_cores
from bench.processes import started
from schedsvc_lab.load.generator import LoadRun, Pace, RunResult
from schedsvc_lab.load.result import generator_health
from schedsvc_lab.load.samples import Fate
from schedsvc_lab.load.target import Target
from schedsvc_lab.workload import TraceRequest

__all__ = ["main", "measure"]

LAG_MS_MAX = 5.0
TENANTS = 27
_END_S_MAX = 30.0
_EPILOG = """\b
Example:
  python -m bench.load --rate 1000 --seconds 20
  python -m bench.load --rate 1000 --prompt-tokens 2000 --json

Exit status 1: the 99th percentile of the lag is above --lag-max, or not all was answered.
"""


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    """Run the server that answers at once, on its core; gives its URL."""
    ready = folder / "port"
    with started(["-m", "bench.instant", "--ready-file", str(ready)], ready, cores=server_cores()):
        yield f"http://127.0.0.1:{ready.read_text()}"


def _trace(rate: float, seconds: float, prompt_tokens: int, seed: int) -> list[TraceRequest]:
    stream = np.random.default_rng(seed)
    times_s = np.cumsum(stream.exponential(1 / rate, round(rate * seconds)))
    return [
        TraceRequest(float(at_s), f"tenant-{index % TENANTS}", prompt_tokens, 8)
        for index, at_s in enumerate(times_s)
    ]


def measure(rate: float, seconds: float, prompt_tokens: int, seed: int = 1) -> dict[str, Any]:
    """Drive the server; returns lag in ms, CPU per request in µs, and how many were answered."""
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as url:
        trace = _trace(rate, seconds, prompt_tokens, seed)
        run = LoadRun(Target(url), trace, Pace(seed=seed, warmup_requests=50))
        with pinned(generator_cores()):
            before_ns = time.process_time_ns()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result = runner.run(asyncio.wait_for(run.run(), seconds + _END_S_MAX))
            used_ns = time.process_time_ns() - before_ns
    return _report(result, rate, prompt_tokens, used_ns)


def _report(result: RunResult, rate: float, prompt_tokens: int, used_ns: int) -> dict[str, Any]:
    samples = result.recorder.samples
    ttft_ms = [sample.ttft_ms for sample in samples]
    return {
        "rate": rate,
        "prompt_tokens": prompt_tokens,
        "requests": len(samples),
        "answered": sum(sample.fate is Fate.COMPLETED for sample in samples),
        "cpu_us_per_request": round(used_ns / 1e3 / len(samples), 1),
        "ttft_ms": {f"p{at}": round(float(np.percentile(ttft_ms, at)), 3) for at in (50, 99)},
        **generator_health(result),
        "machine": describe(),
    }


@click.command(epilog=_EPILOG)
@click.option("--rate", type=click.FloatRange(min=1), default=1000.0, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0.5), default=20.0, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--lag-max", "lag_max_ms", type=float, default=LAG_MS_MAX, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def main(rate: float, seconds: float, prompt_tokens: int, lag_max_ms: float, as_json: bool) -> None:
    """Measure the load generator's own lag and CPU against a server that answers at once."""
    try:
        report = measure(rate, seconds, prompt_tokens)
    except TimeoutError:
        raise click.ClickException("the server of the measurement did not answer") from None
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show(report)
    if report["answered"] != report["requests"]:
        raise click.ClickException(
            f"{report['answered']:,} of {report['requests']:,} requests were answered"
        )
    if report["send_lag_ms"]["p99"] > lag_max_ms:
        raise click.ClickException(
            f"the lag's 99th percentile is {report['send_lag_ms']['p99']} ms, "
            f"above {lag_max_ms:g} ms"
        )


def _show(report: dict[str, Any]) -> None:
    table = Table("", "p50", "p99", "max")
    for name in ("send_lag_ms", "loop_lag_ms", "connect_ms"):
        row = report[name]
        table.add_row(name, *(str(row[at]) for at in ("p50", "p99", "max")))
    console = Console()
    console.print(table)
    console.print(
        f"{report['requests']:,} requests of {report['prompt_tokens']} tokens at "
        f"{report['sent_requests_per_s']:,.0f}/s, {report['cpu_us_per_request']} µs of CPU each, "
        f"TTFT p50 {report['ttft_ms']['p50']} ms, p99 {report['ttft_ms']['p99']} ms",
        highlight=False,
    )


if __name__ == "__main__":
    main(prog_name="python -m bench.load")
