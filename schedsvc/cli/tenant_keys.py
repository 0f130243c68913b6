"""Makes and revokes API keys that stand for a tenant: `schedsvc tenants keys`."""

import json
from datetime import UTC, datetime
from typing import Any

import click
from schedsvc_client.operator import Operator

from schedsvc.cli.complete import complete_tenants
from schedsvc.cli.connect import Connection, connects
from schedsvc.text.option_types import FiniteRange
from schedsvc.text.printable import printable

_EPILOG = """\b
Example:
  schedsvc tenants keys create research
  schedsvc tenants keys rotate research --grace 3600
  schedsvc tenants keys list research
"""
_CREATE_EPILOG = """\b
Example:
  schedsvc tenants keys create research
  schedsvc tenants keys create research --expires-in 86400

The key is shown this once: the scheduler keeps its hash. Its id, on stderr, names it in other
commands.
"""
_ROTATE_EPILOG = """\b
Example:
  schedsvc tenants keys rotate research
  schedsvc tenants keys rotate research 5f0c2a91 --grace 0

Without an ID the tenant must have one key. The old key goes on for an hour, so that its users can
change it, or for --grace. If it may have leaked, use --grace 0.
"""
_REVOKE_EPILOG = """\b
Example:
  schedsvc tenants keys revoke research 5f0c2a91

For the scheduler the key is unknown at once. Gates that ask it (SCHEDSVC_API_KEYS_FROM=scheduler)
refuse the key within 30 s. Requests that run or wait go on.
"""
_LIST_EPILOG = """\b
Example:
  schedsvc tenants keys list research
"""
_GRACE_S = 3_600.0


@click.group(epilog=_EPILOG)
def keys() -> None:
    """Create, rotate, revoke and list API keys of a tenant."""


@keys.command(epilog=_CREATE_EPILOG)
@connects
@click.argument("name", shell_complete=complete_tenants)
@click.option(
    "--expires-in", type=FiniteRange(min=0.001), metavar="SECONDS", help="Expire after this."
)
@click.option("--json", "as_json", is_flag=True, help="Print the key as JSON.")
def create(connection: Connection, name: str, expires_in: float | None, as_json: bool) -> None:
    """Make an API key for the tenant NAME, and print it."""
    with Operator(connection.target, **connection.proof) as operator:
        made = operator.create_key(name, expires_in_s=expires_in or 0.0)
    _show(name, made, as_json)


@keys.command(epilog=_ROTATE_EPILOG)
@connects
@click.argument("name", shell_complete=complete_tenants)
@click.argument("key_id", metavar="[ID]", default="")
@click.option(
    "--grace",
    "grace_s",
    type=FiniteRange(min=0.0),
    default=_GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="Let the old key expire after this.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the new key as JSON.")
def rotate(connection: Connection, name: str, key_id: str, grace_s: float, as_json: bool) -> None:
    """Replace the API key ID of the tenant NAME by a new one, and print it."""
    with Operator(connection.target, **connection.proof) as operator:
        made = operator.rotate_key(name, key_id, grace_s=grace_s)
    _show(name, made, as_json)
    click.echo(f"key {made.old_key.id} expires {_time(made.old_key.expires_unix_ms)}", err=True)


@keys.command(epilog=_REVOKE_EPILOG)
@connects
@click.argument("name", shell_complete=complete_tenants)
@click.argument("key_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def revoke(connection: Connection, name: str, key_id: str, as_json: bool) -> None:
    """Revoke the API key ID of the tenant NAME."""
    with Operator(connection.target, **connection.proof) as operator:
        operator.revoke_key(name, key_id)
    if as_json:
        click.echo(json.dumps({"tenant": name, "id": key_id, "revoked": True}))
    else:
        click.echo(f"key {printable(key_id)} of {printable(name)} is revoked")


@keys.command("list", epilog=_LIST_EPILOG)
@connects
@click.argument("name", shell_complete=complete_tenants)
@click.option("--json", "as_json", is_flag=True, help="Print each key as a line of JSON.")
def list_(connection: Connection, name: str, as_json: bool) -> None:
    """List the API keys that operators have made for the tenant NAME."""
    with Operator(connection.target, **connection.proof) as operator:
        found = operator.keys(name)
    if not as_json:
        click.echo("id        created               expires")
    for key in found:
        created, expires = _time(key.created_unix_ms), _time(key.expires_unix_ms)
        if as_json:
            click.echo(json.dumps({"id": key.id, "created": created, "expires": expires}))
        else:
            click.echo(f"{printable(key.id)}  {created}  {expires}")


def _show(name: str, made: Any, as_json: bool) -> None:
    if as_json:
        told = {"tenant": name, "id": made.key.id, "api_key": made.api_key}
        click.echo(json.dumps({**told, "expires": _time(made.key.expires_unix_ms)}))
        return
    click.echo(made.api_key)
    expires = _time(made.key.expires_unix_ms)
    click.echo(f"key {made.key.id} of {printable(name)}, expires {expires}", err=True)


def _time(unix_ms: int) -> str:
    if not unix_ms:
        return "never"
    return datetime.fromtimestamp(unix_ms / 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
