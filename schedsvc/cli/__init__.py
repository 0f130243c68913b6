"""Runs the command line: `schedsvc COMMAND`. A command's code is imported when it is asked for."""

import schedsvc.cli.early_signals  # before all others, because it handles signals
import schedsvc.cli.streams  # noqa: F401 - before anything opens a file

# isort: split
import errno
import gc
import importlib
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import click
from click.shell_completion import CompletionItem

__all__ = ["main"]

# grpc's C core writes a line to stderr for each handshake of a client that fails. It reads this
# when it is imported, which no command has done yet; errors that concern us it also raises.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

#: Command to where it is defined and what it does in one line.
_SERVICE = {
    "serve": ("schedsvc.cli.serve:serve", "Serve admission over gRPC."),
    "edge": ("schedsvc.cli.edge:edge", "Let callers who are not trusted reach a scheduler."),
    "check": ("schedsvc.cli.check:check", "Check a configuration file."),
    "health": ("schedsvc.cli.health:health", "Ask for the health of a scheduler."),
    "stats": ("schedsvc.cli.stats:stats", "Show what a running scheduler does."),
    "top": ("schedsvc.cli.top:top", "Show the same live, and look into a tenant or a request."),
    "why": ("schedsvc.cli.why:why", "Say why a request waits."),
    "drain": ("schedsvc.cli.drain:drain", "Stop admitting to a pool, or to all; or begin again."),
    "leases": ("schedsvc.cli.leases:leases", "List the leases that run, or revoke them."),
    "mode": ("schedsvc.cli.mode:mode", "Enforce decisions or only count them, for all at once."),
    "tenants": ("schedsvc.cli.tenants:tenants", "List, change and delete tenants."),
    "pools": ("schedsvc.cli.release:pools", "Release a pool for another caller."),
    "cluster": (
        "schedsvc.cli.cluster:cluster",
        "Prepare and inspect the store that the schedulers of a cluster share.",
    ),
    "usage": ("schedsvc.cli.usage:usage", "Export and back up what tenants used."),
    "state": ("schedsvc.cli.state:state", "Back up counters, quotas, and what operators set."),
    "completion": (
        "schedsvc.cli.completion:completion",
        "Print the completion script of a shell.",
    ),
}

#: The commands of the laboratory, each with its one line of help. Entry points of its package say
#: where they are.
_LAB = {
    "quickstart": "Start all that a first request needs, and print one to send.",
    "demo": "Show a noisy neighbour, without and with the scheduler.",
    "sim": "Simulate what a configuration does to a trace.",
    "advise": "Draft a configuration that meets goals on a trace.",
    "predict": "Measure what output lengths are promised to a trace.",
    "simtest": "Test the scheduler against every fault.",
    "emulate": "Serve an emulated engine in OpenAI's format.",
    "load": "Send a trace of requests to an OpenAI-compatible server.",
    "workload": "Read, describe, convert and make traces.",
    "prefix": "Show what the prompts of a trace share.",
    "converse": "Hold conversations with an OpenAI-compatible server.",
}
_LAB_GROUP, _LAB_PACKAGE = "schedsvc.commands", "schedsvc-lab"

_COMMANDS = {name: text for name, (_, text) in _SERVICE.items()} | _LAB

#: The extra that brings what a command needs.
_EXTRAS = dict.fromkeys(_LAB, "lab") | {"cluster": "cluster", "top": "top"}

#: Errors of a write to a full disk or device.
_OUTPUT_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: Exit status after Ctrl-C: 128 and the number of the signal, as shells report it.
_INTERRUPTED = 130

_INSTALL_LAB = "pip install 'schedsvc[lab]'"

_EPILOG = """\b
Example:
  schedsvc check schedsvc.yaml && schedsvc serve --config schedsvc.yaml
  schedsvc stats --target 127.0.0.1:7600
"""


class _Missing(click.ClickException):
    """Reports a missing package that a command needs; the message says what to install."""

    exit_code = 2

    def __init__(self, name: str, package: str) -> None:
        install = f"pip install 'schedsvc[{_EXTRAS[name]}]'"
        super().__init__(f"schedsvc {name} needs the package {package}: {install}")


