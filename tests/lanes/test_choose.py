"""A change of each kind of file selects what judges it; without a base everything runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .change import QUARTERS, Change, change, tracked
from .choose import Selection, deal
from .graph import Graph
from .rules import LANES, STAGES

ROOT = Path(__file__).resolve().parents[2]


# Sources are read once: no test changes them.
GRAPH = Graph(ROOT, tracked(ROOT))


def select(*paths: str, tree: int = 0) -> Selection:
    """Select for a change of these files; all of them exist, except names that say otherwise."""
    assert all(path in GRAPH.paths or path.startswith("no/") for path in paths)
    return Selection(ROOT, Change("a base", frozenset(paths), tree), GRAPH)


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("_core/model/flows.pxi", ("core/test_tree.py", "lab/faults/cluster/test_runs.py")),
        ("_core/model/flows.pxi", ("cluster/test_shares.py", "lab/sim/test_suite.py")),
        ("proto/schedsvc/v1/pool.proto", ("core/test_transitions.py", "conformance/test_skew.py")),
        ("schedsvc/cluster/limits.lua", ("cluster/test_slots_store.py",)),
        ("lab/schedsvc_lab/engine/profiles/fast.yaml", ("lab/sim/test_suite.py",)),
        ("lab/schedsvc_lab/engine/blocks.pxd", ("lab/sim/test_suite.py",)),
        ("lab/setup.py", ("lab/sim/test_suite.py",)),
        ("lab/schedsvc_lab/demo/engine.yaml", ("lab/demo/test_demo.py",)),
        ("clients/node/targets.ts", ("conformance/test_conformance.py",)),
        ("clients/conformance/queue.json", ("conformance/test_conformance.py",)),
        ("clients/vllm/schedsvc_vllm/sse.py", ("clients/test_interop.py",)),
        ("schedsvc/server/reload.py", ("processes/test_kills.py", "server/test_watch.py")),
        ("tests/processes/programs.py", ("processes/test_kills.py",)),
        ("deploy/grafana/schedsvc.json", ("server/test_dashboard.py",)),
        ("bench/loops.pxi", ("ladder/test_inside.py",)),
        ("docs/use/researcher.md", ("lab/sim/test_researcher_page.py",)),
        ("lab/schedsvc_lab/sim/notebook.py", ("lab/sim/test_researcher_page.py",)),
    ],
)
def test_a_change_selects_the_tests_of_its_subject(path: str, tests: tuple[str, ...]) -> None:
    concerned, _ = select(path).slow()
    assert {f"tests/{test}" for test in tests} <= concerned.keys()


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("lab/schedsvc_lab/load/generator.py", "core/test_tree.py"),
        ("_core/model/flows.pxi", "lab/demo/test_demo.py"),
        ("docs/understand/queues.md", "core/test_tree.py"),
        ("lab/schedsvc_lab/emulator/answers.py", "cluster/test_shares.py"),  # imported ahead alone
        ("schedsvc/data/console/table.mjs", "processes/test_kills.py"),
    ],
)
def test_a_change_leaves_out_what_does_not_need_it(path: str, test: str) -> None:
    selection = select(path)
    assert not selection.subject.everything
    assert f"tests/{test}" not in selection.slow()[0]


@pytest.mark.parametrize(
    "path", ["Makefile", ".ci/run", "constraints.txt", "tests/lanes/rules.py", "no/such.thing"]
)
def test_a_change_of_what_chooses_selects_everything(path: str) -> None:
    selection = select(path)
    assert selection.slow()[0].keys() == set(selection.slow_tests())
    assert all(selection.lane(name) for name in LANES)


@pytest.mark.parametrize(
    ("path", "lane"),
    [
        ("docs/use/install.md", "test-image"),
        ("docs/use/install.md", "test-dist"),
        ("deploy/Containerfile", "test-image"),
        ("deploy/chart/schedsvc/values.yaml", "test-chart"),
        ("schedsvc/config/models.py", "test-chart"),
        ("schedsvc/data/console/console.css", "test-browser"),
        ("schedsvc/data/schedsvc.yaml", "test-dist"),
        ("clients/vllm/pyproject.toml", "test-dist"),
        ("clients/vllm/schedsvc_vllm/sse.py", "test-vllm"),
        ("tests/vllm/install.sh", "test-vllm"),
        ("clients/go/targets.go", "test-go"),
        ("clients/conformance/queue.json", "test-go"),
        ("proto/schedsvc/v1/pool.proto", "test-go"),
        ("schedsvc/service/scheduler_servicer.py", "test-go"),
        ("clients/java/pom.xml", "test-java"),
        ("clients/java/src/main/java/io/github/schedsvc/client/Calls.java", "test-java"),
        ("clients/conformance/queue.json", "test-java"),
        ("proto/schedsvc/v1/pool.proto", "test-java"),
        ("schedsvc/service/scheduler_servicer.py", "test-java"),
        ("clients/cpp/CMakeLists.txt", "test-cpp"),
        ("clients/cpp/src/links.h", "test-cpp"),
        ("clients/conformance/queue.json", "test-cpp"),
        ("proto/schedsvc/v1/pool.proto", "test-cpp"),
        ("schedsvc/service/scheduler_servicer.py", "test-cpp"),
    ],
)
def test_a_change_runs_the_lane_of_its_subject(path: str, lane: str) -> None:
    assert "quarter" not in (select(path).lane(lane) or "quarter")


def test_every_lane_has_its_stage() -> None:
    assert LANES.keys() <= set(STAGES)


def test_a_lane_without_a_change_runs_in_its_quarter() -> None:
    runs = [[bool(select(tree=tree).lane(name)) for tree in range(QUARTERS)] for name in LANES]
    assert [sum(quarters) for quarters in runs] == [1] * len(LANES)


def test_quarters_cover_every_slow_test_once() -> None:
    tests = select().slow_tests()
    parts = [select(tree=tree).slow()[1] for tree in range(QUARTERS)]
    assert sorted(test for part in parts for test in part) == tests
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_deal_does_not_follow_the_order_of_names() -> None:
    dealt = deal(map(str, range(40)))
    assert [dealt[str(n)] for n in range(40)] != [n % QUARTERS for n in range(40)]


def test_every_file_has_a_rule_or_a_reader() -> None:
    found = {path: select(path).subject.everything for path in GRAPH.paths}
    assert {path for path, why in found.items() if why.startswith("no rule")} == set()


@pytest.mark.parametrize(
    ("path", "mutant"),
    [
        ("_core/lifecycle/lease.pxi", "leak-on-cancel"),
        ("lab/schedsvc_lab/faults/auditor/records.py", "leak-on-cancel"),
        ("tests/mutants/bugs.py", "leak-on-cancel"),
        ("tests/mutants/wrong_core.py", "leak-on-cancel"),
        ("tests/other_core.py", "leak-on-cancel"),
    ],
)
def test_a_mutant_runs_for_its_file_and_for_what_kills_it(path: str, mutant: str) -> None:
    assert mutant in select(path).mutants()


def test_a_mutant_of_a_test_runs_for_the_oracle_of_the_test() -> None:
    found = select("tests/core/twin.py").mutants()
    assert "leak-on-cancel" not in found
    assert found


def test_a_change_elsewhere_runs_no_mutant() -> None:
    assert not select("_core/view/stats.pxi", "schedsvc/driver/driver.py").mutants()


def commit(folder: Path, name: str, when: str) -> str:
    (folder / name).write_text(name)
    run = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    variables = {"GIT_COMMITTER_DATE": when, "GIT_AUTHOR_DATE": when, "PATH": "/usr/bin:/bin"}
    subprocess.run([*run, "add", "."], check=True)
    subprocess.run([*run, "commit", "-qm", name], check=True, env=variables)
    asked = [*run, "rev-parse", "HEAD"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CI_BASE", raising=False)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def test_the_base_is_the_newest_commit_older_than_a_day(repository: Path) -> None:
    commit(repository, "old", "2020-01-01T00:00:00Z")
    base = commit(repository, "yesterday", "2020-01-02T00:00:00Z")
    commit(repository, "new", "2090-01-01T00:00:00Z")
    (repository / "untracked").write_text("")
    (repository / "old").unlink()
    found = change(repository)
    assert found.paths == {"new", "untracked", "old"}
    assert base[:8] in str(found)


def test_a_base_of_the_caller_counts(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = commit(repository, "a", "2020-01-01T00:00:00Z")
    commit(repository, "b", "2020-01-02T00:00:00Z")
    monkeypatch.setenv("CI_BASE", base)
    assert change(repository).paths == {"b"}


@pytest.mark.parametrize("base", ["", "0" * 40, "no-branch"])
def test_without_a_base_everything_runs(
    repository: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    commit(repository, "new", "2090-01-01T00:00:00Z")
    if base:
        monkeypatch.setenv("CI_BASE", base)
    found = change(repository)
    assert found.paths is None
    assert Selection(ROOT, found).lane("test-image") == str(found)


def test_a_shallow_clone_without_the_base_runs_everything(repository: Path) -> None:
    commit(repository, "old", "2020-01-01T00:00:00Z")
    commit(repository, "new", "2090-01-01T00:00:00Z")
    clone = repository / "clone"
    source = f"file://{repository}"
    subprocess.run(["git", "clone", "-q", "--depth", "1", source, str(clone)], check=True)
    assert change(clone).paths is None


def test_a_folder_without_git_runs_everything(tmp_path: Path) -> None:
    assert change(tmp_path).paths is None


def test_a_test_file_that_a_change_deletes_is_not_run() -> None:
    gone = "tests/cluster/test_gone.py"
    graph = Graph(ROOT, GRAPH.paths | {gone})
    selection = Selection(ROOT, Change("a base", frozenset({gone})), graph)
    assert gone not in selection.slow_tests()
