"""Each bounded table has a flood that speaks the contract, and a caller beside it is granted."""

from itertools import islice

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from bench.table_floods import CALLS, STREAMS, messages
from bench.tables import measure


@pytest.mark.parametrize("table", STREAMS)
def test_a_stream_of_events_is_a_session(table: str) -> None:
    capacity, events = STREAMS[table]
    for data, count in islice(messages(capacity, events), 2):
        assert len(pb.SessionRequest.FromString(data).events) == count > 0


@pytest.mark.parametrize("table", CALLS)
def test_a_call_has_a_message_for_each_number(table: str) -> None:
    _, message = CALLS[table]
    assert message(1).IsInitialized()


@pytest.mark.slow
def test_a_caller_is_granted_beside_a_flood() -> None:
    found = measure("places in the queue", 1.0, 1.0)
    assert found["hostile"]["sent"] > 0
    assert min(found["ms"]["quiet"]["p99"], found["ms"]["attacked"]["p99"]) > 0
