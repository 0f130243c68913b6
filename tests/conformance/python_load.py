"""Sends requests by the Python client without a pause: `python_load.py kill TARGETS`.

A line on stdin ends it, and so does the first failure. It prints how many were served, and what
failed and why.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from schedsvc_client import SchedulerError
from schedsvc_client.aio import AsyncScheduler

AT_ONCE = 32
REQUEST: dict[str, Any] = {"tenant": "red", "input_tokens": 100, "max_output_tokens": 20}


class LostError(Exception):
    """Reports a lease that was lost while its request ran."""


async def kill(targets: str) -> dict[str, Any]:
    """Ask until a line arrives or a request fails; return the counts."""
    served, failed = 0, list[str]()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, stopped.set)

    async def loop(scheduler: AsyncScheduler) -> None:
        nonlocal served
        while not stopped.is_set():
            async with scheduler.admission(**REQUEST) as admission:
                await asyncio.sleep(0.02)
                if admission.lost is not None:
                    raise LostError(admission.lost)
            served += 1
            if served % 100 == 0:
                print(served, flush=True)

    async with AsyncScheduler(targets, token=os.environ["SCHEDSVC_TOKEN"]) as scheduler:
        try:
            await asyncio.gather(*(loop(scheduler) for _ in range(AT_ONCE)))
        except (SchedulerError, LostError) as error:
            failed.append(repr(error))
    return {"served": served, "failed": failed}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(kill(sys.argv[2]))))
