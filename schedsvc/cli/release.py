"""Takes leases or an owner off a pool for an operator: `schedsvc pools`."""

import json

import click
from schedsvc_client.operator import Operator

from schedsvc.cli.complete import complete_pools
from schedsvc.cli.connect import Connection, connects
from schedsvc.text.printable import printable

_POOLS_EPILOG = """\b
Example:
  schedsvc pools release gpu-1
"""
_RELEASE_EPILOG = """\b
Example:
  schedsvc pools release gpu-1

A pool stays with the caller that offered it for the lease TTL and grace after the caller's last
stream, since its requests may still run. Release it to move the engine to another host, with
another token, without that wait. Stop the former gate first: while it offers the pool, this fails.
"""


@click.group(epilog=_POOLS_EPILOG)
def pools() -> None:
    """Release a pool for another caller."""


@pools.command(epilog=_RELEASE_EPILOG)
@connects
@click.argument("name", shell_complete=complete_pools)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def release(connection: Connection, name: str, as_json: bool) -> None:
    """Let another caller offer the pool NAME at once."""
    with Operator(connection.target, **connection.proof) as operator:
        operator.release_pool(name)
    if as_json:
        click.echo(json.dumps({"pool": name, "released": True}))
    else:
        click.echo(f"{printable(name)} is free: another caller can offer it now")
