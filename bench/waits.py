"""Measures, as `python -m bench.waits`, whether a flood's requests learn how long they will wait.

A scheduler with the defaults, and the emulated engine with the gate in it, each run in a process of
their own. The flood of tests/lab/sim/waits.py arrives in real time; each of its requests names the
engine's pool, as the gate does. A watcher notes the waits that Stats and `why` expect as a request
comes, and how long it has waited in the end.
"""

import asyncio
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import grpc
import uvloop
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from schedsvc_client.v1 import explain_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.explain_pb2_grpc import ExplainServiceStub
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from bench import machine
from bench.harness import json_option, verdict
from bench.peers import emulator, serving
from schedsvc.text.option_types import make_folder
from schedsvc_lab.demo.traffic import Tenant, generate
from schedsvc_lab.load.generator import LoadRun, Pace
from schedsvc_lab.load.target import OutputMode, Target

__all__ = ["TRUE_MIN", "main", "measure"]

#: The forecast has to be within a factor of 1.5 of the real wait for this part of the requests.
TRUE_MIN = 0.8
#: A flood of more than twice what the engine serves, beside two tenants within their shares.
FLOOD = (
    Tenant("hog", 12.0, 5.0, 300, 0.6, 100, 0.6, 1_000),
    Tenant("quiet", 0.5, 0.0, 40, 0.6, 40, 0.6, 1_000),
    Tenant("steady", 0.5, 0.0, 120, 0.6, 100, 0.6, 1_000),
)

_PROFILE = "a10g-llama2-7b"
_OUTPUT_MAX = 1_000
_PERIOD_S = 0.25
#: A refusal that comes so soon is an early one.
_EARLY_S = 1.0
_CALL_S_MAX = 30.0
#: Longer than any request may wait.
_DRAIN_S = 32.0
_KINDS = {"early refusal": True, "evictions alone": False}
_EPILOG = """\b
Examples:
  python -m bench.waits --seconds 120
  python -m bench.waits --rate 9 --json

Requests that are refused within a second are not judged: they do not wait. Exit status 1: fewer
than 80 % of the others had a forecast within a factor of 1.5 (both below a second counts).
"""


@dataclass(slots=True)
class _Wait:
    """Holds one request's expectations at its arrival, in ms (-1: none), and what it waited."""

    tenant: str
    stats_ms: int
    why_ms: int
    waited_s: float = -1.0
    granted: bool = False

    @property
    def counts(self) -> bool:
        """Return whether it was decided, and not refused at once."""
        return self.waited_s >= 0 and (self.granted or self.waited_s > _EARLY_S)


@dataclass
class _Watcher:
    """Asks the scheduler about each request as it comes, until it has been decided."""

    target: str
    from_s: float
    waits: dict[str, _Wait] = field(default_factory=dict)
    evicted: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self._open: set[str] = set()
        self._seen: set[str] = set()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._began_s = time.monotonic()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs. Raises what stopped the watcher."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        if self._error is not None:
            raise self._error

    def _watch(self) -> None:
        try:
            with grpc.insecure_channel(self.target) as channel:
                scheduler: Any = SchedulerServiceStub(channel)
                explain: Any = ExplainServiceStub(channel)
                expected: dict[str, int] = {}
                for turn in itertools.count():
                    self._look(explain, expected, all_open=turn % 4 == 0)
                    stats = scheduler.Stats(pb.StatsRequest(), timeout=_CALL_S_MAX)
                    expected = {flow.tenant: flow.wait_expected_ms for flow in stats.flows}
                    if self._stop.wait(_PERIOD_S) and not self._open:
                        return
        except BaseException as error:
            self._error = error

    def _look(self, explain: Any, expected: dict[str, int], *, all_open: bool) -> None:
        """Note the requests that are new; look at those that wait."""
        listed = explain.ListRequestIds(
            explain_pb2.ListRequestIdsRequest(), timeout=_CALL_S_MAX
        ).request_ids
        new = [name for name in listed if name not in self._seen]
        self._seen.update(new)
        for name in (*new, *(tuple(self._open) if all_open else ())):
            request = explain_pb2.ExplainRequest(request_id=name)
            for story in explain.Explain(request, timeout=_CALL_S_MAX).requests[:1]:
                self._note(name, story, expected)

    def _note(self, name: str, story: Any, expected: dict[str, int]) -> None:
        if name not in self.waits:
            if time.monotonic() - self._began_s < self.from_s:
                return
            told_ms = expected.get(story.tenant, -1)
            self.waits[name] = _Wait(story.tenant, told_ms, story.wait_told_ms)
        self._open.add(name)
        if story.state == explain_pb2.REQUEST_STATE_QUEUED:
            return
        self._open.discard(name)
        wait = self.waits[name]
        wait.waited_s = story.queue_duration_us / 1e6
        wait.granted = story.state != explain_pb2.REQUEST_STATE_REFUSED
        self.refused += not wait.granted
        self.evicted += wait.counts and not wait.granted


def is_true(told_s: float, real_s: float) -> bool:
    """Return whether a forecast is within a factor of 1.5; both below a second counts."""
    if max(told_s, real_s) < 1:
        return told_s >= 0
    return real_s / 1.5 <= told_s <= real_s * 1.5


