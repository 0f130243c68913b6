"""The noisy neighbour on the real vLLM, without the scheduler and with it, in interleaved pairs.

    python -m tests.vllm.pairs --pairs 5 --null 2
    python -m tests.vllm.pairs --large --pairs 7 --null 2 --out out/vllm-large
    python -m tests.vllm.pairs --gpu ENVIRONMENT --out out/vllm-gpu

Open loop: `hog` sends 20 requests a second of 512/256 tokens, `quiet` 2 of 64/64. Two servers run
side by side, one plain and one behind the gate; only one of them is busy at a time. A null pair is
the plain server twice: what differs there is noise. With `--large` quiet's requests are as large
as the hog's; `--alone` adds runs of quiet behind the gate without the hog, one after each pair.
TTFT is taken at the client and at the server's edge, by the same code in both arms. A run whose
client was late is void, and repeated. With `--gpu` both servers share a GPU, with a model of 13 G
parameters in each (random weights, 53 GB in all); ENVIRONMENT is a virtual environment with vLLM
and `clients/*` in it, into which the model's configuration is written.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from schedsvc_lab.load.generator import LoadRun, Pace, RunResult
from schedsvc_lab.load.report import percentile, run_report
from schedsvc_lab.load.target import Target
from schedsvc_lab.workload import TraceRequest

from . import programs
from .figures import CLIENT_LAG_MS_MAX, Report, judge, summary
from .stack import Stack

# Name, requests a second, input and output tokens.
TENANTS = (("hog", 20.0, 512, 256), ("quiet", 2.0, 64, 64))
HOG = TENANTS[0]
BURST = 96
WARMUP_S = 10.0
DRAIN_S_MAX = 60.0
TRIES = 3


@dataclass(frozen=True)
class Arms:
    """Holds the two servers."""

    plain: Stack
    gated: Stack


def arrivals(
    seed: int, seconds: float, hog_per_s: float = HOG[1], large: bool = False
) -> list[TraceRequest]:
    """Draw Poisson arrivals of both tenants; of quiet alone where the hog sends none a second."""
    streams = np.random.default_rng(seed).spawn(len(TENANTS))
    drawn = []
    for (name, per_s, prompt_tokens, output_tokens), stream in zip(TENANTS, streams, strict=True):
        rate = hog_per_s if name == HOG[0] else per_s
        if large:
            _, _, prompt_tokens, output_tokens = HOG
        at_s = 0.0 if rate else seconds
        while (at_s := at_s + stream.exponential(1 / (rate or 1))) < seconds:
            drawn.append(TraceRequest(at_s, name, prompt_tokens, output_tokens))
    return sorted(drawn, key=lambda request: request.arrival_s)


@contextlib.contextmanager
def both(machine: programs.Machine | None = None) -> Iterator[Arms]:
    """Run a scheduler with the defaults, and both servers."""
    with tempfile.TemporaryDirectory(prefix="v") as name:
        folders = [Path(name) / arm for arm in ("p", "g")]
        for folder in folders:
            folder.mkdir()
        names = [tenant[0] for tenant in TENANTS]
        with (
            programs.Scheduler(folders[1], names, {}) as scheduler,
            programs.vllm(folders[0], gated=False, edge=True, machine=machine) as plain,
            programs.vllm(folders[1], gated=True, edge=True, machine=machine) as gated,
        ):
            yield Arms(Stack(plain, scheduler), Stack(gated, scheduler))


@dataclass(frozen=True)
class Load:
    """Holds the settings of every run: its length, its warm-up, the size of the flood."""

    seconds: float = 40.0
    warmup_s: float = WARMUP_S
    hog_per_s: float = HOG[1]
    large: bool = False  # quiet's requests, too


def saturated_per_s(stack: Stack) -> float:
    """Measure how many of the hog's requests the engine ends in a second when it is full."""
    name, _, prompt_tokens, output_tokens = HOG
    burst = [TraceRequest(0.0, name, prompt_tokens, output_tokens) for _ in range(BURST)]
    pace = Pace(seed=0, warmup_requests=3, warmup_s=0.0, drain_s=DRAIN_S_MAX)
    target = Target(url=stack.url, model=programs.MODEL)
    result = asyncio.run(LoadRun(target, burst, pace).run())
    stack.rest(DRAIN_S_MAX)
    ends = [s.end_s for s in result.recorder.samples if s.end_s == s.end_s]
    return len(ends) / max(ends)


