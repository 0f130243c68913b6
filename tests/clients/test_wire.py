"""Tests that events written by hand are, byte by byte, what protobuf writes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedsvc_client import InvalidRequest, Outcome, wire
from schedsvc_client.leases import Lease
from schedsvc_client.requests import Asked, admit_request
from schedsvc_client.v1 import scheduler_pb2 as pb

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=300)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 1 << 15)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(0, 300)
TOTAL = st.none() | st.integers(0, 1 << 15) | st.integers(-5, 1 << 30)
FIELDS = {
    "request_id": TEXT,
    "tenant": TEXT,
    "api_key_sha256": st.binary(max_size=40),
    "pools": st.lists(TEXT, max_size=3),
    "input_tokens": st.lists(INT64, max_size=5),
    "n": INT32,
    "max_output_tokens": INT64,
    "prefix_block_hashes": st.lists(st.integers(0, (1 << 64) - 1), max_size=40),
    "adapter": TEXT,
    "request_class": TEXT,
    "deadline_ms": INT64,
    "queue_ttl_ms": INT64,
    "reports_progress": st.booleans(),
    "tenant_proof": st.integers(0, 4),
    "whole_answer": st.booleans(),
    "client_request_id": TEXT,
    "session": TEXT,
}
#: Values of other types, which protobuf takes or refuses.
ODD: list[dict[str, Any]] = [
    {"n": 2.0},
    {"max_output_tokens": 1 << 63},
    {"max_output_tokens": -1},
    {"n": 1 << 31},
    {"tenant": b"bytes"},
    {"tenant": "\ud800"},
    {"tenant": None},
    {"pools": 5},
    {"api_key_sha256": "text"},
    {"input_tokens": None},
    {"input_tokens": [1.5]},
    {"input_tokens": [None]},
    {"prefix_block_hashes": None},
    {"prefix_block_hashes": [1 << 64]},
    {"prefix_block_hashes": [0.5]},
    {"reports_progress": 1},
    {"reports_progress": None},
    {"whole_answer": "yes"},
    {"input_estimated": 0},
    {"tenant_proof": None},
    {"deadline_ms": "1"},
    {"session": 0},
]


def written(**fields: Any) -> bytes:
    given = {"request_id": "", "input_tokens": (), "max_output_tokens": 0, "n": 0}
    return admit_request(**given | {"reports_progress": False} | fields).encoded


@given(fields=st.fixed_dictionaries({}, optional=FIELDS), estimated=st.none() | st.booleans())
def test_an_admit_is_written_as_protobuf_writes_it(
    fields: dict[str, Any], estimated: bool | None
) -> None:
    presence = {} if estimated is None else {"input_estimated": estimated}
    message = pb.AdmitRequest(**fields, **presence)
    assert written(**fields, **presence) == message.SerializeToString()


@given(fields=st.fixed_dictionaries({}, optional=FIELDS), tag=st.integers(1, 1 << 40))
def test_an_event_of_an_admit_is_written_as_protobuf_writes_it(
    fields: dict[str, Any], tag: int
) -> None:
    admit = pb.SessionAdmit(tag=tag, request=pb.AdmitRequest(**fields))
    whole = pb.SessionRequest(events=[pb.SessionEvent(admit=admit)]).SerializeToString()
    assert wire.admit_event(tag, written(**fields)) == whole


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_value_of_an_odd_type_is_judged_by_protobuf(odd: dict[str, Any]) -> None:
    [field] = odd
    try:
        message = pb.AdmitRequest(**odd)
    except (TypeError, ValueError):
        message = None
    if message is None or odd[field] is None:
        with pytest.raises(InvalidRequest) as caught:
            written(**odd)
        assert caught.value.violations[0].field == field
    else:
        assert written(**odd) == message.SerializeToString()


@given(
    lease_id=st.integers(0, (1 << 64) - 1), epoch=INT64,
    outcome=st.sampled_from([Outcome.COMPLETED, Outcome.CANCELLED]),
    known=st.tuples(TOTAL, TOTAL, TOTAL), totals=st.tuples(TOTAL, TOTAL, TOTAL),
)  # fmt: skip
def test_a_complete_is_written_as_protobuf_writes_it(
    lease_id: int, epoch: int, outcome: Outcome, known: Any, totals: Any
) -> None:
    lease = Lease(lease_id, "p", epoch, 1, 1, 0, Asked("r", b""), 0, *known)
    event = pb.SessionEvent(complete=lease.complete(outcome, totals))
    whole = pb.SessionRequest(events=[event]).SerializeToString()
    assert lease.complete_event(outcome, totals) == whole
