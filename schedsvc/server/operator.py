"""What an operator asks of the whole server: drains with their health, and modes over the file."""

from collections.abc import Callable

import structlog
from schedsvc_client.v1 import mode_pb2

from schedsvc.config import Config, ModeOverlay, in_force, with_pools_kept
from schedsvc.config.models import Mode
from schedsvc.driver import Driver
from schedsvc.server.health import Health
from schedsvc.service.servicer_base import not_found, untimely

__all__ = ["OperatorActions"]

_log = structlog.get_logger("schedsvc.operator")

_MODES: dict[int, Mode | None] = {
    mode_pb2.MODE_ENFORCE: "enforce",
    mode_pb2.MODE_AUDIT: "dry_run",
    mode_pb2.MODE_CONFIGURED: None,
}


class OperatorActions:
    """The actions behind OperatorService, and the configuration as an operator has changed it."""

    def __init__(
        self,
        driver: Driver,
        config: Config,
        health: Health,
        show: Callable[[Config], None],
        save: Callable[[], None],
    ) -> None:
        """Act on a driver, and on what the health service says.

        `show` is told what is in force by now; `save` that something has to outlive the process.
        """
        self._save = save
        self._driver = driver
        self._config = config
        self._health = health
        self._show = show
        #: The process is on its way out: a drain is not undone any more.
        self.stopping = False
        self._overlay = ModeOverlay()
        self._say(self._overlay)

    async def resume(self, said: ModeOverlay) -> None:
        """Go on with what operators said before a restart: drains are in the core already.

        What was said of tenants that are not configured any more is void.
        """
        said = said.naming({entry.name for entry in self._config.tenants})
        if said != self._overlay:
            self._driver.change_modes(said.on(self._config), self._config)
            self._say(said)
            self._show(said.on(self._config))
        stats = self._driver.stats(0)
        drained = [row["name"] for row in stats["pools"] if row["draining"]]
        if drained or stats["draining"] or said != ModeOverlay():
            _log.warning(
                "operator_resumed", draining=stats["draining"], pools_draining=drained,
                mode=said.everyone, tenant_modes=dict(said.tenants),
                undo="schedsvc drain --undo, schedsvc mode configured",
            )  # fmt: skip
        await self._health.tell(serves=not stats["draining"])

    async def drain(self, pool: str, undo: bool) -> None:
        """Drain a pool or ("") the service, or let it serve again; health says so."""
        if self.stopping and undo:
            raise untimely("undo", "the scheduler is stopping for good")
        self._driver.set_draining(pool.encode(), not undo)
        self._save()
        if not pool:
            await self._health.tell(serves=undo)

    def set_mode(self, mode: int, tenant: str) -> None:
        """Say a mode for all ("") or for one tenant that the file lists. O(tenants)."""
        if tenant and tenant not in {entry.name for entry in self._config.tenants}:
            raise not_found("tenant", f"the configuration lists no tenant {tenant!r}")
        before = self._overlay.on(self._config)
        self._say(self._overlay.saying(_MODES[mode], tenant))
        self._driver.change_modes(self._overlay.on(self._config), before)
        self._save()
        self._show(self._overlay.on(self._config))

    def reconfigured(self, config: Config) -> tuple[Config, list[tuple[str, str]]]:
        """Put a file in force, under what operators said; see `Driver.reconfigure()`.

        Returns what is in force now, and the pools of the file that are not. Raises CallerError or
        Broken, and then nothing has changed.
        """
        before = self._config
        config = in_force(config, before)
        overlay = self._overlay.naming({entry.name for entry in config.tenants})
        kept = self._driver.reconfigure(overlay.on(config), self._overlay.on(before))
        self._config = with_pools_kept(config, before, [pool for pool, _ in kept])
        self._say(overlay)
        self._show(overlay.on(self._config))
        return self._config, kept

    def _say(self, overlay: ModeOverlay) -> None:
        self._overlay = self._driver.mode_overlay = overlay
        self._driver.mode_configured = self._config.mode
