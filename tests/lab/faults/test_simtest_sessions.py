"""Runs the fault simulator's seeds with sessions of agents, and tests what the auditor sees."""

from random import Random

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.auditor import ViolationError
from schedsvc_lab.faults.cluster_options import CLUSTER
from schedsvc_lab.faults.event_queue import EventQueue
from schedsvc_lab.faults.jobs import JobMaker
from schedsvc_lab.faults.options import SESSIONS, Options, draw
from schedsvc_lab.faults.run import Case, Tally, run_cases

from .test_auditor import Desk, S


def is_capped(options: Options) -> bool:
    return options.sessions is not None and options.sessions.max_tokens > 0


def test_seeds_with_sessions_hold() -> None:
    drawn = {seed: draw(seed, 2_000) for seed in range(SESSIONS, SESSIONS + 120)}
    assert all(o.sessions is not None for o in drawn.values())
    fair = [s for s, o in drawn.items() if o.fair and o.hostile is None and len(o.pools) == 1]
    capped = [s for s, o in drawn.items() if is_capped(o) and len(o.pools) == 1]
    several = [s for s, o in drawn.items() if is_capped(o) and len(o.pools) > 1]
    kept = [s for s, o in drawn.items() if o.state and o.hostile is None]
    hostile = [s for s, o in drawn.items() if o.hostile is not None]
    groups = (fair, capped, several, kept, hostile)
    assert all(len(seeds) > 2 for seeds in groups)
    chosen = {s for seeds in groups for s in seeds[:3]}
    tally = Tally()
    for _ in run_cases((Case(seed) for seed in sorted(chosen)), tally):
        pass
    assert tally.failures == []


def test_sessions_are_drawn_from_their_seeds_alone() -> None:
    for first in (0, 1 << 40, 1 << 46, 1 << 48, 1 << 52, 1 << 53, SESSIONS - 20):
        for seed in range(first, first + 20):
            options = draw(seed, 2_000)
            assert options.sessions is None
            assert options.limits is None or options.limits.sessions_max_tokens == 0
    assert draw(SESSIONS - 1, 2_000).hostile is not None
    assert SESSIONS < CLUSTER


def test_requests_of_such_seeds_name_sessions() -> None:
    names = set()
    for seed in range(SESSIONS, SESSIONS + 10):
        options = draw(seed, 2_000)
        maker = JobMaker(EventQueue(Random(seed)), options)
        names |= {maker.job().request.session for _ in range(100)}
    assert "" in names
    assert len(names) > 10


def test_auditor_holds_the_order_inside_a_session() -> None:
    desk = Desk(has_sessions=True)
    desk.ask(0, "a-1", session="a")
    other = desk.ask(0, "b-1", session="b")
    second = desk.ask(0, "a-2", session="a")
    desk.grant(0, other, 1)
    desk.auditor.settled(0)
    desk.grant(0, second, 2)
    with pytest.raises(ViolationError, match="granted before one that came earlier"):
        desk.auditor.settled(0)


@pytest.mark.parametrize("waits_for", [[], ["p"]])
@pytest.mark.parametrize("target", [[], ["p"]])
def test_auditor_holds_sessions_that_wait_to_the_bound(
    target: list[str], waits_for: list[str]
) -> None:
    """One session is served repeatedly while another waits all the time."""

    def serve(count: int) -> None:
        desk = Desk(has_sessions=True)
        desk.ask(0, "waits", session="b", pools=waits_for)
        for number in range(1, count + 1):
            desk.grant(S, desk.ask(S, f"a-{number}", session="a", pools=target), number)
            done = pb.CompleteRequest(lease_id=number, pool_epoch=1, output_tokens=10)
            desk.auditor.settled(S)
            desk.say(S, complete=done)

    serve(10)
    with pytest.raises(ViolationError, match="a session that waited all the time"):
        serve(20)
