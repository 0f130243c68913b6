"""Tests the comparison of two simulators: it runs both, and notices different runs."""

from pathlib import Path

import click
import pytest

from bench import simulator

ROOT = Path(simulator.__file__).resolve().parents[1]
ROWS = "".join(f"{number / 4},c{number % 3},40,{9 + number}\n" for number in range(30))


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"arrival_s,client,prompt_tokens,output_tokens\n{ROWS}")
    return [str(trace), "fast", "vtc", "1"]


def test_a_tree_beside_itself_makes_the_same_run(arguments: list[str]) -> None:
    found, digests = simulator.measured(ROOT, arguments, 1)
    assert len(digests) == 1
    assert found.a > 0
    assert found.b > 0


def test_runs_that_differ_have_two_digests(arguments: list[str]) -> None:
    digests: set[str] = set()
    for policy in ("vtc", "engine"):
        simulator._run(ROOT, [*arguments[:2], policy, "1"], digests)
    assert len(digests) == 2


def test_a_commit_that_is_not_there_is_named() -> None:
    with pytest.raises(click.ClickException, match="no commit 0000000"):
        simulator.built("0000000")
