"""Holds a file in a process until it is killed, so nothing of it is closed in order."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import forked

_HOLD = "from tests.killed import hold; hold()"


def hold() -> None:
    """Call the function that the arguments name, say so, and keep its result until killed."""
    module, name, path = sys.argv[1:]
    sys.path.append(str(Path(__file__).parent))  # pytest names a module by its folder below this
    kept = getattr(importlib.import_module(module), name)(Path(path))
    print("held", flush=True)
    sys.stdin.read()  # to the end of this process's parent
    del kept


@contextmanager
def holding(make: Callable[[Path], object], path: Path) -> Iterator[Callable[[], None]]:
    """Call `make(path)` in a separate process, which then waits; yield the function that kills it.

    A fork of this process would be quicker, and now and then never run: of its threads only one is
    copied, and another may hold a lock.

    Args:
        make: A function of a module, which the other process imports.
        path: Its argument.
    """
    with forked.Popen(
        [sys.executable, "-c", _HOLD, make.__module__, make.__qualname__, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[1],
    ) as process:

        def kill() -> None:
            process.kill()
            process.wait()  # until the kernel has closed its files

        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n", "it ended before it held the file"
            yield kill
        finally:
            kill()
