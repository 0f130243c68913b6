"""Loads that a client of any language has to stand: withdrawn requests, and a leader that dies."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from schedsvc_client.aio import AsyncScheduler

from tests.cluster.member_process import MemberProcess, start_set
from tests.cluster.members import TOKEN, ready_store
from tests.cluster.store_server import StoreServer
from tests.waiting import until

#: Served before the leader is killed, and then by the next one.
SERVED = 300


def script(**config: Any) -> dict[str, Any]:
    """Return a configuration with one tenant and one pool."""
    pool = {"name": "main", "capacity_tokens": 8_192, "max_running": 1}
    return {"config": {"tenants": [{"name": "red"}], "pools": [pool], **config}}


async def emptied(target: str) -> Any:
    """Wait until all gauges of a scheduler are 0; return its totals."""
    async with AsyncScheduler(target) as client:

        async def is_empty() -> bool:
            totals = (await client.stats()).totals
            assert totals.expired == 0, totals
            return not (totals.queued or totals.live_leases or totals.promised_tokens)

        await until(is_empty, "all gauges are 0")
        return (await client.stats()).totals


def load(program: Sequence[str], targets: str, halfway: Callable[[], None]) -> Any:
    """Send requests without a pause, and go on after `halfway`; return their counts.

    The program ends by itself at the first failure.
    """
    asking = subprocess.Popen(
        [*program, "kill", targets],
        env={**os.environ, "SCHEDSVC_TOKEN": TOKEN},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert asking.stdout is not None
        for served in (SERVED, 2 * SERVED):
            while (line := asking.stdout.readline().strip()).isdigit() and int(line) < served:
                pass
            if not line.isdigit():
                return json.loads(line)
            if served == SERVED:
                halfway()
        said, _ = asking.communicate("stop\n", timeout=60)
        return json.loads(said.splitlines()[-1])
    finally:
        asking.kill()
        asking.wait()


async def no_request_fails(program: Sequence[str], folder: Path, store: StoreServer) -> None:
    """Hold that a program's requests are all served while the leader is killed."""
    await ready_store(store)
    pools = [{"name": "main", "capacity_tokens": 8_192, "max_running": 8}]
    async with AsyncExitStack() as stack:
        a, b = (
            MemberProcess(folder, name, store.url, pools=pools, tenants=[{"name": "red"}])
            for name in "ab"
        )
        for each in (a, b):
            stack.callback(each.end)
        await start_set(a, b)
        targets = f"{a.target},{b.target}"
        counts = await asyncio.to_thread(load, program, targets, a.end)  # by SIGKILL
        assert counts["failed"] == [], counts["failed"]
        assert (await b.stats()).totals.completed > 100
