"""`scheduler` has few keys; those under `scheduler.expert` are accepted only there."""

from pathlib import Path

import pytest
import yaml

from schedsvc.config.settings import Expert, Scheduler

from .test_config import MINIMAL, SAMPLE, found, reading


def test_sample_shows_at_most_20_keys_and_no_expert_key() -> None:
    shown = yaml.safe_load(SAMPLE.read_text())["scheduler"]
    assert shown.keys() == {f.alias or n for n, f in Scheduler.model_fields.items()} - {"expert"}
    assert len(shown) <= 20


@pytest.mark.parametrize("field", Expert.model_fields)
def test_expert_key_outside_expert_is_refused_with_its_place(tmp_path: Path, field: str) -> None:
    key = Expert.model_fields[field].alias or field
    assert found(tmp_path, MINIMAL + f"scheduler: {{{key}: 1}}") == [
        f"2:13 scheduler.{key}: the key '{key}' does not belong here; move it to"
        f" scheduler.expert.{key}"
    ]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "expert: {queue_max: 9}",
            "2:22 scheduler.expert.queue_max: the key 'queue_max' does not belong here; move it to"
            " scheduler.queue_max",
        ),
        (
            "quantle: 0.8",
            "2:13 scheduler.quantle: unknown key 'quantle'; did you mean"
            " 'scheduler.expert.quantile'?",
        ),
        (
            "expert: {quantle: 0.8}",
            "2:22 scheduler.expert.quantle: unknown key 'quantle'; did you mean 'quantile'?",
        ),
    ],
)
def test_wrong_key_near_expert_is_named(tmp_path: Path, keys: str, expected: str) -> None:
    assert found(tmp_path, MINIMAL + f"scheduler: {{{keys}}}") == [expected]


def test_expert_key_under_expert_reaches_the_core(tmp_path: Path) -> None:
    config = reading(tmp_path, MINIMAL + "scheduler: {expert: {bypass_max: 3}}").config
    assert config is not None
    assert config.core_options()["bypass_max"] == 3
