"""Tests that "ok" holds if, and only if, no tenant was harmed and every part works."""

import pytest
from schedsvc_client.v1 import judgement_pb2

from tests.seeds import fresh

from .random_runs import play_run


@pytest.mark.parametrize("seed", fresh(60))
def test_ok_agrees_with_what_became_of_the_requests(seed: int) -> None:
    run = play_run(seed)
    assert run.is_right, (seed, run)


def test_random_runs_have_all_levels_and_few_doubts() -> None:
    runs = [play_run(seed) for seed in range(60)]
    levels = {run.level for run in runs}
    assert levels == set(judgement_pb2.JudgementLevel.values()[1:])
    assert sum(run.doubtful for run in runs) <= 6
