"""Finds a lease in the configuration: the groups above its tenant, the model of its pool."""

from fnmatch import translate
from functools import lru_cache
from re import Pattern, compile

from schedsvc.config import UNKNOWN_TENANT, Config, Tenant

__all__ = ["Places"]

_NAMES_KEPT = 65_536


class Places:
    """Looks names up in one configuration. Each name costs O(rules) once."""

    def __init__(self, config: Config) -> None:
        self._tenants = {tenant.name: tenant.group for tenant in config.tenants}
        self._tenants.setdefault(UNKNOWN_TENANT, config.unknown_limits.group)
        self._rules = [(_pattern(rule.match), rule.group) for rule in config.tenant_rules]
        self._parents = {group.name: group.parent for group in config.groups}
        self._models = {pool: model.name for model in config.models for pool in model.pools}
        self.groups_of = lru_cache(_NAMES_KEPT)(self._groups_of)

    def group_names(self, tenant: str) -> list[str]:
        """Return the groups above a tenant, innermost first."""
        known = tenant in self._tenants
        return self.path_of_group(self._tenants[tenant] if known else self._by_rule(tenant))

    def path_of_group(self, group: str | None) -> list[str]:
        """Return a group and those above it, innermost first."""
        found = []
        while group is not None:
            found.append(group)
            group = self._parents.get(group)
        return found

    def put(self, tenant: str, listed: Tenant | None) -> None:
        """Look up a tenant as an operator has set it; None: as the rules say. O(names)."""
        if listed is None:
            self._tenants.pop(tenant, None)
        else:
            self._tenants[tenant] = listed.group
        self.groups_of.cache_clear()

    def model_of(self, pool: str) -> str:
        """Return the model that runs in a pool; the pool's own name if no model lists it."""
        return self._models.get(pool, pool)

    def _groups_of(self, tenant: str) -> str:
        """Return the groups above a tenant, outermost first, joined by `/`."""
        return "/".join(reversed(self.group_names(tenant)))

    def _by_rule(self, tenant: str) -> str | None:
        return next((group for pattern, group in self._rules if pattern.match(tenant)), None)


def _pattern(match: str) -> Pattern[str]:
    """Compile a pattern of the configuration, in which only `*` is special."""
    return compile(translate(match.replace("[", "[[]").replace("?", "[?]")))
