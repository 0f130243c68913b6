"""The health service's names: whether the process is alive, and whether it takes requests.

name                            NOT_SERVING while
liveness                        an invariant is broken: only a restart helps
readiness, the service's, ""    the service is drained, the process stops, another member leads
                                the set of pools, or as liveness
"""

from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from schedsvc.service import SERVICE_NAME

__all__ = ["LIVENESS", "READINESS", "Health"]

LIVENESS, READINESS = "liveness", "readiness"
_READY_NAMES = (READINESS, SERVICE_NAME, "")
_STATUS = health_pb2.HealthCheckResponse.ServingStatus


class Health:
    """Keeps the health of one scheduler, the same at all its listeners."""

    def __init__(self, *, stands_by: bool = False) -> None:
        """Begin; `stands_by` says that another member of the set takes the requests."""
        self._stands_by = stands_by
        self._servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined] # no stubs
        self._stops = False

    def add_to(self, server: Any) -> None:
        """Let a server answer for it."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def tell(self, *, serves: bool) -> None:
        """Say that the process is alive, and whether it takes requests; once it stops, never."""
        await self._servicer.set(LIVENESS, _STATUS.SERVING)
        for name in _READY_NAMES:
            ready = serves and not self._stops and not self._stands_by
            await self._servicer.set(name, _STATUS.SERVING if ready else _STATUS.NOT_SERVING)

    async def stop(self) -> None:
        """Say that no more requests are taken; the process is alive until it ends."""
        self._stops = True
        await self.tell(serves=False)

    async def fail(self) -> None:
        """Say for good that nothing works."""
        await self._servicer.enter_graceful_shutdown()