def run_once(stack: Stack, seed: int, load: Load) -> Report:
    """Drive one run and sum it up; waits until the server is at rest."""
    _edge(stack)
    before, cpu_s = stack.gauges(), stack.server.cpu_s()
    target = Target(url=stack.url, model=programs.MODEL)
    pace = Pace(seed=seed, warmup_requests=3, warmup_s=load.warmup_s, drain_s=DRAIN_S_MAX)
    drawn = arrivals(seed, load.seconds, load.hog_per_s, load.large)
    result: RunResult = asyncio.run(LoadRun(target, drawn, pace).run())
    cpu_s = stack.server.cpu_s() - cpu_s
    preemptions = stack.gauges()["num_preemptions_total"] - before["num_preemptions_total"]
    report = run_report(result, round(preemptions))
    ended = sum(t["completed"] for t in report["tenants"].values())
    report["api_server_cpu_ms_per_request"] = round(1e3 * cpu_s / max(1, ended), 3)
    rows = _edge(stack)
    for name, tenant in report["tenants"].items():
        at_edge = [ttft_ms for who, status, ttft_ms in rows if (who, status) == (name, 200)]
        tenant["edge_ttft_ms"] = {p: percentile(at_edge, int(p[1:])) for p in ("p50", "p99")}
    stack.rest(DRAIN_S_MAX)
    return report


def run_sound(stack: Stack, seed: int, load: Load) -> Report:
    """Drive runs until the client was in time; the last one counts in any case."""
    for _ in range(TRIES):
        report = run_once(stack, seed, load)
        if report["client_lag_ms_p99"] <= CLIENT_LAG_MS_MAX:
            break
        sys.stderr.write(f"void: client lag {report['client_lag_ms_p99']:.0f} ms; once more\n")
    return report


def _edge(stack: Stack) -> list[Any]:
    with urllib.request.urlopen(f"{stack.url}/edge", timeout=10) as response:
        rows: list[Any] = json.loads(response.read())
    return rows


def measure(
    arms: Arms,
    pairs: int,
    null: int,
    *,
    seed: int,
    load: Load,
    alone: int = 0,
    keep: Callable[[Report], None] = lambda made: None,
) -> Report:
    """Run all pairs. The order within a pair alternates; the other runs go between the pairs.

    A run alone has quiet's arrivals from the pair before it. `keep` is called after each pair, so
    an interruption costs at most one.
    """
    made: Report = {"pairs": [], "null": [], "alone": []}
    started = time.monotonic()
    programs.go_first()  # its children are started already, in sessions of their own
    for number in range(max(pairs, null, alone)):
        if number < pairs:
            sides = [("plain", arms.plain), ("with", arms.gated)]
            pair = {
                name: run_sound(stack, seed + 2 * number, load)
                for name, stack in (sides if number % 2 == 0 else sides[::-1])
            }
            made["pairs"].append(pair)
            keep(made)
            _tell(f"pair {number + 1} of {pairs}", pair, started)
        if number < alone:
            of_quiet = run_sound(arms.gated, seed + 2 * number, replace(load, hog_per_s=0.0))
            made["alone"].append(of_quiet)
            keep(made)
            _tell(f"alone {number + 1} of {alone}", {"with": of_quiet}, started)
        if number < null:
            of_null = {
                name: run_sound(arms.plain, seed + 2 * number + 1, load) for name in ("a", "b")
            }
            made["null"].append(of_null)
            keep(made)
            _tell(f"null pair {number + 1} of {null}", of_null, started)
    return made


