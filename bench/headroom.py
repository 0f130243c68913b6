"""`python -m bench.headroom` measures what the adaptive headroom costs beside the best fixed one.

Tenants whose lengths are drawn from a public trace wait all the time for one engine, in virtual
time. Each load runs with the adaptive headroom from its default start and from a bad one, and with
fixed ones. Results are lines of a file in `--out`; a run that is there is not made again.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import click

from schedsvc import _core as core
from schedsvc.config import Config, configure
from schedsvc_lab.engine import Engine, Profile, load_profile
from schedsvc_lab.sim.overrides import override, parse
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.runner import EngineRunner
from schedsvc_lab.sim.scenario import patient_config
from schedsvc_lab.sim.scheduler_adapter import CoreAdapter
from schedsvc_lab.sim.workers import work_all
from schedsvc_lab.sim.world import Settings, World
from schedsvc_lab.workload import read_trace

__all__ = ["main"]

LMSYS, AZURE = "lmsys_arena_vtc.csv", "AzureLLMInferenceTrace_conv.csv"
#: Trace and number of tenants.
LOADS = {"LMSYS 8": (LMSYS, 8), "Azure 2": (AZURE, 2), "Azure 4": (AZURE, 4)}
#: Seconds of a run, and more service (input and twice the output) than is served in a second.
PROFILES = {
    "a10g-llama2-7b": (3_000, 2_000),
    "tiny-cpu": (900, 18_000),
    "cpu-tiny-llama": (900, 36_000),
}
SEEDS = 6
OUTPUT_MAX = 1_024
#: A run from a bad start has this time to be where the others are.
FIND_S = 300
START, BAD_START = 0.05, 0.2
FIXED = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08)
PREEMPTED_MAX = 3.0  # of 1,000
PART_MIN = 0.99
_NS = 1_000_000_000
Lengths = Sequence[Sequence[tuple[int, int]]]
_EPILOG = """\b
Example:
  python -m bench.headroom --traces ../shared/data/traces

The bar: at most 3 preemptions of 1,000, and 0.99 of the tokens a second of the best fixed headroom
that preempts no more; from a bad start it has five minutes to get there.
"""


@dataclass(frozen=True)
class Task:
    """One run: its engine, its load, and its headroom: a start, or a fixed one."""

    profile: str
    load: str
    seed: int
    headroom: float
    fixed: bool

    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults."""
        names = ["scheduler.headroom"]
        if self.fixed:
            names += ["scheduler.expert.headroom_min", "scheduler.expert.headroom_max"]
        return dict.fromkeys(names, self.headroom)


@dataclass(frozen=True)
class Found:
    """Holds what one engine served in a span, and how often it preempted."""

    ended: int
    tokens: int
    preempted: int
    seconds: float


class Backlog(World):
    """Runs for a time, and notes preemptions as they come."""

    def __init__(self, requests: Requests, profile: Profile, config: Config) -> None:
        engine = profile.config()
        scheduler = core.Scheduler(**config.core_options())
        configure(scheduler, config, 0)
        scheduler.set_pool(
            0, b"engine", 1, engine.capacity_tokens, engine.block_size_tokens,
            engine.sequences_max, engine.context_tokens_max,
        )  # fmt: skip
        flows = [scheduler.flow_index(name.encode()) for name in requests.clients]
        adapter = CoreAdapter(scheduler, requests, flows, OUTPUT_MAX)
        runner = EngineRunner(Engine(engine, profile.step_cost(engine.sequences_max)))
        self.core = scheduler
        self.preempted_ns: list[int] = []
        super().__init__(requests, adapter, [runner], Settings())

    def _sample(self) -> None:
        super()._sample()
        fresh = self._runners[0].engine.counts()[2] - len(self.preempted_ns)
        self.preempted_ns += [self.now_ns] * fresh

    def play(self, seconds: int) -> None:
        """Run for a time. Raises RuntimeError if a tenant had nothing queued before the end."""
        while self.now_ns < seconds * _NS and self.ended < len(self.requests):
            self._step(self._next_ns())
        for name in self.requests.clients:
            flow = self.core.flow_index(name.encode())
            if not self.core.flow_stats(self.now_ns, flow)["queued"]:
                raise RuntimeError(f"{name} has nothing queued: give it more requests")

    def found(self, from_s: int) -> Found:
        """Sum up from a second on. O(requests)."""
        first, tokens, ended = from_s * _NS, 0, 0
        for at, end_ns in enumerate(self.outcomes.end_ns):
            if end_ns >= first:
                ended += 1
                tokens += self.requests.prompt_tokens[at] + self.requests.output_tokens[at]
        preempted = sum(at_ns >= first for at_ns in self.preempted_ns)
        return Found(ended, tokens, preempted, (self.now_ns - first) / _NS)


Results = dict[Task, dict[str, Any]]


def lengths_of(folder: Path, load: str, context: int) -> Lengths:
    """Return the lengths that each tenant draws from: of its client, or of the whole trace."""
    file, tenants = LOADS[load]
    of_client: dict[str, list[tuple[int, int]]] = {}
    for row in read_trace(folder / file, tenant=""):
        if row.prompt_tokens + OUTPUT_MAX <= context and row.output_tokens:
            pair = (row.prompt_tokens, min(row.output_tokens, OUTPUT_MAX))
            of_client.setdefault(row.tenant, []).append(pair)
    busiest = sorted(of_client.values(), key=len, reverse=True)[:tenants]
    return busiest if len(busiest) == tenants else busiest * tenants


