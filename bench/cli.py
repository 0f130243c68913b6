"""`python -m bench` measures the ladder, shows it, and writes the report."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from bench import chart, chart_features, machine, show
from bench.report import LEVELS, build
from bench.sizes import ENVIRONMENT, FULL, QUICK, SMOKE
from schedsvc.text.option_types import make_folder

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[1]
#: Test files by level.
_FILES = {level: f"bench/test_{level}.py" for level in LEVELS}
_LOG_TAIL = 40
_EPILOG = """\b
Example:
  python -m bench --out out/bench
  python -m bench --quick --only core --json

A ratio of two things measured in one run counts; a time on a shared machine is context. So every
reference is measured in turns with ours (A B B A), and first beside itself. Exit status 0 means
that it measured: a missed target is shown, not hidden.
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/bench"),
    show_default=True,
    help="Folder for report.json, ladder.png, features.png, pytest-benchmark's JSON and the log.",
)
@click.option("--full", "sizes", flag_value=FULL.name, default=FULL.name, help="The default.")
@click.option("--quick", "sizes", flag_value=QUICK.name, help="Half a minute, and one to build.")
@click.option("--smoke", "sizes", flag_value=SMOKE.name, help="Only shows that it works.")
@click.option(
    "--only",
    type=click.Choice(list(LEVELS)),
    multiple=True,
    help="Measure this level alone; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def main(out: Path, sizes: str, only: tuple[str, ...], as_json: bool) -> None:
    """Measure what an admission costs at every rung, each beside its reference."""
    make_folder(out)
    if sizes != SMOKE.name:
        machine.need_release_core()
    about, commit = machine.describe(), machine.commit()
    measured, written = out / "pytest-benchmark.json", out / "report.json"
    # Remove results of an earlier run, so that none passes for one of this run.
    ladder, features = out / "ladder.png", out / "features.png"
    for file in (measured, written, ladder, features):
        file.unlink(missing_ok=True)
    _measure(measured, out / "bench.log", sizes, only or tuple(LEVELS))
    report = build(measured, about, commit, sizes)
    written.write_text(json.dumps(report, indent=1) + "\n")
    if report["rungs"]:
        chart.draw(report, ladder)
    if report["features"]:
        chart_features.draw(report, features)
    if as_json:
        click.echo(json.dumps(report))
        return
    show.show(report)
    click.echo(", ".join(str(file) for file in (written, ladder, features) if file.exists()))


def _measure(measured: Path, log: Path, sizes: str, levels: tuple[str, ...]) -> None:
    """Run the measurements in a process of their own. Raises ClickException if one fails."""
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider"]
    command += ["-o", "timeout=300", "--benchmark-only", f"--benchmark-json={measured.resolve()}"]
    command += [_FILES[level] for level in LEVELS if level in levels]
    with log.open("w") as written:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**os.environ, ENVIRONMENT: sizes},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if process.stdout is None:
            raise click.ClickException("the measurements have no output")
        _follow(process.stdout, written.write)
        status = process.wait()
    if status != 0:
        tail = "\n".join(log.read_text().splitlines()[-_LOG_TAIL:])
        raise click.ClickException(f"the measurements failed (pytest status {status}):\n{tail}")


def _follow(lines: Iterable[str], write: Callable[[str], object]) -> None:
    """Log what pytest prints, and show the test that runs."""
    columns = (TextColumn("measuring"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("...", total=None)
        for line in lines:
            write(line)
            if "::" in line:
                progress.update(task, description=line.split("::")[1].split()[0])
