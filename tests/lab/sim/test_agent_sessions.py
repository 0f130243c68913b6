"""Simulates sessions of agents: the cap saves the prefix cache, and all sessions begin."""

from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.agent_sessions import compare
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Run, Scenario, simulate
from schedsvc_lab.workload import Record, TraceRequest


def test_a_cap_on_sessions_raises_the_hit_rate() -> None:
    without, capped = compare((0.0, 0.8), 300, 1)
    assert capped["hit_rate"] > 2 * without["hit_rate"]
    # About eight have room at once: others have begun and ended, too.
    assert capped["sessions"] > 9


def talks(*, named: bool) -> Run:
    """Return one tenant: a session with many requests, and one with few, all at once."""
    trace = [
        TraceRequest(
            0.0, "a", 100, 50, Record(conversation="busy" if k % 5 else "calm", tenant="a")
        )
        for k in range(200)
    ]
    scenario = Scenario(profile=load_profile("fast"), sessions=named)
    return simulate(scenario, Requests.from_trace(trace), "vtc")


def last_end_s(run: Run) -> float:
    """Return when the last request of the calm session ended."""
    return max(run.outcomes.end_ns[k] for k in range(0, 200, 5)) / 1e9


def test_conversations_of_a_trace_are_sessions_only_if_asked_for() -> None:
    plain, named = talks(named=False), talks(named=True)
    assert plain.requests.sessions is not None
    assert last_end_s(named) < 0.6 * last_end_s(plain)
