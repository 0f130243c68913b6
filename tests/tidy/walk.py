"""Counts how often the walk of one gated request returns to a room that it has left.

    python -m tests.tidy.walk

The walk is the order in which a real request's functions are first called, as one reads them. Only
the rooms that drive a request or keep its state are stations: what they call to compute something
(parsers, sizes, forms of answers) is read from where it is called.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from itertools import groupby

import uvloop

from bench import exchange
from bench.gate import scheduler

#: The station that each module belongs to.
STATIONS = {
    "schedsvc_vllm/gate.py": "door",
    "schedsvc_vllm/gated_request.py": "door",
    "schedsvc_vllm/turn.py": "door",
    "schedsvc_vllm/exchange.py": "exchange",
    "schedsvc_vllm/account.py": "exchange",
    "schedsvc_vllm/runtime.py": "runtime",
    "schedsvc_client/aio/admission.py": "session",
    "schedsvc_client/aio/session.py": "session",
}


def stations(files: Iterable[str]) -> list[str]:
    """Return the stations of a walk through files, each as often as the walk comes to it."""
    named = ("/".join(file.partition("/clients/")[2].split("/")[1:]) for file in files)
    walked = (STATIONS[name] for name in named if name in STATIONS)
    return [station for station, _ in groupby(walked)]


def returns(walk: list[str]) -> int:
    """Return how often a walk comes to a station where it was before."""
    return len(walk) - len(set(walk))


def measure() -> list[str]:
    """Return the stations of one request's walk."""
    with scheduler() as target, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return stations(code.co_filename for code in runner.run(exchange.walk(target)))


if __name__ == "__main__":
    found = measure()
    print(f"{' > '.join(found)}: {returns(found)} returns")
    sys.exit()
