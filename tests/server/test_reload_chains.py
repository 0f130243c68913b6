"""Tests chains of reloads: each is applied whole or not at all; restart settings wait."""

import copy
import random
import re
import time
from collections.abc import Callable, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import structlog
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import Scheduler
from schedsvc.cli.stats import _config as config_lines
from schedsvc.config import Config, configure, reconfigure
from schedsvc.config.in_force import RESTART_KEYS, in_force
from schedsvc.driver import new_core
from schedsvc.server import Server
from schedsvc.server.reload import Reloader
from tests.seeds import fresh

from .conftest import ask, calling, config_of, serving, totals
from .test_metrics import of, scrape

OPS = {"name": "ops", "exempt": False, "rank": 5}


def named(logs: list[Any]) -> list[str]:
    """Return the settings that the log says need a restart."""
    return [key for entry in logs if entry["event"] == "config_needs_restart"
            for key in entry["keys"]]  # fmt: skip


async def test_exempt_changed_live_waits_and_the_rest_applies() -> None:
    exempt = {"name": "ops", "exempt": True}
    async with serving(classes=[OPS], metrics={"listen": "127.0.0.1:0"}) as server:
        server.reconfigure(config_of(classes=[exempt], metrics={"listen": "127.0.0.1:0"}))
        new = {
            "classes": [exempt],
            "scheduler": {"headroom": 0, "policy": "fcfs"},
            "tenants": [{"name": "a", "weight": 7}, {"name": "c"}],
            "metrics": {"listen": "127.0.0.1:0"},
        }
        with structlog.testing.capture_logs() as logs:
            server.reconfigure(config_of(**new))
        assert named(logs) == ["classes (ops)"]
        stats = server.driver.stats(0)
        assert stats["policy"] == "fcfs"
        assert [(row["name"], row["rank"], row["exempt"]) for row in stats["classes"]] == [
            ("default", 0, False),
            ("ops", 5, False),
        ]
        assert server.driver.tenant_stats(b"a")[0]["weight_milli"] == 7_000
        assert server.driver.tenant_stats(b"c")
        assert of(await scrape(server), "config_needs_restart") == 1
        async with calling(server.targets[0]) as stub:
            told = (await stub.Stats(pb.StatsRequest())).config
    assert list(told.needs_restart) == ["classes (ops)"]
    assert told.problem == ""
    assert list(config_lines(told)) == ["waits for a restart: classes (ops)"]


async def test_epoch_waits_for_a_restart_in_later_reloads_too() -> None:
    async with serving() as server, calling(server.targets[0]) as stub:
        runs = await stub.Admit(ask(100))
        for capacity, expected in ((1_600, 1_600), (3_200, 3_200)):
            pool = {"name": "pool", "capacity_tokens": capacity, "epoch": 2}
            with structlog.testing.capture_logs() as logs:
                server.reconfigure(config_of(pools=[pool]))
            assert named(logs) == ["pools (pool).epoch"]
            [row] = server.driver.stats(0)["pools"]
            assert (row["epoch"], row["capacity_tokens"]) == (1, expected)
            assert totals(server)["live_leases"] == 1
        lease = {"lease_id": runs.grant.lease_id, "pool_epoch": 1}
        ended = await stub.Complete(pb.CompleteRequest(**lease))
        assert ended.outcome == pb.OUTCOME_COMPLETED


class FailingOnce:
    """Fails at a core's call of a number, counted from 0; all others reach the core."""

    def __init__(self, core: Scheduler, call: int) -> None:
        self._core = core
        self.left = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._core, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                raise ValueError("refused")
            return method(*args, **kwargs)

        return call


def observed(core: Scheduler) -> dict[str, Any]:
    """Return the visible part of a core's configuration."""
    stats = core.stats(0, 1_000)
    flows = {
        (row["tenant"], row["request_class"]): (row["weight_milli"], row["audit"], row["quotas"])
        for row in stats["flows"]
    }
    pools = ("name", "epoch", "capacity_tokens", "block_size_tokens", "max_running")
    classes = ("name", "rank", "ageing_ms", "exempt")
    return {
        "policy": (stats["policy"], stats["flow_order"]),
        "pools": sorted(tuple(row[key] for key in pools) for row in stats["pools"]),
        "classes": sorted(tuple(row[key] for key in classes) for row in stats["classes"]),
        "flows": flows,
    }


