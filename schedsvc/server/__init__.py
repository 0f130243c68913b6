"""The gRPC server: wiring, health, reflection, metrics, drain."""

from schedsvc.server.listeners import ListenError
from schedsvc.server.serve import serve
from schedsvc.server.wiring import Server

__all__ = ["ListenError", "Server", "serve"]
