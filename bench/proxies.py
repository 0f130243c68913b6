"""`python -m bench.proxies` measures the proxy beside nginx, HAProxy, Envoy and an earlier commit.

Method: all proxies stand before one origin, which answers at once, and each has one worker. In each
round every proxy gets a slice of requests, each round in another order. A slice gives the CPU clock
of the whole proxy, the requests in a second, and the time to the first byte of an answer that has
no other beside it. The time that a proxy adds to the origin's own is its part of that. The proxy of
this project serves a path that it passes on, and one that it admits by a scheduler.
"""

import asyncio
import json
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import click
import uvloop

from bench import gate as gates
from bench import machine
from bench.http_cost import earlier
from bench.machine import cpu_ns, generator_cores, pinned, server_cores
from bench.processes import ROOT, started

_PROXY = "from schedsvc_vllm.proxy_cli import main; main()"
_PLAIN, _ADMITTED = "/plain", "/v1/completions"
_START_S_MAX = 60.0
_USAGE = {"prompt_tokens": 480, "completion_tokens": 16}
_ANSWER = json.dumps({"choices": [{"index": 0, "text": " a" * 16}], "usage": _USAGE}).encode()
_ORIGINS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(_ANSWER),
    _ANSWER,
)
_PROMPT = "Tell me a story of a queue in which nobody waits without end. " * 30
_BODY = json.dumps({"model": "emulated", "prompt": _PROMPT, "max_tokens": 16}).encode()
_EPILOG = """\b
Examples:
  python -m bench.proxies
  python -m bench.proxies --before HEAD~1 --envoy ./envoy --rounds 20 --json
"""


class _Origin(asyncio.Protocol):
    """Answers each request at once. A head and a body of a known length make one."""

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            head, end, rest = self._data.partition(b"\r\n\r\n")
            if not end:
                return
            _, _, told = head.lower().partition(b"content-length:")
            size = int(told.partition(b"\r\n")[0] or 0)
            if len(rest) < size:
                return
            self._data = rest[size:]
            self._transport.write(_ORIGINS)


async def _be_origin(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Origin, "127.0.0.1", port)
    await server.serve_forever()


class _Client(asyncio.Protocol):
    """Asks on one connection, one request after the other, while any is left."""

    def __init__(self, request: bytes, left: list[int], firsts_ns: list[int]) -> None:
        self._request, self._left, self._firsts_ns = request, left, firsts_ns
        self._data = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def _ask(self) -> None:
        if not self._left:
            self.done.set_result(None)
            self._transport.close()
            return
        self._left.pop()
        self._data = b""
        self._began_ns = time.perf_counter_ns()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._data:
            self._firsts_ns.append(time.perf_counter_ns() - self._began_ns)
        self._data += data
        if self._data.endswith((_ANSWER, b"\r\n0\r\n\r\n")):
            if not self._data.startswith(b"HTTP/1.1 200"):
                self._fail()
            else:
                self._ask()
        elif b"error" in data:
            self._fail()

    def connection_lost(self, _: Exception | None) -> None:
        self._fail()

    def _fail(self) -> None:
        if not self.done.done():
            said = self._data[:200].decode(errors="replace")
            self.done.set_exception(click.ClickException(f"a request was not served: {said}"))


