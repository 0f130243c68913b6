"""Compares policies on a trace from Python, see docs/use/researcher.md."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time_ns
from typing import Any, NamedTuple

import numpy as np

from schedsvc.config import Config, load
from schedsvc_lab.engine import Profile, load_profile
from schedsvc_lab.sim import scenario as scenarios
from schedsvc_lab.sim.overrides import override
from schedsvc_lab.sim.own_policy import Policy, PolicyError, load_policy, policy_name
from schedsvc_lab.sim.report import Column, columns_of, summarise, write_requests
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import POLICIES, Run, Scenario, patient_config
from schedsvc_lab.sim.workers import work_all

__all__ = ["Comparison", "Measured", "each_run", "simulate"]

_NS_PER_MS = 1_000_000
_TEXTS = ("policy", "tenant", "request_class", "verdict", "engine")
_NOTHING = Requests((), ())

#: Hears of a run by policy and seed how many of its requests have ended.
Watch = Callable[[str, int, int], None]


class Measured(NamedTuple):
    """Holds a run, and the CPU time that it took."""

    run: Run
    cpu_s: float


class _Task(NamedTuple):
    policy: Policy
    seed: int
    watch: Watch | None


def each_run(
    scenario: Scenario,
    requests: Requests,
    policies: Sequence[Policy],
    seeds: int = 1,
    jobs: int = 1,
    watch: Watch | None = None,
) -> Iterator[Measured]:
    """Run every policy with every seed, up to `jobs` at a time, and yield the runs in order.

    `watch` hears only of runs in this process. Raises PolicyError, ScenarioError and WorkerError.
    """
    pairs = [(policy, seed) for policy in policies for seed in range(seeds)]
    if min(jobs, len(pairs)) <= 1:
        yield from work_all(_run, [_Task(*pair, watch) for pair in pairs], (scenario, requests))
        return
    tasks = [_Task(_importable(policy), seed, None) for policy, seed in pairs]
    for run, cpu_s in work_all(_run_away, tasks, (scenario, requests), jobs):
        # The requests of a run are those of its seed, and need not travel.
        jittered = requests.jittered(run.seed, scenario.jitter_ns)
        yield Measured(replace(run, requests=jittered), cpu_s)


def _run(common: tuple[Scenario, Requests], task: _Task) -> Measured:
    scenario, requests = common
    name, hears = policy_name(task.policy), task.watch
    watch = None if hears is None else lambda ended: hears(name, task.seed, ended)
    before_ns = process_time_ns()
    run = scenarios.simulate(scenario, requests, task.policy, task.seed, watch)
    # A clock may stand still over a very short run.
    return Measured(run, max(process_time_ns() - before_ns, 1_000) / 1e9)


def _run_away(common: tuple[Scenario, Requests], task: _Task) -> Measured:
    measured = _run(common, task)
    return Measured(replace(measured.run, requests=_NOTHING), measured.cpu_s)


def _importable(policy: Policy) -> str:
    """Name a policy so that another process finds it. Raises PolicyError."""
    name = policy_name(policy)
    if isinstance(policy, str):
        return name
    module = policy.__module__
    if module == "__main__" or "<locals>" in name or load_policy(name) is not policy:
        raise PolicyError(
            f"{name}: another process cannot import it; put the class into a module of its own, "
            "or take jobs=1"
        )
    return name


@dataclass(frozen=True)
class Comparison:
    """Holds the runs of one trace under several policies, by policy and seed."""

    runs: tuple[Measured, ...]

    def columns(self) -> dict[str, Column]:
        """Return the tidy table, one row for each request of each run, as columns by name.

        The rows follow the runs, and in a run the arrivals. Times are in seconds, NaN for what did
        not happen. O(rows).
        """
        parts = [columns_of(measured.run) for measured in self.runs]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def frame(self) -> Any:
        """Return the tidy table as a DataFrame. Raises ImportError if pandas is not installed."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                "frame() needs pandas: pip install 'schedsvc-lab[frames]'; columns() holds the same"
            ) from error
        return pd.DataFrame(self.columns()).astype(dict.fromkeys(_TEXTS, "category"))

    def report(self, span_s: float | None = None) -> dict[str, list[dict[str, Any]]]:
        """Sum up the runs of each policy as `report.json` does. O(requests)."""
        report: dict[str, list[dict[str, Any]]] = {}
        for run, cpu_s in self.runs:
            report.setdefault(run.policy, []).append(summarise(run, cpu_s, span_s))
        return report

    def write_csv(self, path: str | Path) -> None:
        """Write the tidy table to a file; what did not happen is empty. O(rows)."""
        with Path(path).open("w", newline="") as file:
            for measured in self.runs:
                write_requests(measured.run, file, header=file.tell() == 0)

    def draw(self, folder: str | Path, span_s: float | None = None) -> list[Path]:
        """Draw the pictures of `schedsvc sim --figures` for the first seed; return the files."""
        # Imported here: matplotlib would make all else start later.
        from schedsvc_lab.sim.figures import draw_all

        Path(folder).mkdir(parents=True, exist_ok=True)
        first = [measured.run for measured in self.runs if measured.run.seed == 0]
        return draw_all(first, Path(folder), span_s)


def simulate(
    trace: str | Path | Requests,
    policy: Policy | Sequence[Policy] = "vtc",
    profile: str | Profile = "a10g-llama2-7b",
    *,
    config: str | Path | Config | None = None,
    changes: Mapping[str, Any] | None = None,
    engines: int = 1,
    seeds: int = 1,
    jitter_ms: float = 0.0,
    max_tokens: int = 0,
    sessions: bool = False,
    jobs: int = 1,
) -> Comparison:
    """Serve a trace under one or several policies, as `schedsvc sim` does with the same options.

    A policy is one of `--policy`, a class, or package.module:Class. `changes` are those of `--set`
    as a mapping of names to values. Raises ValueError for whatever is wrong with what is given, and
    OSError.
    """
    policies = [policy] if isinstance(policy, str | type) else list(policy)
    for each in policies:
        if isinstance(each, str) and ":" not in each and each not in POLICIES:
            raise PolicyError(f"{each!r} is none of {', '.join(POLICIES)}, nor module:Class")
    if not policies or min(seeds, jobs, engines) < 1:
        raise ValueError("there has to be at least one policy, seed, job and engine")
    loaded = load_profile(profile) if isinstance(profile, str) else profile
    requests = trace if isinstance(trace, Requests) else Requests.read(Path(trace))
    rules = config if config is None or isinstance(config, Config) else load(Path(config))
    if changes:
        loaded, rules = override(loaded, rules or patient_config(requests.clients), dict(changes))
    scenario = Scenario(
        profile=loaded,
        config=rules,
        engines=engines,
        jitter_ns=round(jitter_ms * _NS_PER_MS),
        output_tokens_max=max_tokens,
        sessions=sessions,
    )
    return Comparison(tuple(each_run(scenario, requests, policies, seeds, jobs)))
