"""SIGHUP in the time in which a command that lives through it is still imported.

Imported before everything else, because the default action of the signal ends the process.
"""

import signal
import sys

__all__ = ["hung_up"]

#: `serve` reloads on SIGHUP, `edge` lives on. An option may precede them.
_COMMANDS = {"serve", "edge"}
_hangups: list[int] = []


def hung_up() -> bool:
    """Whether a SIGHUP came before the command itself handles it."""
    return bool(_hangups)


if _COMMANDS.intersection(sys.argv[1:3]):
    signal.signal(signal.SIGHUP, lambda number, _: _hangups.append(number))
