"""Targets, credentials and limits: everything about a connection that is not a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import grpc

from schedsvc_client.errors import SchedulerUnavailable

Token = str | Callable[[], str]
"""A bearer token, or a function that gives the one in force (read anew for each call)."""

ChannelCredentials = grpc.ChannelCredentials

# Held calls and streams may be silent for long: pings find a dead peer within 20 s. Retries by
# grpc would ask for the same verdict twice, so they are off.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Else a ping may wait a minute for its answer, whatever the keepalive says.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True)
class ClientOptions:
    """Limits of a client. The defaults suit a scheduler on the same host or network."""

    # A held Admit; the scheduler's own queue TTL (30 s) ends most waits before.
    admit_deadline_s: float = 60.0
    # Every other unary call.
    call_deadline_s: float = 5.0
    # Opening a Session, until its Welcome.
    connect_deadline_s: float = 5.0
    # How long admissions wait for a lost scheduler before they raise SchedulerUnavailable.
    unavailable_after_s: float = 1.0
    # Between two attempts to connect, or to deliver a Complete; grows by 2, with full jitter.
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0
    # Progress of all leases is gathered this long (0: what is told in one moment); other events go
    # out at once.
    progress_delay_s: float = 0.02
    # A Session's ends wait so long for another event to leave with. 0: they go out at once, as they
    # do while a request of this Session waits for its verdict.
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
            if value < 0:
                raise ValueError(f"{entry.name} must not be negative: {value}")
            if value == 0 and entry.name not in ("end_delay_s", "progress_delay_s"):
                raise ValueError(f"{entry.name} must be positive, not 0")
        if self.message_bytes_max < 1_024:
            raise ValueError(f"message_bytes_max must be at least 1024: {self.message_bytes_max}")
        if self.backoff_max_s < self.backoff_min_s:
            raise ValueError("backoff_max_s must not be below backoff_min_s")


def check_target(target: str) -> str:
    """Return a target that grpc understands: `host:port`, `unix:/path`, `dns:///...`.

    Raises ValueError that says what is missing.
    """
    if target.startswith("unix:"):
        if len(target) == len("unix:"):
            raise ValueError("target 'unix:' names no socket; write unix:/path/to/socket")
        return target
    host, colon, port = target.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit():
        raise ValueError(f"target {target!r} must be host:port or unix:/path")
    if not 0 < int(port) < 65_536:
        raise ValueError(f"target {target!r}: port {port} is not in 1..65535")
    return target


def bearer_metadata(token: Token | None) -> tuple[tuple[str, str], ...]:
    """Call metadata that carries the token; empty without one.

    Raises SchedulerUnavailable where the token's function fails: the next call asks it anew.
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
    """Channel credentials for TLS, and for mTLS where a certificate and its key are given.

    Without `ca_file` grpc's own roots are trusted. Raises ValueError where certificate and key
    do not come together, OSError where a file cannot be read.
    """
    if bool(certificate_file) != bool(key_file):
        raise ValueError("certificate_file and key_file belong together; give both or neither")
    read = [Path(name).read_bytes() if name else None for name in (ca_file, key_file)]
    chain = Path(certificate_file).read_bytes() if certificate_file else None
    return grpc.ssl_channel_credentials(
        root_certificates=read[0], private_key=read[1], certificate_chain=chain
    )


def backoff_ceiling_s(options: ClientOptions, failures: int) -> float:
    """Return the longest wait after so many failures in a row; the caller draws below it."""
    return min(options.backoff_max_s, options.backoff_min_s * 2.0 ** min(failures, 16))
