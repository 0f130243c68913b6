"""Tests policies that are classes of the user's own, by name and as classes."""

import sys

import pytest
from click.testing import CliRunner

from schedsvc._core import GRANTED
from schedsvc.cli import main
from schedsvc.config import Config
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.own_policy import PolicyError, policy_name
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Scenario, patient_config, simulate
from schedsvc_lab.workload import read_trace

MODULE = """
class Sif:
    def key(self, request, standing):
        return request.prompt_tokens

class Shortest(Sif):
    def place(self, request):
        return request.prompt_tokens

class Raises:
    def key(self, request, standing):
        return standing.queued / 0

class Half:
    def key(self, request, standing):
        return 0.5

class Unready(Sif):
    def __init__(self, more):
        pass

class Misplaces(Sif):
    def place(self, request):
        return None

class NoKey:
    pass
"""


class Sif:
    """Orders as the core's `sif` does."""

    def key(self, request, standing):
        return request.prompt_tokens


class Shortest(Sif):
    """Orders the requests of one tenant, too."""

    def place(self, request):
        return request.prompt_tokens


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Draw requests that an engine cannot serve as they come."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    result = CliRunner().invoke(
        main,
        ["workload", "synth", "--out", str(path), "--requests", "1200", "--rate", "4", "--tenants",
         "9", "--input", "lognormal:40:1.8:1021", "--output", "lognormal:210:0.7:977"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def requests(trace):
    return Requests.from_trace(read_trace(trace))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make the module in the folder where a command runs."""
    (tmp_path / "own_policies.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)
    return tmp_path


def limited(clients):
    """Configure classes, quotas and guarantees that bind, over two engines."""
    tenants = [{"name": client} for client in clients]
    for at, tenant in enumerate(tenants):
        if at % 3 == 0:
            tenant["quota"] = {"tokens_per_minute": 9_000, "concurrency": 3}
        if at % 3 == 1:
            tenant["share"] = {"tokens_per_minute": 8_000}
        if at % 4 == 0:
            tenant["class"] = "low"
    return Config.model_validate(
        {
            "listeners": [{"unix": "unused.sock"}],
            "scheduler": {"queue_ttl_ms": 60_000, "flow_queue_max": 10_000, "queue_max": 100_000},
            "classes": [{"name": "low", "rank": 5}],
            "unknown_tenants": "refuse",
            "pools": [
                {"name": "x", "capacity_tokens": 8_000},
                {"name": "y", "capacity_tokens": 5_000},
            ],
            "tenants": tenants,
        }
    )


def run(requests, policy, config):
    return simulate(
        Scenario(profile=load_profile("a10g-llama2-7b"), config=config), requests, policy
    )


@pytest.mark.parametrize("configure", [patient_config, limited])
def test_a_class_with_the_key_of_a_known_policy_gives_its_run(requests, configure):
    """A class changes the order alone: guarantees, quotas and ledger decide as ever."""
    known, own = (run(requests, policy, configure(requests.clients)) for policy in ("sif", Sif))
    assert own.digest == known.digest
    assert own.outcomes.end_ns == known.outcomes.end_ns
    assert (set(own.outcomes.outcome) != {GRANTED}) == (configure is limited)
    assert own.policy == policy_name(Sif) == f"{__name__}:Sif"


def test_places_order_what_one_tenant_waits_with(requests):
    """A class without places lets the requests of one tenant go as they arrived."""
    config = patient_config(requests.clients)
    for policy, in_order in ((Sif, True), (Shortest, False)):
        done = run(requests, policy, config)
        by_client = {}
        for index in done.outcomes.order:
            by_client.setdefault(requests.client[index], []).append(index)
        assert (all(order == sorted(order) for order in by_client.values())) == in_order


def test_a_command_takes_a_class_from_its_folder(folder, trace):
    result = CliRunner().invoke(
        main,
        ["sim", "--trace", str(trace), "--policy", "sif", "--policy", "own_policies:Sif",
         "--out", "out", "--span", "60"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    digests = {line.partition(": digest ")[2] for line in result.output.splitlines()
               if ": digest " in line}  # fmt: skip
    assert len(digests) == 1
    assert (folder / "out" / "decisions_own_policies.Sif_0.csv").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_policies:None", "module 'own_policies' has no attribute 'None'"),
        ("own_policies:NoKey", "has to be a class with a method key(self, request, standing)"),
        ("no_such_module:Sif", "No module named 'no_such_module'"),
        ("sfi", "'sfi' is none of engine, fcfs, vtc, "),
        ("own_policies:Raises", "own_policies:Raises.key(): ZeroDivisionError: division by zero"),
        ("own_policies:Half", "own_policies:Half.key: must be an int from -2^60 + 1 to"),
        ("own_policies:Misplaces", "own_policies:Misplaces.place: must be an int from"),
        ("own_policies:Unready", "own_policies:Unready.__init__(): TypeError"),
    ],
)
@pytest.mark.parametrize("command", [(), ("sweep", "--vary", "engine.sequences_max=8,16")])
def test_a_wrong_class_is_named(folder, trace, name, message, command):
    result = CliRunner().invoke(
        main, ["sim", *command, "--trace", str(trace), "--policy", name]
    )  # fmt: skip
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Sif(), "give the name of a policy, or a class"),
        (int, "int: has to be a class with a method"),
    ],
)
def test_a_policy_that_is_none_is_named(requests, policy, message):
    with pytest.raises(PolicyError, match=message):
        run(requests, policy, patient_config(requests.clients))
