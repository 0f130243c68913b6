"""The gRPC server: wiring, health, reflection, metrics, drain."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedsvc.recording.writer import RecordingError
    from schedsvc.server.cluster import ClusterError
    from schedsvc.server.listeners import ListenError
    from schedsvc.server.ready import ReadyFileError
    from schedsvc.server.reload import Source
    from schedsvc.server.server import Server
    from schedsvc.state import StateError
    from schedsvc.usage import UsageError

__all__ = [
    "ClusterError",
    "ListenError",
    "ReadyFileError",
    "RecordingError",
    "Server",
    "Source",
    "StateError",
    "UsageError",
]

_HOMES = {
    "ClusterError": "schedsvc.server.cluster",
    "ListenError": "schedsvc.server.listeners",
    "ReadyFileError": "schedsvc.server.ready",
    "RecordingError": "schedsvc.recording.writer",
    "Server": "schedsvc.server.server",
    "Source": "schedsvc.server.reload",
    "StateError": "schedsvc.state",
    "UsageError": "schedsvc.usage",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is used: the edge needs listeners without the server's 20 MB."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_HOMES[name]), name)
