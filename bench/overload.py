"""`python -m bench.overload` measures goodput when 2, 5 and 10 times too much is asked (T8).

A scheduler, and the emulated engine with the gate in it, each run in a process of their own.
Requests of three tenants arrive in open-loop Poisson processes, so no client waits for an answer
before it sends the next request. The engine's steps take a fixed time, so its capacity does not
depend on this machine, but the cost of refusals does. Beside the load a probe reports and ends
leases of its own (bench/overload_probe.py).
"""

import asyncio
import json
import re
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import uvloop
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from bench import machine, memory
from bench.harness import json_option, verdict
from bench.machine import cpu_ns
from bench.overload_probe import probing
from bench.peers import Peer, emulator, serving
from schedsvc.text.option_types import make_folder
from schedsvc_lab.load.generator import LoadRun, Pace, RunResult
from schedsvc_lab.load.report import output_tokens_per_s, percentile
from schedsvc_lab.load.samples import Fate
from schedsvc_lab.load.target import Target
from schedsvc_lab.workload import TraceRequest

__all__ = ["GOODPUT_MIN", "LEVELS", "main", "measure"]

GOODPUT_MIN = 0.9
LEVELS = (0.5, 1.0, 2.0, 5.0, 10.0)
TENANTS = ("one", "two", "three")

_STEP_MS, _SEQUENCES = 25, 16
_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 40
#: Requests a second that the engine serves: each is in one prompt step and its decode steps.
CAPACITY = _SEQUENCES / ((_OUTPUT_TOKENS + 1) * _STEP_MS / 1e3)
_SETTLE = 0.3
_TABLE_CHARS = 160
_DRAIN_S = 15.0
_LAG = re.compile(r'^schedsvc_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)
_EPILOG = """\b
Examples:
  python -m bench.overload --seconds 20
  python -m bench.overload --levels 1,10 --json

Exit status 1: goodput at the highest load is below nine tenths of its peak.
"""


@dataclass(frozen=True)
class _Stand:
    """Holds the measured processes: the scheduler, and the engine behind the gate."""

    scheduler: Peer
    engine_pid: int
    url: str
    metrics: str

    def lag(self) -> dict[float, float]:
        """Read how often the scheduler's event loop was how late, by upper bounds in seconds."""
        with urllib.request.urlopen(f"{self.metrics}/metrics", timeout=30) as page:
            text = page.read().decode()
        return {float(bound): float(count) for bound, count in _LAG.findall(text)}


@contextmanager
def _engine(folder: Path, target: str) -> Iterator[tuple[int, str]]:
    """Run the emulated engine with the gate in it; its process and its URL."""
    profile = folder / "engine.yaml"
    step_ns = _STEP_MS * 1_000_000
    cost = {"step_ns": 0, "prefill_ns": step_ns, "prefill_token_ns": 0, "decode_kv_token_ns": 0}
    sizes = {
        "kv_tokens": 2 * _SEQUENCES * (_PROMPT_TOKENS + _OUTPUT_TOKENS),
        "block_size_tokens": 8,
        "sequences_max": _SEQUENCES,
        "step_tokens_max": 4_096,
        "context_tokens_max": 1_024,
    }
    # JSON is YAML.
    fields = {"cost": cost | {"decode_ns": [[0, step_ns]]}, "engine": sizes}
    profile.write_text(json.dumps({"name": "steady", "source": "Steps of one length.", **fields}))
    variables = {"SCHEDSVC_TARGET": target, "SCHEDSVC_TENANT_HEADERS": "x-tenant-id"}
    gate = ("--middleware", "schedsvc_vllm.gate.Gate")
    with emulator(folder, *gate, profile=str(profile), environment=variables) as engine:
        yield engine


@contextmanager
def _standing() -> Iterator[_Stand]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overload-")))
        tenants = [{"name": name} for name in (*TENANTS, "probe")]
        settings = {
            # Each is as long as two thirds of the engine's work for a second.
            "scheduler": {"flow_queue_max": 16, "queue_ttl_ms": 5_000},
            "limits": {"drain_ms": 0},
            "tenants": tenants,
            "pools": [{"name": "probe", "capacity_tokens": 1 << 24}],
            "metrics": {"listen": "127.0.0.1:0"},
            "log": {"level": "warning"},
        }
        scheduler = stack.enter_context(serving(folder, settings, cores=()))
        told = json.loads((folder / "scheduler.ready").read_text())
        pid, url = stack.enter_context(_engine(folder, scheduler.unix))
        yield _Stand(scheduler, pid, url, told["metrics"].removesuffix("/metrics"))


def _trace(rate: float, seconds: float, seed: int) -> list[TraceRequest]:
    draws = np.random.default_rng(seed)
    times_s = np.cumsum(draws.exponential(1 / rate, max(1, round(rate * seconds))))
    return [
        TraceRequest(float(at_s), TENANTS[index % 3], _PROMPT_TOKENS, _OUTPUT_TOKENS)
        for index, at_s in enumerate(times_s)
    ]


def measure(levels: Sequence[float], seconds: float, seed: int = 1) -> list[dict[str, Any]]:
    """Measure each load on one stand, one after the other; times in ms, memory in MB."""
    with _standing() as stand:
        _run(stand, _trace(CAPACITY / 2, 3.0, seed), 0.0)  # the first of everything
        return [_measure(stand, level, seconds, seed) for level in levels]


def _run(stand: _Stand, trace: list[TraceRequest], warmup_s: float) -> RunResult:
    run = LoadRun(Target(stand.url), trace, Pace(warmup_s=warmup_s, drain_s=_DRAIN_S))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run.run())


