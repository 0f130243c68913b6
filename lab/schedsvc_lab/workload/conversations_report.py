"""Summarises conversations that were held with a server."""

import csv
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schedsvc_lab.workload.conversations_client import Fate, Talks, Turn

_TURNS_TOLD = 8


def report(talks: Talks, skipped: Counter[str], *, complete: bool) -> dict[str, Any]:
    """Sum a run up: counts, times of first tokens and answers, in all and by number of the turn.

    `sent_late_ms` is the generator's own delay: the time from the planned to the real sending.
    """
    turns = talks.turns
    done = [turn for turn in turns if turn.fate is Fate.COMPLETED]
    lasted_s = max((turn.end_s for turn in turns if turn.end_s == turn.end_s), default=0.0)
    by_turn = {
        str(number): _times([turn for turn in done if turn.turn == number])
        for number in range(1, min(_TURNS_TOLD, max((turn.turn for turn in done), default=0)) + 1)
    }
    return {
        "complete": complete,
        "conversations": talks.started,
        "conversations_ended": talks.ended,
        "turns": len(turns),
        **{fate.value: sum(turn.fate is fate for turn in turns) for fate in Fate},
        "reasons": dict(Counter(turn.reason for turn in turns if turn.reason).most_common()),
        "cut": dict(talks.cut),
        "skipped": dict(skipped),
        "duration_s": lasted_s,
        "input_tokens": sum(turn.prompt_tokens for turn in done),
        "output_tokens": sum(turn.output_tokens for turn in done),
        **_times(done),
        "by_turn": by_turn,
        "sent_late_ms": _percentiles((t.sent_s - t.intended_s) * 1e3 for t in turns),
    }


def _times(turns: Sequence[Turn]) -> dict[str, Any]:
    return {
        "answered": len(turns),
        "prompt_tokens_mean": _mean(turn.prompt_tokens for turn in turns),
        "ttft_ms": _percentiles((turn.first_s - turn.sent_s) * 1e3 for turn in turns),
        "e2e_ms": _percentiles((turn.end_s - turn.sent_s) * 1e3 for turn in turns),
    }


def _mean(values: Iterable[int]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def _percentiles(values: Iterable[float]) -> dict[str, float] | None:
    found = np.array([value for value in values if not math.isnan(value)])
    if not len(found):
        return None
    return {f"p{share}": float(np.percentile(found, share)) for share in (50, 90, 99)}


def write_turns(turns: Iterable[Turn], path: Path) -> None:
    """Write a row for each turn; what never happened is an empty cell."""
    times = ("intended_s", "sent_s", "first_s", "end_s")
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        header = ("conversation", "turn", *times, "fate", "reason", "prompt_tokens")
        rows.writerow((*header, "output_tokens"))
        for turn in turns:
            moments = [getattr(turn, name) for name in times]
            rows.writerow(
                (
                    turn.conversation,
                    turn.turn,
                    *("" if math.isnan(at) else round(at, 6) for at in moments),
                    turn.fate.value,
                    turn.reason,
                    turn.prompt_tokens,
                    turn.output_tokens,
                )
            )
