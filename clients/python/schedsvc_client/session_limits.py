"""Declares the bounds of one session."""

from __future__ import annotations

from dataclasses import dataclass

from schedsvc_client.channel import ClientOptions


@dataclass(frozen=True)
class SessionLimits:
    """Holds the limits of one session."""

    message_bytes_max: int = 65_536
    events_max: int = 4_096
    open_requests_max: int = 16_384
    unacknowledged_max: int = 65_536
    progress_delay_ns: int = 20_000_000
    # The scheduler forgets the answer of an ended lease after this.
    answer_ttl_ns: int = 300_000_000_000


def limits_of(options: ClientOptions) -> SessionLimits:
    """Return what bounds the session of a client with these options."""
    return SessionLimits(
        message_bytes_max=options.message_bytes_max,
        events_max=options.events_max,
        open_requests_max=options.open_requests_max,
        unacknowledged_max=options.unacknowledged_max,
        progress_delay_ns=int(options.progress_delay_s * 1e9),
    )
