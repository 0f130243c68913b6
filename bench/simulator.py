"""`python -m bench.simulator` counts requests simulated in a CPU second, before and after (T12).

The earlier commit is built in a folder below build/, its core with the flags of a release. Both run
the trace under one policy, each in a process of its own, in turns (A B B A), so other load of the
machine affects both alike. Their digests have to be equal: the same run, only faster.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from bench import machine
from bench.compare import Comparison, abba, compare

__all__ = ["main"]

#: The last commit whose simulator was plain Python.
BASE = "919edf3d"
RATIO_MIN = 8.0
_ROOT = Path(__file__).resolve().parents[1]
_PROGRAM = """
import sys, time
from pathlib import Path
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Scenario, simulate
from schedsvc_lab.workload import read_trace

requests = Requests.from_trace(read_trace(Path(sys.argv[1])))
scenario, policy, runs = Scenario(load_profile(sys.argv[2])), sys.argv[3], int(sys.argv[4])
run = simulate(scenario, requests, policy)
before = time.process_time()
for _ in range(runs):
    simulate(scenario, requests, policy)
print(runs * len(requests) / (time.process_time() - before), run.digest)
"""
_EPILOG = """\b
Example:
  python -m bench.simulator --trace lmsys_arena_vtc.csv

Exit status 1: the target is missed, or the two do not make the same run.
"""


def built(commit: str) -> Path:
    """Return a folder with the tree of a commit, built; made once. Raises ClickException."""
    folder = _ROOT / "build" / "simulator" / commit
    done = folder / "built"
    if done.exists():
        return folder
    archive = subprocess.run(
        ["git", "archive", "--format=tar", commit], cwd=_ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        raise click.ClickException(f"no commit {commit}: {archive.stderr.decode().strip()}")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    for project in (folder, folder / "lab"):
        if (project / "setup.py").exists():
            subprocess.run(
                [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
                cwd=project,
                env={**os.environ, "SCHEDSVC_CORE": "release"},
                check=True,
                stdout=subprocess.DEVNULL,
            )
    done.touch()
    return folder


def _run(tree: Path, arguments: list[str], digests: set[str]) -> list[float]:
    """Simulate in a tree; return the requests for each second of CPU, and note the digest."""
    paths = (tree, tree / "lab", tree / "clients/python", tree / "clients/vllm")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    speed, digest = done.stdout.split()
    digests.add(digest)
    return [float(speed)]


def measured(base: Path, arguments: list[str], rounds: int) -> tuple[Comparison, set[str]]:
    """Compare this tree with another; return the comparison and all digests that were seen."""
    digests: set[str] = set()
    slices = [partial(_run, tree, arguments, digests) for tree in (_ROOT, base)]
    pairs = abba(slices[0], slices[1], rounds)
    return compare(np.asarray(pairs[:, :, 0])), digests


@click.command(epilog=_EPILOG)
@click.option(
    "--trace",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Trace to simulate.",
)
@click.option("--base", default=BASE, show_default=True, help="Commit to compare with.")
@click.option("--profile", default="a10g-llama2-7b", show_default=True, help="Engine's profile.")
@click.option("--policy", default="vtc", show_default=True, help="Policy that decides.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--runs", type=click.IntRange(1), default=10, show_default=True, help="In a slice.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    trace: Path, base: str, profile: str, policy: str, rounds: int, runs: int, as_json: bool
) -> None:
    """Compare how fast this tree simulates a trace with how fast an earlier commit does."""
    machine.need_release_core()
    arguments = [str(trace.resolve()), profile, policy, str(runs)]
    found, digests = measured(built(base), arguments, rounds)
    holds = found.ratio >= RATIO_MIN and len(digests) == 1
    report: dict[str, Any] = {
        "machine": machine.describe(),
        "commit": machine.commit(),
        "base": base,
        "requests_per_cpu_s": found.a,
        "base_requests_per_cpu_s": found.b,
        "ratio": found.ratio,
        "ratio_95": [found.low, found.high],
        "target": RATIO_MIN,
        "digests": sorted(digests),
        "holds": holds,
    }
    click.echo(json.dumps(report)) if as_json else _show(report)
    if not holds:
        sys.exit(1)


def _show(report: dict[str, Any]) -> None:
    low, high = report["ratio_95"]
    same = "the same run" if len(report["digests"]) == 1 else f"runs differ: {report['digests']}"
    Console().print(
        f"T12: {report['requests_per_cpu_s']:,.0f} requests a CPU second; "
        f"{report['base_requests_per_cpu_s']:,.0f} at {report['base']}\n"
        f"{report['ratio']:.2f} times as many ({low:.2f} to {high:.2f}; asked: "
        f"{report['target']:g}); {same}",
        highlight=False,
    )


if __name__ == "__main__":
    main(prog_name="python -m bench.simulator")
