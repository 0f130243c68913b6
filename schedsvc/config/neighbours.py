"""Finds a second scheduler on the same engine, as far as files on this machine show it."""

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from schedsvc.config.rule_helpers import Finding, items, mapping
from schedsvc.config.tenants_dir import content_of, decoded
from schedsvc.config.yaml_positions import Path, Problem, read_yaml

__all__ = ["neighbour_advice"]

_FILES_MAX = 16
_EFFECT = (
    "without one, each of two schedulers promises an engine's whole capacity: give them a cluster"
    " (docs/operate/cluster.md), or each its own engines"
)


def neighbour_advice(data: dict[str, Any], folder: FilePath) -> Iterator[Finding]:
    """Yield the pools that another file of the folder has too, without a cluster. O(files).

    A file with an address of this one is a copy of it: the two cannot run side by side.
    """
    if "cluster" in data:
        return
    for i, entry in items(mapping(data.get("auth")).get("principals")):
        if entry.get("member") is True:
            what = "is another scheduler, and this one has no `cluster`"
            yield ("auth", "principals", i, "member"), f"{what}; {_EFFECT}"
    own, addresses = dict(_pools(data)), _addresses(data)
    for file in _neighbours(folder) if own else ():
        text = decoded(content_of(file))
        other = None if isinstance(text, Problem) else read_yaml(text).data
        if not isinstance(other, dict) or not _addresses(other) or addresses & _addresses(other):
            continue
        shared = next((pool for pool, _ in _pools(other) if pool in own), None)
        if shared is not None:
            yield own[shared], f"{shared} is a pool of the scheduler of {file} too; {_EFFECT}"


def _neighbours(folder: FilePath) -> list[FilePath]:
    try:
        return sorted(folder.glob("*.y*ml"))[:_FILES_MAX]
    except OSError:
        return []


def _addresses(data: dict[str, Any]) -> set[str]:
    given = [entry.get(key) for _, entry in items(data.get("listeners")) for key in ("tcp", "unix")]
    return {address for address in given if isinstance(address, str) and address[-2:] != ":0"}


def _pools(data: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield each pool that a file names, and where; the patterns of callers name none."""
    for i, entry in items(data.get("pools")):
        if isinstance(entry.get("name"), str):
            yield entry["name"], ("pools", i, "name")
    lists: list[tuple[Path, dict[str, Any]]] = [
        (("pool_limits", i), entry) for i, entry in items(data.get("pool_limits"))
    ]
    callers = items(mapping(data.get("auth")).get("principals"))
    lists += [(("auth", "principals", i), entry) for i, entry in callers]
    for path, entry in lists:
        listed = entry.get("pools")
        for k, name in enumerate(listed if isinstance(listed, list) else []):
            if isinstance(name, str) and "*" not in name:
                yield name, (*path, "pools", k)
