"""Holds drafts to a bar: on later traffic, each meets its goal if any random configuration does.

For each goal of each trace, `advise` drafts on the first half of the trace. The second half judges
the draft, today's configuration (all defaults), and 200 random configurations. Traces without
tenants are labelled by Zipf's law. `make advise-bars` continues where an earlier run ended: each
judged configuration is a line in the folder's files.
"""

import argparse
import json
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from schedsvc.config import Config
from schedsvc_lab.advise.cli import Advice
from schedsvc_lab.advise.draft import Draft, apply, draft_of, prices_of
from schedsvc_lab.advise.goals import parse_goal
from schedsvc_lab.engine import Profile, load_profile
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Scenario
from schedsvc_lab.workload import read_trace
from schedsvc_lab.workload.make import labeller

TODAY = {"listeners": [{"tcp": "127.0.0.1:0"}]}
RANDOM_COUNT = 200
TENANTS, ZIPF, LABEL_SEED = 8, 1.0, 1
_MS_PER_S = 1_000


@dataclass(frozen=True)
class Bar:
    """Describes one trace, the engines that serve it, and its goals."""

    name: str
    file: str
    profile: Callable[[], Profile]
    engines: int
    goals: tuple[str, ...]


def large_gpu() -> Profile:
    """Return an engine for long prompts: assumed figures of a large GPU, no measurement."""
    return Profile.model_validate(
        {
            "name": "large-gpu",
            "source": "Assumed: 40,000 prompt tokens a second, 100 to 33 steps a second.",
            "cost": {
                "step_ns": 0,
                "prefill_ns": 10_000_000,
                "prefill_token_ns": 25_000,
                "decode_kv_token_ns": 10,
                "decode_ns": [[0, 10_000_000], [256, 30_000_000]],
            },
            "engine": {
                "kv_tokens": 400_000,
                "block_size_tokens": 16,
                "sequences_max": 256,
                "step_tokens_max": 8_192,
                "context_tokens_max": 131_072,
            },
        }
    )


def a10g() -> Profile:
    """Return the engine of the VTC paper."""
    return load_profile("a10g-llama2-7b")


BARS = (
    Bar(
        "lmsys",
        "lmsys_arena_vtc.csv",
        a10g,
        1,
        (
            "client-13 p99 first token <= 2 s",
            "* p90 first token <= 5 s",
            "client-02 share >= 30 %",
        ),
    ),
    Bar(
        "azure",
        "AzureLLMInferenceTrace_conv.csv",
        a10g,
        6,
        (
            "tenant-8 p99 first token <= 2 s",
            "* p90 first token <= 2 s",
            "tenant-1 refusals <= 1 %",
        ),
    ),
    Bar(
        "mooncake",
        "mooncake_conversation_trace.jsonl",
        large_gpu,
        1,
        (
            "tenant-8 p99 first token <= 10 s",
            "* p50 first token <= 5 s",
            "tenant-1 p90 wait <= 20 s",
        ),
    ),
)


def halves(path: Path) -> tuple[Requests, Requests]:
    """Read a trace and cut it in the middle of its requests. O(requests)."""
    label = labeller("zipf", TENANTS, ZIPF, LABEL_SEED)
    rows = []
    for request in read_trace(path, tenant="", keep_records=True):
        assert request.record is not None
        tenant = request.tenant or label(request.record)
        at_ns = round(request.arrival_s * 1e9)
        rows.append((at_ns, tenant, request.prompt_tokens, request.output_tokens))
    middle = len(rows) // 2
    # Both halves have the same tenants, so a draft of one configures the other.
    names = sorted({tenant for _, tenant, _, _ in rows})
    return _requests(names, rows[:middle]), _requests(names, rows[middle:])


def _requests(names: list[str], rows: list[tuple[int, str, int, int]]) -> Requests:
    start_ns = rows[0][0]
    return Requests(
        names,
        (
            (at_ns - start_ns, bisect_left(names, tenant), prompt, output)
            for at_ns, tenant, prompt, output in rows
        ),
    )


