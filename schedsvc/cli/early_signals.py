"""Handles signals while a command that keeps running is imported, and reads its files.

Imported before everything else. SIGTERM and SIGINT end the process at once with 0, until the
command's event loop handles them: nothing is granted yet, and the files are those of a killed
process. Commands that do not stay keep the default actions.
"""

import os
import signal
import sys

__all__ = ["hung_up"]

#: An option may precede them.
_COMMANDS = {"serve", "edge", "emulate"}
#: `serve` reloads on SIGHUP, `edge` lives on.
_HUNG_UP_COMMANDS = {"serve", "edge"}
_hangups: list[int] = []


def hung_up() -> bool:
    """Return whether a SIGHUP came before the command itself handles it."""
    return bool(_hangups)


def _handle() -> None:
    given = set(sys.argv[1:3])
    signals = {signal.SIGTERM, signal.SIGINT} if _COMMANDS & given else set()
    if _HUNG_UP_COMMANDS & given:
        signals.add(signal.SIGHUP)
    for number in signals:
        # An ignored one stays ignored, as nohup and a shell's background jobs need it.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _hung_up if number == signal.SIGHUP else _end)
    # A supervisor's mask is inherited. One that it blocked has perhaps come already.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _hung_up(number: int, _: object) -> None:
    _hangups.append(number)


def _end(number: int, _: object) -> None:
    # No exception: one that is raised in a callback of an import is lost.
    os._exit(0)


_handle()
