"""Former names of keys and values: they keep working for one minor version, with a warning."""

from collections.abc import Mapping
from typing import Any

from schedsvc.config.rule_helpers import Finding, items, mapping
from schedsvc.config.yaml_positions import Path, path_text

__all__ = ["RENAMED_MODES", "Former", "modernise", "modernise_setting"]

#: Path of a former key, and its path today. Both are in the same section.
RENAMED_KEYS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("front",): ("edge",),
    ("scheduler", "stagger"): ("scheduler", "grant_pacing"),
}
#: Former values of the keys `mode`, and their names today.
RENAMED_MODES: Mapping[str, str] = {"audit": "dry_run"}


class Former:
    """The former names that a file still uses."""

    def __init__(self) -> None:
        self.problems: list[Finding] = []
        self.warnings: list[Finding] = []
        self._written: dict[Path, Path] = {}

    def as_written(self, path: Path) -> Path:
        """Return a path under today's names as it stands in the file. O(renamed keys)."""
        for today, former in self._written.items():
            if path[: len(today)] == today:
                return (*former, *path[len(today) :])
        return path

    def moved(self, today: Path, former: Path) -> None:
        """Note that what stands under today's path is written under a former one."""
        self._written[today] = former

    def rename(self, former: tuple[str, ...], today: tuple[str, ...], data: dict[str, Any]) -> None:
        """Rename one key in `data`, if it is there."""
        section = data
        for part in former[:-1]:
            section = mapping(section.get(part))
        if former[-1] not in section:
            return
        if today[-1] in section:
            text = f"is the former name of {path_text(today)}, which is set too; remove this one"
            self.problems.append((former, text))
        else:
            self.warnings.append((former, f"is deprecated; write {path_text(today)} instead"))
            section[today[-1]] = section[former[-1]]
            self.moved(today, former)
        del section[former[-1]]


def _modernise_lift(scheduler: dict[str, Any], former: Former) -> None:
    """Give the former values of scheduler.lift their meaning of today."""
    lift = scheduler.get("lift")
    if lift == "queued":
        if "credit_max" in scheduler:
            text = "'queued' means credit_max: 0, which is set too; remove this one"
            former.problems.append((("scheduler", "lift"), text))
        else:
            text = "'queued' is deprecated; write credit_max: 0 instead"
            former.warnings.append((("scheduler", "lift"), text))
            scheduler["credit_max"] = 0
        del scheduler["lift"]
    elif lift == "active":
        former.warnings.append(
            (
                ("scheduler", "lift"),
                "'active' is deprecated: a tenant that sends little for hours is then served alone"
                " for minutes; remove this line, or set credit_max",
            )
        )


def _modernise_callers(data: dict[str, Any], former: Former) -> None:
    """Let auth.tokens and auth.operators be principals that may do what they could."""
    auth = mapping(data.get("auth"))
    given: dict[str, Any] = {key: auth.pop(key) for key in ("tokens", "operators") if key in auth}
    for kind, value in list(given.items()):
        path: Path = ("auth", kind)
        if not isinstance(value, list):
            former.problems.append((path, "has to be a list"))
            del given[kind]
        elif value:
            text = "is deprecated; write auth.principals, which say what each caller may do"
            former.warnings.append((path, text))
    if not given or not isinstance(auth.setdefault("principals", []), list):
        return
    principals, operators = auth["principals"], given.get("operators", [])
    everything = {"pools": ["*"], "tenants": ["*"], "stats": "all"}
    found: set[str] = set()
    for i, entry in enumerate(given.get("tokens", [])):
        today: Path = ("auth", "principals", len(principals))
        if isinstance(entry, dict):
            name = entry.get("name")
            entry = {"token_file" if k == "file" else k: v for k, v in entry.items()} | everything
            former.moved((*today, "token_file"), ("auth", "tokens", i, "file"))
            if isinstance(name, str) and name in operators:
                entry["operator"] = True
                found.add(name)
        former.moved(today, ("auth", "tokens", i))
        principals.append(entry)
    for i, name in enumerate(operators):
        if isinstance(name, str) and name in found:
            continue
        # All certificates of the CA were let in, not only those of operators.
        auth.setdefault("unlisted_certificates", "allow")
        today = ("auth", "principals", len(principals))
        for key in ("name", "certificate"):
            former.moved((*today, key), ("auth", "operators", i))
        former.moved(today, ("auth", "operators", i))
        principals.append({"name": name, "certificate": name, "operator": True} | everything)


def modernise(data: Any) -> Former:
    """Give the keys and values of a file today's names, in place. O(file)."""
    former = Former()
    if not isinstance(data, dict):
        return former
    for before, today in RENAMED_KEYS.items():
        former.rename(before, today, data)
    _modernise_lift(mapping(data.get("scheduler")), former)
    _modernise_callers(data, former)
    sections: list[tuple[Path, dict[str, Any]]] = [((), data)]
    sections += [(("tenants", i), entry) for i, entry in items(data.get("tenants"))]
    for path, entry in sections:
        mode = entry.get("mode")
        if isinstance(mode, str) and mode in RENAMED_MODES:
            entry["mode"] = RENAMED_MODES[mode]
            text = f"{mode!r} is deprecated; write {entry['mode']!r} instead"
            former.warnings.append(((*path, "mode"), text))
    return former


def modernise_setting(name: str, value: Any) -> tuple[str, Any]:
    """Return today's name and value of one setting, such as scheduler.stagger. O(1)."""
    section, _, key = name.partition(".")
    data = {section: {key: value}}
    modernise(data)
    [(section, rest)] = data.items()
    [(key, value)] = rest.items()
    return f"{section}.{key}", value
