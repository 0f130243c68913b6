"""Tests a leader that knows nothing of earlier leases: it trusts holders, within bounds."""

from typing import Any

import pytest
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import Stream, asking, fates, faults, notices, replaying
from .support import SECOND, admit_message, pool

BEAT = pb.SessionEvent(beat=pb.SessionBeat())
WINDOW = 30 * SECOND
UNKNOWN = pb.LEASE_STATE_UNKNOWN


def leader(*, cold: bool = True, **options: Any) -> core.Scheduler:
    """Return one pool of the configuration, for 100 tokens, and two callers."""
    given: dict[str, Any] = {
        "lease_ttl_ns": 10 * SECOND, "lease_grace_ns": 20 * SECOND, "headroom_ppm": 0,
        "headroom_min_ppm": 0, "headroom_max_ppm": 0, "queue_ttl_ns": 10 * WINDOW,
    }  # fmt: skip
    s = core.Scheduler(**given | options)
    s.set_flow(b"f", 1000)
    s.set_principal(0, 0, b"gate")
    s.set_principal(0, 1, b"other", pools=[b"q"])
    s.set_pool(0, b"p", 0, 100, 1)
    s.set_term_begun(0, [], cold)
    return s


def offering(gates: int = 0, name: str = "p", epoch: int = 1) -> pb.SessionEvent:
    return pb.SessionEvent(
        pool=pool_pb2.PoolRegistration(
            pool=name, epoch=epoch, capacity_tokens=100, block_size_tokens=1, gates=gates
        )
    )


def runs(lease_id: int, **fields: Any) -> pb.SessionEvent:
    return replaying(lease_id, f"r{lease_id}", **fields)


@pytest.mark.parametrize(("cold", "outcome"), [(True, None), (False, core.GRANTED)])
def test_a_pool_of_the_configuration_waits_if_cold(cold: bool, outcome: int | None) -> None:
    s = leader(cold=cold)
    handle = s.admit_wire(0, 0, admit_message("r", tenant="f").SerializeToString())
    assert isinstance(handle, int) == (outcome is None)
    assert pool(s, 0)["wait_reason"] == ("DETACHED" if cold else "NONE")
    s.check()


def test_without_gates_it_grants_after_the_window() -> None:
    s = leader()
    s.admit_wire(0, 0, admit_message("r", tenant="f").SerializeToString())
    assert s.next_deadline() == WINDOW
    assert s.poll(WINDOW - 1) == []
    assert [d.outcome for d in s.poll(WINDOW)] == [core.GRANTED]


@pytest.mark.parametrize("gates", [0, 1])
def test_a_gate_has_to_replay_first_however_it_counts(gates: int) -> None:
    s = leader()
    handle = s.admit_wire(0, 0, admit_message("r", [60], tenant="f").SerializeToString())
    gate = Stream(s)
    gate.send(0, offering(gates))
    assert s.poll(0) == []
    gate.send(0, runs(7, reserved_tokens=70, prompt_tokens=60))
    assert s.poll(0) == []  # more replays may follow
    gate.send(0, BEAT)
    assert s.poll(0) == []  # there is no room
    assert pool(s, 0)["promised_tokens"] == 70
    gate.send(0, pb.SessionEvent(complete=pb.CompleteRequest(lease_id=7, pool_epoch=1)))
    assert s.stats(0)["totals"]["live_leases"] == 1
    assert handle
    s.check()


def test_two_gates_have_to_replay() -> None:
    s = leader()
    gates = [Stream(s), Stream(s)]
    for gate in gates:
        gate.send(0, offering(2))
    gates[0].send(0, BEAT, asking(1, "r", pools=["p"]))
    assert fates(gates[0].pull(0)) == []
    gates[1].send(0, BEAT)
    assert fates(gates[0].pull(0)) == [(1, core.GRANTED)]


def test_a_hostile_caller_gains_nothing_at_a_cold_leader() -> None:
    """It may not offer the pool: it replays nothing into it, and opens it for no grant."""
    s = leader()
    s.admit_wire(0, 0, admit_message("waits", tenant="f").SerializeToString())
    hostile = Stream(s, principal=1)
    answer = hostile.send(0, runs(7, pool_epoch=0), runs(8, pool_epoch=0, reserved_tokens=1))
    assert notices(answer) == [(7, UNKNOWN), (8, UNKNOWN)]
    assert faults(hostile.send(0, offering(1), BEAT)) != []
    hostile.send(0, offering(1, "q"), runs(9, pool="q"), BEAT)
    assert s.poll(0) == []  # the pool still waits for its gate
    assert pool(s, 0)["promised_tokens"] == 0
    assert s.stats(0)["totals"]["replays_refused"] == 2
    s.check()


def test_a_gate_that_lies_fills_its_own_pool_at_most() -> None:
    """Reservations beyond the possible grants, a class that Admit refuses, and a repeated id."""
    s = leader(ledger="sum")
    gate = Stream(s)
    gate.send(0, offering(1))
    answers = [notices(gate.send(0, runs(k, reserved_tokens=90))) for k in range(1, 12)]
    assert answers[0] == []
    assert all(answer in ([], [(k + 1, UNKNOWN)]) for k, answer in enumerate(answers))
    accepted = answers.count([])
    # The bound of replay.pxi: the most that leases of a pool of that capacity can reserve.
    assert accepted * 90 <= 100 * (1 + (accepted - 1).bit_length()) + 2 * (accepted + 1)
    assert accepted < 11
    assert notices(gate.send(0, runs(1, request_class="unknown"))) == []
    assert s.stats(0)["totals"]["live_leases"] == accepted
    assert s.stats(0)["totals"]["replays_refused"] == 11 - accepted
    gate.send(0, BEAT, asking(1, "new", pools=["p"]))
    assert fates(gate.pull(0)) == []
    s.check()


def test_replayed_leases_are_marked() -> None:
    s = leader()
    gate = Stream(s)
    gate.send(0, offering(1), runs(7), BEAT)
    granted = gate.grant(0, 1, "new", pools=["p"])
    rows = s.list_leases(0, 0, 1_000, 1_000)[1]
    assert {row["lease_id"]: row["replayed"] for row in rows} == {7: True, granted: False}


def test_the_window_ends_the_trust() -> None:
    s = leader()
    gate = Stream(s)
    gate.send(0, offering(1))
    assert notices(gate.send(WINDOW - 1, runs(7))) == []
    assert notices(gate.send(WINDOW, runs(8))) == [(8, UNKNOWN)]
