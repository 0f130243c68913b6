"""Tests `schedsvc health`, as the health check of a container runs it."""

import asyncio
import json
from pathlib import Path

from click.testing import Result

from schedsvc.server import Server

from .conftest import calling, serving
from .test_cli import run


async def asked(server: Server, *words: object) -> Result:
    return await asyncio.to_thread(run, "health", *words, "--target", server.targets[0])


async def test_health_of_a_scheduler_is_serving(server: Server) -> None:
    for words in ([], ["readiness"], ["liveness"]):
        result = await asked(server, *words)
        name = words[0] if words else "readiness"
        assert (result.exit_code, result.output) == (0, f"{name}: SERVING\n")
    result = await asked(server, "liveness", "--json")
    assert json.loads(result.output) == {"name": "liveness", "status": "SERVING"}


async def test_health_during_a_drain_is_live_but_not_ready(server: Server) -> None:
    async with calling(server.targets[0]):
        await server.drain()
        assert (await asked(server, "liveness")).exit_code == 0
        result = await asked(server, "readiness")
        assert (result.exit_code, result.output) == (1, "readiness: NOT_SERVING\n")


async def test_health_without_a_token_is_answered(tmp_path: Path) -> None:
    listeners = [{"unix": str(tmp_path / "s.sock"), "auth": "token"}]
    token = {"name": "t", "sha256": "ab" * 32}
    async with serving(listeners=listeners, auth={"principals": [token]}) as server:
        assert (await asked(server, "liveness")).exit_code == 0


async def test_health_of_several_targets_names_each(server: Server, tmp_path: Path) -> None:
    async with serving() as other:
        targets = [server.targets[0], other.targets[0]]

        async def of_both(*words: object) -> tuple[int, list[str]]:
            listed = ("--target", ", ".join(targets))
            result = await asyncio.to_thread(run, "health", *words, *listed)
            return result.exit_code, result.output.splitlines()

        first, second = targets
        both = [f"{first}: readiness: SERVING", f"{second}: readiness: SERVING"]
        assert await of_both() == (0, both)
        await other.drain()
        one = [both[0], f"{second}: readiness: NOT_SERVING"]
        assert await of_both("readiness") == (0, one)
        assert (await of_both("liveness"))[0] == 0
        code, lines = await of_both("--json")
        assert (code, [json.loads(line)["status"] for line in lines]) == (
            0, ["SERVING", "NOT_SERVING"]
        )  # fmt: skip
        await server.drain()
        assert (await of_both("readiness"))[0] == 1
        assert (await of_both("liveness"))[0] == 0
        targets[1] = gone = f"unix:{tmp_path}/none.sock"
        code, lines = await of_both("liveness")
        assert (code, lines[0]) == (1, f"{first}: liveness: SERVING")
        assert lines[1].startswith(f"{gone}: liveness: NO_ANSWER ({gone}: no scheduler answers at")


def test_health_of_a_wrong_list_names_the_target() -> None:
    for listed, named in (("127.0.0.1:7600,x", "'x'"), ("a:1,a:1", "'a:1' is listed twice")):
        result = run("health", "--target", listed)
        assert result.exit_code == 2
        assert named in result.output


def test_health_without_a_scheduler_names_the_address(tmp_path: Path) -> None:
    result = run("health", "--target", f"unix:{tmp_path}/none.sock")
    assert result.exit_code == 1
    assert f"{tmp_path}/none.sock" in result.output


def test_health_of_an_unknown_name_is_refused() -> None:
    result = run("health", "speed")
    assert result.exit_code == 2
    assert "'speed' is not one of 'liveness', 'readiness'" in result.output