@dataclass
class _Side:
    """Holds one proxy and how it is asked; without a process, the origin itself."""

    process: "subprocess.Popen[bytes] | None"
    port: int
    path: str = _PLAIN
    taken: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def serve(self, requests: int, at_once: int) -> tuple[float, list[int]]:
        """Serve a slice; return its seconds, and the times to the first bytes in ns."""
        loop = asyncio.get_running_loop()
        head = f"POST {self.path} HTTP/1.1\r\nhost: x\r\nx-tenant-id: a\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(_BODY)}\r\n\r\n"
        left, firsts_ns = list(range(requests)), list[int]()
        began_s = time.perf_counter()
        opened = [
            await loop.create_connection(
                lambda: _Client(head.encode() + _BODY, left, firsts_ns), "127.0.0.1", self.port
            )
            for _ in range(at_once)
        ]
        await asyncio.gather(*(client.done for _, client in opened))
        return time.perf_counter() - began_s, firsts_ns

    async def measure(self, requests: int, at_once: int) -> None:
        """Keep the figures of a slice."""
        before_ns = cpu_ns(self.process.pid) if self.process else 0
        seconds, _ = await self.serve(requests, at_once)
        if self.process:
            used_us = (cpu_ns(self.process.pid) - before_ns) / 1e3
            self.taken["cpu_us"].append(used_us / requests)
        self.taken["requests_s"].append(requests / seconds)
        _, firsts_ns = await self.serve(requests // 8, 1)
        self.taken["first_ms"].append(statistics.median(firsts_ns) / 1e6)


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as made:
        return int(made.getsockname()[1])


def _is_open(port: int) -> bool:
    try:
        with closing(socket.create_connection(("127.0.0.1", port), 1)):
            return True
    except OSError:
        return False


def _nginx(folder: Path, port: int, origin: int) -> list[str]:
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;"
        " events { worker_connections 4096; }"
        f" http {{ access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;"
        f" fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;"
        " keepalive_requests 1000000;"
        f" upstream o {{ server 127.0.0.1:{origin}; keepalive 256; keepalive_requests 1000000; }}"
        f" server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://o;"
        ' proxy_http_version 1.1; proxy_set_header Connection ""; } } }'
    )
    return ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def _haproxy(folder: Path, port: int, origin: int) -> list[str]:
    (folder / "haproxy.cfg").write_text(
        "global\n  nbthread 1\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n"
        f"  timeout server 60s\nfrontend f\n  bind 127.0.0.1:{port}\n  default_backend o\n"
        f"backend o\n  http-reuse always\n  server o 127.0.0.1:{origin}\n"
    )
    return ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")]


def _envoy(program: str, folder: Path, port: int, origin: int) -> list[str]:
    def address(number: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    types = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "f",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "o",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "o"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "r", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    endpoint = {"endpoint": {"address": address(origin)}}
    cluster = {
        "name": "o",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "o", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    listener = {"name": "f", "address": address(port), "filter_chains": [{"filters": filters}]}
    (folder / "envoy.json").write_text(
        json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}})
    )
    return [program, "-c", str(folder / "envoy.json"), "--concurrency", "1", "-l", "error",
            "--disable-hot-restart"]  # fmt: skip


