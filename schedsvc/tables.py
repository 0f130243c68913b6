"""Consoles for tables: fitted to a terminal, and whole for a file or another program."""

from rich.console import Console

__all__ = ["table_console"]

#: Wider than any table, so that nothing is cut or wrapped.
_WIDTH_OF_FILES = 100_000


def table_console(*, markup: bool = False) -> Console:
    """Return a console on stdout. Without `markup`, names may hold brackets."""
    console = Console(markup=markup)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    return console
