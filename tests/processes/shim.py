"""Runs a shim as a process that can be killed: `python shim.py JSON`.

It offers a pool of its own (none where `capacity_tokens` is 0), takes `running` leases and keeps
them, and asks for `queued` requests more. Then it writes the ready file, and renews until it is
killed.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from schedsvc_client import ClientOptions
from schedsvc_client.aio import SchedulerSession

INPUT_TOKENS = OUTPUT_TOKENS = 80


def tell(ready: Path) -> None:
    """Say that it has asked."""
    ready.write_text("ready")


async def serve(asked: dict[str, Any]) -> None:
    options = ClientOptions(backoff_min_s=0.01, unavailable_after_s=30)
    pool = asked.get("pool", asked["name"])
    async with SchedulerSession(
        asked["target"], client_id=asked["name"], incarnation=time.time_ns(), options=options
    ) as session:
        if asked.get("capacity_tokens"):
            session.register_pool(
                pool=pool,
                epoch=time.time_ns(),
                capacity_tokens=asked["capacity_tokens"],
                block_size_tokens=16,
            )
        shape: dict[str, Any] = {
            "tenant": asked["tenant"],
            "pools": [pool],
            "input_tokens": INPUT_TOKENS,
            "max_output_tokens": OUTPUT_TOKENS,
        }
        held = [session.admission(**shape) for _ in range(asked["running"])]
        for admission in held:
            await admission.submit()
        waiting = [session.admission(**shape).submit() for _ in range(asked["queued"])]
        tell(Path(asked["ready"]))
        for step in range(1, OUTPUT_TOKENS):
            for admission in held:
                admission.progress(input_tokens=INPUT_TOKENS, output_tokens=step)
            await asyncio.sleep(0.1)
        await asyncio.gather(*waiting)


asyncio.run(serve(json.loads(sys.argv[1])))
