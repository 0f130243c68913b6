"""Runs an edge process: it listens, asks the scheduler, and ends at the first signal."""

import asyncio
import os
import signal
from pathlib import Path

import grpc
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from schedsvc.config import Config
from schedsvc.config.models import Listener
from schedsvc.edge.relay import Allowance, Relay
from schedsvc.server.credentials import credentials_of
from schedsvc.server.descriptors import watch_descriptors
from schedsvc.server.health import LIVENESS, READINESS
from schedsvc.server.listeners import bind, server_options
from schedsvc.server.logs import configure_logs, flush_logs
from schedsvc.server.malloc import return_freed_memory
from schedsvc.server.notify import Notifier
from schedsvc.server.ready import ReadyFile
from schedsvc.server.strangers import Strangers
from schedsvc.service import SERVICE_NAME, Authenticator

__all__ = ["WINDOW_BYTES", "Edge", "serve"]

_log = structlog.get_logger("schedsvc.edge")
_STATUS = health_pb2.HealthCheckResponse.ServingStatus
_AGAIN_S = 0.5
#: The window of each stream, before the edge reads its message.
WINDOW_BYTES = 16_384
#: Health names whose status the edge copies from the scheduler; it is alive by itself.
_FOLLOWED = ("", SERVICE_NAME, READINESS)
#: A burst of this many calls is never shed before the relay sees it, however few may be open.
_WAITING_MIN = 100
#: A stranger can fill the window of each stream before its call is refused. A call that is passed
#: on gets the window that its message needs.
_MEMORY_OPTIONS = (("grpc.http2.lookahead_bytes", WINDOW_BYTES), ("grpc.http2.bdp_probe", 0))
_STOP_GRACE_S = 1.0
_STOP_S_MAX = 10.0


class Edge:
    """Serves the listener `edge` of a configuration, before a scheduler on a Unix socket."""

    def __init__(self, config: Config) -> None:
        """Make one; nothing listens yet. Has to be called in the event loop."""
        edge, socket = config.edge, config.edge_socket
        if edge is None or socket is None:
            raise ValueError("the configuration has no edge")
        self._config = config
        self._listener = Listener(tcp=edge.tcp, tls=edge.tls)
        most = config.limits.message_max_bytes
        self._upstream = grpc.aio.insecure_channel(
            f"unix:{config.resolve(socket)}",
            [
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", most),
                ("grpc.enable_http_proxy", 0),
                # A scheduler that restarts is found soon.
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1_000),
            ],
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined] # not in the stubs
        # A call that waits for its turn here may wait again upstream, so few may wait.
        waiting_max = max(edge.calls_max, _WAITING_MIN)
        changes = {"streams_max": waiting_max, "connections_max": edge.connections_max}
        limits = config.limits.model_copy(update=changes)
        self._server = grpc.aio.server(options=[*server_options(limits), *_MEMORY_OPTIONS])
        self._strangers = Strangers(edge.connections_max)
        authenticator = Authenticator(credentials_of(config), "token", proven=self._strangers.prove)

        def allowance() -> Allowance:
            return Allowance(edge.calls_per_second, edge.calls_max)

        self.relay = Relay(self._upstream, authenticator, allowance)
        self._server.add_generic_rpc_handlers((self.relay,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._tasks: list[asyncio.Task[None]] = []
        #: The address as a client's target, once started.
        self.target = ""

    async def start(self) -> None:
        """Listen. Raises ListenError."""
        await self._health.set(LIVENESS, _STATUS.SERVING)
        for name in _FOLLOWED:
            await self._health.set(name, _STATUS.NOT_SERVING)
        try:
            self.target = bind(self._server, self._config, self._listener).target
        finally:
            # Only a server that runs gives its address back when it stops.
            await self._server.start()
        loop = asyncio.get_running_loop()
        self._strangers.watch(self.target)
        self._tasks = [loop.create_task(self._follow(name)) for name in _FOLLOWED]
        self._tasks.append(loop.create_task(self._strangers.run()))
        _log.info("listening", target=self.target, tls=self._listener.tls is not None)

    async def stop(self, grace_s: float | None = _STOP_GRACE_S) -> None:
        """Stop listening; calls that are open get `grace_s` (None: nothing)."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop(grace_s)
        await self._upstream.close(None)

    async def _follow(self, name: str) -> None:
        """Let our health be the scheduler's, so that asking for it costs the scheduler nothing."""
        stub = health_pb2_grpc.HealthStub(self._upstream)
        while True:
            try:
                async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=name)):
                    await self._health.set(name, answer.status)
            except grpc.aio.AioRpcError as error:
                _log.warning("scheduler_away", service=name, code=error.code().name)
            await self._health.set(name, _STATUS.NOT_SERVING)
            await asyncio.sleep(_AGAIN_S)


def serve(config: Config, ready_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP changes nothing. Raises ListenError and ReadyFileError.

    While listening, `ready_file` holds `{"targets": [...], "metrics": null}` as JSON.
    """
    return_freed_memory()
    configure_logs(config.log.format, config.log.level)
    try:
        with ReadyFile(ready_file) as ready:
            uvloop.run(_serve(config, ready))
    finally:
        flush_logs()


async def _serve(config: Config, ready: ReadyFile) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            continue  # as it was inherited
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _on_hangup)
    notifier = Notifier()
    edge = Edge(config)
    await edge.start()
    _log.info("ready", pid=os.getpid(), targets=[edge.target])
    ready.write([edge.target], None)
    notifier.ready()
    loop = asyncio.get_running_loop()
    watches = [loop.create_task(notifier.keep_watchdog()), loop.create_task(watch_descriptors())]
    await stopped.wait()
    notifier.stopping(_STOP_S_MAX)
    await edge.stop()
    for task in watches:
        task.cancel()
    _log.info("stopped")


def _on_hangup() -> None:
    effect = "none: the edge reads its configuration at the start; start it again to change it"
    _log.warning("signal", name="SIGHUP", effect=effect)
