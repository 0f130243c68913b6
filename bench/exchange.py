"""`python -m bench.exchange` counts what the gate takes for one streamed request of eight pieces.

It counts instructions, by callgrind, and calls, by Python's profiler, each in a process of its own
that serves the same requests through a gate and past it. A scheduler has a process of its own, and
the app behind the gate answers at once. The count of requests past the gate is subtracted, so the
figures are the gate's own with its client of the scheduler, gRPC's threads included. One at a time
each request has messages of its own to the scheduler; those in flight together share some. Two
counts of instructions differ by about 2 %, because gRPC's threads wake at random.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import click
import uvloop
from schedsvc_vllm.asgi import App, Receive, Scope, Send
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import PoolSettings, Settings

from bench import gate as gates
from bench import machine
from bench.instructions import Counter, under_callgrind
from bench.processes import ROOT

__all__ = ["PIECES", "Calls", "main", "measure", "walk"]

PIECES = 8
IN_FLIGHT = 16
_WARM_UP = 40
_BODY = json.dumps(
    {"model": "m", "prompt": "Tell me a story. " * 20, "max_tokens": 64, "stream": True}
).encode()
_PIECE = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
_LAST = b"data: [DONE]\n\n"
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
_EPILOG = """\b
Examples:
  python -m bench.exchange
  python -m bench.exchange --requests 400 --json
"""
#: No vLLM: usage is read from the answers.
_OWNER = SimpleNamespace(state=SimpleNamespace(vllm_config=None))


async def _app(_scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    for _ in range(PIECES):
        await send({"type": "http.response.body", "body": _PIECE, "more_body": True})
    await send({"type": "http.response.body", "body": _LAST, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def _gate(target: str) -> AsyncIterator[Gate]:
    """Give a gate that the scheduler serves, warm. Raises RuntimeError if it serves none."""
    pool = PoolSettings(
        capacity_tokens=1_000_000, block_size_tokens=16, max_running=256, max_model_tokens=8_192
    )
    gate = Gate(_app, Settings(target=target, tenant_headers=("x-tenant-id",), pool=pool))
    deadline_s = time.monotonic() + 4 * gates.START_S_MAX
    try:
        while await gates.ask(gate, _OWNER, _BODY) != b"enforced":
            if time.monotonic() > deadline_s:
                raise RuntimeError("the gate does not reach the measurement's scheduler")
            await asyncio.sleep(0.05)
        for _ in range(_WARM_UP):
            await _ask(gate)
        yield gate
    finally:
        await gate._close()


async def _ask(app: App) -> None:
    """Send one request. Raises RuntimeError if the gate lets it run without the scheduler."""
    if await gates.ask(app, _OWNER, _BODY) != (b"" if app is _app else b"enforced"):
        raise RuntimeError("a request did not run with the scheduler")


async def _ask_many(app: App, requests: int) -> None:
    left = iter(range(requests))

    async def work() -> None:
        for _ in left:
            await _ask(app)

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))


class Calls:
    """Counts calls in this thread while it is entered: of Python's functions, and of C's."""

    def __init__(self) -> None:
        self.python, self.c = 0, 0

    def __enter__(self) -> "Calls":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        # The call of this method, and the one that ends the count.
        self.python -= 1
        self.c -= 1

    def _note(self, _: FrameType, event: str, __: object) -> None:
        if event == "call":
            self.python += 1
        elif event == "c_call":
            self.c += 1


async def _count_calls(target: str, requests: int) -> dict[str, float]:
    async with _gate(target) as gate:
        through, past = Calls(), Calls()
        for app, calls in ((gate, through), (_app, past)):
            with calls:
                for _ in range(requests):
                    await _ask(app)
    return {
        "python_calls": (through.python - past.python) / requests,
        "c_calls": (through.c - past.c) / requests,
    }


async def _count_instructions(target: str, requests: int, folder: Path) -> dict[str, float]:
    counter, found = Counter(folder), dict[str, float]()
    async with _gate(target) as gate:
        for name, app in (("one", gate), ("past", _app)):
            counter.look()
            for _ in range(requests):
                await _ask(app)
            found[name] = counter.look() / requests
        await _ask_many(gate, IN_FLIGHT)
        counter.look()
        await _ask_many(gate, requests)
        found["many"] = counter.look() / requests
    return {
        "instructions": found["one"] - found["past"],
        "instructions_in_flight": found["many"] - found["past"],
        "instructions_of_the_app": found["past"],
    }


async def walk(target: str) -> list[CodeType]:
    """Serve one request; return the functions that it calls, each where it is first called."""
    found: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.setdefault(frame.f_code)

    async with _gate(target) as gate:
        sys.setprofile(note)
        try:
            await _ask(gate)
        finally:
            sys.setprofile(None)
    return list(found)


def _child(what: str, target: str, requests: int, folder: Path) -> dict[str, float]:
    """Count in a process of its own. Raises click.ClickException."""
    command = [sys.executable, "-m", "bench.exchange", "--count", what, target, str(folder)]
    command += ["--requests", str(requests)]
    if what == "instructions":
        command = under_callgrind(command, folder)
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=False
        )
    except FileNotFoundError:
        raise click.ClickException("valgrind is not installed; it counts") from None
    if done.returncode:
        raise click.ClickException(f"the count of {what} failed; see above")
    counts: dict[str, float] = json.loads(done.stdout)
    return counts


def measure(requests: int) -> dict[str, int | float]:
    """Count; returns what one request takes."""
    found: dict[str, int | float] = {"requests": requests}
    with gates.scheduler() as target, tempfile.TemporaryDirectory() as name:
        calls = _child("calls", target, requests, Path(name))
        found |= {kind: round(count, 1) for kind, count in calls.items()}
    with gates.scheduler() as target, tempfile.TemporaryDirectory() as name:
        counts = _child("instructions", target, requests, Path(name))
        found |= {kind: round(count) for kind, count in counts.items()}
    return found


def _run(what: str, target: str, folder: Path, requests: int) -> dict[str, float]:
    counted: Any = (
        _count_calls(target, requests)
        if what == "calls"
        else _count_instructions(target, requests, folder)
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found: dict[str, float] = runner.run(counted)
        return found


@click.command(epilog=_EPILOG)
@click.option("--requests", type=click.IntRange(1), default=200, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--count", nargs=3, hidden=True, metavar="WHAT TARGET FOLDER")
def main(requests: int, as_json: bool, count: tuple[str, str, str] | None) -> None:
    """Count the instructions and calls of the gate for one streamed request of eight pieces."""
    if count:
        what, target, folder = count
        click.echo(json.dumps(_run(what, target, Path(folder), requests)))
        return
    found = measure(requests)
    if as_json:
        click.echo(json.dumps({"machine": machine.describe(), "commit": machine.commit(), **found}))
        return
    click.echo(f"a request of {PIECES} pieces, one at a time:")
    click.echo(f"  {found['instructions']:>11,} instructions of the gate")
    click.echo(
        f"  {found['python_calls']:>11,} calls of Python's functions, {found['c_calls']:,} of C's"
    )
    click.echo(f"{IN_FLIGHT} in flight:")
    click.echo(f"  {found['instructions_in_flight']:>11,} instructions of the gate")
    click.echo(f"  {found['instructions_of_the_app']:>11,} of the app alone, taken off above")


if __name__ == "__main__":
    main(prog_name="python -m bench.exchange")
