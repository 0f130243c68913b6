"""Runs the gate in a process of its own, before any server: `schedsvc-proxy --upstream URL`."""

from __future__ import annotations

from schedsvc_vllm import early_signals  # before everything that takes time

# isort: split
import argparse
import importlib
import ipaddress
import logging
import os
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

from schedsvc_vllm.certificates import XFCC
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.launcher import EXIT_USAGE, LaunchError, options_text, split, version
from schedsvc_vllm.log_limit import limit_lines
from schedsvc_vllm.router import Router
from schedsvc_vllm.settings import Settings, SettingsError
from schedsvc_vllm.upstream_list import ListError, UpstreamList, check_url, named_all

EXIT_FAILED = 1
WAIT_S_MAX = 86_400
#: A server that answers no probe within this time is down.
HEALTH_S = 2.0
#: Each holds at most about 0.5 MB; requests that wait hold one each.
CONNECTIONS_MAX = 4_096
#: Longer than the 60 s for which nginx and AWS keep a connection to a server behind them.
KEEP_ALIVE_S = 75
BACKLOG = 2_048
_log = logging.getLogger("schedsvc_vllm")
EXTRA = "pip install 'schedsvc-vllm[proxy]'"


class _Version(argparse.Action):
    """Prints the version, which argparse's own action would look up at each start."""

    def __call__(self, made: argparse.ArgumentParser, *_: object) -> None:
        """Print it and end."""
        sys.stdout.write(f"{made.prog} {version()}\n")
        made.exit()


def parser() -> argparse.ArgumentParser:
    """Describe the command's own options."""
    made = argparse.ArgumentParser(
        prog="schedsvc-proxy",
        description="Be a reverse proxy with the schedsvc gate in it, for servers that cannot"
        "\nload the gate themselves.",
        epilog="Each --schedsvc- option is also a variable: --schedsvc-pool is SCHEDSVC_POOL.\n\n"
        + options_text()
        + "\n\nExample:\n  schedsvc-proxy --upstream http://127.0.0.1:8000 --port 9000 \\\n"
        "      --schedsvc-target unix:/run/schedsvc/schedsvc.sock \\\n"
        "      --schedsvc-tenant-headers x-tenant-id",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action=_Version, nargs=0, help="Show the version and exit.")
    made.add_argument(
        "--upstream",
        action="append",
        metavar="[NAME=]URL",
        help="The server behind it. Repeatable: each is a pool, named NAME or its HOST:PORT.",
    )
    made.add_argument(
        "--upstreams-file",
        metavar="FILE",
        help="YAML list of the servers behind it, which is read again when it changes.",
    )
    made.add_argument(
        "--host",
        default="127.0.0.1",
        help="Address to listen on (127.0.0.1); 0.0.0.0 and :: mean all, of IPv4 and of IPv6.",
    )
    made.add_argument("--port", type=int, default=9000, help="Port; 0 takes any free one (9000).")
    made.add_argument("--uds", metavar="PATH", help="Listen on this Unix socket instead.")
    made.add_argument("--ssl-certfile", metavar="FILE", help="PEM of its certificate: serve TLS.")
    made.add_argument("--ssl-keyfile", metavar="FILE", help="PEM of the certificate's key.")
    made.add_argument(
        "--ssl-ca-certs",
        metavar="FILE",
        help="PEM of who signs clients' certificates; each client then needs one.",
    )
    made.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        metavar="0|1|2",
        help="Ask clients for no certificate (0), take one (1), need one (2 with --ssl-ca-certs).",
    )
    made.add_argument(
        "--wait-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="Wait up to SECONDS for the server behind it (600).",
    )
    made.add_argument(
        "--health-s",
        type=float,
        default=HEALTH_S,
        metavar="SECONDS",
        help="Answer /health with 503 if the server behind it does not answer its own within"
        f" SECONDS ({HEALTH_S:g}).",
    )
    _add_connections(made)
    made.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="Least severe lines of the log (info).",
    )
    return made


def _add_connections(made: argparse.ArgumentParser) -> None:
    """Describe the options about clients' connections."""
    made.add_argument(
        "--connections-max",
        type=int,
        default=CONNECTIONS_MAX,
        metavar="N",
        help=f"For a connection beyond N ({CONNECTIONS_MAX}) close the one idle longest, or it.",
    )  # fmt: skip
    made.add_argument(
        "--keep-alive-s",
        type=int,
        default=KEEP_ALIVE_S,
        metavar="SECONDS",
        help=f"Keep a connection without a request for SECONDS ({KEEP_ALIVE_S}); more than the"
        " load balancer in front does.",
    )
    made.add_argument(
        "--graceful-s",
        type=int,
        metavar="SECONDS",
        help="Wait up to SECONDS for running requests at the stop (without end).",
    )
    made.add_argument(
        "--backlog",
        type=int,
        default=BACKLOG,
        metavar="N",
        help=f"Connections that may wait to be accepted ({BACKLOG}).",
    )


