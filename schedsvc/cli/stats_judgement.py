"""Prints the judgement of Stats as one line, for `schedsvc stats` and `schedsvc top`."""

from typing import Any

from rich.text import Text

__all__ = ["judgement_line"]

#: The word and the style of each schedsvc.v1.JudgementLevel.
_LEVELS = {1: ("ok", "green"), 2: ("notice", "yellow"), 3: ("trouble", "bold red")}
_UNKNOWN = ("unknown", "dim")


def judgement_line(snapshot: Any) -> Text:
    """Return the level and the sentence; the word repeats what the colour says."""
    word, style = _LEVELS.get(snapshot.judgement.level, _UNKNOWN)
    return Text.assemble((f"{word}: ", style), snapshot.judgement.text)
