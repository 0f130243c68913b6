"""Requests and the engine's profile are taken from a recording."""

from random import Random

import pytest

from schedsvc_lab.advise.recorded import RecordedError, recorded_traffic
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.requests import Requests

from .virtual_server import record_run

A10G = load_profile("a10g-llama2-7b")


def poisson(count, rate, seed=1):
    """Draw requests of two clients with prompts and outputs of many lengths."""
    draws, at_s, rows = Random(seed), 0.0, []
    for _ in range(count):
        at_s += draws.expovariate(rate)
        rows.append(
            (round(at_s * 1e9), draws.randrange(2), draws.randint(20, 900), draws.randint(30, 400))
        )
    return Requests(("a", "b"), rows)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded") / "recording"
    requests = poisson(600, 1.5)
    record_run(A10G, requests, path, scheduler={"queue_ttl_ms": 3_600_000})
    return path, requests


def test_requests_of_a_recording_are_those_that_were_asked(recorded):
    path, requests = recorded
    traffic = recorded_traffic(path, fits=False)
    assert traffic.profile is None
    assert traffic.engines == 1
    found = traffic.requests
    assert found.clients == requests.clients
    start_ns = requests.arrival_ns[0]
    assert list(found.arrival_ns) == [at - start_ns for at in requests.arrival_ns]
    for column in ("client", "prompt_tokens", "output_tokens"):
        assert list(getattr(found, column)) == list(getattr(requests, column))


def test_a_recording_gives_back_the_profile_of_its_engine(recorded):
    """Within 2 % for steps of many sizes; sizes are those of the pool."""
    profile = recorded_traffic(recorded[0], fits=True).profile
    for field in ("kv_tokens", "block_size_tokens", "sequences_max", "context_tokens_max"):
        assert getattr(profile.engine, field) == getattr(A10G.engine, field)
    true, fitted = A10G.step_cost(64), profile.step_cost(64)
    for decodes, kv_tokens in ((4, 1_500), (8, 4_000), (12, 6_000), (16, 8_000)):
        step = true.duration_ns(0, decodes, kv_tokens)
        assert fitted.duration_ns(0, decodes, kv_tokens) == pytest.approx(step, rel=0.02)
        # The fixed part of a prompt is spread over its tokens.
        both = true.duration_ns(460, decodes, kv_tokens)
        assert fitted.duration_ns(460, decodes, kv_tokens) == pytest.approx(both, rel=0.02)


def test_a_recording_with_few_reports_asks_for_a_profile(tmp_path):
    path = tmp_path / "recording"
    record_run(A10G, poisson(2, 1.0), path)
    with pytest.raises(RecordedError, match=r"intervals are too few; .*; give --profile"):
        recorded_traffic(path, fits=True)
    assert len(recorded_traffic(path, fits=False).requests) == 2


def test_a_file_that_is_no_recording_is_named(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,client\n")
    with pytest.raises(RecordedError, match=r"trace.csv: is no recording"):
        recorded_traffic(path, fits=True)
