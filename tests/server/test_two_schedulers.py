"""Tests two schedulers that serve one engine and are no cluster."""

import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from .conftest import POOL, ask, calling, serving, totals
from .test_cli import run

POOLS = "pools: [{name: gpu-1, capacity_tokens: 1600}]\n"
CALLER = "auth: {principals: [{name: gate, token_file: gate.token, pools: ['*', gpu-1]}]}\n"
MEMBER = "auth: {principals: [{name: b, token_file: gate.token, member: true}]}\n"
CLUSTER = "cluster: {name: c, store: {urls: ['rediss://store:6379']}}\n"


async def test_each_of_two_schedulers_promises_the_engine_whole() -> None:
    """docs/understand/promises.md lists this as not promised."""
    promised = 0
    async with AsyncExitStack() as stack:
        for _ in range(2):
            server = await stack.enter_async_context(serving())
            stub = await stack.enter_async_context(calling(server.targets[0]))
            answer = await stub.Admit(ask(1_500, max_output_tokens=1))
            assert answer.outcome == pb.OUTCOME_GRANTED
            promised += totals(server)["promised_tokens"]
    assert promised > POOL["capacity_tokens"]


@pytest.mark.parametrize(
    ("own", "other", "path"),
    [
        (POOLS, POOLS, "pools[0].name"),
        (POOLS, CALLER, "pools[0].name"),
        (CALLER, POOLS, "auth.principals[0].pools[1]"),
        (POOLS, POOLS.replace("gpu-1", "gpu-2"), None),
        (POOLS + CLUSTER, POOLS, None),
        (MEMBER, "", "auth.principals[0].member"),
        (MEMBER + CLUSTER, "", None),
        (POOLS, "pools: 3\nauth: [no\n", None),
    ],
)
def test_check_warns_of_a_pool_of_two_schedulers(
    tmp_path: Path, own: str, other: str, path: str | None
) -> None:
    (tmp_path / "gate.token").write_text("a-token-that-is-long-enough")
    for name, port, text in (("a", 7_600, own), ("b", 7_601, other), ("copy", 7_600, own)):
        where = f"listeners: [{{tcp: '127.0.0.1:{port}'}}]\n"
        (tmp_path / f"{name}.yaml").write_text(where + text)
    found = json.loads(run("check", str(tmp_path / "a.yaml"), "--json").stdout)["warnings"]
    twice = [entry for entry in found if "each of two schedulers promises" in entry["message"]]
    assert [entry["path"] for entry in twice] == ([] if path is None else [path])
    if path and "member" not in path:
        assert str(tmp_path / "b.yaml") in twice[0]["message"]
