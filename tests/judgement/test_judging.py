"""Tests the judgement in a running scheduler: who sees what, and how often it changes."""

import asyncio
import random
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner
from schedsvc_client.v1 import judgement_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.cli import main
from schedsvc.service.judgement import judge
from schedsvc.service.judging import STEADY_NS, Steady
from tests.lab.sim.waits import SECOND, Tenant, Waits
from tests.seeds import fresh
from tests.server.conftest import calling, serving

from .plays import named, snapshot, stale_pool

TENANTS: list[dict[str, Any]] = [{"name": "acme"}, {"name": "beta"}]


def test_a_sentence_changes_at_most_once_in_ten_seconds() -> None:
    for seed in fresh(20):
        rng, steady, now_ns = random.Random(seed), Steady(), 0
        changes: list[int] = []
        shown = judgement_pb2.Judgement()
        for _ in range(400):
            now_ns += rng.choice([1, 10**8, 10**9, 3 * 10**9])
            found = judgement_pb2.Judgement(level=rng.randint(1, 4), text=f"{rng.randint(1, 3)}.")
            said = steady.take(found, now_ns)
            if said != shown:
                changes.append(now_ns)
                shown = said
            if now_ns - changes[-1] >= STEADY_NS:
                assert said == found, "an old sentence goes"
        assert len(changes) > 10
        gaps = [after - before for before, after in pairwise(changes)]
        assert min(gaps) >= STEADY_NS, seed


async def test_stats_and_the_command_begin_with_the_judgement() -> None:
    async with serving(tenants=TENANTS) as server, calling(server.targets[0]) as stub:
        found = (await stub.Stats(pb.StatsRequest())).judgement
        assert found.level in (
            judgement_pb2.JUDGEMENT_LEVEL_OK, judgement_pb2.JUDGEMENT_LEVEL_NOTICE,
        )  # fmt: skip
        words = ("stats", "--target", server.targets[0])
        shown = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert shown.output.startswith(("ok: ", "notice: "))
        assert found.text.split()[0] in shown.output.splitlines()[0]


@pytest.mark.parametrize("seed", fresh(12))
def test_a_caller_reads_only_of_tenants_and_pools_that_it_sees(seed: int) -> None:
    rng = random.Random(seed)
    names = ["alpha", "bravo", "charlie"]
    tenants = [Tenant(name, rng.choice([0.5, 2.0, 8.0]), 200, 90) for name in names]
    own = {name: {"quota": {"requests_per_minute": 20, "over": "refuse"}} for name in names[:2]}
    world = Waits(
        tenants, 50, seed=seed, config=named(*tenants, **own), queue_ttl_ms=4_000,
    )  # fmt: skip
    seen = rng.choice(names)
    world.core.set_principal(0, 1, b"caller", tenants=[seen.encode()], pools=[b"engine"])
    world.run_until(15 * SECOND)
    stale_pool(world, "secret-engine")
    then = snapshot(world)
    world.run_until(25 * SECOND)
    found = judge(then, snapshot(world, 1), 0, 10)
    hidden = [name for name in (*names, "secret-engine") if name != seen]
    assert [name for name in hidden if name in found.text] == []
    whole = judge(then, snapshot(world), 0, 10)
    assert "secret-engine" in whole.text