def prepare(
    arguments: Sequence[str], environment: MutableMapping[str, str]
) -> tuple[argparse.Namespace, Settings]:
    """Read the command line. Raises LaunchError or SettingsError; exits as argparse does."""
    rest, own = split(arguments)
    environment.update(own)
    options = parser().parse_args(rest)
    options.upstreams = _upstreams(options, environment)
    if not 0 <= options.port <= 65_535:
        raise LaunchError(f"--port {options.port}: must be from 0 to 65535")
    if not 0 <= options.wait_s <= WAIT_S_MAX:
        raise LaunchError(f"--wait-s {options.wait_s:g}: must be from 0 to {WAIT_S_MAX}")
    if not 0 < options.health_s <= WAIT_S_MAX:
        raise LaunchError(
            f"--health-s {options.health_s:g}: must be more than 0, and at most {WAIT_S_MAX}"
        )
    for name in ("connections_max", "backlog"):
        if (given := getattr(options, name)) < 1:
            raise LaunchError(f"--{name.replace('_', '-')} {given}: must be at least 1")
    for name in ("keep_alive_s", "graceful_s"):
        given = getattr(options, name)
        if given is not None and not 0 <= given <= WAIT_S_MAX:
            raise LaunchError(f"--{name.replace('_', '-')} {given}: must be from 0 to {WAIT_S_MAX}")
    if options.uds is not None:
        check_socket(options.uds)
    check_tls(options)
    return options, Settings.from_environment(environment)


def _upstreams(options: argparse.Namespace, environment: Mapping[str, str]) -> UpstreamList | None:
    """Read which servers are behind it; None: one, `options.upstream`. Raises LaunchError."""
    given: list[str] = options.upstream or []
    if bool(given) == bool(options.upstreams_file):
        raise LaunchError("--upstream URL, --upstreams-file FILE: give one of them")
    try:
        if len(given) == 1 and "=" not in given[0].partition("://")[0]:
            options.upstream = given[0]
            check_url(given[0], f"--upstream {given[0]}")
            return None
        listed = UpstreamList(named_all(given), options.upstreams_file or "")
    except ListError as error:
        raise LaunchError(str(error)) from None
    for variable in ("SCHEDSVC_POOL", "SCHEDSVC_POOL_EPOCH"):
        if environment.get(variable):
            raise LaunchError(
                f"{variable}: is of one engine; several upstreams have their own names and starts"
            )
    return listed


def check_tls(options: argparse.Namespace) -> None:
    """Raise LaunchError if the files for TLS cannot be used."""
    if options.ssl_cert_reqs is None:
        options.ssl_cert_reqs = int(ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE)
    if options.ssl_cert_reqs and not options.ssl_ca_certs:
        raise LaunchError(
            f"--ssl-cert-reqs {options.ssl_cert_reqs}: give --ssl-ca-certs FILE, too, to verify"
            " clients' certificates"
        )
    certificate, key = options.ssl_certfile, options.ssl_keyfile
    if not certificate:
        for name, file in (("keyfile", key), ("ca-certs", options.ssl_ca_certs)):
            if file:
                raise LaunchError(f"--ssl-{name} {file}: give --ssl-certfile FILE, too")
        return
    if not key:
        raise LaunchError(f"--ssl-certfile {certificate}: give --ssl-keyfile FILE, too")
    tls_of(options)


def tls_of(options: argparse.Namespace) -> ssl.SSLContext | None:
    """Read the files for TLS; None: it is not served. Raises LaunchError."""
    certificate, key = options.ssl_certfile, options.ssl_keyfile
    if not certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _read_tls(f"--ssl-keyfile {key}", lambda: open(key, "rb").close())
    # An empty password: a key that needs one must not wait until it is typed.
    _read_tls(
        f"--ssl-certfile {certificate}, --ssl-keyfile {key}",
        lambda: context.load_cert_chain(certificate, key, lambda: ""),
    )
    if ca := options.ssl_ca_certs:
        _read_tls(f"--ssl-ca-certs {ca}", lambda: context.load_verify_locations(ca))
    context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    return context


def _read_tls(where: str, read: Callable[[], None]) -> None:
    try:
        read()
    except ssl.SSLError as error:
        raise LaunchError(f"{where}: is no PEM that fits: {error.reason or error}") from None
    except OSError as error:
        raise LaunchError(f"{where}: {error.strerror}") from None


