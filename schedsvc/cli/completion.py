"""Prints the script that makes a shell complete our commands: `schedsvc completion`."""

import click
from click.shell_completion import get_completion_class

_EPILOG = """\b
Example:
  eval "$(schedsvc completion bash)"
  schedsvc completion zsh > ~/.zfunc/_schedsvc
  schedsvc completion fish > ~/.config/fish/completions/schedsvc.fish

Completes commands, options, and files. Pools, tenants, and lease ids come from the scheduler that
the line or SCHEDSVC_TARGET names; if none answers within 300 ms, they are not completed.
"""


@click.command(epilog=_EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a SHELL."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"the installed click completes nothing in {shell}; update it")
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "schedsvc", "_SCHEDSVC_COMPLETE").source())
