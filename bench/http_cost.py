"""`python -m bench.http_cost` measures the CPU of gate and proxy, against an earlier commit.

Method: the clients of the earlier commit and those of this tree each run in a process of their own,
before the same scheduler and the same engine. They serve slices of streamed requests in turn, each
round in the other order, and a round's ratio compares the CPU clocks of the two whole processes.
The gate stands in an app that makes pieces and nothing else (`bench.gate`). The proxy stands before
the emulator.
"""

import asyncio
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import click
import numpy as np
import uvloop
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import PoolSettings, Settings

from bench import gate as gates
from bench import machine
from bench.compare import Floats, compare
from bench.machine import cpu_ns
from bench.peers import emulator
from bench.processes import ROOT, started

#: The last commit before gate and proxy read usage by its place and gate by canonical paths.
BEFORE = "412ae96"
_PROXY = "from schedsvc_vllm.proxy_cli import main; main()"
_SIZES = {"capacity_tokens": 100_000, "block_size_tokens": 16, "max_running": 256}
_EPILOG = """\b
Examples:
  python -m bench.http_cost
  python -m bench.http_cost --app proxy --pieces 256 --rounds 40 --json
"""


@contextmanager
def earlier(commit: str, part: str = "clients") -> Iterator[Path]:
    """Write a part of a commit's tree to a folder. Raises click.ClickException."""
    packed = subprocess.run(
        ["git", "archive", commit, part], cwd=ROOT, capture_output=True, check=False
    )
    if packed.returncode:
        raise click.ClickException(
            f"--before {commit}: {packed.stderr.decode().strip()}; name a commit of this clone"
        )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def _started(
    tree: Path, arguments: Sequence[str], ready: Callable[[], bool] = lambda: True, **more: Any
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    paths = (tree / "clients/python", tree / "clients/vllm", ROOT)
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return started(arguments, ready, environment=environment, cwd=tree, **more)


class GateSide:
    """Runs the gate of one tree, in a process that serves a slice for each line that it reads."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    async def serve(self, requests: int) -> None:
        """Serve a slice. Raises click.ClickException."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"%d\n" % requests)
        self.process.stdin.flush()
        if not await asyncio.to_thread(self.process.stdout.readline):
            raise click.ClickException("a gate of the measurement has ended; see above")


async def serve_lines(target: str, pool: str, pieces: int) -> None:
    """Be the process of a `GateSide`."""
    engine = gates.Engine()
    engine.pieces = pieces
    settings = Settings(
        target=target,
        tenant_headers=("x-tenant-id",),
        client_id=pool,
        pool=PoolSettings(name=pool, **_SIZES),
    )
    gate = Gate(engine, settings)
    steps = asyncio.ensure_future(engine.run())
    while await gates.ask(gate, engine) != b"enforced":
        pass  # until the scheduler is reached; `main()` ends it if that takes too long
    while line := await asyncio.to_thread(sys.stdin.readline):
        await gates.serve_slice(gate, engine, int(line))
        print(flush=True)
    steps.cancel()


class ProxySide:
    """Runs the proxy of one tree; a client here sends it the slices."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path, pieces: int) -> None:
        self.process = process
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None
        text = "Tell me a story of a queue in which nobody waits without end. " * 30
        self._body = {"model": "emulated", "prompt": text, "max_tokens": pieces, "stream": True}

    async def serve(self, requests: int) -> None:
        """Serve a slice. Raises click.ClickException if one is not answered through the gate."""
        if self._session is None:
            connector = aiohttp.UnixConnector(str(self._socket))
            self._session = aiohttp.ClientSession("http://proxy", connector=connector)
        session, left = self._session, list(range(requests))

        async def work() -> None:
            while left:
                left.pop()
                headers = {"x-tenant-id": "a"}
                async with session.post("/v1/completions", json=self._body, headers=headers) as got:
                    body = await got.read()
                mode = got.headers.get("x-schedsvc-mode")
                if mode != "enforced" or not body.endswith(b"data: [DONE]\n\n"):
                    raise click.ClickException(f"a request was not served: {got.status} {mode}")

        await asyncio.gather(*(work() for _ in range(gates.IN_FLIGHT)))

    async def close(self) -> None:
        """End its connections."""
        if self._session is not None:
            await self._session.close()


Side = GateSide | ProxySide


@asynccontextmanager
async def _sides(
    app: str, trees: Sequence[Path], target: str, pieces: int
) -> AsyncIterator[list[Side]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides: list[Side] = []
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        if app == "proxy":
            _, url = stack.enter_context(emulator(folder))
        for name, tree in zip(("before", "now"), trees, strict=True):
            if app == "gate":
                command = ["-m", "bench.http_cost", "--serve", target, name]
                command += ["--pieces", str(pieces)]
                sides.append(
                    GateSide(stack.enter_context(_started(tree, command, stdin=pipe, stdout=pipe)))
                )
                continue
            command = ["-c", _PROXY, "--upstream", url]
            command += ["--uds", str(folder / name), "--log-level", "error"]
            command += ["--schedsvc-target", target, "--schedsvc-pool", name]
            command += ["--schedsvc-client-id", name, "--schedsvc-tenant-headers", "x-tenant-id"]
            is_there = (folder / name).exists
            process = stack.enter_context(_started(tree, command, is_there, stdout=null))
            sides.append(ProxySide(process, folder / name, pieces))
        try:
            yield sides
        finally:
            for side in sides:
                if isinstance(side, ProxySide):
                    await side.close()


async def _first(side: Side) -> None:
    """Serve until the scheduler grants.

    A proxy's socket is there before it listens, and it lets the first requests run without the
    scheduler. Raises click.ClickException if that takes too long, or the process has ended.
    """
    deadline_s = time.monotonic() + gates.START_S_MAX
    while True:
        try:
            await side.serve(gates.IN_FLIGHT)
        except (click.ClickException, aiohttp.ClientError, OSError) as error:
            if side.process.poll() is not None or time.monotonic() > deadline_s:
                if isinstance(error, click.ClickException):
                    raise
                raise click.ClickException(f"no answer to the first request: {error}") from error
            await asyncio.sleep(0.1)
        else:
            return


async def _measure(
    app: str, trees: Sequence[Path], pieces: int, rounds: int, requests: int
) -> Floats:
    """Return CPU in ms for a request: an array of shape (rounds, 2), now and before."""
    taken = []
    with gates.scheduler() as target:
        async with _sides(app, trees, target, pieces) as sides:
            for side in sides:
                await _first(side)
                await side.serve(requests)
            for number in range(rounds):
                took: dict[Side, float] = {}
                for side in sides[:: -1 if number % 2 else 1]:
                    began_ns = cpu_ns(side.process.pid)
                    await side.serve(requests)
                    took[side] = (cpu_ns(side.process.pid) - began_ns) / 1e6 / requests
                taken.append((took[sides[1]], took[sides[0]]))
    return np.asarray(taken)


def _measured(app: str, before: str, pieces: int, rounds: int, requests: int) -> Floats:
    with earlier(before) as tree, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(app, (tree, ROOT), pieces, rounds, requests))


@click.command(epilog=_EPILOG)
@click.option("--app", type=click.Choice(("gate", "proxy")), default="gate", show_default=True)
@click.option("--before", default=BEFORE, show_default=True, metavar="COMMIT")
@click.option(
    "--pieces", type=click.IntRange(1), default=gates.FEW, show_default=True, help="Per answer."
)
@click.option("--rounds", type=click.IntRange(2), default=60, show_default=True)
@click.option(
    "--requests", type=click.IntRange(1), default=96, show_default=True, help="Per slice."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--serve", nargs=2, hidden=True, metavar="TARGET POOL")
def main(
    app: str,
    before: str,
    pieces: int,
    rounds: int,
    requests: int,
    as_json: bool,
    serve: tuple[str, str] | None,
) -> None:
    """Measure the CPU of gate or proxy for a request, as a ratio to that of an earlier commit."""
    if serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_lines(*serve, pieces))
        return
    found = compare(_measured(app, before, pieces, rounds, requests))
    report: dict[str, Any] = {"machine": machine.describe(), "commit": machine.commit()}
    report |= {"app": app, "before": before, "pieces": pieces, "rounds": rounds}
    report |= {
        "before_ms": round(found.b, 4),
        "now_ms": round(found.a, 4),
        "ratio": round(found.ratio, 4),
        "interval_95": [round(found.low, 4), round(found.high, 4)],
    }
    if as_json:
        click.echo(json.dumps(report))
        return
    click.echo(
        f"{app}, answers of {pieces} pieces: {found.a:.3f} ms of CPU a request,"
        f" {found.b:.3f} ms at {before};\nratio {found.ratio:.3f}, with 95 % from {found.low:.3f}"
        f" to {found.high:.3f}; {rounds} rounds of {requests} requests"
    )


if __name__ == "__main__":
    main(prog_name="python -m bench.http_cost")