def check_socket(path: str) -> None:
    """Raise LaunchError if a Unix socket cannot be made here; a live one would be replaced."""
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            raise LaunchError(
                f"--uds {path}: the folder {folder} does not exist; make it"
            ) from None
        return
    except OSError as error:
        raise LaunchError(f"--uds {path}: {error.strerror}") from None
    if not stat.S_ISSOCK(kind):
        raise LaunchError(f"--uds {path}: it is no socket; move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return  # its server has gone
        except OSError as error:
            raise LaunchError(f"--uds {path}: {error.strerror or error}") from None
    raise LaunchError(f"--uds {path}: another server answers there; stop it first")


def build(options: argparse.Namespace, settings: Settings) -> Gate:
    """Put the gate before the upstream. Raises LaunchError if the extra is not installed."""
    try:
        proxy: Any = importlib.import_module("schedsvc_vllm.proxy")
    except ModuleNotFoundError as error:
        raise LaunchError(f"{error.name} is not installed: {EXTRA}") from None
    made = partial(
        proxy.Upstream,
        wait_s=options.wait_s,
        health_s=options.health_s,
        body_bytes_max=settings.body_bytes_max,
        bodies_bytes_max=settings.bodies_bytes_max,
        fronted=settings.is_fronted,
        kept_headers=frozenset(
            name.encode() for name in (XFCC, *settings.tenant_headers, *settings.request_headers)
        ),
    )
    if options.upstreams is None:
        return Gate(made(options.upstream), settings)
    return Gate(Router(options.upstreams, made, wait_s=options.wait_s), settings)


def server_for(gate: Gate, options: argparse.Namespace) -> Any:
    """Make the server. Raises LaunchError if the extra is not installed."""
    try:
        door: Any = importlib.import_module("schedsvc_vllm.door.server")
    except ModuleNotFoundError as error:
        raise LaunchError(f"{error.name} is not installed: {EXTRA}") from None
    config = door.Config(
        host=options.host,
        port=options.port,
        uds=options.uds,
        backlog=options.backlog,
        tls=tls_of(options),
        keep_alive_s=options.keep_alive_s,
        connections_max=options.connections_max,
        graceful_s=options.graceful_s,
    )
    server = door.Server(gate, config)
    upstream: Any = gate.app
    upstream.state.server = server  # as vLLM does
    upstream.stopping = lambda: server.should_exit
    return server


def serve(gate: Gate, options: argparse.Namespace) -> bool:
    """Serve until a signal; True if the start succeeded, or a signal ended it."""
    server = server_for(gate, options)
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ModuleNotFoundError:
        raise LaunchError(f"uvloop is not installed: {EXTRA}") from None
    # The default action would end the process, and there is nothing to read again.
    signal.signal(signal.SIGHUP, lambda *_: _log.warning("SIGHUP has no effect; start it again"))
    wildcard = wildcard_socket(options)
    try:
        uvloop.run(server.serve([wildcard] if wildcard is not None else ()))
    except OSError as error:
        where = options.uds or f"{options.host}:{options.port}"
        _log.error("cannot listen on %s: %s", where, error.strerror or error)
        return False
    return bool(server.started or server.stopped)


def wildcard_socket(options: argparse.Namespace) -> socket.socket | None:
    """Return a bound socket for all addresses of this host, of both families, if they are wanted.

    None: for a real address. Raises LaunchError.
    """
    if options.uds is not None or not _is_wildcard(options.host):
        return None
    has_both = socket.has_dualstack_ipv6()
    made = socket.socket(socket.AF_INET6 if has_both else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if has_both:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(("", options.port))
    except OSError as error:
        made.close()
        where = f"--host {options.host} --port {options.port}"
        raise LaunchError(f"{where}: {(error.strerror or str(error)).lower()}") from None
    return made


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def open_missing_streams() -> None:
    """Open closed standard streams on the null device, before a socket gets their numbers."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - it stays
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115 - it stays


def main() -> None:
    """Run the proxy; exit status 2 where the command line or a setting is wrong."""
    early_signals.handle()
    open_missing_streams()
    try:
        options, settings = prepare(sys.argv[1:], dict(os.environ))
        logging.basicConfig(
            level=options.log_level.upper(), format="%(levelname)s: %(name)s: %(message)s"
        )
        for handler in logging.getLogger().handlers:
            limit_lines(handler)
        started = serve(build(options, settings), options)
    except (LaunchError, SettingsError) as error:
        sys.stderr.write(f"schedsvc-proxy: {error}\n")
        sys.exit(EXIT_USAGE)
    sys.exit(0 if started else EXIT_FAILED)
