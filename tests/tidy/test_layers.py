"""The core is built in layers: a file uses only what files above it in `_core/core.pyx` declare."""

import re
import shutil
from pathlib import Path

import pytest

from tests.other_core import CORE, core_sources

from .core_layers import undeclared_attributes, upward
from .sources import ROOT

APIS = ("tenants_api", "usage_api", "cluster_api", "api", "simulator_api")
LAYERS = ("base", "wire", "model", "policy", "lifecycle", "session", "view")
_INCLUDE = re.compile(r'^include "([^"]+)"(?:\s+# (\S.*))?$', re.MULTILINE)


def complaints(main: Path) -> list[str]:
    """Yield one sentence for each use of a name that a later file declares."""
    return [
        f"{use.path.relative_to(main.parent)}:{use.line} uses {use.name},"
        f" which {later.relative_to(main.parent)} declares later"
        for use, later in upward(main)
    ]


def test_no_file_uses_what_a_later_file_declares() -> None:
    found = complaints(CORE / "core.pyx")
    assert not found, "\n".join(found)


def test_the_layers_are_included_from_the_lowest_up() -> None:
    text = (CORE / "core.pyx").read_text()
    included = [name for name, _ in _INCLUDE.findall(text)]
    assert included == [f"{name}.pxi" for name in (*LAYERS, *APIS)]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layers_header_says_what_each_of_its_files_offers(layer: str) -> None:
    listed = dict(_INCLUDE.findall((CORE / f"{layer}.pxi").read_text()))
    there = {name for name in core_sources() if name.startswith(f"{layer}/")}
    assert listed.keys() == there
    silent = sorted(name for name, offers in listed.items() if not offers)
    assert not silent, f"_core/{layer}.pxi does not say what these offer: {silent}"


@pytest.mark.parametrize("name", core_sources())
def test_files_that_a_comment_names_exist(name: str) -> None:
    there = {other.rpartition("/")[2] for other in core_sources()} | set(core_sources())
    named = set(re.findall(r"[\w/]+\.(?:pyx|pxi)\b", core_sources()[name].read_text()))
    assert named <= there, f"_core/{name} names files that are gone: {sorted(named - there)}"


UPPER = (
    "cdef enum:\n    BUSY = 1\ncdef struct Row:\n    int size\n"
    "cdef class Counter:\n    cdef int count\n"
    "cdef int LIMIT = 4\ncdef int upper(int a) noexcept:\n    return a\n"
)


def planted(folder: Path, lower: str) -> list[str]:
    (folder / "core.pyx").write_text('include "lower.pxi"\ninclude "upper.pxi"\n')
    (folder / "lower.pxi").write_text(lower)
    (folder / "upper.pxi").write_text(UPPER)
    return complaints(folder / "core.pyx")


@pytest.mark.parametrize(
    ("lower", "name"),
    [
        ("cdef int f():\n    return upper(1)\n", "upper"),
        ("cdef object f(list rows):\n    return sorted(rows, key=upper)\n", "upper"),
        ("cdef int f():\n    return BUSY\n", "BUSY"),
        ("cdef int f():\n    return LIMIT\n", "LIMIT"),
        ("cdef void f(Row* row):\n    row.size = 1\n", "Row"),
        ("cdef class Counter\ncdef int f(Counter c):\n    return c.count\n", "Counter"),
        ("cdef class Lower:\n    cdef Counter counter\n", "Counter"),
        ("cdef class Lower:\n    cdef int f(self):\n        return upper(1)\n", "upper"),
    ],
)
def test_a_use_of_a_later_file_is_found(tmp_path: Path, lower: str, name: str) -> None:
    found = planted(tmp_path, lower)
    assert len(found) == 1
    assert f" uses {name}, which upper.pxi declares later" in found[0]


@pytest.mark.parametrize(
    "lower",
    [
        "cdef int f(int upper):\n    return upper\n",
        "cdef int f():\n    upper = 1\n    return upper\n",
        "cdef int f(object a):\n    return a.upper(1)\n",
        "cdef class Lower:\n    cdef int upper(self):\n        return 1\n",
        "cdef object f():\n    # upper(1)\n    return 'upper(1)'\n",
    ],
)
def test_a_name_of_its_own_is_no_use_of_a_later_file(tmp_path: Path, lower: str) -> None:
    assert planted(tmp_path, lower) == []


def test_every_attribute_of_the_core_and_its_loops_is_declared(tmp_path: Path) -> None:
    shutil.copytree(CORE, tmp_path / "core", ignore=shutil.ignore_patterns("*.c"))
    shutil.copy(ROOT / "bench" / "loops.pxi", tmp_path / "core")
    main = tmp_path / "core" / "core.pyx"
    main.write_text(main.read_text() + 'include "loops.pxi"\n')
    found = [f"{use.path.name}:{use.line}: {use.name}" for use in undeclared_attributes(main)]
    assert not found, f"Cython would look these up by name when they run: {found}"


def test_a_call_of_a_method_that_has_gone_is_found(tmp_path: Path) -> None:
    main = tmp_path / "core.pyx"
    main.write_text(
        "cdef class Counter:\n    cdef int count\n    cdef int add(self):\n        return 1\n"
        "cdef int f(Counter c):\n    c.count = c.add() + c.charge()\n"
    )
    assert [use.name for use in undeclared_attributes(main)] == ["charge"]
