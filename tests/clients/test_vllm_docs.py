"""Tests that the operator's page states what the code does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from schedsvc_vllm.launcher import OPTION_PREFIX, OPTIONS
from schedsvc_vllm.routes import GATED_PATHS

from tests import forked

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "use" / "vllm.md"
README = ROOT / "clients" / "vllm" / "README.md"


@pytest.mark.parametrize("page", [PAGE, README])
def test_every_option_and_variable_it_names_is_there(page: Path) -> None:
    text = page.read_text()
    for option in re.findall(rf"{OPTION_PREFIX}([a-z-]+[a-z])", text):
        assert option in OPTIONS, option
    known = {f"SCHEDSVC_{name.upper().replace('-', '_')}" for name in OPTIONS} | {"SCHEDSVC_TOKEN"}
    for variable in re.findall(r"SCHEDSVC_[A-Z_]+[A-Z]", text):
        assert any(name.startswith(variable) for name in known), variable


def test_every_endpoint_is_in_its_table() -> None:
    text = PAGE.read_text()
    table = text[text.index("## Gated endpoints") : text.index("## Answers to clients")]
    for path in GATED_PATHS:
        assert f"`{path}`" in table, path


def test_the_manifest_holds_a_configuration_that_the_scheduler_takes(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    deployment, config = (
        document for block in blocks for document in yaml.safe_load_all(block) if document
    )
    containers = deployment["spec"]["template"]["spec"]["containers"]
    gate = next(container for container in containers if container["name"] == "vllm")
    variables = {entry["name"]: entry["value"] for entry in gate["env"]}
    file = tmp_path / "schedsvc.yaml"
    file.write_text(config["data"]["schedsvc.yaml"])
    listener = yaml.safe_load(file.read_text())["listeners"][0]["unix"]
    assert variables["SCHEDSVC_TARGET"] == f"unix:{listener}"
    # The folders of the socket and the state are mounted in the pod; here they have to exist.
    text = file.read_text()
    for path in (listener, yaml.safe_load(text)["state"]["file"]):
        text = text.replace(str(Path(path).parent), str(tmp_path))
    file.write_text(text)
    command = [sys.executable, "-m", "schedsvc", "check", str(file)]
    checked = forked.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
