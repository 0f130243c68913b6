"""Runs a scheduler process: start, ready, drain on the first signal, stop on the second."""

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import structlog
import uvloop

from schedsvc.config import Config
from schedsvc.server.descriptors import watch_descriptors
from schedsvc.server.led import LedServer, server_of
from schedsvc.server.logs import configure_logs, flush_logs
from schedsvc.server.malloc import return_freed_memory
from schedsvc.server.notify import Notifier
from schedsvc.server.ready import ReadyFile
from schedsvc.server.reload import Reloader, Source
from schedsvc.server.server import Server

__all__ = ["serve"]

_log = structlog.get_logger("schedsvc.server")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    config: Config,
    ready_file: Path | None = None,
    source: Source | None = None,
    hung_up: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises ListenError, RecordingError, ReadyFileError, StateError and UsageError.

    On SIGHUP the file of `source` is read again, and, if it is watched, also when it has changed.
    One that is wrong changes nothing. A SIGHUP during the start, also one before it of which
    `hung_up()` knows, reloads after it.

    While listening, `ready_file` holds `{"targets": [...], "metrics": URL}` as JSON.
    """
    return_freed_memory()
    configure_logs(config.log.format, config.log.level)
    try:
        with ReadyFile(ready_file) as ready:
            uvloop.run(_serve(config, ready, source, hung_up))
    finally:
        flush_logs()


async def _serve(
    config: Config,
    ready: ReadyFile,
    source: Source | None,
    hung_up: Callable[[], bool],
) -> None:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            continue  # as it was inherited
        loop.add_signal_handler(number, signals.put_nowait, number)
    hangups = asyncio.Event()
    if source is not None and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hangups.set)
        if hung_up():
            hangups.set()
    notifier = Notifier()
    # Until it listens: what a start makes lasts as long as the process.
    gc.disable()
    server = server_of(config)
    await server.start()
    reloads = [] if source is None else _start_reloads(server, notifier, source, hangups)
    gc.collect()
    gc.freeze()
    gc.enable()
    _log.info("ready", pid=os.getpid(), targets=server.targets, metrics=server.metrics_url)
    ready.write(server.targets, server.metrics_url)
    notifier.ready()
    watches = [loop.create_task(notifier.keep_watchdog()), loop.create_task(watch_descriptors())]
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
    for task in watches:
        task.cancel()
    _log.info("stopped")


def _start_reloads(
    server: Server | LedServer, notifier: Notifier, source: Source, hangups: asyncio.Event
) -> list[asyncio.Task[None]]:
    """Begin to reload the file on SIGHUP, and to watch it if that is wanted."""
    loop = asyncio.get_running_loop()
    loading = server.driver.loading
    reloader = Reloader(source.file, server.reconfigure, loading, source.digest, source.tenants_dir)
    tasks = [loop.create_task(_reload_on(hangups, reloader, notifier))]
    if source.watch_s:
        tasks.append(loop.create_task(reloader.watch(source.watch_s)))
    return tasks


async def _reload_on(hangups: asyncio.Event, reloader: Reloader, notifier: Notifier) -> None:
    while True:
        await hangups.wait()
        # Further ones ask for the same, until the file is read.
        hangups.clear()
        _log.info("signal", name="SIGHUP")
        notifier.reloading()
        await reloader.reload()
        notifier.ready()
