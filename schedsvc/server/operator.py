"""What an operator asks of the whole server: drains with their health, and modes over the file."""

from collections.abc import Callable
from typing import Any

from grpc_health.v1 import health_pb2
from schedsvc_client.v1 import mode_pb2

from schedsvc.config import Config, ModeOverlay
from schedsvc.config.models import Mode
from schedsvc.driver import Driver
from schedsvc.service import SERVICE_NAME
from schedsvc.service.calls import not_found, untimely

__all__ = ["Handles"]

_MODES: dict[int, Mode | None] = {
    mode_pb2.MODE_ENFORCE: "enforce",
    mode_pb2.MODE_AUDIT: "audit",
    mode_pb2.MODE_CONFIGURED: None,
}


class Handles:
    """The actions behind OperatorService, and the configuration as an operator has changed it."""

    def __init__(
        self, driver: Driver, config: Config, health: Any, show: Callable[[Config], None]
    ) -> None:
        """Act on a driver and a grpc_health servicer; `show` is told what is in force by now."""
        self._driver = driver
        self._config = config
        self._health = health
        self._show = show
        #: The process is on its way out: a drain is not undone any more.
        self.stopping = False
        self._overlay = ModeOverlay()
        self._say(self._overlay)

    async def drain(self, pool: str, undo: bool) -> None:
        """Drain a pool or ("") the service, or let it serve again; health says so."""
        if self.stopping and undo:
            raise untimely("undo", "the scheduler is stopping for good")
        self._driver.set_draining(pool.encode(), not undo)
        if not pool:
            status = health_pb2.HealthCheckResponse.ServingStatus
            for name in ("", SERVICE_NAME):
                await self._health.set(name, status.SERVING if undo else status.NOT_SERVING)

    def set_mode(self, mode: int, tenant: str) -> None:
        """Say a mode for all ("") or for one tenant that the file lists. O(tenants)."""
        if tenant and tenant not in {entry.name for entry in self._config.tenants}:
            raise not_found("tenant", f"the configuration lists no tenant {tenant!r}")
        before = self._overlay.on(self._config)
        self._say(self._overlay.saying(_MODES[mode], tenant))
        self._driver.change_modes(self._overlay.on(self._config), before)
        self._show(self._overlay.on(self._config))

    def reconfigured(self, config: Config) -> list[tuple[str, str]]:
        """Let another file be in force, under what was said; see `Driver.reconfigure()`."""
        before, names = self._overlay.on(self._config), {entry.name for entry in config.tenants}
        self._config = config
        for gone in self._overlay.tenants.keys() - names:
            self._overlay = self._overlay.saying(None, gone)
        self._say(self._overlay)
        kept = self._driver.reconfigure(self._overlay.on(config), before)
        self._show(self._overlay.on(config))
        return kept

    def _say(self, overlay: ModeOverlay) -> None:
        self._overlay = self._driver.mode_overlay = overlay
        self._driver.mode_configured = self._config.mode