def random_draft(advice: Advice, number: int) -> Draft:
    """Draw a configuration over the whole space of drafts; the same number draws the same."""
    draws = Random(f"random configuration {number}")
    demand: dict[str, float] = dict.fromkeys(advice.requests.clients, 0.0)
    minutes = advice.requests.arrival_ns[-1] / 60e9
    for at, client in enumerate(advice.requests.client):
        tokens = advice.requests.prompt_tokens[at] + advice.requests.output_tokens[at]
        demand[advice.requests.clients[client]] += tokens / minutes
    names = [tenant.name for tenant in advice.config.tenants]

    def limit(name: str) -> int:
        factor = math.exp(draws.uniform(math.log(0.1), math.log(2.0)))
        return max(2, round(factor * demand[name])) if draws.random() < 0.25 else 0

    return Draft(
        weights_milli=tuple(round(1_000 * 10 ** draws.uniform(-1, 2)) for _ in names),
        quotas=tuple(limit(name) for name in names),
        shares=tuple(limit(name) for name in names),
        queue_ttl_ms=round(_MS_PER_S * math.exp(draws.uniform(math.log(0.5), math.log(120)))),
        headroom_ppm=draws.randrange(0, 300_001),
        prices_micro=prices_of(advice.config),
    )


class Book:
    """Records the judged configurations of a trace, one line each; none is judged twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[str, Any] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.rows[row["name"]] = row["value"]

    def value(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a value of the book; make and write it if it is absent."""
        if name not in self.rows:
            self.rows[name] = make()
            with self._path.open("a") as file:
                file.write(json.dumps({"name": name, "value": self.rows[name]}) + "\n")
            print(f"{self._path.stem}: {name}: {self.rows[name]}", flush=True)
        return self.rows[name]


def judged(advice: Advice, draft: Draft) -> list[list[float | None]]:
    """Return figure and badness of each goal; None stands for infinity."""
    trial = advice.trial(draft)
    if trial is None:
        return [[None, None] for _ in advice.goals]
    return [[each if math.isfinite(each) else None for each in goal] for goal in trial.goals]


def met(value: list[float | None]) -> bool:
    """Return whether a goal is met."""
    return value[1] is not None and value[1] <= 1.0


def run_bar(bar: Bar, traces: Path, out: Path, count: int) -> Iterator[dict[str, Any]]:
    """Judge all configurations of a trace, and yield a row for each goal."""
    book = Book(out / f"{bar.name}.jsonl")
    first, second = halves(traces / bar.file)
    scenario = Scenario(bar.profile(), Config.model_validate(TODAY), bar.engines)
    goals = [parse_goal(text) for text in bar.goals]
    judge = Advice(scenario, second, goals)
    today = book.value("today", lambda: judged(judge, draft_of(judge.config)))
    drafts = []
    for at, goal in enumerate(goals):
        draft = partial(_drafted, scenario, first, judge, at)
        drafts.append(book.value(f"draft {goal.text}", draft))
    randoms = []
    for number in range(count):
        drawn = partial(judged, judge, random_draft(judge, number))
        randoms.append(book.value(f"random {number}", drawn))
    for at, goal in enumerate(goals):
        yield {
            "trace": bar.name,
            "goal": goal.text,
            "today": today[at][0],
            "draft": drafts[at]["second"][0],
            "draft_met": met(drafts[at]["second"]),
            "first_met": met(drafts[at]["first"]),
            "random_met": sum(met(each[at]) for each in randoms),
            "random_best": min(
                (each[at] for each in randoms if each[at][1] is not None),
                key=lambda value: value[1],
                default=[None, None],
            )[0],
            "random": len(randoms),
        }


def _drafted(scenario: Scenario, first: Requests, judge: Advice, at: int) -> dict[str, Any]:
    """Draft for one goal on the first half, and judge the draft on both."""
    advice = Advice(scenario, first, [judge.goals[at]])
    report, config = advice.run(1)
    draft = draft_of(config)
    assert apply(judge.config, draft) is not None
    return {
        "first": judged(advice, draft)[0],
        "second": judged(judge, draft)[at],
        "changes": report["changes"],
        "simulations": report["simulations"],
    }


def main() -> int:
    """Run every bar; the exit status is 1 if a draft misses what a random configuration meets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="Folder of the public traces.")
    parser.add_argument("--out", type=Path, required=True, help="Folder of the results.")
    parser.add_argument("--count", type=int, default=RANDOM_COUNT, help="Random configurations.")
    parser.add_argument("--bar", action="append", choices=[bar.name for bar in BARS])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for bar in BARS:
        if given.bar and bar.name not in given.bar:
            continue
        for row in run_bar(bar, given.traces, given.out, given.count):
            holds = row["draft_met"] or not row["random_met"]
            failed |= not holds
            print(f"{'holds' if holds else 'FAILS'}: {json.dumps(row)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
