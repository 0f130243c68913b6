"""Reads the configuration file, checks it as a whole, and names the place of each problem."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from schedsvc.config.apply import (
    Configurable,
    change_modes,
    configure,
    reconfigure,
)
from schedsvc.config.apply_tenant import change_tenant
from schedsvc.config.explain import explain
from schedsvc.config.export import tenants_yaml
from schedsvc.config.in_force import in_force, needs_restart, with_pools_kept
from schedsvc.config.models import Config, Tenant
from schedsvc.config.modes import ModeOverlay
from schedsvc.config.operator_tenants import (
    ApiKey,
    EntryLog,
    OperatorEntry,
    TenantError,
    checked_tenant,
    file_form,
    restored_entries,
    rule_tenant,
)
from schedsvc.config.outputs import Budget, time_zone
from schedsvc.config.rules import UNKNOWN_TENANT, advice, broken_rules
from schedsvc.config.tenants_dir import TenantFiles, content_of, decoded, folder_of
from schedsvc.config.tokens import token_digest
from schedsvc.config.yaml_positions import (
    Path as YamlPath,
)
from schedsvc.config.yaml_positions import Place, Problem, YamlText, path_text, read_yaml
from schedsvc.text.printable import printable

__all__ = [
    "UNKNOWN_TENANT",
    "ApiKey",
    "Budget",
    "Config",
    "ConfigError",
    "Configurable",
    "EntryLog",
    "ModeOverlay",
    "OperatorEntry",
    "Place",
    "Problem",
    "Reading",
    "Tenant",
    "TenantError",
    "change_modes",
    "change_tenant",
    "checked_tenant",
    "configure",
    "file_digest",
    "file_form",
    "in_force",
    "load",
    "load_version",
    "needs_restart",
    "path_text",
    "problem_text",
    "read",
    "reconfigure",
    "restored_entries",
    "rule_tenant",
    "tenants_yaml",
    "time_zone",
    "token_digest",
    "with_pools_kept",
]


class ConfigError(Exception):
    """The file is wrong; `problems` holds every reason, in the order of the file."""

    def __init__(self, file: Path, problems: list[Problem]) -> None:
        self.file = file
        self.problems = problems
        super().__init__("\n".join(problem_text(file, problem) for problem in problems))


@dataclass(frozen=True)
class Reading:
    """Holds the result of reading a file: a config if it is valid, else the problems."""

    config: Config | None
    problems: list[Problem]
    warnings: list[Problem]
    #: The `file_digest()` of what was read.
    digest: bytes = b""
    #: The folder of `tenants_dir`, if the file can be read as far as to name it.
    tenants_dir: Path | None = None


def problem_text(file: Path, problem: Problem) -> str:
    """Write a problem as `file:line:column: path: message`; `file`: the main file."""
    where = f"{problem.file or file}:{problem.place.line}:{problem.place.column}"
    path = path_text(problem.path)
    return printable(": ".join([where, *([path] if path else []), problem.message]))


def load(file: Path, environ: Mapping[str, str] | None = None) -> Config:
    """Read and check a configuration file. Raises ConfigError with every problem. O(file)."""
    return load_version(file, environ)[0]


def load_version(file: Path, environ: Mapping[str, str] | None = None) -> tuple[Config, bytes]:
    """Do the same, and also return the `file_digest()` of what was read."""
    reading = read(file, environ)
    if reading.config is None:
        raise ConfigError(file, reading.problems)
    return reading.config, reading.digest


def read(file: Path, environ: Mapping[str, str] | None = None) -> Reading:
    """Read and check a configuration file, and the files of its `tenants_dir`. O(files).

    Never raises for what stands in them.
    """
    content = content_of(file)
    text = decoded(content)
    if isinstance(text, Problem):
        return Reading(None, [text], [], _digest(content, None))
    source = read_yaml(text)
    if source.problems and source.data is None:
        return Reading(None, source.problems, [], _digest(content, None))
    folder = file.absolute().parent
    tenants_dir = folder_of(source.data, folder)
    files = None if tenants_dir is None else TenantFiles(tenants_dir)
    reading = _check(file, source, files, folder, os.environ if environ is None else environ)
    return replace(reading, digest=_digest(content, files), tenants_dir=tenants_dir)


def file_digest(file: Path, tenants_dir: Path | None = None) -> bytes:
    """Return a digest of the content of a file, and of the files of a folder. O(content).

    Both may be such as cannot be read.
    """
    return _digest(content_of(file), None if tenants_dir is None else TenantFiles(tenants_dir))


def _digest(content: bytes | str, files: TenantFiles | None) -> bytes:
    if isinstance(content, str):
        content = b"\0" + content.encode()  # no valid file begins with it
    found = hashlib.sha256(content)
    if files is not None:
        found = hashlib.sha256(found.digest() + files.digest())
    return found.digest()


def _check(
    file: Path,
    source: YamlText,
    files: TenantFiles | None,
    folder: Path,
    environ: Mapping[str, str],
) -> Reading:
    problems = list(source.problems)
    config = None
    data = {} if source.data is None else source.data

    def found(path: YamlPath, message: str, *, key: bool = False) -> Problem:
        if files is not None and (problem := files.located(path, message, file, key=key)):
            return problem
        return Problem(source.place(path, key=key), path, message)

    if files is not None:
        problems += files.add_to(data)
        if files.problem:
            problems.append(found(("tenants_dir",), files.problem))

    try:
        config = Config.model_validate(data)
        config._folder = folder
    except ValidationError as error:
        for details in error.errors(include_url=False):
            message, about_key = explain(details, Config)
            path = tuple(details["loc"])
            if details["type"] == "missing":
                path = path[:-1]
            problems.append(found(path, message, key=about_key))
    rules = broken_rules(data, file.absolute(), environ)
    problems += [found(path, message) for path, message in rules]
    unique = {(problem.file, problem.place, problem.message): problem for problem in problems}
    ordered = sorted(unique.values(), key=lambda problem: (str(problem.file or ""), problem.place))
    warnings = [found(path, message) for path, message in advice(data, folder)]
    return Reading(None if ordered else config, ordered, warnings)