def draw(lengths: Lengths, service: int, seed: int) -> Requests:
    """Draw requests of all tenants, so much service of each; all arrive at once."""
    draws, rows = Random(f"headroom {seed}"), []
    for tenant, pairs in enumerate(lengths):
        left = service / len(lengths)
        while left > 0:
            prompt, output = draws.choice(pairs)
            rows.append((0, tenant, prompt, output))
            left -= prompt + 2 * output
    return Requests([f"t{tenant}" for tenant in range(len(lengths))], rows)


def play(folder: Path, task: Task, more: dict[str, Any]) -> dict[str, Any]:
    """Make one run, and return its figures."""
    seconds, service = PROFILES[task.profile]
    profile = load_profile(task.profile)
    lengths = lengths_of(folder, task.load, profile.engine.context_tokens_max or 4_096)
    requests = draw(lengths, seconds * service, task.seed)
    profile, config = override(
        profile, patient_config(requests.clients), {**task.settings(), **more}
    )
    run = Backlog(requests, profile, config)
    run.play(seconds)
    run.core.check()
    return {"all": asdict(run.found(0)), "found": asdict(run.found(FIND_S))}


def _work(common: tuple[Path, dict[str, Any]], task: Task) -> dict[str, Any]:
    return play(common[0], task, common[1])


def tasks_of(seeds: int, fixed: Sequence[float]) -> Iterator[Task]:
    """Yield all runs."""
    for profile, load, seed in product(PROFILES, LOADS, range(1, seeds + 1)):
        for start in (START, BAD_START):
            yield Task(profile, load, seed, start, fixed=False)
        for headroom in fixed:
            yield Task(profile, load, seed, headroom, fixed=True)


def pooled(results: Iterable[dict[str, Any]], span: str) -> tuple[float, float]:
    """Return tokens a second, and preemptions of 1,000 requests, over all seeds."""
    spans = [each[span] for each in results]
    tokens = sum(each["tokens"] for each in spans) / sum(each["seconds"] for each in spans)
    preempted = 1_000 * sum(each["preempted"] for each in spans)
    return tokens, preempted / max(1, sum(each["ended"] for each in spans))


@dataclass(frozen=True)
class Row:
    """Compares the adaptive headroom of a load with the best fixed one that preempts no more."""

    tokens: float
    preempted: float
    part: float  # of the best fixed one; not a number: each fixed one preempts more

    @property
    def holds(self) -> bool:
        """Return whether the bar holds."""
        return self.preempted <= PREEMPTED_MAX and not self.part < PART_MIN


def compare(results: Results, profile: str, load: str, start: float) -> Row:
    """Compare from the start on; from a bad start after the time to find the way. O(runs)."""
    span = "found" if start == BAD_START else "all"
    groups: dict[tuple[bool, float], list[dict[str, Any]]] = {}
    for task, result in results.items():
        if (task.profile, task.load) == (profile, load):
            groups.setdefault((task.fixed, task.headroom), []).append(result)
    tokens, preempted = pooled(groups[False, start], span)
    fixed = (pooled(runs, span) for (is_fixed, _), runs in groups.items() if is_fixed)
    best = max((served for served, thrown in fixed if thrown <= preempted), default=math.nan)
    return Row(tokens, preempted, tokens / best)


def read(file: Path) -> Results:
    """Read the results of an earlier command."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = (json.loads(line) for line in lines)
    return {Task(**row["task"]): row["result"] for row in rows}


@click.command(epilog=_EPILOG)
@click.option("--traces", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/headroom"))
@click.option("--seeds", default=SEEDS, show_default=True)
@click.option("--fixed", multiple=True, type=float, default=FIXED, help="A fixed headroom.")
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="A setting.")
@click.option("--jobs", default=2, show_default=True)
def main(
    traces: Path, out: Path, seeds: int, fixed: Sequence[float], given: Sequence[str], jobs: int
) -> None:
    """Measure, and print a row for each load and start. Exit status 1: the bar does not hold."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "runs.jsonl"
    results = read(file)
    lacking = [task for task in tasks_of(seeds, fixed) if task not in results]
    more = dict(parse(text) for text in given)
    for task, result in zip(lacking, work_all(_work, lacking, (traces, more), jobs), strict=True):
        with file.open("a") as book:
            book.write(json.dumps({"task": asdict(task), "result": result}) + "\n")
        results[task] = result
    misses = 0
    for profile, load, start in product(PROFILES, LOADS, (START, BAD_START)):
        row = compare(results, profile, load, start)
        misses += not row.holds
        click.echo(
            f"{profile:16}{load:9}{start:5.0%}{row.tokens:10,.0f} tokens/s{row.preempted:7.2f}"
            f" preempted of 1,000{row.part:7.3f} of the best fixed"
            f"{'' if row.holds else '  MISSES'}"
        )
    sys.exit(misses > 0)


if __name__ == "__main__":
    main(prog_name="python -m bench.headroom")