def _tell(title: str, pair: dict[str, Report], started: float) -> None:
    parts = []
    for name, run in pair.items():
        quiet = run["tenants"]["quiet"]["ttft_ms"]
        parts.append(
            f"{name}: quiet {quiet['p50']:.0f} / {quiet['p99']:.0f} ms, "
            f"{run['output_tokens_per_s']:.0f} tok/s, {run['preemptions']} preemptions"
        )
    sys.stderr.write(f"{title} ({time.monotonic() - started:.0f} s): {'; '.join(parts)}\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.pairs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=5, help="plain and gated (default 5)")
    parser.add_argument("--null", type=int, default=2, help="plain and plain (default 2)")
    parser.add_argument("--alone", type=int, default=0, help="runs of quiet alone (default 0)")
    parser.add_argument("--large", action="store_true", help="quiet's requests as the hog's")
    parser.add_argument("--gpu", type=Path, metavar="ENVIRONMENT", help="not on the CPU")
    parser.add_argument(
        "--hog-per-s", type=float, default=HOG[1], help=f"of the hog (default {HOG[1]:g})"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals (default 40)")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and prompts (default 1)")
    parser.add_argument("--out", type=Path, default=Path("out/vllm"), help="folder of report.json")
    parser.add_argument("--append", action="store_true", help="add to the pairs that are there")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    options = parser.parse_args()
    if options.pairs < 1 or options.null < 0 or options.alone < 0:
        parser.error("--pairs must be at least 1, --null and --alone at least 0")
    if options.seconds <= WARMUP_S:
        parser.error(f"--seconds must be more than {WARMUP_S:g}: tokens count only after that")
    if options.hog_per_s <= 0:
        parser.error(f"--hog-per-s must be more than 0, not {options.hog_per_s:g}")
    if options.gpu and not (options.gpu / "bin" / "vllm").exists():
        parser.error(f"--gpu: there is no {options.gpu / 'bin' / 'vllm'}; install vLLM there")
    if not options.gpu and not programs.installed():
        parser.error("the real vLLM is not installed; `make test-vllm` does it")
    return options


def _machine(environment: Path | None) -> programs.Machine | None:
    """Describe the GPU, and make its model where that has not been done; None is the CPU."""
    if environment is None:
        return None
    model = environment / "model-14b"
    if not (model / "config.json").exists():  # written last
        make = Path(__file__).with_name("make_model.py")
        command = [str(environment / "bin" / "python"), str(make), "--size", "14b", str(model)]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return programs.on_gpu(environment.resolve(), model.resolve())


@contextlib.contextmanager
def _told_if_interrupted(file: Path, report: Report) -> Iterator[None]:
    """Say on Ctrl-C what is kept, and end with the status that a shell gives it."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{file} has pairs: {len(report['pairs'])}, null pairs: {len(report['null'])}"
        sys.stderr.write(f"interrupted; {kept if report['pairs'] else 'no report was written'}\n")
        sys.exit(130)


def main() -> None:
    """Measure, write the report, print each figure beside its bar; status 1 where one is missed."""
    options = _options()
    programs.end_on_signal()
    file: Path = options.out / "report.json"
    earlier: Report = {"pairs": [], "null": [], "alone": []}
    if options.append and file.exists():
        earlier |= json.loads(file.read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    report = dict(earlier)

    def keep(made: Report) -> None:
        pairs, null, alone = (earlier[name] + made[name] for name in ("pairs", "null", "alone"))
        bars = [vars(bar) for bar in judge(pairs, alone, options.large)]
        report.update(pairs=pairs, null=null, alone=alone, summary=summary(pairs, null), bars=bars)
        file.write_text(json.dumps(report, indent=1) + "\n")

    with _told_if_interrupted(file, report), both(_machine(options.gpu)) as arms:
        measure(
            arms,
            options.pairs,
            options.null,
            seed=options.seed + 1_000 * len(earlier["pairs"]),
            load=Load(options.seconds, hog_per_s=options.hog_per_s, large=options.large),
            alone=options.alone,
            keep=keep,
        )
    if options.json:
        print(json.dumps({"summary": report["summary"], "bars": report["bars"]}, indent=1))
    else:
        for title, named in report["summary"].items():
            for name, ratio in named.items():
                spread = f"[{ratio['low']:.3f}, {ratio['high']:.3f}]"
                print(f"{title:>10} {name:<11} {ratio['median']:.3f}  {spread}")
        for bar in report["bars"]:
            print(f"{'holds ' if bar['holds'] else 'MISSED'}  {bar['what']}: {bar['figure']}")
    sys.exit(0 if all(bar["holds"] for bar in report["bars"]) else 1)


if __name__ == "__main__":
    main()
