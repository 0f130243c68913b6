"""Serves gRPC over HTTP/2 by nghttp2, with the handlers that grpc.aio's server takes."""

from schedsvc.transport.link import Bounds
from schedsvc.transport.server import Server
from schedsvc.transport.sockets import bound_socket, wildcard_socket

__all__ = ["Bounds", "Server", "bound_socket", "wildcard_socket"]
