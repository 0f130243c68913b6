"""Fits the step cost of an engine to steps that were measured on it, by least squares.

The model is the engine's own (StepCost): a step takes fixed + f(sequences that decode) + b * KV
tokens, and where it computes prompts c + a * prompt tokens more; f is piecewise linear and does not
fall. Least squares keep the sum: the fitted steps take as long as the measured ones.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from schedsvc_lab.engine import CostFields, EngineFields, Profile

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of sequences at which the cost of decoding may bend."""
STEPS_MIN = 30
_NS = 1e9
# A coefficient below this share of the greatest gradient is no gain.
_TOLERANCE = 1e-9


class FitError(ValueError):
    """The measurements are unreadable or too few; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps that took `duration_s` together; `running` and `kv_tokens` are means of a step."""

    duration_s: float
    prompt_tokens: float
    running: float
    kv_tokens: float
    steps: float = 1.0


@dataclass(frozen=True, slots=True)
class Quality:
    """States how well a fit describes the measured intervals (single steps, if measured so).

    `r2` is the share of the durations' variance that it explains; `total_ratio` compares the sums.
    """

    intervals: int
    steps: int
    r2: float
    median_abs_error_ms: float
    median_duration_ms: float
    total_ratio: float


def read_measured(path: Path) -> list[Measured]:
    """Read steps, or samples of counters, from a CSV file with a header or from JSON lines.

    Steps have the columns duration_s, prompt_tokens, running, kv_tokens (others are ignored).
    Samples, as of an engine's /metrics, have at_s, steps_total, prompt_tokens_total,
    generation_tokens_total, kv_tokens, and running; two that follow one another make an interval,
    unless the engine was idle at either.
    """
    try:
        rows = list(_rows(path))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise FitError(f"{path}: cannot be read: {why}") from error
    if not rows:
        raise FitError(f"{path}: is empty")
    if "at_s" in rows[0][1]:
        return list(_intervals(path, rows))
    return [_step(path, line, row) for line, row in rows]


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            for row in (reader := csv.DictReader(file)):
                yield reader.line_num, row
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise FitError(f"{path}:{number}: is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise FitError(f"{path}:{number}: must be a JSON object")
            yield number, row


def _number(path: Path, line: int, row: Mapping[str, Any], name: str) -> float:
    try:
        value = float(row[name])
    except KeyError:
        raise FitError(f"{path}:{line}: {name} is missing") from None
    except (TypeError, ValueError):
        raise FitError(f"{path}:{line}: {name}: {row[name]!r} is no number") from None
    if not 0 <= value < math.inf:
        raise FitError(f"{path}:{line}: {name}: must be a number of at least 0, not {value}")
    return value


def _step(path: Path, line: int, row: Mapping[str, Any]) -> Measured:
    duration_s, prompt, running, kv_tokens = (
        _number(path, line, row, name)
        for name in ("duration_s", "prompt_tokens", "running", "kv_tokens")
    )
    # KV tokens count if sequences decode over them, as in the engine model.
    return Measured(duration_s, prompt, running, kv_tokens if running else 0.0)


def _intervals(path: Path, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> Iterator[Measured]:
    names = (
        "at_s",
        "steps_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "kv_tokens",
        "running",
    )
    last: list[float] | None = None
    for line, row in rows:
        now = [_number(path, line, row, name) for name in names]
        if last is not None:
            grown = [new - old for new, old in zip(now[:4], last[:4], strict=True)]
            if grown[0] <= 0 or min(grown) < 0:
                raise FitError(f"{path}:{line}: {names[grown.index(min(grown))]}: must grow")
            seconds, steps, prompt, output = grown
            if steps and now[5] and last[5]:
                kv_tokens = (now[4] + last[4]) / 2
                yield Measured(seconds, prompt, output / steps, kv_tokens, steps)
        last = now


def fit(measured: Iterable[Measured]) -> tuple[CostFields, Quality]:
    """Fit a cost to the measurements. O(measurements). Raises FitError: too few, or all alike."""
    rows = [m for m in measured if m.steps and (m.prompt_tokens or m.running)]
    if len(rows) < STEPS_MIN:
        raise FitError(f"{len(rows)} busy steps or intervals are too few; give {STEPS_MIN} or more")
    table = np.array(
        [(m.duration_s, m.prompt_tokens, m.running, m.kv_tokens, m.steps) for m in rows]
    )
    duration, prompt, running, kv_tokens, steps = table.T
    most = max(math.ceil(running.max()), 1)
    segments = list(pairwise([0, *(k for k in KNOTS if k < most), most]))
    # A row of several steps does not show how many of them had prompts.
    with_prompts = (prompt > 0) & (steps == 1)
    columns = [steps, with_prompts.astype(float), prompt, steps * kv_tokens]
    columns += [steps * np.clip(running - low, 0.0, high - low) for low, high in segments]
    design = np.stack(columns, axis=1)
    found = _non_negative(design, duration)
    predicted = design @ found
    error = np.abs(predicted - duration)
    spread = float(((duration - duration.mean()) ** 2).sum())
    if not spread:
        raise FitError("all durations are equal: these are no measurements")
    fixed, for_prompts, per_prompt, per_kv, *slopes = (found * _NS).tolist()
    points, height = [[0, round(fixed)]], fixed
    for (low, high), slope in zip(segments, slopes, strict=True):
        height += slope * (high - low)
        points.append([high, round(height)])
    try:
        cost = CostFields(
            step_ns=0,
            prefill_ns=round(fixed + for_prompts),
            prefill_token_ns=round(per_prompt),
            decode_kv_token_ns=round(per_kv),
            decode_ns=points,
        )
    except ValueError as error:
        _, field, problem, *_ = str(error).splitlines()
        raise FitError(
            f"the durations fit no engine: {field}: {problem.partition(' [')[0].strip()}; look for"
            " rows whose times lie far from the others"
        ) from None
    return cost, Quality(
        intervals=len(rows),
        steps=int(steps.sum()),
        r2=1.0 - float(((predicted - duration) ** 2).sum()) / spread,
        median_abs_error_ms=float(np.median(error / steps)) * 1e3,
        median_duration_ms=float(np.median(duration / steps)) * 1e3,
        total_ratio=float(predicted.sum() / duration.sum()),
    )


def _non_negative(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solve least squares without negative coefficients (Lawson and Hanson 1974, chapter 23)."""
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0.0] = 1.0
    scaled = design / scale
    count = scaled.shape[1]
    found, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gradient = scaled.T @ (target - scaled @ found)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= _TOLERANCE * np.linalg.norm(target):
            break
        free[best] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            if trial[free].min() > 0:
                break
            # Move towards the trial until a value would become negative, and fix the zeros.
            bad = free & (trial <= 0)
            part = (found[bad] / (found[bad] - trial[bad])).min()
            found = found + part * (trial - found)
            free &= found > _TOLERANCE * found.max()
            found[~free] = 0.0
        found = trial
    return np.asarray(found / scale)


def make_profile(name: str, source: str, cost: CostFields, engine: EngineFields) -> Profile:
    """Put a fitted cost and an engine's sizes together."""
    return Profile(name=name, source=source, cost=cost, engine=engine)
