"""`python -m bench.gate` measures the CPU that the vLLM gate takes for a streamed request.

Method: one process serves slices of requests in turn, through the gate and past it, each round in
the other order; behind the gate stands a scheduler in a process of its own, and an engine that
makes a piece of every running answer at each step, and nothing else. Comparing answers of few and
of many pieces separates the cost of a request from the cost of each piece, which includes the
reports during the request. It is CPU time of the whole process, gRPC's threads included. A real
vLLM keeps the caches full of other things, and the gate costs more there: `make vllm-cost` measures
that.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import uvloop
from rich.console import Console
from rich.table import Table
from schedsvc_vllm.asgi import App, Message, Receive, Scope, Send
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import PoolSettings, Settings

from bench import machine
from bench.processes import started

__all__ = ["Engine", "ask", "main", "measure", "scheduler", "serve_slice"]

INPUT_TOKENS, OUTPUT_TOKENS = 512, 256
#: Pieces of an answer: engines merge tokens when they fall behind.
FEW, MANY = 16, 256
IN_FLIGHT = 12
_STEP_S = 0.002
START_S_MAX = 30.0
_PIECE = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
_LAST = b"data: [DONE]\n\n"
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
_EPILOG = """\b
Examples:
  python -m bench.gate
  python -m bench.gate --rounds 40 --json
"""


class Engine:
    """Streams as an app, with as much of vLLM's state as the gate reads."""

    def __init__(self) -> None:
        told = SimpleNamespace(running=IN_FLIGHT, waiting=0, used_tokens=5_000, preemptions=0)
        self.pieces = MANY
        self.request_states: dict[str, Any] = {}
        client = SimpleNamespace(output_processor=self)
        self.state = SimpleNamespace(engine_client=client, engine_telemetry=lambda: told)
        self._served = 0
        self._step = asyncio.Event()

    def add_request(self, request: Any) -> None:
        """Begin a sequence, as vLLM's output processor does."""
        self.request_states[request.request_id] = SimpleNamespace(
            request_id=request.request_id,
            parent_req=None,
            is_prefilling=False,
            prompt_len=INPUT_TOKENS,
            num_cached_tokens=0,
            detokenizer=SimpleNamespace(num_output_tokens=lambda: OUTPUT_TOKENS),
        )

    async def run(self) -> None:
        """Make a step from time to time."""
        while True:
            await asyncio.sleep(_STEP_S)
            step, self._step = self._step, asyncio.Event()
            step.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request with its stream in a separate task, as Starlette does."""
        await receive()
        self._served += 1
        name = str(self._served)
        self.add_request(SimpleNamespace(request_id=name))
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await asyncio.create_task(self._stream(send))
        del self.request_states[name]
        usage = SimpleNamespace(
            prompt_tokens=INPUT_TOKENS, completion_tokens=OUTPUT_TOKENS, prompt_tokens_details=None
        )
        scope["state"]["request_metadata"] = SimpleNamespace(final_usage_info=usage)

    async def _stream(self, send: Send) -> None:
        for _ in range(self.pieces):
            await self._step.wait()
            await send({"type": "http.response.body", "body": _PIECE, "more_body": True})
        await send({"type": "http.response.body", "body": _LAST, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextmanager
def scheduler() -> Iterator[str]:
    """Run a scheduler; gives its target."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ready = folder / "ready"
        config = {"listeners": [{"unix": str(folder / "s")}], "tenants": [{"name": "a"}]}
        (folder / "c.yaml").write_text(json.dumps(config))
        command = ["-m", "schedsvc", "serve", "--ready-file", str(ready)]
        with started([*command, "--config", str(folder / "c.yaml")], ready, log=folder / "log"):
            yield f"unix:{folder / 's'}"


def _body() -> bytes:
    prompt = [100 + 7 * at % 1900 for at in range(INPUT_TOKENS)]
    asked = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True}
    return json.dumps(asked).encode()


