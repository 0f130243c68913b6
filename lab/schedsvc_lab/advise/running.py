"""Takes the tenants and engines of a running scheduler as those of today."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from schedsvc.config import Config
from schedsvc.config.models import Pool

__all__ = ["Running", "RunningError", "as_today"]


class RunningError(ValueError):
    """Says that the file and the running scheduler do not go together."""


class Running(NamedTuple):
    """Holds the listed tenants of a scheduler in the form of the file, and its attached pools."""

    tenants: list[dict[str, Any]]
    pools: list[Pool]

    @classmethod
    def of(cls, tenants: list[dict[str, Any]], stats: Any) -> "Running":
        """Take what the scheduler answered; `stats` is a StatsResponse."""
        pools = [
            Pool(
                name=pool.name,
                capacity_tokens=pool.capacity_tokens,
                block_size_tokens=pool.block_size_tokens,
                max_running=pool.max_running,
            )
            for pool in stats.pools
            if pool.attached and pool.capacity_tokens
        ]
        return cls(tenants, pools)


def as_today(config: Config, data: Mapping[str, Any], running: Running) -> dict[str, Any]:
    """Return the data of a file, with the tenants of a running scheduler for its own.

    Raises RunningError: a tenant is in a group or a class that the file does not have.
    """
    groups = {group.name for group in config.groups}
    classes = {"default", *(each.name for each in config.classes)}
    for tenant in running.tenants:
        named = {tenant.get("class", "default"), *tenant.get("classes", ())}
        missing = [name for name in (tenant.get("group"),) if name and name not in groups]
        missing += sorted(named - classes)
        if missing:
            raise RunningError(
                f"its tenant {tenant['name']!r} names {missing[0]!r}, which the configuration does "
                "not have; give the scheduler's own file as --config"
            )
    kept = {key: value for key, value in data.items() if key not in ("tenants", "tenants_dir")}
    return {**kept, "tenants": running.tenants} if running.tenants else kept
