"""Tests wrong configurations of queues and of overload."""

from pathlib import Path

import pytest

from .test_config import MINIMAL, found


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "queue_tokens_max: 5, flow_queue_tokens_max: 6",
            "2:57 scheduler.flow_queue_tokens_max: is 6, larger than"
            " queue_tokens_max (5), so it would never be reached; lower it, or raise"
            " queue_tokens_max",
        ),
        ("queue_tokens_max: -1", "2:31 scheduler.queue_tokens_max: is -1; it has to be at least 0"),
        ("saturation: 0", "2:25 scheduler.saturation: is 0; it has to lie between 0.01 and 1"),
        (
            "early_refusal: maybe",
            "2:28 scheduler.early_refusal: has to be true or false, not text",
        ),
        ("flow_order: edf", "2:25 scheduler.flow_order: has to be 'arrival' or 'deadline'"),
        (
            "expert: {queue_target_ms: 0}",
            "2:39 scheduler.expert.queue_target_ms: is 0; it has to be at least 1",
        ),
    ],
)
def test_wrong_setting_is_named_by_its_path(tmp_path: Path, keys: str, expected: str) -> None:
    assert found(tmp_path, MINIMAL + f"scheduler: {{{keys}}}") == [expected]
