"""A process that holds a file until it is killed, so that nothing of it is closed in order."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def holding(hold: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Fork a process that calls `hold` and then waits; yield what kills it with SIGKILL."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            kept = hold()
            os.write(write, b".")
            while kept is not None:
                time.sleep(60)
        finally:
            os._exit(1)
    os.close(write)
    alive = True

    def kill() -> None:
        nonlocal alive
        if alive:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        alive = False

    try:
        assert os.read(read, 1) == b".", "the process ended before it held the file"
        yield kill
    finally:
        kill()
        os.close(read)