def _package(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]


def _of_service(name: str) -> click.Command:
    """Return a command of the service."""
    module, _, attribute = _SERVICE[name][0].partition(":")
    command: click.Command = getattr(importlib.import_module(module), attribute)
    return command


def _of_lab(name: str) -> click.Command:
    """Return a command of the laboratory, or one that says what to install."""
    from importlib import metadata  # 20 ms, which no command of the service needs

    [*found] = metadata.entry_points(group=_LAB_GROUP, name=name)
    if not found:
        return _uninstalled(name, _LAB_PACKAGE)
    try:
        command: click.Command = found[0].load()
    except ModuleNotFoundError as error:
        return _uninstalled(name, _package(error))
    return command


def _uninstalled(name: str, package: str) -> click.Command:
    """Return a command that takes any arguments and says what to install."""

    def fail() -> None:
        raise _Missing(name, package)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return click.Command(name, context_settings=settings, callback=fail, help=_LAB[name])


@contextmanager
def _lasting() -> Iterator[None]:
    """Collect no garbage while modules are imported, nor later look for it in them.

    They last as long as the process and leave little garbage. To scan them again and again would
    be a fifth of the start of `serve`.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Commands(MutableMapping[str, click.Command]):
    """Finds the commands by name, and imports them on first use."""

    def __init__(self) -> None:
        self._loaded: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._loaded:
            with _lasting():
                found = _of_lab(name) if name in _LAB else _of_service(name)
                self._loaded[name] = _with_version(found)
        return self._loaded[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


@contextmanager
def _ending() -> Iterator[None]:
    """End a command in order whose reader has gone, whose disk is full, or that gets Ctrl-C."""
    try:
        yield
    except BrokenPipeError:
        _drop_output()
        raise click.exceptions.Exit(0) from None
    except SystemExit as ended:
        # So rich ends a program whose reader has gone, with status 1.
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        raise click.exceptions.Exit(0) from None
    except KeyboardInterrupt:
        raise click.exceptions.Exit(_INTERRUPTED) from None
    except OSError as error:
        if error.errno not in _OUTPUT_FAILS or error.filename:
            raise
        _drop_output()
        raise click.ClickException(f"cannot write the output: {error.strerror}") from error


def _drop_output() -> None:
    """Let what Python still buffers for stdout go nowhere, or it reports the same at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Root(click.Group):
    """Lists commands without importing them, and ends unexpected errors in one line."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Read the arguments; `--help` and `--version` print here."""
        with _ending():
            return super().make_context(*args, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which one needs them."""
        return list(_COMMANDS)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name from the table, which imports none, or an option."""
        names = [
            CompletionItem(name, help=text)
            for name, text in _COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        for title, names in (("Commands", _SERVICE), (f"Laboratory ({_INSTALL_LAB})", _LAB)):
            with formatter.section(title):
                formatter.write_dl([(name, _COMMANDS[name]) for name in names])

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; an error that it does not know becomes a message and exit status 1."""
        try:
            with _ending():
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if ctx.params["debug"]:
                raise
            command = ctx.invoked_subcommand
            if isinstance(error, ModuleNotFoundError) and command in _EXTRAS:
                raise _Missing(command, _package(error)) from error
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise click.ClickException(f"{what} (schedsvc --debug ... shows where)") from error


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib import metadata  # with a parser of mail, which no other command needs

        click.echo(f"schedsvc {metadata.version('schedsvc')}")
        ctx.exit()


_HAS_VERSION = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version and exit.",
)


def _with_version(command: click.Command) -> click.Command:
    """Give `--version` to a command and all below it."""
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        _with_version(below)
    return _HAS_VERSION(command)


@click.group(
    cls=_Root,
    commands=_Commands(),
    epilog=_EPILOG,
    # All commands inherit these names.
    context_settings={"help_option_names": ["-h", "--help"]},
)
@_HAS_VERSION
@click.option("--debug", is_flag=True, help="Show a traceback where something unexpected fails.")
def main(debug: bool) -> None:
    """Admit requests to shared LLM servers, fair by tokens."""
