from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from schedsvc.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n0,a,10,10\n")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_trace_as_an_argument_warns(trace: Path) -> None:
    now = run("workload", "describe", "--trace", trace, "--json")
    before = run("workload", "describe", trace, "--json")
    assert now.exit_code == before.exit_code == 0
    assert now.stdout == before.stdout
    assert now.stderr == ""
    assert before.stderr == "a trace as an argument is deprecated; use --trace FILE\n"


def test_two_traces_or_none_are_refused(trace: Path) -> None:
    for arguments in ((), (trace, "--trace", trace)):
        result = run("workload", "describe", *arguments)
        assert result.exit_code == 2
        assert result.stderr.endswith("Error: give one trace, as --trace FILE\n")


def test_the_name_that_an_option_had_before_warns(trace: Path) -> None:
    sim = ("sim", "--trace", trace, "--policy", "vtc", "--json")
    now, before = run(*sim, "--profile", "fast"), run(*sim, "--engine", "fast")
    assert now.exit_code == before.exit_code == 0
    assert '"engine": "fast"' in now.stdout
    assert '"engine": "fast"' in before.stdout
    assert "--engine is deprecated; use --profile\n" in before.stderr


def test_an_option_and_the_name_it_had_are_refused(trace: Path) -> None:
    result = run("sim", "--trace", trace, "--profile", "fast", "--engine", "fast")
    assert result.exit_code == 2
    assert "give --profile without --engine, which it replaces" in result.stderr
