"""The graph leads from a test to all that it needs, and a missing edge is found."""

from pathlib import Path

import pytest

from .graph import Graph

TREE = {
    "pyproject.toml": '[project]\nscripts = {schedsvc = "schedsvc.cli:main"}\n',
    "schedsvc/__init__.py": "",
    "schedsvc/__main__.py": "from schedsvc.cli import main\n",
    "schedsvc/cli/__init__.py": 'C = {"serve": ("schedsvc.cli.serve:serve", "x")}\n',
    "lab/pyproject.toml": '[project.entry-points."schedsvc.commands"]\n'
    'sim = "schedsvc_lab.sim.cli:sim"\n',
    "schedsvc/cli/serve.py": "def serve():\n    from ..server import run\n",
    "schedsvc/server.py": 'from . import _core, cluster\nLUA = "limits.lua"\n',
    "schedsvc/cluster/__init__.py": "",
    "tests/server/test_pair.py": 'C = "cluster:\\n  url: x"\nRUN = "schedsvc serve"\n',
    "schedsvc/limits.lua": "",
    "schedsvc/_core.pyi": "",
    "lab/schedsvc_lab/__init__.py": "",
    "lab/schedsvc_lab/sim/__init__.py": "",
    "lab/schedsvc_lab/sim/cli.py": "from schedsvc._core import X\n",
    "schedsvc/words.py": '"""Not `schedsvc.server`."""\n# schedsvc.server\n',
    "tests/conftest.py": "",
    "tests/virtual.py": "",
    "tests/server/__init__.py": "",
    "tests/server/conftest.py": "from .helper import start\n",
    "tests/server/helper.py": 'def start(*words):\n    return ["-m", "schedsvc", *words]\n',
    "tests/server/test_serve.py": 'def test_x(start):\n    start("serve")\n',
    "tests/sim/test_sim.py": 'from virtual import run\nRUN = "schedsvc sim --seeds 3"\n',
    "tests/sim/test_core.py": "if True:\n    from schedsvc import _core\n",
    "tests/sim/test_words.py": "import schedsvc.words\n",
    "tests/sim/test_code.py": 'CODE = """\nimport schedsvc.words\n"""\n',
}


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Graph(tmp_path, TREE)


@pytest.mark.parametrize(
    ("test", "needed"),
    [
        # A fixture's program, its command, a late import, and a data file that is named.
        ("tests/server/test_serve.py", "tests/server/helper.py"),
        ("tests/server/test_serve.py", "schedsvc/cli/serve.py"),
        ("tests/server/test_serve.py", "schedsvc/server.py"),
        ("tests/server/test_serve.py", "schedsvc/limits.lua"),
        ("tests/server/test_pair.py", "schedsvc/cluster/__init__.py"),
        # A command in the laboratory, which drives the core.
        ("tests/sim/test_sim.py", "lab/schedsvc_lab/sim/cli.py"),
        ("tests/sim/test_sim.py", "schedsvc/_core.pyi"),
        ("tests/sim/test_sim.py", "tests/virtual.py"),
        ("tests/sim/test_core.py", "schedsvc/_core.pyi"),
        ("tests/sim/test_words.py", "schedsvc/__init__.py"),
        ("tests/sim/test_words.py", "tests/conftest.py"),
        ("tests/sim/test_code.py", "schedsvc/words.py"),
    ],
)
def test_needs_of_a_test_are_found(graph: Graph, test: str, needed: str) -> None:
    assert needed in graph.needs(test)


@pytest.mark.parametrize(
    ("test", "other"),
    [
        ("tests/server/test_serve.py", "lab/schedsvc_lab/sim/cli.py"),
        ("tests/server/test_serve.py", "schedsvc/_core.pyi"),  # through the service alone
        ("tests/server/test_serve.py", "schedsvc/cluster/__init__.py"),
        ("tests/sim/test_sim.py", "schedsvc/server.py"),
        ("tests/sim/test_words.py", "schedsvc/server.py"),  # in prose alone
        ("tests/sim/test_core.py", "tests/server/conftest.py"),
    ],
)
def test_needs_of_a_test_hold_nothing_else(graph: Graph, test: str, other: str) -> None:
    assert other not in graph.needs(test)


def test_a_deleted_file_is_needed_by_what_names_it(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("from schedsvc.gone import x\n")
    graph = Graph(tmp_path, ["tests/test_a.py", "schedsvc/gone.py"])
    assert "schedsvc/gone.py" in graph.needs("tests/test_a.py")
