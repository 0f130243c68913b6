"""Runs `schedsvc`, whose core reports a broken invariant at its next decision after SIGUSR1."""

import signal

from schedsvc._core import InvariantError
from schedsvc.cli import main
from schedsvc.driver import Driver


def _break(*_: object) -> None:
    def settle(self: Driver, now_ns: int) -> None:
        raise InvariantError("a test broke it")

    Driver._settle = settle  # type: ignore[method-assign]


signal.signal(signal.SIGUSR1, _break)
main(prog_name="schedsvc")
