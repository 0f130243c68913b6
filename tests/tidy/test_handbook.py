"""The generated reference equals a fresh generation, and has a place for all that there is."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from schedsvc_client.v1 import scheduler_pb2 as pb

from deploy.command_pages import commands_page
from deploy.handbook import OUTPUTS
from deploy.man import below, root
from deploy.metric_pages import PARTS, metrics_page, shown
from schedsvc.config import ConfigError, load
from schedsvc.metrics import rows
from schedsvc.metrics.snapshot import Snapshot
from schedsvc.service.status import OUTCOMES
from spec.settings import SECTIONS

from .json_schema import faults
from .sources import ROOT

REFERENCE = ROOT / "docs/reference"
SCHEMA = json.loads((REFERENCE / "configuration.schema.json").read_text())
SAMPLES = [
    "schedsvc/data/schedsvc.yaml",
    *(f"deploy/compose/{path.name}" for path in (ROOT / "deploy/compose").glob("*.yaml")),
]
_LISTENS: dict[str, Any] = {"listeners": [{"unix": "/run/s.sock"}]}
#: A key, with values that a file may have and values that it may not have.
VALUES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"scheduler": {"early_refusal": False}}, True),
    ({"scheduler": {"queue_max": "2k"}}, True),
    ({"scheduler": {"prices": {"cached": 0.25, "kv": 0}}}, True),
    ({"scheduler": {"expert": {"credit_max": "auto", "lead_max": 4_000}}}, True),
    ({"tenants": [{"name": "a", "weight": 0.5, "quota": {"tokens_per_minute": "200k"}}]}, True),
    ({"mode": "dry-run"}, True),
    ({"scheduler": {"queue_maximum": 2}}, False),
    ({"scheduler": {"queue_max": 0}}, False),
    ({"scheduler": {"queue_max": "many"}}, False),
    ({"scheduler": {"policy": "lifo"}}, False),
    ({"scheduler": {"prices": {"cached": 2}}}, False),
    ({"scheduler": {"expert": {"credit_max": "none"}}}, False),
    ({"scheduler": {"early_refusal": "perhaps"}}, False),
    ({"tenants": [{"weight": 1}]}, False),
    ({"tenants": [{"name": ""}]}, False),
    ({"tenants": {"name": "a"}}, False),
    ({"mode": "test"}, False),
]


@pytest.mark.parametrize("path", OUTPUTS)
def test_a_generated_page_equals_a_fresh_generation(path: str) -> None:
    assert OUTPUTS[path]() == (ROOT / path).read_text(), f"run `make handbook` and commit {path}"


def test_every_metric_has_its_row() -> None:
    page = metrics_page()
    tables = [getattr(rows, name) for name in rows.__all__ if name.endswith("_ROWS")]
    declared = [row for table in tables for row in table]
    assert len(declared) > 80
    for row in declared:
        name = row.name if row in rows.GEN_AI_ROWS else f"schedsvc_{row.name}"
        assert f"| `{name}{'_total' * row.is_counter}` |" in page
        assert row.help in page.replace("\\", "")


def test_every_part_of_a_snapshot_that_may_be_absent_is_shown() -> None:
    absent = {field.name for field in dataclasses.fields(Snapshot) if field.default is None}
    assert absent == {"saving", "ledgering", "sharing", "leading"}
    assert absent <= {key for part in PARTS.values() for key in part}
    for title, part in PARTS.items():
        assert not part or shown(**part).keys() > shown().keys(), title


def test_every_metric_of_the_gate_has_its_row() -> None:
    source = (ROOT / "clients/vllm/schedsvc_vllm/metrics_page.py").read_text()
    names = re.findall(r'"((?:schedsvc_)?(?:gate|proxy)_[a-z_]+)"', source)
    assert len(names) >= 8
    page = metrics_page()
    for name in names:
        assert f"| `schedsvc_{name.removeprefix('schedsvc_')}` |" in page


def test_every_metric_that_a_rule_or_a_panel_asks_for_is_on_the_page() -> None:
    texts = [*(ROOT / "deploy/alerts").glob("*.yaml"), *(ROOT / "deploy/grafana").glob("*.json")]
    exprs = " ".join(path.read_text() for path in texts)
    asked = set(re.findall(r"(?<![\w:])(schedsvc_[a-z_]+)(?=[{\[\s)])", exprs))
    assert len(asked) > 30
    page = metrics_page()
    ends = re.compile(r"_(?:bucket|sum|count)$")
    lost = [
        name
        for name in asked
        if f"| `{name}` |" not in page and f"| `{ends.sub('', name)}` |" not in page
    ]
    assert sorted(lost) == []


def test_every_command_has_its_section_options_and_example() -> None:
    page = commands_page()
    contexts = list(below(root()))
    assert len(contexts) > 40
    for context in contexts:
        _, found, rest = page.partition(f"# {context.command_path}\n")
        assert found, context.command_path
        section = re.split(r"\n##+ ", rest)[0]
        assert "```" in section.partition("Example")[2], context.command_path
        for option in context.command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[0] in section, (context.command_path, option.opts)


def test_every_outcome_has_its_place() -> None:
    contract = (REFERENCE / "contract.md").read_text()
    refusals = (REFERENCE / "refusals.md").read_text()
    names = {number: name for name, number in pb.Outcome.items()}
    for number, row in OUTCOMES.items():
        assert f"| `{names[number]}` |" in contract
        if row.name.startswith(("rejected_", "evicted_")):
            assert f"| `{row.name}` |" in refusals


def test_every_setting_is_explained_in_table_and_schema() -> None:
    table = (REFERENCE / "settings.md").read_text()
    for section in SECTIONS:
        keys = SCHEMA["$defs"][section.model]["properties"]
        for setting in section.settings:
            assert f"| `{setting.name}` |" in table
            assert setting.help in keys[setting.name]["description"]
            value = keys[setting.name]["default"]
            assert not list(faults(value, keys[setting.name], SCHEMA)), setting.name


@pytest.mark.parametrize("name", SAMPLES)
def test_schema_takes_each_sample(name: str) -> None:
    assert not list(faults(yaml.safe_load((ROOT / name).read_text()), SCHEMA, SCHEMA))


@pytest.mark.parametrize(("keys", "right"), VALUES, ids=str)
def test_schema_and_check_agree(keys: dict[str, Any], right: bool, tmp_path: Path) -> None:
    file = {**_LISTENS, **keys}
    assert (not list(faults(file, SCHEMA, SCHEMA))) == right
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(file))
    if right:
        load(tmp_path / "file.yaml")
        return
    with pytest.raises(ConfigError):
        load(tmp_path / "file.yaml")


def test_each_symptom_names_what_there_is_and_where_it_shows() -> None:
    text = (ROOT / "docs/operate/symptoms.md").read_text()
    page, operations = metrics_page(), (ROOT / "docs/operate/operations.md").read_text()
    cells = [
        [cell.strip() for cell in line[1:-1].split("|")]
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith(("| ---", "| symptom"))
    ]
    assert len(cells) >= 20
    assert [row for row in cells if len(row) != 3 or not all(row)] == []
    named = set(re.findall(r"schedsvc_[a-z_]+", text))
    assert len(named) > 20
    assert [name for name in sorted(named) if f"| `{name}` |" not in page] == []
    alerts = set(re.findall(r"Schedsvc[A-Z]\w+", text))
    assert [name for name in sorted(alerts) if f"\n### {name}\n" not in operations] == []
