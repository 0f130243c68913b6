"""Where a session stands."""

from __future__ import annotations

import enum


class SessionState(enum.Enum):
    """Where a session stands."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    #: The stream is open, but the scheduler gives no sign of life.
    SILENT = "silent"
    CLOSED = "closed"
