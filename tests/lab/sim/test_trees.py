"""Groups with a weight in the simulator, in recordings and in replays of these."""

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc.config import Config
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.replay.exact import Exact
from schedsvc_lab.sim.replay.reader import Recording
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Run, Scenario, simulate

from .replay_traffic import CONFIG, drive
from .test_replay import ask_until, recording_server

_NS = 1_000_000_000
USERS = {"small": 1, "middle": 3, "large": 6}
WEIGHTS = {"small": 1, "middle": 2, "large": 4}
UNTIL_S = 12


def organisations(*, weighted: bool) -> Config:
    """Return organisations 1:2:4, and two teams 1:2 in the large one."""
    teams = [
        {"name": f"team{k}", "parent": "large", **({"weight": k + 1} if weighted else {})}
        for k in range(2)
    ]
    groups = [{"name": n, **({"weight": w} if weighted else {})} for n, w in WEIGHTS.items()]
    tenants = [
        {"name": f"{org}-{user}", "group": f"team{user % 2}" if org == "large" else org}
        for org, count in USERS.items()
        for user in range(count)
    ]
    patient = {"queue_ttl_ms": 3_600_000, "flow_queue_max": 10**6, "queue_max": 10**6}
    return Config.model_validate(
        {
            "listeners": [{"unix": "unused.sock"}],
            "scheduler": patient,
            "groups": [*groups, *teams],
            "tenants": tenants,
        }
    )


def flooded(config: Config) -> Run:
    """All users ask for more than they can get in UNTIL_S."""
    clients = tuple(tenant.name for tenant in config.tenants)
    rows = [(0, client, 100, 50) for client in range(len(clients)) for _ in range(2_000)]
    return simulate(
        Scenario(profile=load_profile("fast"), config=config),
        Requests(clients, rows),
        "vtc",
        0,
    )


def served(run: Run) -> Counter[str]:
    """Requests of each client that have ended before UNTIL_S."""
    found: Counter[str] = Counter()
    for client, end_ns in zip(run.requests.client, run.outcomes.end_ns, strict=True):
        if 0 < end_ns < UNTIL_S * _NS:
            found[run.requests.clients[client]] += 1
    return found


def parts_of(found: Counter[str]) -> dict[str, float]:
    return {
        org: sum(n for name, n in found.items() if name.startswith(org)) / found.total()
        for org in USERS
    }


@pytest.fixture(scope="module")
def shared() -> Run:
    """Return a flood of the weighted organisations."""
    return flooded(organisations(weighted=True))


def test_simulated_organisations_share_by_weight_at_each_level(shared: Run) -> None:
    found = served(shared)
    assert min(found.values()) > 100
    assert max(found.values()) < 2_000  # each always has something queued
    assert list(parts_of(found).values()) == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.01)
    teams = [sum(found[f"large-{user}"] for user in range(k, 6, 2)) for k in range(2)]
    assert teams[1] / teams[0] == pytest.approx(2, rel=0.02)
    middle = [found[f"middle-{user}"] for user in range(3)]
    assert min(middle) >= 0.98 * max(middle)


def test_simulated_groups_without_weights_change_nothing() -> None:
    plain = organisations(weighted=False)
    run = flooded(plain)
    assert list(parts_of(served(run)).values()) == pytest.approx([0.1, 0.3, 0.6], rel=0.02)
    alone = [tenant.model_copy(update={"group": None}) for tenant in plain.tenants]
    bare = plain.model_copy(update={"groups": [], "tenants": alone})
    assert flooded(bare).digest == run.digest


def test_simulated_tree_is_the_same_from_one_seed(shared: Run) -> None:
    assert flooded(organisations(weighted=True)).digest == shared.digest


TREE = CONFIG.replace(
    "tenants: [{name: hog}, {name: quiet, weight: 2}]",
    """
groups: [{name: org, weight: 1}, {name: team, parent: org, weight: 3}, {name: other, weight: 2.5}]
tenants: [{name: hog, group: team}, {name: quiet, weight: 2, group: other}]
""",
)


def test_replay_of_a_tree_has_the_servers_digest(tmp_path: Path) -> None:
    assert "parent: org" in TREE
    with recording_server(tmp_path, TREE) as (process, target):
        asyncio.run(drive(target))
        stats = ask_until(target, lambda told: not told.totals.live_leases)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    path = tmp_path / "recording"
    replay = Exact(Recording(path))
    assert replay.run().digest == stats.digest != 0
    replay.core.check()
    told = {group.name: group for group in stats.groups}
    assert set(told) == {"group:org", "group:team", "group:other"}
    for row in replay.core.stats(2**62, 0)["groups"]:
        group = told[row["name"]]
        assert (row["granted"], row["vtc_micro"]) == (group.granted, group.vtc_micro)
        assert group.granted > 0

    def what_if(*options: str) -> object:
        """Return the tenants' figures under the same configuration, or a changed one."""
        arguments = ["sim", "--replay", str(path), "--config", str(tmp_path / "c.yaml"), "--json"]
        result = CliRunner().invoke(main, [*arguments, *options])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["what_if"]["tenants"]

    assert what_if() != what_if("--set", "groups.org.weight=0.001")
