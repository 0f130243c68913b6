"""A process that holds a file until it is killed, so that nothing of it is closed in order."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def holding(hold: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Fork a process that calls `hold` and then waits; yield what kills it with SIGKILL."""
    read, write = os.pipe()
    waits, parent = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(parent)
            kept = hold()
            os.write(write, b".")
            os.read(waits, 1)  # to the end of this process's parent
            del kept
        finally:
            os._exit(1)
    os.close(write)
    os.close(waits)
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
        os.close(parent)
