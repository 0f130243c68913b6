"""Tests LoRA adapters: bounded numbers for names, for as long as a request uses them."""

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import Stream, replaying
from .support import SECOND, admit, admit_message, grant, is_drained, make


def test_adapters_in_use_at_once_are_limited() -> None:
    s = make(adapters_max=2)
    runs = grant(s, 0, "runs", adapter=b"a")
    queued = admit(s, 0, "queued", 990, 10, adapter=b"b")
    assert admit(s, 0, "third", adapter=b"c") == -core.REJECTED_LIMIT
    assert admit(s, 0, "known", adapter=b"a") > 0
    assert admit(s, 0, "none") > 0
    s.check()
    s.cancel(1, queued)
    assert admit(s, 1, "in its place", adapter=b"c") > 0
    assert admit(s, 1, "gone", adapter=b"b") == -core.REJECTED_LIMIT
    s.complete(2, runs.lease_id, 1)
    s.check()


def test_the_one_that_is_idle_longest_gives_way() -> None:
    s = make(adapters_max=2, answers_max=0)
    for i, name in enumerate((b"a", b"b", b"a", b"c", b"a", b"d", b"b")):
        d = grant(s, i, f"r{i}", adapter=name)
        s.check()
        s.complete(i, d.lease_id, 1)
        s.check()


@pytest.mark.parametrize("refused", ["too large", "draining"])
def test_a_refused_request_holds_none(refused: str) -> None:
    s = make(adapters_max=1)
    if refused == "draining":
        s.drain(0)
    answer = admit(s, 0, "r", 2_000, adapter=b"a")
    assert answer in (-core.REJECTED_TOO_LARGE, -core.REJECTED_DRAINING)
    s.check()


@pytest.mark.parametrize("prompt", [80, 85])
def test_one_without_a_place_is_not_refused_as_drained(prompt: int) -> None:
    """Only with the adapter, which takes 10 tokens, 85 of them are more than the pool has."""
    s = make(capacity=100, adapters_max=1)
    s.set_pool_limits(0, adapter_tokens=10)
    running = grant(s, 0, "runs", adapter=b"a")
    s.set_draining(0, b"p", True)
    assert admit(s, 0, "r", prompt, adapter=b"b") == -core.REJECTED_LIMIT
    assert admit(s, 0, "s", 95, adapter=b"b") == -core.REJECTED_TOO_LARGE
    s.complete(1, running.lease_id, 1)
    outcome = core.REJECTED_DRAINING if prompt == 80 else core.REJECTED_TOO_LARGE
    assert admit(s, 1, "t", prompt, adapter=b"b") == -outcome
    s.check()


def test_the_adapter_is_part_of_what_was_asked() -> None:
    s = make()
    first = admit(s, 0, "r", adapter=b"a")
    assert admit(s, 0, "r", adapter=b"a") == first
    for other in (b"b", b""):
        with pytest.raises(core.CallerError, match="used for another"):
            admit(s, 0, "r", adapter=other)


@pytest.mark.parametrize("name", [b"x" * 257, b"\xff"])
def test_a_wrong_name_is_named(name: bytes) -> None:
    s = make()
    with pytest.raises(core.CallerError) as error:
        admit(s, 0, "r", adapter=name)
    assert error.value.field == "adapter"
    with pytest.raises(core.CallerError) as error:
        s.replay(0, 0, b"r", 1, 0, 1, 10, 5, 5, adapter=name)
    assert error.value.field == "adapter"


def test_the_wire_carries_it() -> None:
    s = make(adapters_max=1)
    message = admit_message("r", adapter="a").SerializeToString()
    assert isinstance(s.admit_wire(0, 0, message), bytes)
    refused = s.admit_wire(0, 0, admit_message("s", adapter="b").SerializeToString())
    assert isinstance(refused, bytes)
    assert pb.AdmitResponse.FromString(refused).outcome == core.REJECTED_LIMIT


def test_a_replayed_lease_keeps_it() -> None:
    s = make(adapters_max=1, lease_id_base=100, lease_grace_ns=0)
    Stream(s).send(0, replaying(7, "r", adapter="a"))
    assert admit(s, 0, "other", adapter=b"b") == -core.REJECTED_LIMIT
    assert s.replay(0, 0, b"s", 8, 0, 1, 20, 10, 10, adapter=b"b") == core.LEASE_UNKNOWN
    s.poll(10 * SECOND)  # it was not renewed
    handle = admit(s, 10 * SECOND, "again", adapter=b"b")
    assert handle > 0
    s.cancel(10 * SECOND, handle)
    s.poll(10 * SECOND)
    assert is_drained(s, 10 * SECOND)
