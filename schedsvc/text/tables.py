"""Makes consoles for tables: fitted to a terminal, and whole for a file or another program."""

import re
from typing import Any

from rich.console import Console

__all__ = ["Output", "table_console"]

#: Wider than any table, so that nothing is cut or wrapped.
_WIDTH_OF_FILES = 100_000
_BLANKS = re.compile(r" +$", re.MULTILINE)


class Output(Console):
    """Prints to a console whose reader may go; rich would end the process with 1.

    For a file or another program, no line ends in blanks.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, which fills the last column of a table with blanks."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write(_BLANKS.sub("", captured.get()))

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError, which the command line handles for all commands."""
        raise


def table_console(*, markup: bool = False) -> Console:
    """Return a console on stdout. Without `markup`, names may hold brackets."""
    console = Output(markup=markup)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    return console
