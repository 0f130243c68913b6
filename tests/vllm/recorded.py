"""Holds steps of the real engine, run by run, and the profiles that are fitted to them.

A run is simulated with the steps of the *other* runs: so the comparison is with the engine, not
with itself. The machine's speed drifts within minutes, so steps of another hour would
say more about the hour than about the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from schedsvc_lab.engine import Profile, load_profile
from schedsvc_lab.sim.fit import fit, make_profile, read_measured

PLUGIN = Path(__file__).parent / "steps_plugin"
ARGUMENTS = ("--enable-logging-iteration-details", "--no-enable-prefix-caching")
LIKE = "cpu-tiny-llama"
T = TypeVar("T")


def variables(file: Path) -> dict[str, str]:
    """Return what makes a vLLM write its steps to the file, and its requests beside it."""
    return {"PYTHONPATH": str(PLUGIN), "STEPS_FILE": str(file), "REQUESTS_FILE": f"{file}.requests"}


class Recorder:
    """Reads what a vLLM has written, run by run; each run ends at rest."""

    def __init__(self, file: Path) -> None:
        self._files = (file, Path(f"{file}.requests"))
        self._lines = [0, 0]

    def take(self) -> tuple[list[str], list[str]]:
        """Return the steps and the finished requests since the last call, as JSON lines."""
        taken = []
        for at, file in enumerate(self._files):
            lines = file.read_text().splitlines() if file.exists() else []
            taken.append(lines[self._lines[at] :])
            self._lines[at] = len(lines)
        return taken[0], taken[1]


def save(runs: Sequence[Sequence[str]], folder: Path, name: str) -> None:
    """Write each run's steps to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, lines in enumerate(runs):
        _file(folder, name, number).write_text("\n".join(lines) + "\n")


def profiles(folder: Path, name: str, runs: int) -> list[Profile]:
    """Fit a profile for each run to the steps of the others (of a single run, to its own)."""
    measured = [read_measured(_file(folder, name, number)) for number in range(runs)]
    engine = load_profile(LIKE).engine
    made = []
    for number in range(runs):
        cost, quality = fit(step for steps in others(measured, number) for step in steps)
        source = f"{quality.steps} steps of all but run {number} of {name}, R2 {quality.r2:.3f}"
        made.append(make_profile(f"without-{number}", source, cost, engine))
    return made


def others(runs: Sequence[T], number: int) -> list[T]:
    """Return what belongs to the other runs; where there is only one, to that."""
    return [each for at, each in enumerate(runs) if at != number] or list(runs)


def _file(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}-steps-{number}.jsonl"
