"""Serving imports nothing of the laboratory or of a cluster, neither modules nor packages."""

import subprocess
import sys
from collections.abc import Iterable

import pytest

LAB = ("schedsvc_lab", "schedsvc.cluster")
LAB_PACKAGES = (
    "httptools", "jinja2", "matplotlib", "numpy", "redis", "starlette", "textual", "tokenizers",
    "uvicorn",
)  # fmt: skip

# The command resolves to its implementation, as it does when an operator types it.
PROGRAM = """
import sys
from schedsvc.cli import main
main.get_command(None, "serve")
import schedsvc.server
print("\\n".join(sys.modules))
"""


def lab_parts(names: Iterable[str]) -> list[str]:
    """Return the modules that are not for serving, or belong to a package that only they need."""
    roots = (*LAB, *LAB_PACKAGES)
    return sorted(n for n in names if any(n == r or n.startswith(r + ".") for r in roots))


def test_serve_imports_no_laboratory() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    loaded = done.stdout.split()
    assert "schedsvc.server" in loaded
    assert not lab_parts(loaded)


@pytest.mark.parametrize("name", ["numpy.linalg", "schedsvc_lab", "schedsvc_lab.load.runner"])
def test_a_module_of_the_laboratory_is_found(name: str) -> None:
    assert lab_parts([name, "schedsvc.server", "schedsvc.label"]) == [name]
