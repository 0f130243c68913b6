"""`python -m bench.headroom` measures what the adaptive headroom costs beside the best fixed one.

Tenants whose lengths are drawn from a public trace wait all the time for one engine, in virtual
time. Each load runs with the adaptive headroom from its default start and from a bad one, and with
fixed ones. Results are lines of a file in `--out`; a run that is there is not made again.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
BAD_START = 0.2
FIXED = (0.0, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.06, 0.08)
PREEMPTED_MAX = 3.0  # of 1,000
PART_MIN = 0.99
_NS = 1_000_000_000
Lengths = Sequence[Sequence[tuple[int, int]]]


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
    """Runs for a time, and notes preemptions and the headroom as they come."""

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
        self.headrooms: list[float] = []  # once a second, as parts of the pool
        self._capacity_tokens = engine.capacity_tokens
        super().__init__(requests, adapter, [runner], Settings())

    def _sample(self) -> None:
        super()._sample()
        fresh = self._runners[0].engine.counts()[2] - len(self.preempted_ns)
        self.preempted_ns += [self.now_ns] * fresh
        told = self.core.stats(self.now_ns, 0)["pools"][0]
        self.headrooms.append(told["headroom_tokens"] / self._capacity_tokens)

    def play(self, seconds: int) -> None:
        """Run for a time. Raises RuntimeError if a tenant had nothing queued before the end."""
        while self.now_ns < seconds * _NS:
            self._step(self._next_ns())
            if self.ended == len(self.requests):
                break
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
    draws, rows = Random(f"headroom {seed}"), []  # noqa: S311 - a simulation, no secret
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
    return {
        "all": asdict(run.found(0)),
        "found": asdict(run.found(FIND_S)),
        "headrooms": [round(each, 4) for each in run.headrooms[:: max(1, seconds // 48)]],
    }


def _work(common: tuple[Path, dict[str, Any]], task: Task) -> dict[str, Any]:
    return play(common[0], task, common[1])


def tasks_of(
    profiles: Iterable[str], loads: Iterable[str], seeds: int, fixed: Sequence[float]
) -> Iterator[Task]:
    """Yield all runs."""
    for profile in profiles:
        for load in loads:
            for seed in range(1, seeds + 1):
                yield Task(profile, load, seed, 0.02, fixed=False)
                yield Task(profile, load, seed, BAD_START, fixed=False)
                for headroom in fixed:
                    yield Task(profile, load, seed, headroom, fixed=True)


def pooled(results: Iterable[dict[str, Any]], span: str) -> tuple[float, float]:
    """Return tokens a second, and preemptions of 1,000 requests, over all seeds."""
    spans = [each[span] for each in results]
    tokens = sum(each["tokens"] for each in spans) / sum(each["seconds"] for each in spans)
    preempted = 1_000 * sum(each["preempted"] for each in spans)
    return tokens, preempted / max(1, sum(each["ended"] for each in spans))


@click.command()
@click.option("--traces", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/headroom"))
@click.option("--profile", "profiles", multiple=True, default=tuple(PROFILES))
@click.option("--load", "loads", multiple=True, default=tuple(LOADS))
@click.option("--seeds", default=SEEDS, show_default=True)
@click.option("--fixed", multiple=True, type=float, default=FIXED)
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="A setting.")
@click.option("--name", default="runs", help="Name of the file of the results.")
@click.option("--jobs", default=2)
def main(
    traces: Path, out: Path, profiles: Sequence[str], loads: Sequence[str], seeds: int,
    fixed: Sequence[float], given: Sequence[str], name: str, jobs: int,
) -> None:  # fmt: skip
    """Measure."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}.jsonl"
    have: dict[Task, dict[str, Any]] = {}
    if file.exists():
        for line in file.read_text().splitlines():
            row = json.loads(line)
            have[Task(**row["task"])] = row["result"]
    every = list(tasks_of(profiles, loads, seeds, fixed))
    lacking = [task for task in every if task not in have]
    more = dict(parse(text) for text in given)
    for task, result in zip(lacking, work_all(_work, lacking, (traces, more), jobs), strict=True):
        with file.open("a") as book:
            book.write(json.dumps({"task": asdict(task), "result": result}) + "\n")
        have[task] = result
    for profile in profiles:
        for load in loads:
            groups: dict[tuple[bool, float], list[dict[str, Any]]] = {}
            for task in every:
                if (task.profile, task.load) == (profile, load):
                    groups.setdefault((task.fixed, task.headroom), []).append(have[task])
            for (is_fixed, headroom), results in groups.items():
                whole, found = pooled(results, "all"), pooled(results, "found")
                word = "fixed" if is_fixed else "adaptive from"
                print(
                    f"{profile:16}{load:9}{word} {headroom:6.3f}: {whole[0]:8.1f} tokens/s {whole[1]:6.2f}; later {found[0]:8.1f} {found[1]:6.2f}"
                )
            if not fixed:
                print([[h for h in r["headrooms"]] for r in results][0])


if __name__ == "__main__":
    main(prog_name="python -m bench.headroom")
