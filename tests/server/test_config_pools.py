"""Tests limits of pools and adapters in a configuration file."""

from pathlib import Path

import pytest

from schedsvc.config import load
from schedsvc.driver import new_core

from .test_config import MINIMAL, found, reading


def test_limits_of_pools_reach_the_core_each_pool_with_its_own(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        MINIMAL
        + "scheduler: {each_pool: {max_running: 9, max_request_input_tokens: 500}}\n"
        + "pool_limits:\n"
        + "  - {pools: [q], max_running: 0, batch_max_tokens: 70}\n"
        + "  - {pools: [later], max_total_tokens: 640}\n"
        + "pools: [{name: p, capacity_tokens: 9600}, {name: q, capacity_tokens: 9600}]\n"
    )
    core = new_core(load(file), 0)
    core.set_pool(0, b"later", 1, 9_600, 16)
    rows = core.stats(0)["pools"]
    assert [row["max_running"] for row in rows] == [9, 0, 9]
    assert [row["capacity_tokens"] for row in rows] == [9_600, 9_600, 640]
    # A sixth of the pool is 1,600; the longest request is 500.
    assert [row["round_max_tokens"] for row in rows] == [1_600, 70, 500]
    flow = core.flow_index(b"unknown")
    assert core.admit(0, flow, b"r", 501, 1) == -18


def test_adapters_reach_the_core(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        MINIMAL
        + "scheduler: {each_pool: {max_loras: 3, adapter_tokens: 50}}\n"
        + "adapters: [{name: ranked, rank: 16}, {name: told, tokens: 7}]\n"
        + "pools: [{name: p, capacity_tokens: 9600}]\n"
    )
    core = new_core(load(file), 0)
    for i, (adapter, taken) in enumerate(((b"ranked", 64), (b"told", 71), (b"other", 121))):
        core.admit(0, 0, b"r%d" % i, 1, 1, adapter=adapter)
        core.poll(0)
        [row] = core.stats(0)["pools"]
        assert (row["active_adapters"], row["max_loras"]) == (i + 1, 3)
        assert row["adapter_tokens"] == taken


def test_the_cap_on_sessions_reaches_the_core(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        MINIMAL
        + "scheduler: {each_pool: {sessions_max_tokens: 700}}\n"
        + "pool_limits: [{pools: [q], sessions_max_tokens: 0}]\n"
        + "pools: [{name: p, capacity_tokens: 9600}, {name: q, capacity_tokens: 9600}]\n"
    )
    rows = new_core(load(file), 0).stats(0)["pools"]
    assert [row["sessions_max_tokens"] for row in rows] == [700, 0]


def test_default_pool_runs_1000_and_its_round_is_a_sixth(tmp_path: Path) -> None:
    text = MINIMAL + "pools: [{name: p, capacity_tokens: 96000, max_model_tokens: 8000}]"
    config = reading(tmp_path, text).config
    assert config is not None
    [row] = new_core(config, 0).stats(0)["pools"]
    assert (row["max_running"], row["round_max_tokens"]) == (1_000, 16_000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "scheduler: {each_pool: {batch_max_tokens: many}}",
            ["2:43 scheduler.each_pool.batch_max_tokens: has to be auto, or a whole number up to"],
        ),
        (
            "scheduler: {each_pool: {max_runing: 1}}",
            ["2:25 scheduler.each_pool.max_runing: unknown key 'max_runing'; did you mean"],
        ),
        (
            "scheduler: {each_pool: {max_request_input_tokens: 9, max_request_total_tokens: 8}}",
            [
                "2:51 scheduler.each_pool.max_request_input_tokens: is larger than"
                " max_request_total_tokens (8), so it would never be reached"
            ],
        ),
        (
            "scheduler: {each_pool: {max_request_total_tokens: 9}}\n"
            "pool_limits: [{pools: [p], max_total_tokens: 8}]",
            [
                "3:46 pool_limits[0].max_total_tokens: is smaller than"
                " max_request_total_tokens (9), which would never be reached"
            ],
        ),
        (
            "adapters: [{name: x}, {name: y, rank: 1, tokens: 2}, {name: y, rank: 0}]",
            [
                "2:12 adapters[0]: has to have one of tokens or rank",
                "2:39 adapters[1].rank: stands beside tokens; keep one of tokens or rank",
                "2:61 adapters[2].name: this adapter stands twice, first at adapters[1].name;",
                "2:70 adapters[2].rank: is 0; it has to be at least 1",
            ],
        ),
        (
            "pool_limits: [{pools: [p, q]}, {pools: [q]}, {pools: []}, {max_running: -1}]",
            [
                "2:41 pool_limits[1].pools[0]: this pool stands twice, first at"
                " pool_limits[0].pools[1]; remove one",
                "2:54 pool_limits[2].pools: must not be empty",
                "2:59 pool_limits[3]: the key 'pools' is missing; add it",
                "2:73 pool_limits[3].max_running: is -1; it has to be at least 0",
            ],
        ),
    ],
)
def test_wrong_limits_of_pools_are_named_by_place(
    text: str, expected: list[str], tmp_path: Path
) -> None:
    problems = found(tmp_path, MINIMAL + text)
    assert len(problems) == len(expected), problems
    for problem, start in zip(problems, expected, strict=True):
        assert problem.startswith(start)
