"""Tests that a kept client finds its scheduler soon after the name's address changes.

The clients call once a second or less often. So the number of calls that fail shows for how long
the client kept to the old address: 30 s of gRPC's own are 30 calls, or 10 that take 3 s each.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance.conftest import FOLDER, node
from tests.server.test_cli import scheduler

from .name_server import name_server

__all__ = ["node"]

FAILED_MAX = 5
SYNC = """
import sys, time
from schedsvc_client.sync import Scheduler
with Scheduler(sys.argv[1]) as client:
    client.stats()
    print("first", flush=True)
    input()
    for failed in range(30):
        try:
            client.stats()
            break
        except Exception as error:
            print(error, file=sys.stderr)
            time.sleep(1)
    print(failed)
"""
AIO = """
import asyncio, sys
from schedsvc_client.aio import AsyncScheduler
async def run():
    async with AsyncScheduler(sys.argv[1]) as client:
        await client.stats()
        print("first", flush=True)
        input()
        for failed in range(30):
            try:
                await client.stats()
                break
            except Exception as error:
                print(error, file=sys.stderr)
                await asyncio.sleep(1)
        print(failed)
asyncio.run(run())
"""
NODE = """
import { once } from 'node:events';
import { setTimeout as sleep } from 'node:timers/promises';
import { Scheduler } from 'schedsvc';
const client = new Scheduler(process.argv[1]);
await client.stats();
console.log('first');
await once(process.stdin, 'data');
let failed = 0;
for (; failed < 30; failed += 1) {
  try {
    await client.stats();
    break;
  } catch (error) {
    console.error(error.message);
    await sleep(1_000);
  }
}
console.log(failed);
await client.close();
process.exit(0);
"""


@contextmanager
def serving(folder: Path, host: str, port: int) -> Iterator[None]:
    folder.mkdir()
    (folder / "c.yaml").write_text(f"listeners: [{{tcp: '{host}:{port}'}}]\n")
    with scheduler(folder / "c.yaml"):
        yield


def failures(command: list[str], cwd: Path, folder: Path) -> int:
    """Return how many calls of a client fail after its scheduler moved to another address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with name_server("127.0.0.1") as names:
        words = [*command, f"dns://{names.authority}/scheduler.test:{port}"]
        pipe = subprocess.PIPE
        with serving(folder / "a", "127.0.0.1", port):
            # grpc-js asks the server that a target names only with this variable.
            environment = os.environ | {"GRPC_NODE_USE_ALTERNATIVE_RESOLVER": "true"}
            client = subprocess.Popen(
                words, cwd=cwd, env=environment, stdin=pipe, stdout=pipe, text=True
            )
            assert client.stdout is not None
            first = client.stdout.readline()
        try:
            assert first == "first\n"
            with serving(folder / "b", "127.0.0.2", port):
                names.address = "127.0.0.2"
                said, _ = client.communicate("go\n", timeout=110)
        finally:
            client.kill()
            client.wait()
    assert client.returncode == 0
    return int(said)


@pytest.mark.parametrize("code", [SYNC, AIO], ids=["sync", "aio"])
def test_python_client_follows_a_name(code: str, tmp_path: Path) -> None:
    assert failures([sys.executable, "-c", code], tmp_path, tmp_path) <= FAILED_MAX


def test_node_client_follows_a_name(node: str, tmp_path: Path) -> None:
    command = [node, "--input-type=module", "-e", NODE, "--"]
    assert failures(command, FOLDER, tmp_path) <= FAILED_MAX
