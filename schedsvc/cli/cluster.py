"""Makes the store of a cluster ready, and looks at it: `schedsvc cluster`."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import click

from schedsvc.cli.cluster_status import show_status
from schedsvc.cli.starting import config_option, read_config
from schedsvc.cluster.admin import StoreStatus, init_store, status_of
from schedsvc.cluster.errors import StoreError
from schedsvc.cluster.joining import fingerprint_of
from schedsvc.cluster.store import Address
from schedsvc.config import Config
from schedsvc.config.cluster import Cluster
from schedsvc.config.files import read_file
from schedsvc.text.printable import printable

T = TypeVar("T")

_EPILOG = """\b
Example:
  schedsvc cluster init --config schedsvc.yaml \\
      --admin-password-file /root/valkey.password
  schedsvc cluster status --config schedsvc.yaml
"""
_INIT_EPILOG = """\b
Example:
  schedsvc cluster init --config schedsvc.yaml \\
      --admin-password-file /root/valkey.password

If the first of `cluster.store.urls` names a user (redis://USER@HOST:PORT), the command also makes
that user with the password of `cluster.store.password_file`, and limits it to the keys and commands
of this cluster. Run the command again after an upgrade that asks for it.
"""
_STATUS_EPILOG = """\b
Example:
  schedsvc cluster status --config schedsvc.yaml
  schedsvc cluster status --config schedsvc.yaml --json
"""


@click.group(epilog=_EPILOG)
def cluster() -> None:
    """Prepare and inspect the store that the schedulers of a cluster share."""


@cluster.command(epilog=_INIT_EPILOG)
@config_option("Configuration file of any member.")
@click.option(
    "--admin-user",
    metavar="USER",
    help="User of the store that may load functions and change users; default: the store's own.",
)
@click.option(
    "--admin-password-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File that contains the password of that user.",
)
def init(config_file: Path, admin_user: str | None, admin_password_file: Path | None) -> None:
    """Load the functions into the store, and create the user of the members."""
    config, settings = _settings(config_file)
    proof, hint = None, "give an operator's password with --admin-password-file"
    if admin_password_file is not None:
        proof = admin_password_file.read_text().strip()
        hint = f"check --admin-user and --admin-password-file {admin_password_file}"

    async def each(address: Address) -> str:
        admin = dataclasses.replace(address, user=admin_user, password=proof, hint=hint)
        done = await init_store(admin, settings.name, address.user, address.password)
        text = "a replica, which has the functions of its primary"
        text = f"store {address.text}: {text if done.is_replica else 'functions loaded'}"
        if done.before:
            text += f" in place of version {done.before} (now upgrade the schedulers that need it)"
        if address.user is not None:
            text += f", user {address.user} may use the keys of cluster {settings.name}"
        forgets = "; the store forgets the user at its restart: set aclfile"
        return text if done.keeps_user else text + forgets

    for address in _addresses(config, settings):
        if address.user is not None and address.password is None:
            raise click.ClickException(
                f"user {address.user} needs a password; name a file in cluster.store.password_file"
            )
        click.echo(printable(_run(each, address)))


@cluster.command(epilog=_STATUS_EPILOG)
@config_option("Configuration file of any member.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def status(config_file: Path, as_json: bool) -> None:
    """Show the members and sets that the store knows.

    Exit with status 1 if the store cannot be used, a set has no leader, or a set of which several
    members were seen has no standby.
    """
    config, settings = _settings(config_file)
    secret = None
    if settings.secret_file is not None:
        try:
            secret = read_file(config.resolve(settings.secret_file)).strip()
        except OSError as error:
            raise click.ClickException(f"cluster.secret_file: {error}") from None

    async def first(address: Address) -> StoreStatus:
        return await status_of(address, settings.name, settings.set, secret)

    problems = []
    for address in _addresses(config, settings):
        try:
            found = _run(first, address)
        except click.ClickException as error:
            problems.append(error.message)
            continue
        show_status(address.text, found, fingerprint_of(config), as_json)
        if lacks := [text for each in found.sets for text in each.problems]:
            raise click.ClickException(printable("; ".join(lacks)))
        return
    raise click.ClickException("\n".join(problems))


def _settings(config_file: Path) -> tuple[Config, Cluster]:
    config, _ = read_config(config_file, None, "")
    if config.cluster is None:
        raise click.ClickException(
            f"{config_file} has no section `cluster`; see docs/operate/cluster.md"
        )
    return config, config.cluster


def _addresses(config: Config, settings: Cluster) -> list[Address]:
    try:
        return [Address.of(url, settings.store, config.resolve) for url in settings.store.urls]
    except StoreError as error:
        raise click.ClickException(str(error)) from None


def _run(work: Callable[[Address], Awaitable[T]], address: Address) -> T:
    async def call() -> T:
        return await work(address)

    try:
        return asyncio.run(call())
    except StoreError as error:
        raise click.ClickException(printable(str(error))) from None