def measure(
    *, refuses_early: bool, rate: float, settle_s: float, seconds: float, seed: int = 1
) -> tuple[_Watcher, list[_Wait]]:
    """Let a flood run at a real gate; the watcher, and the waits that are judged."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="waits-")))
        settings = {
            "scheduler": {} if refuses_early else {"early_refusal": False},
            "limits": {"drain_ms": 0},
            "tenants": [{"name": tenant.name} for tenant in FLOOD],
            "log": {"level": "warning"},
        }
        scheduler = stack.enter_context(serving(folder, settings, cores=()))
        variables = {"SCHEDSVC_TARGET": scheduler.unix, "SCHEDSVC_TENANT_HEADERS": "x-tenant-id"}
        gate = ("--middleware", "schedsvc_vllm.gate.Gate")
        _, url = stack.enter_context(
            emulator(folder, *gate, profile=_PROFILE, environment=variables)
        )
        watcher = _Watcher(scheduler.unix, settle_s)
        tenants = (replace(FLOOD[0], rate_per_s=rate), *FLOOD[1:])
        trace = generate(seed, settle_s + seconds, tenants)
        target = Target(url, output=OutputMode.EMULATED, max_tokens=_OUTPUT_MAX)
        run = LoadRun(target, trace, Pace(seed=seed, drain_s=_DRAIN_S))
        with watcher.watching(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run.run())
    return watcher, [wait for wait in watcher.waits.values() if wait.counts]


def _row(kind: str, watcher: _Watcher, waits: Sequence[_Wait]) -> dict[str, Any]:
    def part(told: Sequence[bool]) -> float:
        return round(sum(told) / max(1, len(told)), 3)

    # `why` says nothing of a wait where the pool had room.
    why = [is_true(max(0, wait.why_ms) / 1e3, wait.waited_s) for wait in waits]
    return {
        "kind": kind,
        "judged": len(waits),
        "refused": watcher.refused,
        "evicted": watcher.evicted,
        "true_stats": part([is_true(wait.stats_ms / 1e3, wait.waited_s) for wait in waits]),
        "true_why": part(why),
        "tenants": {
            tenant.name: part(
                [is_true(w.stats_ms / 1e3, w.waited_s) for w in waits if w.tenant == tenant.name]
            )
            for tenant in FLOOD
        },
    }


@click.command(epilog=_EPILOG)
@click.option("--seconds", type=click.FloatRange(min=5), default=120.0, show_default=True)
@click.option("--settle", type=click.FloatRange(min=0), default=60.0, show_default=True)
@click.option(
    "--rate", default=FLOOD[0].rate_per_s, show_default=True, help="Requests of the flood a second."
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/waits"),
    show_default=True,
    help="Folder for report.json and waits.png.",
)
@json_option
def main(seconds: float, settle: float, rate: float, seed: int, out: Path, as_json: bool) -> None:
    """Measure whether forecasts of waits are true under a flood, at a gate, in real time."""
    make_folder(out)
    found = {
        kind: measure(refuses_early=early, rate=rate, settle_s=settle, seconds=seconds, seed=seed)
        for kind, early in _KINDS.items()
    }
    rows = [_row(kind, *each) for kind, each in found.items()]
    report: dict[str, Any] = {
        "machine": machine.describe(),
        "commit": machine.commit(),
        "rows": rows,
        "holds": all(
            row["judged"] and min(row["true_stats"], row["true_why"]) >= TRUE_MIN for row in rows
        ),
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    _draw({kind: waits for kind, (_, waits) in found.items()}, out / "waits.png")
    if not as_json:
        click.echo(f"{out / 'report.json'}, {out / 'waits.png'}")
    verdict(report, as_json, _show)


def _show(report: dict[str, Any]) -> None:
    table = Table("", "judged", "refused", "evicted", "true in Stats", "true in why", "by tenant")
    for row in report["rows"]:
        tenants = ", ".join(f"{name} {part:.0%}" for name, part in row["tenants"].items())
        figures = (f"{row[name]:,}" for name in ("judged", "refused", "evicted"))
        parts = (f"{row[name]:.1%}" for name in ("true_stats", "true_why"))
        table.add_row(row["kind"], *figures, *parts, tenants)
    Console().print(table)


def _draw(found: dict[str, list[_Wait]], path: Path) -> None:
    """Draw the expected waits over the real ones. Writes a PNG."""
    figure = Figure(figsize=(11, 4.8), dpi=130, facecolor="white", layout="constrained")
    colors = {
        tenant.name: color
        for tenant, color in zip(FLOOD, ("#d1495b", "#00798c", "#edae49"), strict=True)
    }
    for axes, (kind, waits) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        longest = max([1.0, *(max(w.waited_s, w.stats_ms / 1e3) for w in waits)])
        axes.fill_between(
            [0, longest], [0, longest / 1.5], [0, longest * 1.5], color="#eef1f5",
            label="within a factor of 1.5",
        )  # fmt: skip
        for name, color in colors.items():
            own = [wait for wait in waits if wait.tenant == name]
            axes.scatter(
                [w.waited_s for w in own], [w.stats_ms / 1e3 for w in own],
                s=8, color=color, label=name,
            )  # fmt: skip
        axes.set_xlim(0, longest)
        axes.set_ylim(0, longest)
        axes.set_xlabel("waited, in seconds")
        axes.set_title(f"With {kind}", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("expected by Stats, in seconds")
    figure.axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path)


if __name__ == "__main__":
    main(prog_name="python -m bench.waits")
