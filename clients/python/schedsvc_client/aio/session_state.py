"""Names the states of a session."""

from __future__ import annotations

import enum


class SessionState(enum.Enum):
    """Names the states of a session."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    #: The stream is open, but the scheduler gives no sign of life.
    SILENT = "silent"
    CLOSED = "closed"
