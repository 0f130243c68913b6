"""Opens the addresses to serve on: TCP and Unix sockets, with or without TLS."""

import os
import secrets
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from schedsvc.config import Config
from schedsvc.config.file_rules import UNIX_PATH_BYTES_MAX
from schedsvc.config.files import read_file
from schedsvc.config.models import Limits, Listener, Tls
from schedsvc.config.network import is_wildcard
from schedsvc.server.strangers import IDLE_MS

__all__ = [
    "Address",
    "ListenError",
    "bind",
    "refuse_taken",
    "server_options",
    "wildcard_socket",
]


class ListenError(OSError):
    """An address cannot be served; the text says which, why and what to do."""


def server_options(limits: Limits) -> list[tuple[str, int]]:
    """Return gRPC's channel arguments for a server, whose `Strangers` keep `connections_max`."""
    return [
        # Else a second scheduler on the port would quietly split the ledger.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.message_max_bytes),
        # So a caller finds a place while strangers are being closed.
        ("grpc.max_allowed_incoming_connections", 2 * limits.connections_max),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.max_concurrent_streams", limits.streams_max),
        ("grpc.server_handshake_timeout_ms", limits.handshake_ms),
        # Half-open connections are found and closed.
        ("grpc.keepalive_time_ms", limits.keepalive_ms),
        ("grpc.keepalive_timeout_ms", min(limits.keepalive_ms, 10_000)),
        # Else a ping may wait a minute for its answer, whatever the keepalive says.
        ("grpc.http2.ping_timeout_ms", min(limits.keepalive_ms, 10_000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Else it gives up pinging after two pings in which it had nothing to say.
        ("grpc.http2.max_pings_without_data", 0),
        # A held Admit is silent: its client may ping as often as it likes.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        # If a burst leaves more than 1,000 calls waiting for a handler, gRPC cancels the excess. A
        # Complete must never be shed.
        ("grpc.server.max_pending_requests", limits.streams_max),
        ("grpc.server.max_pending_requests_hard_limit", limits.streams_max),
    ]


@dataclass(frozen=True)
class Address:
    """Names an open address, as a client's target."""

    target: str
    certificates: "Certificates | None" = None
    _path: Path | None = None
    _made: os.stat_result | None = None

    def release(self) -> None:
        """Remove the socket of a Unix address, unless another one stands there by now."""
        if self._path is None or self._made is None:
            return
        with suppress(OSError):
            if os.path.samestat(self._path.lstat(), self._made):
                self._path.unlink()


def bind(server: grpc.aio.Server, config: Config, listener: Listener) -> Address:
    """Open a listener's address on a server. Raises ListenError.

    The address is released by its owner, not by gRPC, which would remove whatever socket it finds.
    """
    try:
        return _bind(server, config, listener)
    except ListenError as error:
        raise ListenError(f"{_field(config, listener)}: {error}") from None


def _field(config: Config, listener: Listener) -> str:
    """Return where a listener's address stands in the configuration."""
    if listener not in config.listeners:
        return "edge.tcp"
    key = "tcp" if listener.unix is None else "unix"
    return f"listeners[{config.listeners.index(listener)}].{key}"


def _bind(server: grpc.aio.Server, config: Config, listener: Listener) -> Address:
    if listener.unix is not None:
        return _bind_unix(server, config.resolve(listener.unix), int(listener.mode, 8))
    address, certificates = listener.tcp or "", None
    refuse_taken(address)
    try:
        if listener.tls is None:
            bound = server.add_insecure_port(address)
        else:
            certificates = Certificates(config, listener.tls)
            bound = server.add_secure_port(address, certificates.credentials())
    except RuntimeError as error:
        raise ListenError(f"cannot listen on {address}: {error}") from None
    if bound == 0:
        raise ListenError(f"cannot listen on {address}; choose another address")
    return Address(f"{address.rpartition(':')[0]}:{bound}", certificates)


def refuse_taken(address: str) -> None:
    """Raise ListenError if HOST:PORT cannot be had; servers themselves only say that they failed.

    The error says why, and what to do.
    """
    host, _, port = address.rpartition(":")
    found = []
    try:
        if not is_wildcard(address):
            found = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
    except OSError as error:
        raise ListenError(f"cannot listen on {address}: {error.strerror}") from None
    try:
        with _bound(found[0][0], found[0][4]) if found else wildcard_socket(int(port)):
            pass
    except OSError as error:
        what = (error.strerror or str(error)).lower()
        raise ListenError(
            f"cannot listen on {address}: {what}; stop the other program or choose another port"
        ) from None


def wildcard_socket(port: int) -> socket.socket:
    """Return a bound socket for all addresses of this host: of IPv4 and, if it has it, of IPv6.

    gRPC does the same for `0.0.0.0` and for `[::]`. Raises OSError.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return _bound(family, ("", port))


def _bound(family: int, where: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # A real address of IPv6 has no other family.
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, where[0] != "")
        made.bind(where)
    except BaseException:
        made.close()
        raise
    return made


def _bind_unix(server: grpc.aio.Server, path: Path, mode: int) -> Address:
    if not path.parent.is_dir():
        raise ListenError(
            f"cannot listen on {path}: the folder {path.parent} does not exist; make it"
        )
    _remove_stale(path)
    # Made under another name, which is the one that gRPC removes in the end.
    partial = path.with_name(f".{secrets.token_hex(2)}")
    more = len(bytes(partial)) - UNIX_PATH_BYTES_MAX
    if more > 0:
        raise ListenError(f"cannot listen on {path}: shorten its folder's path by {more} bytes")
    # No other user can connect between the socket's creation and its mode.
    before = os.umask(0o177)
    try:
        bound = server.add_insecure_port(f"unix:{partial}")
    except RuntimeError as error:
        raise ListenError(f"cannot listen on {path}: {error}") from None
    finally:
        os.umask(before)
    if bound == 0 or not partial.exists():
        raise ListenError(f"cannot listen on {path}; is the folder {path.parent} writable?")
    try:
        partial.chmod(mode)
        made = partial.lstat()
        _move(partial, path)
    except OSError as error:
        raise ListenError(f"cannot listen on {path}: {error.strerror}") from None
    return Address(f"unix:{path}", None, path, made)


def _move(partial: Path, path: Path) -> None:
    """Rename a socket. Raises FileExistsError if another socket has the path by now."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        partial.rename(path)
    else:
        partial.unlink()


def _remove_stale(path: Path) -> None:
    """Remove the socket of a dead server; refuse a live one, and any other file."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ListenError(f"cannot listen on {path}: {error.strerror}") from None
    if not is_socket:
        raise ListenError(f"cannot listen on {path}: it is no socket; move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            raise ListenError(f"cannot listen on {path}: {error}") from None
    raise ListenError(f"cannot listen on {path}: another server answers there; stop it first")


class _Files(NamedTuple):
    """Holds the contents of a listener's TLS files."""

    key: bytes
    cert: bytes
    client_ca: bytes | None

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return them as gRPC takes them."""
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.cert)], root_certificates=self.client_ca
        )


class Certificates:
    """Holds the TLS files of a listener. New connections get what was offered last."""

    def __init__(self, config: Config, tls: Tls) -> None:
        """Read the files. Raises OSError."""
        self._config, self._tls = config, tls
        self._held = self.read()
        self._next: grpc.ServerCertificateConfiguration | None = None

    def read(self) -> _Files:
        """Read the files again. Raises OSError."""
        tls, resolve = self._tls, self._config.resolve
        ca = None if tls.client_ca is None else read_file(resolve(tls.client_ca))
        return _Files(read_file(resolve(tls.key)), read_file(resolve(tls.cert)), ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Return what gRPC asks at each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._held.configuration(),
            self._take,  # type: ignore[arg-type] # None stands for what gRPC has
            require_client_authentication=self._held.client_ca is not None,
        )

    def offer(self, files: _Files) -> bool:
        """Let new connections get what `read()` returned; False if they get that already."""
        if files == self._held:
            return False
        self._held, self._next = files, files.configuration()
        return True

    def _take(self) -> grpc.ServerCertificateConfiguration | None:
        # gRPC calls it in a thread of its own.
        found, self._next = self._next, None
        return found
