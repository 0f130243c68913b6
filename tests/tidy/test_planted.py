"""A fault in any of 20 rooms is seen by a test that CI selects for it; the program shows it."""

import pytest

from tests.lanes.change import Change, tracked
from tests.lanes.choose import Selection
from tests.lanes.graph import Graph

from .planted import is_quick
from .planted_faults import FAULTS, Fault
from .sources import ROOT

GRAPH = Graph(ROOT, tracked(ROOT))
ROOMS_MIN = 20


def test_faults_are_in_20_rooms() -> None:
    assert len({fault.room for fault in FAULTS}) == len(FAULTS) >= ROOMS_MIN


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.room)
def test_a_fault_selects_the_test_that_finds_it(fault: Fault) -> None:
    selection = Selection(ROOT, Change("a base", frozenset({fault.path})), GRAPH)
    assert not selection.subject.everything
    assert fault.caught in GRAPH.paths
    assert selection.why(fault.caught)
    assert is_quick(fault.caught) or fault.caught in selection.slow()[0]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.room)
def test_a_fault_has_its_place_in_the_source(fault: Fault) -> None:
    text = (ROOT / fault.path).read_text()
    assert fault.planted(text) != text


def test_a_fault_without_its_place_is_named() -> None:
    with pytest.raises(ValueError, match="has not exactly one"):
        FAULTS[0].planted("")


def test_a_test_of_another_room_is_not_selected() -> None:
    selection = Selection(ROOT, Change("a base", frozenset({"schedsvc/text/tables.py"})), GRAPH)
    assert not selection.why("tests/lab/engine/test_engine_blocks.py")