@contextmanager
def _other(command: Sequence[str], port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program that listens on a port. Raises click.ClickException."""
    with pinned(server_cores()):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + _START_S_MAX
        while not _is_open(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise click.ClickException(f"{command[0]} did not start")
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def _own(
    stack: ExitStack, tree: Path, name: str, target: str, origin: int
) -> "tuple[subprocess.Popen[bytes], int]":
    port = _free_port()
    paths = (tree / "clients/python", tree / "clients/vllm", ROOT)
    environment = {
        "PYTHONPATH": ":".join(map(str, paths)),
        "SCHEDSVC_TARGET": target,
        "SCHEDSVC_POOL": name,
        "SCHEDSVC_CLIENT_ID": name,
        "SCHEDSVC_TENANT_HEADERS": "x-tenant-id",
        "SCHEDSVC_HEADER_SET_BY": "bench",
        "SCHEDSVC_UNGATED": "pass",
        "SCHEDSVC_POOL_CAPACITY_TOKENS": "1000000",
        "SCHEDSVC_POOL_BLOCK_SIZE_TOKENS": "16",
        "SCHEDSVC_POOL_MAX_RUNNING": "4096",
    }
    command = ["-c", _PROXY, "--upstream", f"http://127.0.0.1:{origin}", "--port", str(port)]
    command += ["--log-level", "error"]
    process = stack.enter_context(
        started(
            command, lambda: _is_open(port), cores=server_cores(), environment=environment, cwd=tree
        )
    )
    return process, port


def _sides(
    stack: ExitStack, folder: Path, before: str | None, envoy: str | None, target: str
) -> dict[str, _Side]:
    origin = _free_port()
    command = ["-m", "bench.proxies", "--origin", str(origin)]
    stack.enter_context(started(command, lambda: _is_open(origin), cores=generator_cores()))
    sides = {"the origin itself": _Side(None, origin)}
    makers: dict[str, Callable[[Path, int, int], list[str]]] = {}
    for name, made in (("nginx", _nginx), ("haproxy", _haproxy)):
        if shutil.which(name):
            makers[name] = made
        else:
            click.echo(f"{name} is not installed", err=True)
    if envoy:
        makers["envoy"] = lambda *places: _envoy(envoy, *places)
    for name, maker in makers.items():
        port = _free_port()
        process = stack.enter_context(_other(maker(folder, port, origin), port))
        sides[name] = _Side(process, port)
    trees = {"now": ROOT}
    if before:
        trees = {"before": stack.enter_context(earlier(before)), **trees}
    for name, tree in trees.items():
        process, port = _own(stack, tree, name, target, origin)
        sides[f"schedsvc-proxy {name}"] = _Side(process, port)
        sides[f"schedsvc-proxy {name}, with admission"] = _Side(process, port, _ADMITTED)
    return sides


async def _measure(sides: dict[str, _Side], rounds: int, requests: int, at_once: int) -> None:
    order = list(sides.values())
    for side in order:
        await side.serve(requests, at_once)
    # The seed makes the orders the same in each run.
    drawn = random.Random(1)
    for _ in range(rounds):
        drawn.shuffle(order)
        for side in order:
            await side.measure(requests, at_once)


def measure(
    before: str | None, envoy: str | None, rounds: int, requests: int, at_once: int
) -> dict[str, dict[str, float]]:
    """Return the medians of each proxy: CPU a request, requests a second, time to first byte."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target = stack.enter_context(gates.scheduler())
        sides = _sides(stack, folder, before, envoy, target)
        with pinned(generator_cores()):
            uvloop.run(_measure(sides, rounds, requests, at_once))
        return {
            name: {kind: round(statistics.median(all_), 3) for kind, all_ in side.taken.items()}
            for name, side in sides.items()
        }


@click.command(epilog=_EPILOG)
@click.option("--before", metavar="COMMIT", help="Measure the proxy of this commit, too.")
@click.option("--envoy", metavar="FILE", help="The program of Envoy, which no package brings.")
@click.option("--rounds", type=click.IntRange(1), default=12, show_default=True)
@click.option("--requests", type=click.IntRange(8), default=2_000, show_default=True)
@click.option("--at-once", type=click.IntRange(1), default=64, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--origin", type=int, hidden=True, metavar="PORT")
def main(
    before: str | None, envoy: str | None, rounds: int, requests: int, at_once: int,
    as_json: bool, origin: int | None,
) -> None:  # fmt: skip
    """Measure the proxy beside others: CPU a request, requests a second, time to first byte."""
    if origin:
        uvloop.run(_be_origin(origin))
        return
    found = measure(before, envoy, rounds, requests, at_once)
    report = {"machine": machine.describe(), "commit": machine.commit(), "rows": found}
    if as_json:
        click.echo(json.dumps(report))
        return
    for name, row in found.items():
        used = f"{row['cpu_us']:7.1f} us" if "cpu_us" in row else " " * 10
        click.echo(
            f"{name:36} {used} of CPU, {row['requests_s']:8,.0f} requests/s,"
            f" first byte after {row['first_ms']:.3f} ms"
        )


if __name__ == "__main__":
    main(prog_name="python -m bench.proxies")
