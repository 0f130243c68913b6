"""Sends requests by the Python client without a pause: `python_load.py kill TARGETS`.

A line on stdin ends it. It prints how many were served, and then what failed and why.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from schedsvc_client import Refused, SchedulerError
from schedsvc_client.aio import AsyncScheduler

AT_ONCE = 32
REQUEST: dict[str, Any] = {"tenant": "red", "input_tokens": 100, "max_output_tokens": 20}


async def kill(targets: str) -> dict[str, Any]:
    """Ask until a line arrives; return the counts."""
    served, failed = 0, list[str]()
    stopped = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))

    async def loop(scheduler: AsyncScheduler) -> None:
        nonlocal served
        while not stopped.done():
            try:
                async with scheduler.admission(**REQUEST) as admission:
                    await asyncio.sleep(0.02)
                    if admission.lost is not None:
                        failed.append(f"its lease was lost: {admission.lost!r}")
                        continue
                served += 1
                if served % 100 == 0:
                    print(served, flush=True)
            except SchedulerError as error:
                failed.append(repr(error))
                if not isinstance(error, Refused):
                    await asyncio.sleep(0.05)

    async with AsyncScheduler(targets, token=os.environ["SCHEDSVC_TOKEN"]) as scheduler:
        await asyncio.gather(*(loop(scheduler) for _ in range(AT_ONCE)))
    return {"served": served, "failed": failed}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(kill(sys.argv[2]))))
