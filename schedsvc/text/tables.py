"""Makes consoles for tables: fitted to a terminal, and whole for a file or another program."""

from rich.console import Console

__all__ = ["Output", "table_console"]

#: Wider than any table, so that nothing is cut or wrapped.
_WIDTH_OF_FILES = 100_000


class Output(Console):
    """Prints to a console whose reader may go; rich would end the process with 1."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError, which the command line handles for all commands."""
        raise


def table_console(*, markup: bool = False) -> Console:
    """Return a console on stdout. Without `markup`, names may hold brackets."""
    console = Output(markup=markup)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    return console
