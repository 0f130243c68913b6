"""pyproject.toml names the packages that are here, and each import is named there."""

import ast
import importlib
import importlib.metadata
import itertools
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
import tomllib

from .sources import PACKAGES, ROOT, imports, is_standard, modules

PROJECTS = {
    "schedsvc": ROOT / "pyproject.toml",
    "schedsvc_client": ROOT / "clients/python/pyproject.toml",
    "schedsvc_vllm": ROOT / "clients/vllm/pyproject.toml",
    "schedsvc_litellm": ROOT / "clients/litellm/pyproject.toml",
    "schedsvc_lab": ROOT / "lab/pyproject.toml",
}

# Modules whose packages an extra names.
EXTRAS = {
    "schedsvc_lab.sim.notebook": ("frames",),
    "schedsvc.cli.top_app": ("top",),
    "schedsvc.cluster": ("cluster",),
    "schedsvc_lab.faults.cluster": ("cluster",),
    "schedsvc_lab.workload.parquet": ("parquet",),
    "schedsvc.records.usage.parquet": ("parquet",),
    "schedsvc_litellm.plugin": ("litellm",),
    "schedsvc_vllm.jwt_tokens": ("jwt",),
    "schedsvc_vllm.otel": ("otel",),
    "schedsvc_vllm.door": ("proxy",),
}

# Packages of an environment of their own, whose lane imports them: the name of the module and that
# of the distribution.
ELSEWHERE = {"litellm": "litellm"}


def extras_of(module: str) -> tuple[str, ...]:
    """Return the extras whose packages a module may import besides those of its distribution."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((EXTRAS[name] for name in names if name in EXTRAS), ())


def required(pyproject: Path, extras: Iterable[str]) -> set[str]:
    """Return the distributions that a pyproject.toml names, in normal form."""
    project = tomllib.loads(pyproject.read_text())["project"]
    optional = project.get("optional-dependencies", {})
    lines = [*project["dependencies"], *itertools.chain(*(optional[extra] for extra in extras))]
    return {_normal(re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0]) for line in lines}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def _owners() -> Mapping[str, list[str]]:
    """Return the distributions of each module that is installed, of which it reads all files."""
    elsewhere = {module: [distribution] for module, distribution in ELSEWHERE.items()}
    return {**importlib.metadata.packages_distributions(), **elsewhere}


def _modules_of(distribution: str) -> list[str]:
    found = _owners().items()
    return [name for name, owners in found if distribution in map(_normal, owners)]


def named(pyproject: Path) -> set[str]:
    """Return the distributions that a pyproject.toml names, those of every extra included."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return required(pyproject, project.get("optional-dependencies", {}))


NAMED = sorted(set().union(*map(named, PROJECTS.values())) - set(ELSEWHERE.values()))


@pytest.mark.parametrize("distribution", NAMED)
def test_every_named_package_is_here(distribution: str) -> None:
    importlib.metadata.distribution(distribution)
    for name in _modules_of(distribution):
        # Type stubs hold no modules, and a name with a dash or underscore first is no public one.
        if name.isidentifier() and not name.startswith("_"):
            importlib.import_module(name)


@pytest.mark.parametrize("package", PROJECTS)
def test_every_import_is_named(package: str) -> None:
    owners = _owners()
    unnamed = set()
    for module in modules():
        if module.name.split(".")[0] != package:
            continue
        allowed = required(PROJECTS[package], extras_of(module.name))
        for _, name in imports(ast.parse(module.path.read_text()), module.name, module.is_package):
            top = name.split(".")[0]
            if top in PACKAGES:
                provider = {top.replace("_", "-")} - {package.replace("_", "-")}
            else:
                provider = set() if is_standard(name) else {_normal(o) for o in owners[top]}
            if provider and not provider & allowed:
                unnamed.add(f"{module.name} imports {top}")
    assert not unnamed, f"{PROJECTS[package]} does not name: {sorted(unnamed)}"
