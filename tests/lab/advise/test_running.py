"""Takes the tenants and engines of a running scheduler as those of today."""

import asyncio
import json

import pytest
import yaml
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc.config import load
from tests.server.test_operator import operating

from .test_advise_cli import trace_file

GOAL = ("--goal", "production p99 first token <= 1 s")
POOLS = [{"name": f"gpu-{at}", "capacity_tokens": 10_000, "max_running": 40} for at in (1, 2)]


async def typed(*words):
    """Run a command beside the server, which shares its process with it."""
    arguments = [str(word) for word in words]
    return await asyncio.to_thread(CliRunner().invoke, main, arguments)


async def advise(server, folder, *more):
    args = ["--trace", trace_file(folder), "--profile", "a10g-llama2-7b", *GOAL, *more]
    return await typed("advise", *args, "--jobs", 1, "--target", server.targets[0])


async def test_a_draft_begins_with_what_operators_set(tmp_path):
    async with operating(tenants=[{"name": "old"}], pools=POOLS[:1]) as (server, _):
        words = ("batch", "--weight", 3, "--tokens-per-minute", 900_000)
        assert (await typed("tenants", "set", *words, "--target", server.targets[0])).exit_code == 0
        result = await advise(server, tmp_path, "--json", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    drafted = load(tmp_path / "out" / "draft.yaml")
    assert [tenant.name for tenant in drafted.tenants] == ["batch", "old", "production"]
    weights = {change["path"]: change["today"] for change in json.loads(result.stdout)["changes"]}
    assert weights.get("tenants.batch.weight", 3.0) == 3.0
    assert "pools" not in yaml.safe_load((tmp_path / "out" / "draft.yaml").read_text())


async def test_its_attached_pools_are_the_engines(tmp_path):
    goal = ("--goal", "* p90 wait <= 1 ms")
    waits = []
    for count in (1, 2):
        async with operating(pools=POOLS[:count]) as (server, _):
            result = await advise(server, tmp_path, "--json", *goal)
        waits.append(json.loads(result.stdout)["goals"][1]["today"]["figure"])
    assert waits[0] > waits[1] == 0.0


async def test_a_group_that_the_file_lacks_is_named(tmp_path):
    tenants = [{"name": "batch", "group": "lab"}]
    async with operating(tenants=tenants, groups=[{"name": "lab"}], pools=POOLS) as (server, _):
        result = await advise(server, tmp_path)
        assert result.exit_code == 1
        assert "its tenant 'batch' names 'lab', which the configuration does not" in result.output
        file = tmp_path / "schedsvc.yaml"
        data = {"listeners": [{"tcp": "127.0.0.1:0"}], "groups": [{"name": "lab"}]}
        file.write_text(yaml.safe_dump(data))
        result = await advise(server, tmp_path, "--config", file)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("target", "text"),
    [("127.0.0.1:1", "no scheduler answers at"), ("::::", "--target")],
)
def test_a_target_that_does_not_answer_is_named(tmp_path, target, text):
    args = ["--trace", trace_file(tmp_path), "--profile", "fast", *GOAL, "--target", target]
    result = CliRunner().invoke(main, ["advise", *map(str, args)])
    assert result.exit_code in (1, 2)
    assert text in result.output
    assert isinstance(result.exception, SystemExit)
