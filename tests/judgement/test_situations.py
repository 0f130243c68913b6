"""Tests that each label has its recording, and each recording its label."""

from .second_plays import PLAYS
from .situations import HERE, LEVELS, labels, recorded


def test_each_situation_has_a_label_and_a_recording() -> None:
    found = labels()
    names = [label.name for label in found]
    assert len(names) == len(set(names)) >= 40
    assert set(names) == {path.stem for path in (HERE / "recorded").glob("*.json")}
    assert PLAYS.keys() <= set(names)
    assert {label.level for label in found} == set(LEVELS)


def test_recordings_are_ten_seconds_of_stats() -> None:
    for label in labels():
        pair = recorded(label.name)
        assert pair.now.policy, label.name
        if pair.then is not None and pair.then.incarnation == pair.now.incarnation:
            then = {flow.tenant: flow.received for flow in pair.then.flows}
            for flow in pair.now.flows:
                assert flow.received >= then.get(flow.tenant, 0), label.name
