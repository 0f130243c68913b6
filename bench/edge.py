"""`python -m bench.edge` counts the instructions of gate and proxy, against an earlier commit.

Method: callgrind counts in a process of each tree that serves the same requests, one at a time,
after a few that warm it up. The app behind the gate answers at once. Behind the proxy's gate and
its HTTP client is the emulator. Emulator and scheduler have processes of their own. The counts of
two runs differ by about 1 %, because gRPC's threads wake at random.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from schedsvc_vllm.asgi import App, Receive, Scope, Send
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.proxy_cli import build, prepare
from schedsvc_vllm.settings import PoolSettings, Settings

from bench import gate as gates
from bench import http_cost
from bench.harness import json_option, verdict
from bench.instructions import Counter, under_callgrind
from bench.peers import emulator
from bench.processes import ROOT

APPS = ("gate", "proxy")
FORMS = ("whole", "streamed")
RATIO_MAX = 1.03
_WARM_UP = 30
_PIECES = 16
_TEXT = "Tell me a story of a queue in which nobody waits without end. " * 30
_PIECE = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
_USAGE = {"prompt_tokens": 400, "total_tokens": 416, "completion_tokens": _PIECES}
_WHOLE = json.dumps({"choices": [{"index": 0, "text": " a" * _PIECES}], "usage": _USAGE}).encode()
_EPILOG = """\b
Examples:
  python -m bench.edge
  python -m bench.edge --before HEAD~3 --requests 500 --json
"""


async def _engine(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, as the body asks."""
    is_stream = json.loads((await receive())["body"])["stream"]
    kind = b"text/event-stream" if is_stream else b"application/json"
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    pieces = [*([_PIECE] * _PIECES), b"data: [DONE]\n\n"] if is_stream else [_WHOLE]
    for number, piece in enumerate(pieces, 1):
        more = number < len(pieces)
        await send({"type": "http.response.body", "body": piece, "more_body": more})


async def _ask(app: App, form: str) -> None:
    """Send one request. Raises RuntimeError if it does not run with the scheduler."""
    asked = {"model": "emulated", "prompt": _TEXT, "max_tokens": _PIECES, "user": "u"}
    body = json.dumps({**asked, "stream": form == "streamed"}).encode()
    if await gates.ask(app, None, body) != b"enforced":
        raise RuntimeError("a request did not run with the scheduler")


async def _reach(app: App) -> None:
    """Ask until the scheduler grants."""
    deadline_s = time.monotonic() + 4 * gates.START_S_MAX
    while True:
        try:
            await _ask(app, "whole")
        except RuntimeError:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.1)
        else:
            return


async def _count(folder: Path, kind: str, target: str, url: str, requests: int) -> dict[str, float]:
    pool = PoolSettings(capacity_tokens=100_000, block_size_tokens=16, max_running=256)
    settings = Settings(target=target, tenant_headers=("x-tenant-id",), pool=pool)
    if kind == "proxy":
        options, _ = prepare(["--upstream", url], {"SCHEDSVC_TARGET": target})
        gate = build(options, settings)
    else:
        gate = Gate(_engine, settings)
    counter, found = Counter(folder), dict[str, float]()
    await _reach(gate)
    for form in FORMS:
        for _ in range(_WARM_UP):
            await _ask(gate, form)
        counter.look()
        for _ in range(requests):
            await _ask(gate, form)
        found[form] = counter.look() / requests
    return found


def _counted(tree: Path, kind: str, target: str, url: str, requests: int) -> dict[str, float]:
    """Count in a process with the clients of a tree. Raises click.ClickException."""
    paths = (tree / "clients/python", tree / "clients/vllm", ROOT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "bench.edge", "--count", name, kind, target, url]
        command += ["--requests", str(requests)]
        try:
            done = subprocess.run(
                under_callgrind(command, Path(name)),
                cwd=tree, env=environment, stdout=subprocess.PIPE, check=False,
            )  # fmt: skip
        except FileNotFoundError:
            raise click.ClickException("valgrind is not installed; it counts") from None
    if done.returncode:
        raise click.ClickException(f"the count of the {kind} failed; see above")
    counts: dict[str, float] = json.loads(done.stdout)
    return counts


def measure(before: str, requests: int, note: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Count both trees; returns instructions of a request and their ratio, by app and form."""
    found: dict[str, dict[str, Any]] = {}
    with (
        gates.scheduler() as target,
        tempfile.TemporaryDirectory() as name,
        emulator(Path(name)) as (_, url),
        http_cost.earlier(before) as tree,
    ):
        for kind in APPS:
            then, now = (_counted(each, kind, target, url, requests) for each in (tree, ROOT))
            for form in FORMS:
                ratio = round(now[form] / then[form], 4)
                row = {"before": round(then[form]), "now": round(now[form]), "ratio": ratio}
                found[f"{kind}, {form}"] = row
                note(f"{kind}, {form}: {row['now']:,} instructions, {row['before']:,} before")
    return found


@click.command(epilog=_EPILOG)
@click.option("--before", default="19073fcd", show_default=True, metavar="COMMIT")
@click.option("--requests", type=click.IntRange(1), default=2_000, show_default=True)
@json_option
@click.option("--count", nargs=4, hidden=True, metavar="FOLDER APP TARGET URL")
def main(before: str, requests: int, as_json: bool, count: tuple[str, ...] | None) -> None:
    """Count what gate and proxy take for a request; exit with status 1 above a ratio of 1.03."""
    if count:
        folder, kind, target, url = count
        click.echo(json.dumps(asyncio.run(_count(Path(folder), kind, target, url, requests))))
        return
    found = measure(before, requests, lambda line: click.echo(line, err=True))
    holds = all(row["ratio"] <= RATIO_MAX for row in found.values())
    report = {"before": before, "requests": requests, "rows": found, "holds": holds}
    verdict(report, as_json, _show)


def _show(report: dict[str, Any]) -> None:
    for name, row in report["rows"].items():
        click.echo(f"{name:16} ratio {row['ratio']:.3f}, at most {RATIO_MAX}")


if __name__ == "__main__":
    main(prog_name="python -m bench.edge")
