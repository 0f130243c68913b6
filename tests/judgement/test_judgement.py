"""Tests the judgement on the recorded situations."""

import pytest
from schedsvc_client.v1 import judgement_pb2

from schedsvc.service.judgement import judge

from .plays import WINDOW_S
from .situations import Label, labels, recorded

#: As many of the situations have to be judged right: 57 of 60.
RIGHT = 0.95


def judged(name: str) -> tuple[str, str]:
    """Return the level and the text of a recorded situation."""
    pair = recorded(name)
    found = judge(pair.then, pair.now, pair.age_ms, WINDOW_S)
    level = judgement_pb2.JudgementLevel.Name(found.level)
    return level.removeprefix("JUDGEMENT_LEVEL_").lower(), found.text


def faults(label: Label) -> list[str]:
    return label.faults(*judged(label.name))


def test_57_of_60_situations_are_judged_right() -> None:
    wrong = {
        label.name: (*judged(label.name), found) for label in labels() if (found := faults(label))
    }
    assert len(wrong) <= (1 - RIGHT) * len(labels()), wrong


@pytest.mark.parametrize("label", labels(), ids=lambda label: label.name)
def test_sentences_are_short_and_whole(label: Label) -> None:
    _, text = judged(label.name)
    assert 10 <= len(text) <= 400
    assert text.endswith(".")
    assert "  " not in text
