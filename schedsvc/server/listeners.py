"""Opens the addresses to serve on: TCP and Unix sockets, with or without TLS."""

import os
import secrets
import socket
import ssl
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc

from schedsvc.config import Config
from schedsvc.config.file_rules import UNIX_PATH_BYTES_MAX
from schedsvc.config.files import read_file
from schedsvc.config.models import Limits, Listener, Tls
from schedsvc.config.network import is_wildcard
from schedsvc.server.strangers import IDLE_MS
from schedsvc.transport import Bounds, bound_socket, wildcard_socket
from schedsvc.transport import Server as OwnServer

__all__ = [
    "Address",
    "AnyServer",
    "ListenError",
    "bind",
    "new_server",
    "refuse_taken",
    "server_options",
]

#: A server of either transport; both take the same handlers.
AnyServer = grpc.aio.Server | OwnServer
#: gRPC's own, which peers see.
_KEEPALIVE_TIMEOUT_MS = 10_000


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
        ("grpc.keepalive_timeout_ms", min(limits.keepalive_ms, _KEEPALIVE_TIMEOUT_MS)),
        # Else a ping may wait a minute for its answer, whatever the keepalive says.
        ("grpc.http2.ping_timeout_ms", min(limits.keepalive_ms, _KEEPALIVE_TIMEOUT_MS)),
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


def new_server(config: Config) -> AnyServer:
    """Return a server of the transport that is configured. Has to be called in the event loop."""
    limits = config.limits
    if config.transport == "grpcio":
        return grpc.aio.server(options=server_options(limits))
    bounds = Bounds(
        message_bytes_max=limits.message_max_bytes,
        # So a caller finds a place while strangers are being closed.
        connections_max=2 * limits.connections_max,
        streams_max=limits.streams_max,
        handshake_s=limits.handshake_ms / 1_000,
        keepalive_s=limits.keepalive_ms / 1_000,
        keepalive_timeout_s=min(limits.keepalive_ms, _KEEPALIVE_TIMEOUT_MS) / 1_000,
        idle_s=IDLE_MS / 1_000,
        write_stall_s=limits.write_stall_ms / 1_000,
    )
    return OwnServer(bounds)


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


def bind(server: AnyServer, config: Config, listener: Listener) -> Address:
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


def _bind(server: AnyServer, config: Config, listener: Listener) -> Address:
    if listener.unix is not None:
        return _bind_unix(server, config.resolve(listener.unix), int(listener.mode, 8))
    address, certificates = listener.tcp or "", None
    refuse_taken(address)
    try:
        if listener.tls is None:
            bound = server.add_insecure_port(address)
        else:
            certificates = Certificates(config, listener.tls)
            if isinstance(server, OwnServer):
                bound = server.add_secure_port(address, certificates.keep_context())
            else:
                bound = server.add_secure_port(address, certificates.credentials())
    except ssl.SSLError as error:
        raise ListenError(f"cannot listen on {address}: {error}") from None
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
        with bound_socket(found[0][0], found[0][4]) if found else wildcard_socket(int(port)):
            pass
    except OSError as error:
        what = (error.strerror or str(error)).lower()
        raise ListenError(
            f"cannot listen on {address}: {what}; stop the other program or choose another port"
        ) from None


def _bind_unix(server: AnyServer, path: Path, mode: int) -> Address:
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

    def context(self) -> ssl.SSLContext:
        """Return them as the standard library takes them. Raises ssl.SSLError."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.set_alpn_protocols(["h2"])
        # It reads files only, and the key must not reach a disk.
        memory = os.memfd_create("tls", os.MFD_CLOEXEC)
        with open(memory, "wb") as file:
            file.write(self.key + b"\n" + self.cert)
            file.flush()
            made.load_cert_chain(f"/proc/self/fd/{memory}")
        if self.client_ca is not None:
            made.verify_mode = ssl.CERT_REQUIRED
            made.load_verify_locations(cadata=self.client_ca.decode("latin-1"))
        return made


class Certificates:
    """Holds the TLS files of a listener. New connections get what was offered last."""

    def __init__(self, config: Config, tls: Tls) -> None:
        """Read the files. Raises OSError."""
        self._config, self._tls = config, tls
        self._context: ssl.SSLContext | None = None
        self._held = self.read()
        self._next: grpc.ServerCertificateConfiguration | None = None

    def read(self) -> _Files:
        """Read the files again. Raises OSError."""
        tls, resolve = self._tls, self._config.resolve
        ca = None if tls.client_ca is None else read_file(resolve(tls.client_ca))
        files = _Files(read_file(resolve(tls.key)), read_file(resolve(tls.cert)), ca)
        if self._context is not None:
            files.context()  # files that are no pair change nothing
        return files

    def keep_context(self) -> Callable[[], ssl.SSLContext]:
        """Return what our transport asks at each handshake. Raises ssl.SSLError."""
        self._context = context = self._held.context()
        return lambda: self._context or context

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
        if self._context is not None:
            self._context = files.context()
        return True

    def _take(self) -> grpc.ServerCertificateConfiguration | None:
        # gRPC calls it in a thread of its own.
        found, self._next = self._next, None
        return found
