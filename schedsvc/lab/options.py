"""Options that several commands have, and names that options had before."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

R = TypeVar("R")


def trace_option(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command `--trace FILE`; the file as an argument is deprecated, and warns."""
    file = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)

    @click.option("--trace", type=file, help="The trace to read.")
    @click.argument("argument", required=False, type=file, metavar="")
    @wraps(command)
    def with_trace(*, trace: Path | None, argument: Path | None, **others: Any) -> R:
        if (trace is None) == (argument is None):
            raise click.UsageError("give one trace, as --trace FILE")
        if argument is not None:
            click.echo("a trace as an argument is deprecated; use --trace FILE", err=True)
        return command(trace=trace or argument, **others)

    return with_trace


def renamed_option(
    before: str, now: str, parameter: str, **of_click: Any
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command the option `before`, which sets the parameter of `now`, and warns."""

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @click.option(before, f"before_{parameter}", hidden=True, **of_click)
        @wraps(command)
        def with_before(*args: Any, **params: Any) -> R:
            value = params.pop(f"before_{parameter}")
            if value is None:
                return command(*args, **params)
            source = click.get_current_context().get_parameter_source(parameter)
            if source is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"give {now} without {before}, which it replaces")
            click.echo(f"{before} is deprecated; use {now}", err=True)
            return command(*args, **{**params, parameter: value})

        return with_before

    return decorate
