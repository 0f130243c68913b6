"""The life of a scheduler process: start, ready, drain on the first signal, stop on the second."""

import asyncio
import gc
import json
import os
import signal
from pathlib import Path

import structlog
import uvloop

from schedsvc.config import Config
from schedsvc.server.logs import configure_logs
from schedsvc.server.notify import Notifier
from schedsvc.server.reload import Reloader
from schedsvc.server.server import Server

__all__ = ["serve", "write_ready"]

_log = structlog.get_logger("schedsvc.server")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    config: Config,
    ready_file: Path | None = None,
    *,
    config_file: Path | None = None,
    watch_s: float = 0.0,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises ListenError, RecordingError and StateError.

    On SIGHUP `config_file` is read again, and also when it has changed, looked at every `watch_s`
    seconds (0: not). One that is wrong changes nothing.

    While listening, `ready_file` holds `{"targets": [...], "metrics": URL}` as JSON.
    """
    configure_logs(config.log.format, config.log.level)
    # One of an earlier run would tell of addresses that are gone.
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    try:
        uvloop.run(_serve(config, ready_file, config_file, watch_s))
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


async def _serve(
    config: Config, ready_file: Path | None, config_file: Path | None, watch_s: float
) -> None:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in _SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    notifier = Notifier()
    server = Server(config)
    await server.start()
    reloads = _start_reloads(server, notifier, config_file, watch_s)
    # What lives as long as the process need not be looked at by each garbage collection.
    gc.collect()
    gc.freeze()
    _log.info("ready", pid=os.getpid(), targets=server.targets, metrics=server.metrics_url)
    if ready_file is not None:
        write_ready(ready_file, server.targets, server.metrics_url)
    notifier.ready()
    watchdog = loop.create_task(notifier.keep_watchdog())
    first = await signals.get()
    notifier.stopping(server.stop_s_max)
    for task in reloads:
        task.cancel()
    _log.info("signal", name=first.name)
    drain = loop.create_task(server.drain())
    second = loop.create_task(signals.get())
    await asyncio.wait({drain, second}, return_when=asyncio.FIRST_COMPLETED)
    if second.done():
        _log.warning("signal", name=second.result().name, effect="stopping at once")
        drain.cancel()
        await server.stop(None)
    else:
        second.cancel()
        await server.stop()
    watchdog.cancel()
    _log.info("stopped")


def _start_reloads(
    server: Server, notifier: Notifier, config_file: Path | None, watch_s: float
) -> list[asyncio.Task[None]]:
    """Begin to reload the file on SIGHUP, and to watch it where that is wanted."""
    if config_file is None:
        return []
    loop = asyncio.get_running_loop()
    reloader = Reloader(config_file, server.reconfigure)
    hangups: asyncio.Queue[None] = asyncio.Queue()
    loop.add_signal_handler(signal.SIGHUP, hangups.put_nowait, None)
    tasks = [loop.create_task(_reload_on(hangups, reloader, notifier))]
    if watch_s:
        tasks.append(loop.create_task(reloader.watch(watch_s)))
    return tasks


async def _reload_on(hangups: asyncio.Queue[None], reloader: Reloader, notifier: Notifier) -> None:
    while True:
        await hangups.get()
        _log.info("signal", name="SIGHUP")
        notifier.reloading()
        await reloader.reload()
        notifier.ready()


def write_ready(file: Path, targets: list[str], metrics: str | None) -> None:
    """Write the ready file in one step, so that nobody reads half of it."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps({"targets": targets, "metrics": metrics}) + "\n")
    partial.replace(file)
