"""Runs the code of docs/use/researcher.md in its order, with a hundredth of its requests."""

import io
import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.sim.notebook import Comparison

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "use" / "researcher.md"
WHOLE, PART = 1_000_000, 10_000
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r'"""(\w+\.py): ')
INSTALL = "pip install 'schedsvc-lab[frames]'"


def run_command(line):
    program, *arguments = shlex.split(line)
    assert program == "schedsvc"
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, (line, result.output)
    return result.output


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Run all of it; return the folder, the names that it defines, and what it prints."""
    folder, names, printed = tmp_path_factory.mktemp("page"), {}, io.StringIO()
    text = PAGE.read_text()
    assert text.count(f"--requests {WHOLE} ") == 1
    text = text.replace(f"--requests {WHOLE} ", f"--requests {PART} ")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        for kind, code in BLOCK.findall(text):
            if kind == "python" and (module := MODULE.match(code)):
                Path(module[1]).write_text(code)
            elif kind == "python":
                with redirect_stdout(printed):
                    exec(code, names)
            elif code.strip() != INSTALL:
                for line in code.splitlines():
                    printed.write(run_command(line))
        yield folder, names, printed.getvalue()
        sys.modules.pop("decayed", None)


def test_the_code_of_the_page_runs(page):
    _, names, printed = page
    frame = names["frame"]
    assert isinstance(names["result"], Comparison)
    assert len(frame) == 3 * PART
    assert set(frame["policy"]) == {"fcfs", "vtc", "decayed:Decayed"}
    assert "first token" in printed
    assert "decayed:Decayed {'max'" in printed


def test_a_policy_of_25_lines_appears_in_table_and_picture(page):
    folder, names, printed = page
    assert len((folder / "decayed.py").read_text().splitlines()) <= 25
    assert re.search(r"\bfcfs +. +vtc +. +decayed:Decayed\b", printed)
    pictures = {file.name for file in names["pictures"]}
    assert {file.name for file in (folder / "out" / "mine").glob("*.png")} == pictures
    waits = names["frame"].groupby("policy", observed=True)["first_token_s"].median()
    assert waits["decayed:Decayed"] < waits["fcfs"]


def test_command_and_library_give_the_same_runs(page):
    folder, names, printed = page
    digests = {policy: runs[0]["digest"] for policy, runs in names["result"].report().items()}
    for policy, digest in digests.items():
        assert f"{policy}: digest {digest}" in printed
    command, library = (folder / "out" / "mine" / "requests.csv"), (folder / "table.csv")
    assert command.read_bytes() == library.read_bytes()
