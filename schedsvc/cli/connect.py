"""Adds the options of every command that talks to a running scheduler."""

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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

__all__ = ["Connection", "connection_of", "connects", "explained", "explaining", "may_connect"]


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
    "put a token of the configuration's auth.principals into SCHEDSVC_TOKEN, or into a file that"
    " --token-file names, or show a client certificate with --tls-cert and --tls-key"
)
_TOKEN, _TOKEN_FILE = "SCHEDSVC_TOKEN", "SCHEDSVC_TOKEN_FILE"
_TLS = ("tls_ca", "tls_cert", "tls_key")
_NAMES = ("target", "tls", *_TLS, "token_env", "token_file")


def _file(name: str, variable: str, text: str) -> Callable[[Any], Any]:
    return click.option(
        name,
        type=click.Path(exists=True),
        envvar=variable,
        show_envvar=True,
        metavar="FILE",
        help=text,
    )


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
        "--tls/--no-tls",
        default=None,
        envvar="SCHEDSVC_TLS",
        show_envvar=True,
        help="Use TLS, or not. Default: if a file below is given.",
    ),
    _file("--tls-ca", "SCHEDSVC_TLS_CA_FILE", "Trust this CA instead of the system's."),
    _file("--tls-cert", "SCHEDSVC_TLS_CERT_FILE", "Client certificate."),
    _file("--tls-key", "SCHEDSVC_TLS_KEY_FILE", "Key of the client certificate."),
    click.option(
        "--token-env",
        metavar="VARIABLE",
        help=f"Environment variable that holds the bearer token. Default: {_TOKEN}.",
    ),
    click.option(
        "--token-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help=f"File that holds the bearer token. Default: the one that {_TOKEN_FILE} names.",
    ),
)


def connection_of(given: Mapping[str, Any]) -> Connection:
    """Return what the options of a command say together.

    Raises UsageError if no token is where one is named, or TLS is off but has files; ValueError if
    the TLS files do not fit, and OSError if one cannot be read.
    """
    token, files = _token(given["token_env"], given["token_file"]), [given[name] for name in _TLS]
    if given["tls"] is False and any(files):
        raise click.UsageError("--no-tls (SCHEDSVC_TLS) excludes the files of TLS; give one")
    if not given["tls"] and not any(files):
        return Connection(given["target"], None, token)
    ca, certificate, key = files
    credentials = tls_credentials(ca_file=ca, certificate_file=certificate, key_file=key)
    return Connection(given["target"], credentials, token)


def _token(variable: str | None, file: Path | None) -> str | None:
    """Return the token that an option names, else the environment; None: neither does."""
    if variable and file:
        raise click.UsageError("--token-env and --token-file exclude each other; give one of them")
    hint = "--token-file"
    if not variable and not file:
        variable = _TOKEN if os.environ.get(_TOKEN) else None
        hint, name = _TOKEN_FILE, os.environ.get(_TOKEN_FILE)
        if variable and name:
            raise click.UsageError(f"{_TOKEN} and {_TOKEN_FILE} exclude each other; set one")
        file = Path(name) if name else None
    if file:
        return _token_in(file, hint)
    token = os.environ.get(variable, "") if variable else None
    if token == "":
        raise click.BadParameter(
            f"the environment variable {variable} is not set; put the token into it",
            param_hint="--token-env",
        )
    return token


def _token_in(file: Path, hint: str) -> str:
    from schedsvc.config.files import read_file  # with pydantic, which few commands need

    try:
        token = read_file(file).decode().strip()
    except OSError as error:
        text = f"cannot read {file}: {error.strerror}"
    except UnicodeDecodeError:
        text = f"{file} is no text in UTF-8; write the token into it"
    else:
        if token:
            return token
        text = f"{file} is empty; write the token into it"
    raise click.BadParameter(text, param_hint=hint)


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a Connection as its first argument, and an end in one line where it fails."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        own = _checked(given)
        with explaining(own["target"]):
            command(connection_of(own), **given)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


def may_connect(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a Connection as its first argument, or None without --target.

    `text` is the help of --target. The command calls the scheduler under `explaining()`.
    """

    def added(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            if given["target"] is None:
                command(None, **{k: v for k, v in given.items() if k not in _NAMES})
                return
            own = _checked(given)
            with explaining(own["target"]):
                connection = connection_of(own)
            command(connection, **given)

        target = click.option("--target", metavar="ADDRESS", help=text)
        for option in reversed((target, *_OPTIONS[1:])):
            run = option(run)
        return run

    return added


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Take the options of a connection out of all that are given."""
    own = {name: given.pop(name) for name in _NAMES}
    try:
        check_targets(own["target"])
    except ValueError as error:
        raise click.BadParameter(
            printable(str(error)), param_hint="--target or SCHEDSVC_TARGET"
        ) from None
    return own


@contextmanager
def explaining(target: str) -> Iterator[None]:
    """End in one line where the scheduler at a target refuses or does not answer."""
    try:
        yield
    except (SchedulerError, ValueError) as error:
        raise click.ClickException(explained(target, error)) from None


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