async def ask(app: App, owner: object, body: bytes | None = None) -> bytes:
    """Send one request to an app; returns how the gate let it run, b"" past it.

    Raises RuntimeError if it is not answered as a whole.
    """
    body = _body() if body is None else body
    inbox: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[int] = []
    told: dict[bytes, bytes] = {}

    async def receive() -> Message:
        if inbox:
            return inbox.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            sent.append(message["status"])
            told.update(message["headers"])
        elif not message.get("more_body"):
            sent.append(0)

    headers = [(b"x-tenant-id", b"a"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await app({**scope, "query_string": b"", "app": owner, "state": {}}, receive, send)
    if sent != [200, 0]:
        raise RuntimeError(f"a request was not served: {sent}")
    return told.get(b"x-schedsvc-mode", b"")


async def serve_slice(app: App, engine: Engine, requests: int) -> float:
    """Serve `requests` requests, some in flight; returns CPU in ms for each.

    Raises RuntimeError if the gate let one run without the scheduler.
    """
    left = list(range(requests))
    mode = b"" if app is engine else b"enforced"

    async def work() -> None:
        while left:
            left.pop()
            if await ask(app, engine) != mode:
                raise RuntimeError("the scheduler of the measurement did not answer in time")

    began_ns = time.process_time_ns()
    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    await asyncio.sleep(0.05)  # the last leases end a moment later
    return (time.process_time_ns() - began_ns) / 1e6 / requests


async def _measure(target: str, rounds: int, requests: int) -> dict[str, Any]:
    engine = Engine()
    pool = PoolSettings(capacity_tokens=100_000, block_size_tokens=16, max_running=256)
    gate = Gate(engine, Settings(target=target, tenant_headers=("x-tenant-id",), pool=pool))
    steps = asyncio.ensure_future(engine.run())
    extra: dict[int, list[float]] = {FEW: [], MANY: []}
    try:
        deadline_s = time.monotonic() + START_S_MAX
        while await ask(gate, engine) != b"enforced":
            if time.monotonic() > deadline_s:
                raise click.ClickException("the gate does not reach the measurement's scheduler")
        await serve_slice(gate, engine, IN_FLIGHT)
        for number in range(rounds):
            for pieces in (FEW, MANY):
                engine.pieces = pieces
                first, second = (gate, engine) if number % 2 else (engine, gate)
                took = {first: await serve_slice(first, engine, requests)}
                took[second] = await serve_slice(second, engine, requests)
                extra[pieces].append(took[gate] - took[engine])
    finally:
        steps.cancel()
        await gate._close()
    few, many = (statistics.median(extra[pieces]) for pieces in (FEW, MANY))
    per_piece_us = 1e3 * (many - few) / (MANY - FEW)
    return {
        "rounds": rounds,
        "requests_of_a_slice": requests,
        "few_pieces_ms": round(few, 3),
        "many_pieces_ms": round(many, 3),
        "each_piece_us": round(per_piece_us, 2),
        "all_rounds_ms": {str(pieces): [round(ms, 3) for ms in extra[pieces]] for pieces in extra},
    }


def measure(rounds: int, requests: int) -> dict[str, Any]:
    """Measure; returns medians over the rounds, in ms of CPU for a request and µs for a piece."""
    with (
        scheduler() as target,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_measure(target, rounds, requests))


@click.command(epilog=_EPILOG)
@click.option("--rounds", type=click.IntRange(1), default=12, show_default=True)
@click.option(
    "--requests", type=click.IntRange(1), default=24, show_default=True, help="Per slice."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(rounds: int, requests: int, as_json: bool) -> None:
    """Measure what the gate takes of its server's CPU for a request, and for each piece."""
    report = {"machine": machine.describe(), "commit": machine.commit()}
    report |= measure(rounds, requests)
    if as_json:
        click.echo(json.dumps(report))
        return
    table = Table("the gate, CPU of its process", f"median of {rounds} rounds")
    table.add_row(f"a request of {FEW} pieces", f"{report['few_pieces_ms']:.3f} ms")
    table.add_row(f"a request of {MANY} pieces", f"{report['many_pieces_ms']:.3f} ms")
    table.add_row("each piece", f"{report['each_piece_us']:.2f} µs")
    Console().print(table)


if __name__ == "__main__":
    main(prog_name="python -m bench.gate")
