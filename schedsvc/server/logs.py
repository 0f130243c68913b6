"""Writes the log: structured lines on stderr, one for each event of the process's life.

The event loop never waits for stderr, and a peer causes few lines: see log_writer.py and
log_limits.py.
"""

import logging
import sys
import time
from typing import Literal

import structlog

from schedsvc.server.log_limits import PeerLimits
from schedsvc.server.log_writer import LogWriter
from schedsvc.text.printable import printable

__all__ = ["configure_logs", "flush_logs", "lines_dropped", "lines_suppressed"]

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_log = structlog.get_logger("schedsvc.logs")
_FLUSH_S = 1.0


class _Handler(logging.Handler):
    """Hands formatted lines to the writer's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = LogWriter(sys.stderr, _say_dropped)

    def emit(self, record: logging.LogRecord) -> None:
        # A library names no peer, and most of its lines have one as their cause.
        is_ours = isinstance(record.msg, dict)
        left_out = 0 if is_ours else _admit(f"library {record.name}")
        if left_out < 0:
            return
        record.suppressed = left_out
        try:
            self.writer.put(self.format(record) + "\n")
        except Exception:  # logging's own way would write to stderr, and could wait there
            self.writer.dropped += 1

    def flush(self) -> None:
        self.writer.flush(_FLUSH_S)


def lines_dropped() -> int:
    """Return how many lines were lost because stderr took none."""
    return _handler.writer.dropped


def lines_suppressed() -> int:
    """Return how many lines about peers were left out because these caused too many."""
    return _limits.suppressed


def flush_logs() -> None:
    """Wait until the lines so far are written, but at most for a second."""
    _handler.flush()


def _say_dropped(lines: int) -> None:
    _log.warning("log_lines_dropped", lines=lines, reason="no program read stderr")


def _admit(peer: str) -> int:
    return _limits.admit(peer, time.monotonic_ns())


_handler = _Handler()
_limits = PeerLimits()


def configure_logs(
    style: Literal["json", "console"], level: Literal["debug", "info", "warning", "error"]
) -> None:
    """Send our events and the libraries' warnings to stderr, as JSON lines or for a person."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final: list[structlog.typing.Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta
    ]
    if style == "json":
        final += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        final += [_printable, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    if _handler.writer.stream is not sys.stderr:
        _handler.writer = LogWriter(sys.stderr, _say_dropped)
    _handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _note_suppressed], processors=final
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [_handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("schedsvc").setLevel(_LEVELS[level])
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            _limit_peers,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _limit_peers(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Leave out lines of a peer that causes too many; the next one reports how many.

    A line with a traceback may have a caller's message as its cause, also if it names no peer.
    """
    peer = event.get("peer") or (event["event"] if event.get("exc_info") else None)
    if peer is not None:
        left_out = _admit(str(peer))
        if left_out < 0:
            raise structlog.DropEvent
        if left_out:
            event["suppressed"] = left_out
    return event


def _note_suppressed(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    if left_out := event["_record"].suppressed:
        event["suppressed"] = left_out
    return event


def _printable(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape control characters in every field but the traceback."""
    for name, value in event.items():
        if isinstance(value, str) and name != "exception":
            event[name] = printable(value)
    return event
