"""Acts on the whole server for an operator: drains with their health, and modes over the file."""

from collections.abc import Callable

import structlog
from schedsvc_client.v1 import mode_pb2

from schedsvc.config import Config, ModeOverlay, change_modes, in_force, with_pools_kept
from schedsvc.config.models import Mode
from schedsvc.driver import Driver
from schedsvc.server.health import Health
from schedsvc.server.listed_tenants import ListedTenants
from schedsvc.service.servicer_base import not_found, untimely

__all__ = ["OperatorActions"]

_log = structlog.get_logger("schedsvc.operator")

_MODES: dict[int, Mode | None] = {
    mode_pb2.MODE_ENFORCE: "enforce",
    mode_pb2.MODE_AUDIT: "dry_run",
    mode_pb2.MODE_CONFIGURED: None,
}


class OperatorActions:
    """Does what OperatorService asks, and keeps the configuration as an operator has changed it."""

    def __init__(
        self,
        driver: Driver,
        config: Config,
        listed: ListedTenants,
        health: Health,
        show: Callable[[Config], None],
        save: Callable[[], None],
    ) -> None:
        """Act on a driver, and on what the health service says.

        `config` is the file; `listed` its tenants under those that operators have set. `show` is
        called with the configuration in force; `save` when something has to outlive the process.
        """
        self._save = save
        self._driver = driver
        #: The file in force, without what operators say.
        self.config = config
        #: The tenants in force.
        self.listed = listed
        self._health = health
        self._show = show
        #: The process is on its way out: a drain is not undone any more.
        self.stopping = False
        #: Called when operators' modes have changed.
        self.on_modes: Callable[[], None] = lambda: None
        self._overlay = ModeOverlay()
        self._say(self._overlay)

    async def resume(self, said: ModeOverlay) -> None:
        """Apply the modes that operators set before a restart; drains are in the core already.

        Modes of tenants that are not configured any more are void.
        """
        said = said.naming(set(self.listed.in_force))
        if said != self._overlay:
            self._change_modes(said)
        stats = self._driver.stats(0)
        drained = [row["name"] for row in stats["pools"] if row["draining"]]
        if drained or stats["draining"] or not said.says_nothing:
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
        """Say a mode for all ("") or for one tenant that is listed. O(tenants)."""
        if tenant and tenant not in self.listed.in_force:
            raise not_found("tenant", f"neither file nor operator lists a tenant {tenant!r}")
        said = self._overlay.saying(_MODES[mode], tenant)
        self.take_modes(said.changed_by(self.listed.origin))

    def take_modes(self, said: ModeOverlay) -> None:
        """Put modes in force that an operator has said, here or at another member. O(tenants)."""
        self._change_modes(said)
        self._save()
        self.on_modes()

    def _change_modes(self, said: ModeOverlay) -> None:
        config = self.listed.on(self.config)
        now, before = said.on(config), self._overlay.on(config)
        self._driver.change(lambda core, now_ns: change_modes(core, now, before, now_ns))
        self._say(said)
        self._show(now)

    def reconfigured(self, config: Config) -> tuple[Config, list[tuple[str, str]]]:
        """Put a file in force, under what operators said; see `Driver.reconfigure()`.

        Returns the file in force now, and its pools that are not. Raises CallerError, Broken or
        TenantError, and then nothing has changed.
        """
        before = self.config
        config = in_force(config, before)
        listed = self.listed.rebased(config)
        overlay = self._overlay.naming(set(listed.in_force))
        kept = self._driver.reconfigure(
            overlay.on(listed.on(config)), self._overlay.on(self.listed.on(before))
        )
        self.config, self.listed = (
            with_pools_kept(config, before, [pool for pool, _ in kept]),
            listed,
        )
        self._say(overlay)
        self._show(overlay.on(listed.on(config)))
        return self.config, kept

    def _say(self, overlay: ModeOverlay) -> None:
        self._overlay = self._driver.mode_overlay = overlay
        self._driver.mode_configured = self.config.mode
