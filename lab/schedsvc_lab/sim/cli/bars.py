"""Shows the progress bar of long simulations."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


def progress_bar(unit: str) -> Progress:
    """Make a bar on standard error that counts `unit`; quiet where that is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def watch(progress: Progress, task: TaskID, ended: int) -> None:
    """Move a bar on."""
    progress.update(task, completed=ended)
