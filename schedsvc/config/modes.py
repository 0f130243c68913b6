"""What an operator says of modes, over what the file says."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from schedsvc.config.models import Config, Mode

__all__ = ["ModeOverlay"]


@dataclass(frozen=True, slots=True)
class ModeOverlay:
    """Modes that go before the file's: for everyone, and before that for single tenants."""

    everyone: Mode | None = None
    tenants: Mapping[str, Mode] = field(default_factory=dict)

    def saying(self, mode: Mode | None, tenant: str = "") -> "ModeOverlay":
        """Return what is said from now on; None takes a word back.

        What is said of everyone takes back what was said of single tenants.
        """
        if not tenant:
            return ModeOverlay(mode)
        tenants = {name: said for name, said in self.tenants.items() if name != tenant}
        if mode is not None:
            tenants[tenant] = mode
        return ModeOverlay(self.everyone, tenants)

    def on(self, config: Config) -> Config:
        """Return the configuration as it is in force. O(tenants)."""
        if self.everyone is None and not self.tenants:
            return config
        tenants = [
            tenant.model_copy(
                update={"mode": self.tenants.get(tenant.name, self.everyone or tenant.mode)}
            )
            for tenant in config.tenants
        ]
        return config.model_copy(update={"mode": self.everyone or config.mode, "tenants": tenants})
