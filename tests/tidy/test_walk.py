"""Tests how often the walk of a gated request returns to a room that it has left."""

from . import walk

RETURNS_MAX = 8


def test_a_gated_request_returns_to_few_rooms() -> None:
    found = walk.measure()
    assert set(found) == {"door", "exchange", "session"}, "stations that the walk leaves out"
    assert walk.returns(found) <= RETURNS_MAX, " > ".join(found)


def test_only_a_station_that_was_left_counts_as_a_return() -> None:
    client = "/x/clients/python/schedsvc_client/aio/"
    gate = "/x/clients/vllm/schedsvc_vllm/"
    files = [f"{gate}gate.py", f"{gate}turn.py", f"{gate}sse.py", f"{client}session.py"]
    found = walk.stations([*files, "/x/bench/gate.py", f"{gate}gate.py", f"{gate}exchange.py"])
    assert found == ["door", "session", "door", "exchange"]
    assert walk.returns(found) == 1