def _measure(stand: _Stand, level: float, seconds: float, seed: int) -> dict[str, Any]:
    pids = {"scheduler": stand.scheduler.process.pid, "engine and gate": stand.engine_pid}
    before_ns = {name: cpu_ns(pid) for name, pid in pids.items()}
    lag = stand.lag()
    with probing(stand.scheduler.unix, seconds) as probed:
        result = _run(stand, _trace(level * CAPACITY, seconds, seed), seconds * _SETTLE)
    used_us = {name: (cpu_ns(pid) - before_ns[name]) / 1e3 for name, pid in pids.items()}
    samples = result.recorder.samples
    fates = {fate: [s for s in samples if s.fate is fate] for fate in Fate}
    refused_ms = [sample.e2e_ms for sample in fates[Fate.REFUSED]]
    return {
        "load": level,
        "asked": len(samples),
        "asked_per_s": round(level * CAPACITY, 1),
        "goodput_tokens_per_s": output_tokens_per_s(result),
        "completed": len(fates[Fate.COMPLETED]),
        "refused": len(refused_ms),
        "errors": len(samples) - len(fates[Fate.COMPLETED]) - len(refused_ms),
        "refusal_ms": {f"p{at}": percentile(refused_ms, at) for at in (50, 99)},
        "cpu_us_per_request": {name: round(us / len(samples)) for name, us in used_us.items()},
        "scheduler_mb": round(memory.peak_mb(stand.scheduler.process.pid), 1),
        "loop_lag_ms_p99": _p99_ms(lag, stand.lag()),
        "generator_lag_ms_p99": percentile(result.recorder.send_lag_ms, 99),
        **probed,
    }


