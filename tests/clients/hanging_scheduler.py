"""Runs `schedsvc`, whose event loop hangs from SIGUSR1 until SIGUSR2; gRPC's threads go on."""

import signal
import time

from schedsvc.cli import main

_hangs = False


def _hang(*_: object) -> None:
    global _hangs
    _hangs = True
    while _hangs:
        time.sleep(0.01)


def _go_on(*_: object) -> None:
    global _hangs
    _hangs = False


signal.signal(signal.SIGUSR1, _hang)
signal.signal(signal.SIGUSR2, _go_on)
main(prog_name="schedsvc")
