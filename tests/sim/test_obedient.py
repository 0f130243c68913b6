"""Retry-After: whoever obeys it is admitted at the next try, and waits not much too long."""

from statistics import median

from .obedient import Obedient, Try


def play(*runs: Obedient, burst: tuple[int, int], every_s: float) -> list[Try]:
    return [each for run in runs for each in run.run(burst, every_s)]


def admitted(tries: list[Try]) -> float:
    return sum(each.admitted for each in tries) / len(tries)


def test_who_obeys_a_full_queue_is_admitted_at_the_next_try() -> None:
    """Bursts of one tenant, beside two that ask steadily."""
    options = {"flow_queue_max": 10}
    runs = [Obedient(seed, options=options, steady_per_s=0.4) for seed in (1, 2, 3)]
    tries = play(*runs, burst=(15, 30), every_s=60)
    known = [each for each in tries if each.oracle_ns >= 0]
    assert len(known) > 500
    assert admitted(tries) >= 0.90
    told, oracle = (median(column) for column in zip(*_waits(known), strict=True))
    assert told <= 1.5 * oracle


def _waits(tries: list[Try]) -> list[tuple[int, int]]:
    return [(each.told_ns, each.oracle_ns) for each in tries]


def test_who_obeys_a_quota_is_admitted_at_the_next_try() -> None:
    runs = [Obedient(seed, quota={"total_tokens": 2_000}) for seed in (1, 2)]
    tries = play(*runs, burst=(10, 25), every_s=180)
    assert len(tries) > 200
    assert admitted(tries) >= 0.90
