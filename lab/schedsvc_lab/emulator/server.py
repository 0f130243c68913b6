"""Runs an emulator under uvicorn: its address, its readiness, its end."""

import asyncio
import ipaddress
import json
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop

from schedsvc_lab.emulator.app import Emulator

BACKLOG = 2_048
# After this time, requests that still run (held by a middleware) are cancelled.
STOP_GRACE_S = 0.5
KEEP_ALIVE_S = 75


class StartError(Exception):
    """The server cannot start; the message says why."""


class AddressError(StartError, OSError):
    """The address cannot be listened on; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Address:
    """Says where to listen: a Unix socket, or else host and port (0: any free one)."""

    host: str = "127.0.0.1"
    port: int = 0
    uds: str | None = None


@dataclass(frozen=True, slots=True)
class Listening:
    """Says where a server listens. Over a Unix socket, `base_url` goes with `uds`."""

    base_url: str
    uds: str | None
    pid: int

    def __str__(self) -> str:
        return self.base_url if self.uds is None else f"unix:{self.uds}"

    def write(self, file: Path) -> None:
        """Write it as JSON; a reader sees all of it or no file."""
        part = file.with_name(f".{file.name}.{self.pid}")
        fields = {"base_url": self.base_url, "uds": self.uds, "pid": self.pid}
        part.write_text(json.dumps(fields) + "\n", encoding="utf-8")
        part.replace(file)


class EmulatorServer(uvicorn.Server):
    """Runs uvicorn, which ends what is under way within a second of SIGTERM or SIGINT."""

    def __init__(
        self, emulator: Emulator, address: Address, on_ready: Callable[[Listening], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                emulator.app,
                uds=address.uds,
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        # As vLLM does: a middleware may bound the HTTP of its server.
        emulator.app.state.server = self
        self._emulator = emulator
        self._address = address
        self._on_ready = on_ready

    async def listen(self) -> None:
        """Listen and serve until a signal stops it. Raises StartError."""
        try:
            if self._address.uds is not None:
                _clear_unix_path(self._address.uds)
                await self.serve()
            else:
                await self.serve([_bind(self._address)])
        except SystemExit:
            # So uvicorn ends if a layer refuses to start, after it has logged the layer's message.
            # The layers below it have started.
            await self.lifespan.shutdown()
            raise StartError("a middleware refused to start; its reason stands above") from None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then report the address."""
        await super().startup(sockets)
        uds = self._address.uds
        url = "http://localhost" if uds is not None else _url(self.servers[0].sockets[0])
        self._on_ready(Listening(url, uds, os.getpid()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End every generation, then the connections."""
        self._emulator.driver.close()
        asyncio.get_running_loop().call_later(STOP_GRACE_S, self._cancel_tasks)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and SIGINT; a stop that was asked for is a success."""
        loop = asyncio.get_running_loop()
        both = (signal.SIGTERM, signal.SIGINT)
        # A signal that was ignored stays ignored.
        signals = [each for each in both if signal.getsignal(each) is not signal.SIG_IGN]
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Ask the server to stop. Idempotent."""
        self.should_exit = True

    def _cancel_tasks(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()


def run(emulator: Emulator, address: Address, on_ready: Callable[[Listening], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartError."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(EmulatorServer(emulator, address, on_ready).listen())


def _bind(address: Address) -> socket.socket:
    host, both = address.host, False
    if _is_wildcard(host):  # all addresses, of both families if there are two
        host, both = "", socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        listener = socket.create_server(
            (host, address.port), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        where = f"{address.host}:{address.port}"
        raise AddressError(f"cannot listen on {where}: {error.strerror or error}") from error
    # Connections inherit it; asyncio's own loop would not set it on those of a foreign socket.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _clear_unix_path(path: str) -> None:
    """Remove the socket of a server that has ended; refuse any other file of the name."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not Path(path).absolute().parent.is_dir():
            raise AddressError(
                f"cannot listen on {path}: the folder {Path(path).parent} does not exist; make it"
            ) from None
        return
    if not stat.S_ISSOCK(mode):
        raise AddressError(f"cannot listen on {path}: there is a file which is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            os.unlink(path)
            return
    raise AddressError(f"cannot listen on {path}: another server does")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