def test_reload_refused_at_any_call_changes_nothing() -> None:
    old = config_of(classes=[OPS], tenants=[{"name": "a", "class": "ops"}, {"name": "b"}])
    new = config_of(
        scheduler={"headroom": 0, "policy": "fcfs", "flow_order": "deadline"},
        classes=[{"name": "fast", "rank": -3, "ageing_ms": 70}],
        groups=[{"name": "g", "quota": {"concurrency": 4}}],
        tenants=[
            {"name": "a", "weight": 3, "group": "g", "class": "fast"},
            {"name": "b", "quota": {"concurrency": 1}, "mode": "dry_run"},
        ],
        unknown_tenants="refuse",
    )
    for call in range(100):
        core = Scheduler(**old.core_options())
        configure(core, old, 0)
        before = observed(core)
        failing = FailingOnce(core, call)
        try:
            reconfigure(failing, new, old, 0)
        except ValueError:
            assert observed(core) == before, call
            core.check()
        else:
            break
    assert call >= 15
    assert observed(core) != before


async def test_reload_that_fails_is_counted_and_the_next_works(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    text = "listeners: [{tcp: '127.0.0.1:0'}]\ntenants: [{name: a, weight: 5}]\n"
    before_s = time.time() - 0.001  # the server counts milliseconds
    async with serving(metrics={"listen": "127.0.0.1:0"}) as server:
        reloader = Reloader(file, server.reconfigure, server.driver.loading)
        began = of(await scrape(server), "config_last_reload_success_timestamp_seconds")
        after_s = time.time()
        assert before_s <= began <= after_s
        core = server.driver._core
        before = observed(core)
        server.driver._core = FailingOnce(core, 4)  # type: ignore[assignment]
        file.write_text(text)
        with structlog.testing.capture_logs() as logs:
            assert not await reloader.reload()
        assert observed(core) == before
        [entry] = [entry for entry in logs if entry["event"] == "config_rejected"]
        assert entry["reason"] == "ValueError: refused"
        samples = await scrape(server)
        assert of(samples, "config_last_reload_successful") == 0
        assert of(samples, "config_reload_failures_total") == 1
        assert of(samples, "config_last_reload_success_timestamp_seconds") == began
        async with calling(server.targets[0]) as stub:
            told = (await stub.Stats(pb.StatsRequest())).config
        assert told.problem == "ValueError: refused"
        assert list(config_lines(told)) == [
            "the last reload changed nothing: ValueError: refused",
        ]
        server.driver.loading.succeeded_ms = 0
        assert await reloader.reload()
        samples = await scrape(server)
        assert of(samples, "config_last_reload_successful") == 1
        assert of(samples, "config_last_reload_success_timestamp_seconds") >= began
        assert server.driver.tenant_stats(b"a")[0]["weight_milli"] == 5_000


# Random chains. The settings in force are worked out from the files and the log alone.


def changed(rng: random.Random, data: dict[str, Any]) -> dict[str, Any]:
    """Return a valid file that differs from another one here and there."""
    new = copy.deepcopy(data)
    scheduler = new["scheduler"]
    for _ in range(rng.randint(1, 4)):
        what = rng.choice(
            ["class", "class", "pool", "pool", "pool", "live", "restart", "limits", "tenant", "top"]
        )
        if what == "class":
            name = rng.choice(["x", "y", "z"])
            rest = [entry for entry in new.get("classes", []) if entry["name"] != name]
            rank = {"rank": rng.randint(1, 3) * 10 + "xyz".index(name)}
            entry = rng.choice([None, rank, {"exempt": True}])
            new["classes"] = rest + ([] if entry is None else [{"name": name, **entry}])
        elif what == "pool":
            name = rng.choice(["p", "q"])
            rest = [entry for entry in new.get("pools", []) if entry["name"] != name]
            block = rng.choice([1, 8])
            # With blocks of 8 that stay, 4 tokens are refused by the core.
            entry = {"name": name, "capacity_tokens": rng.choice([4 if block == 1 else 8, 1_600])}
            entry |= {"epoch": rng.randint(1, 3), "block_size_tokens": block}
            new["pools"] = rest + rng.choice([[], [entry], [entry]])
        elif what == "live":
            scheduler["policy"] = rng.choice(["fcfs", "vtc", "dlpm"])
            scheduler["flow_order"] = rng.choice(["arrival", "deadline"])
        elif what == "restart":
            key, values = rng.choice(
                [("headroom", [0, 0.1]), ("ledger", ["sum", "peak"]), ("bypass_ms", [1, 2]),
                 ("samples_min", [3, 4])]
            )  # fmt: skip
            (scheduler if key == "headroom" else scheduler["expert"])[key] = rng.choice(values)
        elif what == "limits":
            key = rng.choice(["drain_ms", "sessions_max", "streams_max", "message_max_bytes"])
            new.setdefault("limits", {})[key] = rng.randint(2_000, 2_003)
        elif what == "tenant":
            new["tenants"] = [
                {"name": name, "weight": rng.randint(1, 9)} for name in "abc" if rng.random() < 0.7
            ]
        else:
            new["metrics"] = {"listen": "127.0.0.1:0", "tenants_max": rng.randint(1, 3)}
    return new


def less(file: dict[str, Any], before: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Return the file, with what is named as it was before."""
    found = copy.deepcopy(file)
    for key in keys:
        if "(" not in key:
            *path, field = key.split(".")
            keep(reduce(getitem, path, found), reduce(getitem, path, before), field)
            continue
        match = re.fullmatch(r"(\w+) \((\w+)\)(?:\.(\w+))?", key)
        assert match is not None, key
        section, name, field = match.groups()
        [old] = [entry for entry in before[section] if entry["name"] == name]
        entries = [entry for entry in found.get(section, []) if entry["name"] == name]
        if not entries:
            found.setdefault(section, []).append(old)
        elif field is None:
            found[section][found[section].index(entries[0])] = old
        else:
            keep(entries[0], old, field)
    return found


def keep(new: dict[str, Any], old: Mapping[str, Any], key: str) -> None:
    new.pop(key, None)
    if key in old:
        new[key] = old[key]


def plain(config: Config) -> dict[str, Any]:
    """Return a configuration as data; the order of pools and classes does not matter."""
    data = config.model_dump()
    for key in ("pools", "classes"):
        data[key] = sorted(data[key], key=lambda entry: str(entry["name"]))
    return data


async def play(seed: int) -> int:
    """Play a chain; return how often the log named something."""
    rng = random.Random(seed)
    times_named = 0
    scheduler: dict[str, Any] = {"expert": {}}
    file: dict[str, Any] = {"limits": {}, "scheduler": scheduler, "pools": [], "classes": []}
    for _ in range(3):
        force = file = changed(rng, file)
        server = Server(config_of(**file))
        for step in range(4):
            file = changed(rng, file)
            with structlog.testing.capture_logs() as logs:
                server.reconfigure(config_of(**file))
            keys = named(logs)
            keys += [f"pools ({e['pool']})" for e in logs if e["event"] == "pool_unchanged"]
            force = less(file, force, keys)
            times_named += bool(keys)
            expected = config_of(**{**force, "pools": force.get("pools", [])})
            expected = in_force(expected, expected)  # with the proof that listeners ask for
            assert plain(server._config) == plain(expected), (seed, step)
            names = [tenant.name for tenant in expected.tenants]
            cores = server.driver._core, new_core(expected, 0)
            assert seen(cores[0], names) == seen(cores[1], names), (seed, step)
        server.driver._core.check()
        await server.stop(None)
    return times_named


def seen(core: Scheduler, tenants: list[str]) -> dict[str, Any]:
    """Return it without tenants that are gone: they keep their flows, which nothing reaches."""
    found = observed(core)
    found["flows"] = {name: flow for name, flow in found["flows"].items() if name[0] in tenants}
    return found


async def test_random_chains_hold_what_file_and_log_say() -> None:
    found = [await play(seed) for seed in fresh(40)]
    assert sum(found) > 40


def test_operations_page_lists_all_that_needs_a_restart() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operate" / "operations.md").read_text()
    [listed] = re.findall(r"These settings need a restart(.*?)\n\n", page, re.DOTALL)
    keys = set(re.findall(r"`(\w+)`", listed))
    assert keys == {*RESTART_KEYS, "epoch", "block_size_tokens", "exempt"}
