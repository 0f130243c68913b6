"""Measure the memory that attackers cost the edge, the metrics page, the gate and the proxy.

Attackers flood all of them for some minutes: endless bodies, endless headers, large headers, silent
connections, clients that read nothing, and the attacks of `bench.attackers` at the edge. The
resident memory of each process is read each second.
"""

import asyncio
import contextlib
import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.harness import attacking, json_option, verdict
from bench.machine import need_release_core
from bench.memory import resident_mb
from bench.peers import edge, emulator, serving
from bench.processes import started
from schedsvc_lab.demo.processes import free_port

__all__ = ["TOTAL_MB", "main"]

#: The limit for edge, scheduler with its metrics page, gate and proxy together, idle included.
TOTAL_MB = 512.0
_BODY_BYTES = 30_000_000
_PIECE = b" " * 65_536
_AGAIN_S = 0.2
#: Addresses of the attackers: one caller may send only a part of the bodies.
_SOURCES = tuple(f"127.0.0.{number}" for number in range(1, 5))


async def _unfinished_body(writer: asyncio.StreamWriter) -> None:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {_BODY_BYTES}\r\n\r\n"
    writer.write(head.encode())
    for _ in range(_BODY_BYTES // len(_PIECE)):
        writer.write(_PIECE)
        await writer.drain()
    await asyncio.sleep(3_600)


async def _unfinished_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n")
    while True:
        writer.write(b"x-a: b\r\n")
        await writer.drain()
        await asyncio.sleep(1)


async def _large_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n")
    while True:
        writer.write(b"x-a: " + b"b" * 60_000 + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def _silence(_: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3_600)


async def _reads_nothing(writer: asyncio.StreamWriter) -> None:
    writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's transport has it
    while True:
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 20)
        await writer.drain()
        await asyncio.sleep(0.05)


Attack = Callable[[asyncio.StreamWriter], Any]

ATTACKS: dict[str, Attack] = {
    "bodies": _unfinished_body,
    "slow-heads": _unfinished_head,
    "large-heads": _large_head,
    "silence": _silence,
    "unread": _reads_nothing,
}


async def _attack(port: int, attack: Attack, source: str) -> None:
    """Attack on one connection after another until the server closes each."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(source, 0)
            )
            doing = asyncio.ensure_future(attack(writer))
            closed = asyncio.ensure_future(reader.read())
            await asyncio.wait((doing, closed), return_when=asyncio.FIRST_COMPLETED)
            writer.transport.abort()
            for task in (doing, closed):
                task.cancel()
            await asyncio.gather(doing, closed, return_exceptions=True)
        await asyncio.sleep(_AGAIN_S)


async def _besiege(
    attacks: Sequence[Attack],
    ports: list[int],
    processes: dict[str, int],
    connections: int,
    seconds: float,
) -> dict[str, tuple[float, float]]:
    """Attack for a while; return the first and the largest resident memory of each, in MB."""
    seen = {name: (resident_mb(pid), 0.0) for name, pid in processes.items()}
    tasks = [
        asyncio.ensure_future(
            _attack(
                port,
                attacks[number % len(attacks)],
                _SOURCES[number // len(attacks) % len(_SOURCES)],
            )
        )
        for port in ports
        for number in range(connections)
    ]
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        await asyncio.sleep(1)
        for name, pid in processes.items():
            first, most = seen[name]
            seen[name] = (first, max(most, resident_mb(pid)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen


def _settings() -> dict[str, Any]:
    return {
        "listeners": [
            {"unix": "gate.sock", "auth": "none"},
            {"unix": "behind.sock", "auth": "token"},
        ],
        "edge": {"tcp": "127.0.0.1:0"},
        "auth": {"principals": [{"name": "gate", "sha256": "0" * 64, "tenants": ["*"]}]},
        "metrics": {"listen": "127.0.0.1:0"},
        "tenants": [{"name": f"t{number}"} for number in range(1_000)],
        "limits": {"drain_ms": 0},
        "log": {"level": "warning"},
    }


@contextlib.contextmanager
def _besieged(folder: Path) -> Iterator[tuple[list[int], dict[str, int]]]:
    """Run all that is attacked; yield the HTTP ports and the processes."""
    environment = {"SCHEDSVC_TARGET": f"unix:{folder}/gate.sock", "SCHEDSVC_UNREACHABLE": "closed"}
    port = free_port()
    attackers = ["-m", "bench.attackers", "--kind", "mixed", "--connections", "1000"]
    with (
        serving(folder, _settings(), []) as scheduler,
        edge(folder) as front,
        emulator(folder, "--middleware", "schedsvc_vllm.gate.Gate", environment=environment) as (
            gate,
            url,
        ),
    ):
        proxy = ["-c", "from schedsvc_vllm.proxy_cli import main; main()", "--upstream", url]
        proxy += ["--port", str(port), "--log-level", "error"]
        pool = {"SCHEDSVC_POOL": "proxied"}
        with (
            started(proxy, lambda: _answers(port), environment=environment | pool) as behind,
            attacking([*attackers, "--target", front.tcp], folder / "attackers.ready"),
        ):
            ready = json.loads((folder / "scheduler.ready").read_text())
            metrics = int(ready["metrics"].split(":")[2].split("/")[0])
            yield (
                [metrics, int(url.rpartition(":")[2]), port],
                {
                    "edge": front.process.pid,
                    "scheduler with metrics": scheduler.process.pid,
                    "emulated engine with the gate": gate,
                    "proxy": behind.pid,
                },
            )


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@click.command(epilog="Example: python -m bench.siege --minutes 10")
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(min=0.05))
@click.option("--connections", default=120, show_default=True, help="At each HTTP listener.")
@click.option(
    "--attack", "names", multiple=True, type=click.Choice(list(ATTACKS)),
    help="Only this attack at the HTTP listeners; repeatable.",
)  # fmt: skip
@json_option
def main(minutes: float, connections: int, names: tuple[str, ...], as_json: bool) -> None:
    """Show the memory of each process; exit with status 1 if all together have more than 512 MB."""
    need_release_core()
    attacks = [ATTACKS[name] for name in names] or list(ATTACKS.values())
    with (
        tempfile.TemporaryDirectory(prefix="siege-") as name,
        _besieged(Path(name)) as (ports, ids),
    ):
        seen = asyncio.run(_besiege(attacks, ports, ids, connections, minutes * 60))
    before, most = (round(sum(column), 1) for column in zip(*seen.values(), strict=True))
    held = {what: {"before_mb": first, "most_mb": top} for what, (first, top) in seen.items()}
    held["together"] = {"before_mb": before, "most_mb": most}
    verdict({"processes": held, "holds": most <= TOTAL_MB}, as_json, _show)


def _show(report: dict[str, Any]) -> None:
    table = Table("process", "before", "most", "grew by")
    for what, held in report["processes"].items():
        first, most = held["before_mb"], held["most_mb"]
        table.add_row(what, f"{first:,.0f} MB", f"{most:,.0f} MB", f"{most - first:,.0f} MB")
    Console().print(table)
    if not report["holds"]:
        click.echo(f"more than {TOTAL_MB:g} MB together", err=True)


if __name__ == "__main__":
    main(prog_name="python -m bench.siege")
