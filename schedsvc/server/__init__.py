"""Runs the gRPC server: wiring, health, reflection, metrics, drain."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedsvc.records.recording.writer import RecordingError
    from schedsvc.records.state import StateError
    from schedsvc.records.usage import UsageError
    from schedsvc.server.cluster import ClusterError
    from schedsvc.server.listeners import ListenError
    from schedsvc.server.ready import ReadyFileError
    from schedsvc.server.reload import Source
    from schedsvc.server.server import Server

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
    "RecordingError": "schedsvc.records.recording.writer",
    "Server": "schedsvc.server.server",
    "Source": "schedsvc.server.reload",
    "StateError": "schedsvc.records.state",
    "UsageError": "schedsvc.records.usage",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is used: the edge needs listeners without the server's 20 MB."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_HOMES[name]), name)
