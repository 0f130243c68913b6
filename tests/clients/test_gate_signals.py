"""Tests that the gate inside an engine leaves signals to it, also ignored and blocked ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

from .upstreams import POOL

#: An engine with handlers of its own, which loads the gate, starts it, serves, and gets signals.
ENGINE = """
import asyncio, json, os, re, signal, sys

got = []
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
for number in HANDLED:
    signal.signal(number, lambda number, _: got.append(int(number)))
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})

def handlers():
    with open("/proc/self/status") as status:
        masks = re.findall("Sig(?:Blk|Ign|Cgt):(.*)", status.read())
    kernels = [int(mask, 16) & ~(3 << 31) for mask in masks]  # 32 and 33 are the C library's
    return {number: signal.getsignal(number) for number in signal.valid_signals()}, kernels

at_start = handlers()
from schedsvc_vllm.gate import Gate
from tests.clients.asgi import Engine, Exchange, ask, owner
imported = handlers()

async def serve():
    engine = Engine()
    gate = Gate(engine)
    served = await Exchange(gate, ask(), owner=owner()).run()
    started = handlers()
    for number in HANDLED:
        os.kill(os.getpid(), number)
    while len(got) < len(HANDLED):
        await asyncio.sleep(0)
    assert gate._runtime is not None
    await gate._close()
    return served, started

served, started = asyncio.run(serve())
changed = [at_start != later for later in (imported, started)]
json.dump([served.status, changed, sorted(got) == sorted(HANDLED)], sys.stdout)
"""


def test_the_gate_leaves_signals_to_the_engine(tmp_path: Path) -> None:
    settings = {
        "SCHEDSVC_TARGET": f"unix:{tmp_path}/none.sock",
        "SCHEDSVC_POOL": "p",
        "SCHEDSVC_UNREACHABLE_AFTER": "0.1",
        "SCHEDSVC_FAILOVER_WAIT": "0.01",
    }
    done = subprocess.run(
        [sys.executable, "-c", ENGINE], env=os.environ | POOL | settings, capture_output=True,
        text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    status, changed, all_came = json.loads(done.stdout)
    assert status == 200
    assert changed == [False, False]
    assert all_came
