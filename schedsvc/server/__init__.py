"""The gRPC server: wiring, health, reflection, metrics, drain."""

from schedsvc.recording.writer import RecordingError
from schedsvc.server.cluster import ClusterError
from schedsvc.server.listeners import ListenError
from schedsvc.server.ready import ReadyFileError
from schedsvc.server.reload import Source
from schedsvc.server.serve import serve
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
    "serve",
]
