"""Handles signals in the time in which the proxy is still imported.

Imported before everything else. SIGTERM and SIGINT end the proxy at once with 0, until its server
handles them: nothing is admitted yet.
"""

import os
import signal
import sys

__all__ = ["handle"]


def handle() -> None:
    """Let both signals end the process; an ignored one stays ignored, as nohup needs it."""
    signals = {signal.SIGTERM, signal.SIGINT}
    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    # A supervisor's mask is inherited. One that it blocked has perhaps come already.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _end(number: int, _: object) -> None:
    # No exception: one that is raised in a callback of an import is lost.
    os._exit(0)


if os.path.basename(sys.argv[0]) == "schedsvc-proxy":
    handle()
