"""Builds the configuration that a reload puts in force.

It is the new file, in which the settings that need a restart keep their old values.

A reload calls `in_force()` with the new file and the configuration in force, gives the result to
the core, and logs `needs_restart()`. So a setting that needs a restart keeps its value in every
later reload too.
"""

from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import TypeVar

from pydantic import BaseModel

from schedsvc.config.models import Class, Config, Listener, Pool
from schedsvc.config.settings import RESTART

__all__ = ["RESTART_KEYS", "in_force", "needs_restart", "with_pools_kept"]

S = TypeVar("S", bound=BaseModel)

#: Keys of the file that are read at the start only.
RESTART_KEYS = ("listeners", "transport", "metrics", "record", "state", "usage", "cluster")

#: The figures of a pool that say how its leases are counted.
_RESTART_POOL = ("epoch", "block_size_tokens")


def in_force(config: Config, before: Config) -> Config:
    """Return what is in force after a reload of a file. O(file).

    A pool that the file no longer has stays. A class whose `exempt` changed stays as a whole,
    because rank and ageing time mean nothing without it.
    """
    for section, fields in RESTART.items():
        config = _with_section(config, before, section.split("."), fields)
    return config.model_copy(
        update={
            **{key: getattr(before, key) for key in RESTART_KEYS},
            "listeners": _listeners(before),
            "classes": _classes(config, before),
            "pools": _pools(config, before),
        }
    )


def with_pools_kept(config: Config, before: Config, names: Collection[str]) -> Config:
    """Return a configuration in which these pools are as they were before, or are not. O(pools)."""
    if not names:
        return config
    pools = [pool for pool in config.pools if pool.name not in names]
    pools += [pool for pool in before.pools if pool.name in names]
    return config.model_copy(update={"pools": pools})


def needs_restart(config: Config, before: Config) -> list[str]:
    """Name the settings of a file that differ from those in force, and that stay as they were."""
    found = [key for key in RESTART_KEYS if getattr(config, key) != getattr(before, key)]
    if _listeners(config) == _listeners(before):
        found = [key for key in found if key != "listeners"]
    elif "listeners" not in found:
        found.insert(0, "listeners")
    for section, fields in RESTART.items():
        part = attrgetter(section)
        found += _differing(section, part(config), part(before), fields)
    kept = {entry.name for entry in _kept_classes(config, before)}
    found += [f"classes ({entry.name})" for entry in config.classes if entry.name in kept]
    pools = {pool.name: pool for pool in config.pools}
    for old in before.pools:
        new = pools.get(old.name)
        if new is None:
            found.append(f"pools ({old.name})")
        else:
            found += _differing(f"pools ({old.name})", new, old, _RESTART_POOL)
    return found


def _listeners(config: Config) -> list[Listener]:
    """Return the listeners with the proof that each asks for; callers may change the default."""
    return [
        listener.model_copy(update={"auth": config.auth_kind(listener)})
        for listener in config.listeners
    ]


def _with_section(new: S, old: S, path: list[str], fields: Collection[str]) -> S:
    """Return a model in which a section, at most O(depth) below, has these fields of another."""
    if not path:
        return _with(new, old, fields)
    key, *rest = path
    part = _with_section(getattr(new, key), getattr(old, key), rest, fields)
    return new.model_copy(update={key: part})


def _with(new: S, old: S, fields: Collection[str]) -> S:
    return new.model_copy(update={field: getattr(old, field) for field in fields})


def _differing(where: str, new: S, old: S, fields: Collection[str]) -> Iterator[str]:
    for field in fields:
        if getattr(new, field) != getattr(old, field):
            yield f"{where}.{type(new).model_fields[field].alias or field}"


def _kept_classes(config: Config, before: Config) -> list[Class]:
    exempt = {entry.name: entry.exempt for entry in config.classes}
    return [old for old in before.classes if exempt.get(old.name, old.exempt) != old.exempt]


def _classes(config: Config, before: Config) -> list[Class]:
    kept = {entry.name: entry for entry in _kept_classes(config, before)}
    return [kept.get(entry.name, entry) for entry in config.classes]


def _pools(config: Config, before: Config) -> list[Pool]:
    old = {pool.name: pool for pool in before.pools}
    names = {pool.name for pool in config.pools}
    pools = [
        _with(pool, old[pool.name], _RESTART_POOL) if pool.name in old else pool
        for pool in config.pools
    ]
    return pools + [pool for pool in before.pools if pool.name not in names]
