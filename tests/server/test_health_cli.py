"""`schedsvc health`, as the health check of a container runs it."""

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


def test_health_without_a_scheduler_names_the_address(tmp_path: Path) -> None:
    result = run("health", "--target", f"unix:{tmp_path}/none.sock")
    assert result.exit_code == 1
    assert f"{tmp_path}/none.sock" in result.output


def test_health_of_an_unknown_name_is_refused() -> None:
    result = run("health", "speed")
    assert result.exit_code == 2
    assert "'speed' is not one of 'liveness', 'readiness'" in result.output
