"""Takes any recording: a draft that `check` takes, or a sentence that says why not."""

from random import Random

import pytest
import yaml
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.advise.recorded import RecordedError, recorded_traffic
from tests.seeds import fresh

from .odd_recordings import record_odd

SEEDS = fresh(20)
GOALS = ("* p90 first token <= 2 s", "* refusals <= 5 %")


@pytest.fixture(scope="module")
def advised(tmp_path_factory):
    """Ask for advice on each recording; return what came of it by seed."""
    found = {}
    for seed in SEEDS:
        folder = tmp_path_factory.mktemp("odd")
        data, rnd = record_odd(seed, folder / "recording"), Random(seed)
        file = folder / "schedsvc.yaml"
        file.write_text(yaml.safe_dump(data))
        args = ["--recording", folder / "recording", "--goal", rnd.choice(GOALS), "--jobs", "1"]
        args += ["--config", file] if rnd.random() < 0.7 else []
        args += ["--profile", "a10g-llama2-7b"] if rnd.random() < 0.6 else []
        args += ["--out", folder / "out"]
        result = CliRunner().invoke(main, ["advise", *map(str, args)])
        found[seed] = folder, result
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_any_recording_gets_a_draft_or_a_sentence(advised, seed):
    folder, result = advised[seed]
    assert isinstance(result.exception, SystemExit | None), (result.exception, result.stderr)
    if result.exit_code == 0 or "goals" in result.stdout:
        checked = CliRunner().invoke(main, ["check", str(folder / "out" / "draft.yaml")])
        assert checked.exit_code == 0, checked.output
    else:
        assert result.stderr.splitlines()[-1].startswith("Error: "), result.stderr
        assert "Traceback" not in result.output


@pytest.mark.slow
def test_most_recordings_get_a_draft(advised):
    drafts = [result for _, result in advised.values() if "goals" in result.stdout]
    assert len(drafts) >= len(SEEDS) // 3
    unlisted = [result for result in drafts if "'unknown'" in result.stderr]
    assert unlisted


@pytest.mark.slow
@pytest.mark.parametrize("seed", fresh(300))
def test_any_recording_is_read_or_named(tmp_path, seed):
    path = tmp_path / "recording"
    record_odd(seed, path, steps=60)
    for fits in (False, True):
        try:
            assert len(recorded_traffic(path, fits=fits).requests)
        except RecordedError as error:
            assert str(error).startswith(f"{path}: ")  # noqa: PT017 - both ends are right
