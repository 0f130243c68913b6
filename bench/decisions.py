"""`python -m bench.decisions` counts instructions of the core's decisions, before and after.

Method: both cores are compiled as a release, and callgrind counts each in a process of its own. The
same calls take both through the same states. A count is that of the core's methods alone, with all
that they call; what Python does around them is left out.

`admit`: an Admit and the poll after it, with 100,000 flows and as many queued requests. `pair`:
Admit, poll and Complete of a request that is granted at once. `blocked`: a Progress and the poll
after it, while the next request of a full pool waits and eight others, each within the lead, fit
and would move its start.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from bench import inside
from bench.decision_counts import LEASES
from bench.http_cost import earlier
from bench.instructions import under_callgrind
from bench.processes import ROOT

#: The last commit whose core lets requests pass a head regardless of the lead.
BEFORE = "ce11482c"
RATIO_MAX = {"admit": 1.05, "pair": 1.05} | {f"blocked {leases}": 1.10 for leases in LEASES}
_FLOWS = 100_000
_EPILOG = """\b
Examples:
  python -m bench.decisions
  python -m bench.decisions --before HEAD~3 --flows 1000 --json
"""


def _counted(core: Path, flows: int, rounds: int) -> dict[str, float]:
    """Count in a process of its own. Raises click.ClickException."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "bench.decision_counts", name, str(core)]
        command += ["--flows", str(flows), "--rounds", str(rounds)]
        try:
            done = subprocess.run(
                under_callgrind(command, Path(name)), cwd=ROOT, stdout=subprocess.PIPE, check=False
            )
        except FileNotFoundError:
            raise click.ClickException("valgrind is not installed; it counts") from None
    if done.returncode:
        raise click.ClickException("the count failed; see above")
    counts: dict[str, float] = json.loads(done.stdout)
    return counts


def measure(before: str, flows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Count both cores; returns instructions and their ratio, by kind of decision."""
    with earlier(before, "_core") as tree:
        cores = [inside.built(each / "_core") for each in (tree, ROOT)]
    then, now = (_counted(core, flows, rounds) for core in cores)
    return {
        name: {
            "before": round(then[name]),
            "now": round(now[name]),
            "ratio": now[name] / then[name],
        }
        for name in RATIO_MAX
    }


@click.command(epilog=_EPILOG)
@click.option("--before", default=BEFORE, show_default=True, metavar="COMMIT")
@click.option("--flows", type=click.IntRange(10), default=_FLOWS, show_default=True)
@click.option("--rounds", type=click.IntRange(4), default=400, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(before: str, flows: int, rounds: int, as_json: bool) -> None:
    """Count the instructions of decisions; exit with status 1 if one costs too much more."""
    found = measure(before, flows, rounds)
    if as_json:
        click.echo(json.dumps({"before": before, "flows": flows, "rows": found}))
    else:
        for name, row in found.items():
            click.echo(
                f"{name:12} {row['now']:9,} instructions, {row['before']:9,} before:"
                f" ratio {row['ratio']:.3f}, at most {RATIO_MAX[name]:.2f}"
            )
    sys.exit(any(row["ratio"] > RATIO_MAX[name] for name, row in found.items()))


if __name__ == "__main__":
    main(prog_name="python -m bench.decisions")