def _p99_ms(before: dict[float, float], after: dict[float, float]) -> float:
    """Return the upper bound of the bucket that holds the 99th percentile."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = counts[max(counts)]
    return next(bound * 1e3 for bound, count in counts.items() if count >= 0.99 * total)


def _levels(_: object, __: object, text: str) -> tuple[float, ...]:
    try:
        levels = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter("must be numbers, as in 1,2,5,10") from None
    if not all(0 < level <= 100 for level in levels):
        raise click.BadParameter("each must be above 0 and at most 100")
    return levels


@click.command(epilog=_EPILOG)
@click.option("--seconds", type=click.FloatRange(min=3), default=20.0, show_default=True)
@click.option(
    "--levels",
    default=",".join(f"{level:g}" for level in LEVELS),
    callback=_levels,
    show_default=True,
    help="Loads, in multiples of the engine's capacity.",
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/overload"),
    show_default=True,
    help="Folder for report.json and overload.png.",
)
@json_option
def main(seconds: float, levels: tuple[float, ...], seed: int, out: Path, as_json: bool) -> None:
    """Measure goodput, and what refusals cost, at several times the capacity."""
    make_folder(out)
    measured = measure(levels, seconds, seed)
    peak = max(level["goodput_tokens_per_s"] for level in measured)
    last = max(measured, key=lambda level: float(level["load"]))
    ratio = last["goodput_tokens_per_s"] / peak
    report: dict[str, Any] = {
        "machine": machine.describe(),
        "commit": machine.commit(),
        "capacity_requests_per_s": round(CAPACITY, 1),
        "levels": measured,
        "goodput_to_peak": round(ratio, 3),
        "holds": ratio >= GOODPUT_MIN,
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    _draw(report, out / "overload.png")
    if not as_json:
        click.echo(f"{out / 'report.json'}, {out / 'overload.png'}")
    verdict(report, as_json, _show)


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "load": lambda row: f"{row['load']:g}",
    "asked/s": lambda row: f"{row['asked_per_s']:.0f}",
    "goodput tok/s": lambda row: f"{row['goodput_tokens_per_s']:.0f}",
    "refused": lambda row: f"{row['refused']:,} of {row['asked']:,}",
    "refusal p50 / p99 ms": lambda row: _pair(row["refusal_ms"]),
    "Progress p50 / p99 ms": lambda row: _pair(row["progress_ms"]),
    "Complete p50 / p99 ms": lambda row: _pair(row["complete_ms"]),
    "CPU µs/request": lambda row: f"{row['cpu_us_per_request']['scheduler']:,}",
    "loop lag p99 ms": lambda row: f"≤ {row['loop_lag_ms_p99']:g}",
    "MB": lambda row: f"{row['scheduler_mb']:.0f}",
}


def _pair(percentiles: dict[str, float | None]) -> str:
    """Write two percentiles."""
    return " / ".join("-" if at is None else f"{at:.1f}" for at in percentiles.values())


def _show(report: dict[str, Any]) -> None:
    console = Console()
    # Without a terminal the console has no width.
    console.width = max(console.width, _TABLE_CHARS)
    table = Table(*_COLUMNS)
    for row in report["levels"]:
        table.add_row(*(write(row) for write in _COLUMNS.values()))
    console.print(table)
    console.print(
        f"goodput at {report['levels'][-1]['load']:g} times the capacity over its peak: "
        f"{report['goodput_to_peak']:.3f} (T8: at least {GOODPUT_MIN})",
        highlight=False,
    )


def _draw(report: dict[str, Any], path: Path) -> None:
    """Draw goodput and the latencies of what must not be shed, over the load. Writes a PNG."""
    rows = sorted(report["levels"], key=lambda row: float(row["load"]))
    loads = [row["load"] for row in rows]
    figure = Figure(figsize=(11, 4.6), dpi=130, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(loads, [row["goodput_tokens_per_s"] for row in rows], "o-", color="#00798c", lw=2)
    left.set_ylim(bottom=0)
    left.set_ylabel("output tokens a second")
    left.set_title(
        f"Goodput: {report['goodput_to_peak']:.0%} of its peak at {loads[-1]:g} times the capacity",
        loc="left",
    )
    for name, color in (("progress", "#30638e"), ("complete", "#edae49"), ("refusal", "#d1495b")):
        for percent, style in (("p50", "-"), ("p99", "--")):
            values = [row[f"{name}_ms"][percent] for row in rows]
            label = f"{name.capitalize()}, {percent}"
            known = [np.nan if value is None else value for value in values]
            right.plot(loads, known, style, marker=".", color=color, label=label)
    right.set_yscale("log")
    right.set_ylabel("ms")
    right.set_title("Latency of what is never shed, and of refusals", loc="left")
    right.legend(frameon=False, fontsize=8, ncols=3)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.minorticks_off()
        axes.set_xlabel("load, in multiples of the engine's capacity")
        axes.grid(color="#e6e8ec")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    main(prog_name="python -m bench.overload")
