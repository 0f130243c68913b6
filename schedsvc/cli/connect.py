"""Adds the options of every command that talks to a running scheduler."""

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click
from schedsvc_client import (
    ChannelCredentials,
    SchedulerError,
    SchedulerUnavailable,
    Unauthenticated,
    tls_credentials,
)
from schedsvc_client.channel import proxy_variable
from schedsvc_client.targets import check_targets

from schedsvc.text.printable import printable

__all__ = ["Connection", "connection_of", "connects", "explained"]


@dataclass(frozen=True, slots=True)
class Connection:
    """Says where the scheduler is, and what is shown to it."""

    target: str
    credentials: ChannelCredentials | None
    token: str | None

    @property
    def proof(self) -> dict[str, Any]:
        """Return keyword arguments of a client."""
        return {"credentials": self.credentials, "token": self.token}


_NOT_CONNECTED = "failed to connect"
# As gRPC names the address of its last attempt.
_ADDRESS = re.compile(r"(?:ipv4|ipv6|unix):\S+(?=:\s)")
_PROVE = (
    "put a token of the configuration's auth.principals into an environment variable and name that "
    "with --token-env, or show a client certificate with --tls-cert and --tls-key"
)
_TLS = ("tls_ca", "tls_cert", "tls_key")
_NAMES = ("target", *_TLS, "token_env")
_OPTIONS = (
    click.option(
        "--target",
        default="127.0.0.1:7600",
        envvar="SCHEDSVC_TARGET",
        show_default=True,
        show_envvar=True,
        metavar="ADDRESS",
        help="HOST:PORT or unix:PATH of the scheduler; separate several with commas.",
    ),
    click.option(
        "--tls-ca",
        type=click.Path(exists=True),
        metavar="FILE",
        help="Trust this CA; turns TLS on.",
    ),
    click.option(
        "--tls-cert", type=click.Path(exists=True), metavar="FILE", help="Client certificate."
    ),
    click.option(
        "--tls-key",
        type=click.Path(exists=True),
        metavar="FILE",
        help="Key of the client certificate.",
    ),
    click.option(
        "--token-env", metavar="VARIABLE", help="Environment variable that holds the bearer token."
    ),
)


def connection_of(given: Mapping[str, Any]) -> Connection:
    """Return what the options of a command say together.

    Raises BadParameter if the token's variable is not set, ValueError if the TLS files do not fit,
    and OSError if one cannot be read.
    """
    token_env = given["token_env"]
    token = os.environ.get(token_env, "") if token_env else None
    if token == "":
        raise click.BadParameter(
            f"the environment variable {token_env} is not set; put the token into it",
            param_hint="--token-env",
        )
    credentials = None
    if any(given[name] for name in _TLS):
        credentials = tls_credentials(
            ca_file=given["tls_ca"],
            certificate_file=given["tls_cert"],
            key_file=given["tls_key"],
        )
    return Connection(given["target"], credentials, token)


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a Connection as its first argument, and an end in one line where it fails."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        own = {name: given.pop(name) for name in _NAMES}
        try:
            check_targets(own["target"])
        except ValueError as error:
            raise click.BadParameter(
                printable(str(error)), param_hint="--target or SCHEDSVC_TARGET"
            ) from None
        try:
            command(connection_of(own), **given)
        except (SchedulerError, ValueError) as error:
            raise click.ClickException(explained(own["target"], error)) from None

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


def explained(target: str, error: SchedulerError | ValueError) -> str:
    """Return, for a terminal, which address was tried, why that failed, and what to do."""
    return printable(_explained(target, error))


def _explained(target: str, error: SchedulerError | ValueError) -> str:
    if not isinstance(error, SchedulerUnavailable) or _NOT_CONNECTED not in error.message:
        text = str(error)
        text = text if target in text else f"{target}: {text}"
        return f"{text}; {_PROVE}" if isinstance(error, Unauthenticated) else text
    cause = error.message.rpartition(": ")[2]
    # Names of hosts may have many addresses, and a proxy has its own.
    tried = _ADDRESS.search(error.message.removeprefix(f"{target}: "))
    address = tried[0] if tried and tried[0] != target else "that address"
    if proxy := proxy_variable(target):
        advice = f"{proxy} names a proxy: unset it, or add the host to no_proxy"
    else:
        advice = "start one with `schedsvc serve`, or name its address with --target"
    return f"{target}: no scheduler answers at {address} ({cause}); {advice}"
