"""Opens channels: targets, credentials and limits, and all of a connection but its calls."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import grpc
import grpc.aio

from schedsvc_client.errors import SchedulerUnavailable

Token = str | Callable[[], str]
"""A bearer token, or a function that returns the present one, called for each call or stream."""

ChannelCredentials = grpc.ChannelCredentials

# Held calls and streams may be silent for long: pings find a dead peer within 20 s. Retries by
# grpc would ask for the same verdict twice, so they are off.
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Otherwise a ping may wait a minute for its answer, whatever the keepalive is.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Otherwise a name with a new address is not looked up again for 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
# Schemes of gRPC's own targets that are not just host and port.
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix-abstract:", "vsock:", "xds:")
# In the order in which gRPC reads them.
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")


@dataclass(frozen=True)
class ClientOptions:
    """Sets the limits of a client. The defaults suit a scheduler on the same host or network."""

    # A held Admit; the scheduler's own queue TTL (30 s) ends most waits before.
    admit_deadline_s: float = 60.0
    # Every other unary call.
    call_deadline_s: float = 5.0
    # Opening a Session, until its Welcome.
    connect_deadline_s: float = 5.0
    # How long admissions wait for a lost scheduler before they raise SchedulerUnavailable.
    unavailable_after_s: float = 1.0
    # How long a scheduler whose stream is open may give no sign of life until admissions raise
    # SchedulerUnavailable. Time in which this process stood still does not count. 0: for ever.
    silent_after_s: float = 3.0
    # With several targets these two apply instead: the time that admissions wait for one that
    # leads, and the silence after which the client moves on to the next.
    failover_wait_s: float = 5.0
    failover_silent_after_s: float = 1.5
    # Between two attempts to connect, or to deliver a Complete; grows by 2, with full jitter.
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0
    # The client batches the progress of all leases for this time, and sends other events at once.
    # With 0 it batches only reports of the same moment.
    progress_delay_s: float = 0.02
    # How long a Session holds the end of a lease back, so that it shares a message with another
    # event. It sends ends at once while one of its requests waits for its verdict, and always if
    # this is 0.
    end_delay_s: float = 0.0
    # How long the scheduler keeps an expired lease: past it a Complete is no longer retried.
    lease_grace_s: float = 20.0
    # The scheduler's limits for one message and one stream.
    message_bytes_max: int = 65_536
    events_max: int = 4_096
    open_requests_max: int = 16_384
    # Completes that wait for their acknowledgement; past it the oldest is given up.
    unacknowledged_max: int = 65_536

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not isinstance(value, int | float) or value != value:
                raise TypeError(f"{entry.name} is {value!r}; it has to be a number")
            if value < 0:
                raise ValueError(f"{entry.name} must not be negative: {value}")
            if value == 0 and entry.name not in (
                "end_delay_s",
                "progress_delay_s",
                "silent_after_s",
                "failover_silent_after_s",
            ):
                raise ValueError(f"{entry.name} must be positive, not 0")
        if self.message_bytes_max < 1_024:
            raise ValueError(f"message_bytes_max must be at least 1024: {self.message_bytes_max}")
        if self.backoff_max_s < self.backoff_min_s:
            raise ValueError("backoff_max_s must not be below backoff_min_s")


def options_of(given: ClientOptions | None) -> ClientOptions:
    """Return the options of a client, the defaults for None. Raises TypeError for anything else."""
    if given is None:
        return ClientOptions()
    if not isinstance(given, ClientOptions):
        raise TypeError(f"options is {given!r}; it has to be a ClientOptions")
    return given


def check_target(target: str) -> str:
    """Return a target that grpc understands: `host:port`, `unix:/path`, `dns:///...`.

    Raises ValueError that says what is missing.
    """
    if target.startswith("unix:"):
        path = target.removeprefix("unix:")
        if not path:
            raise ValueError("target 'unix:' names no socket; write unix:/path/to/socket")
        if path.startswith("//") and not path.startswith("///"):
            raise ValueError(
                f"target {target!r}: behind unix:// stands an absolute path;"
                f" write unix:{path.lstrip('/')}"
            )
        return target
    scheme, slashes, address = target.partition("://")
    if slashes and scheme.lower() in ("http", "https", "grpc", "grpcs", "tcp"):
        raise ValueError(
            f"target {target!r} is a URL, and has to be host:port or unix:/path;"
            f" write {address.partition('/')[0]}"
        )
    if target.startswith("/"):
        raise ValueError(f"target {target!r} must be host:port or unix:/path; write unix:{target}")
    host, colon, port = target.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit():
        raise ValueError(
            f"target {target!r} must be host:port or unix:/path, such as 127.0.0.1:7600"
        )
    if not target.startswith(_SCHEMES):
        _check_brackets(target, host, port)
    if not 0 < int(port) < 65_536:
        raise ValueError(f"target {target!r}: port {port} is not in 1..65535")
    return target


def _check_brackets(target: str, host: str, port: str) -> None:
    """Refuse an IPv6 address without its brackets, whose last part would be taken for the port."""
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        address = host.strip("[]")
        raise ValueError(
            f"target {target!r}: an IPv6 address stands in brackets; write [{address}]:{port}"
        )


def is_local(target: str) -> bool:
    """Return whether a target is on this host by its name: a Unix socket, or a loopback address."""
    scheme, colon, rest = target.partition(":")
    if colon and scheme in ("unix", "unix-abstract"):
        return True
    # As in ipv4:127.0.0.1:7600 and dns:///localhost:7600; a DNS server may precede the name.
    address = rest.rpartition("/")[2] if scheme in ("dns", "ipv4", "ipv6") else target
    host = (address.rpartition(":")[0] or address).strip("[]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None) or ip
    # A connection to 0.0.0.0 or :: reaches this host.
    return mapped.is_loopback or mapped.is_unspecified


def channel_options(target: str) -> tuple[tuple[str, int], ...]:
    """Return gRPC's options for a target; a local one is never reached through a proxy.

    gRPC itself uses the proxies of the environment even for loopback addresses.
    """
    return (*_CHANNEL_OPTIONS, *((("grpc.enable_http_proxy", 0),) if is_local(target) else ()))


def proxy_variable(target: str) -> str:
    """Return the environment variable whose proxy gRPC uses for a target; empty if none."""
    set_here = (name for name in _PROXY_VARIABLES if os.environ.get(name))
    return "" if is_local(target) else next(set_here, "")


def open_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """Return a channel for threads to a checked target; without credentials no TLS."""
    if credentials is None:
        return grpc.insecure_channel(target, options=channel_options(target))
    return grpc.secure_channel(target, credentials, options=channel_options(target))


def open_aio_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Do what `open_channel` does, for asyncio; call it in the event loop that uses the channel."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=channel_options(target))
    return grpc.aio.secure_channel(target, credentials, options=channel_options(target))


def bearer_metadata(token: Token | None) -> tuple[tuple[str, str], ...]:
    """Call metadata that carries the token; empty without one.

    Raises SchedulerUnavailable if the token's function fails. The next call runs it again.
    """
    try:
        value = token() if callable(token) else token
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise SchedulerUnavailable(
            grpc.StatusCode.UNAVAILABLE, f"cannot get a token: {cause}"
        ) from error
    return (("authorization", f"Bearer {value}"),) if value else ()


def tls_credentials(
    *,
    ca_file: str | None = None,
    certificate_file: str | None = None,
    key_file: str | None = None,
) -> grpc.ChannelCredentials:
    """Return channel credentials for TLS, and for mTLS if a certificate and its key are given.

    Without `ca_file` grpc's own roots are trusted. Raises ValueError if only one of certificate and
    key is given, OSError if a file cannot be read.
    """
    if bool(certificate_file) != bool(key_file):
        raise ValueError("certificate_file and key_file belong together; give both or neither")
    read = [Path(name).read_bytes() if name else None for name in (ca_file, key_file)]
    chain = Path(certificate_file).read_bytes() if certificate_file else None
    return grpc.ssl_channel_credentials(
        root_certificates=read[0], private_key=read[1], certificate_chain=chain
    )


def backoff_ceiling_s(options: ClientOptions, failures: int) -> float:
    """Return the longest wait after `failures` in a row; the caller draws below it."""
    return backoff_s(options.backoff_min_s, options.backoff_max_s, failures)


def backoff_s(least_s: float, most_s: float, failures: int) -> float:
    """Return a wait that doubles with each of `failures` in a row, up to a limit."""
    return min(most_s, least_s * 2.0 ** min(failures, 16))
