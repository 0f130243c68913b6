"""Tests a folder with one file for each tenant: read, checked, watched with the main file."""

import json
from pathlib import Path

import pytest

from schedsvc.config import Config, load, load_version, problem_text, read, tenants_dir
from schedsvc.server.reload import Reloader

from .test_cli import run

MINIMAL = "listeners: [{unix: /tmp/unused}]\ntenants_dir: tenants.d\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text(MINIMAL)
    made = tmp_path / "tenants.d"
    made.mkdir()
    return made


def main_file(folder: Path) -> Path:
    return folder.parent / "c.yaml"


def problems(folder: Path) -> list[str]:
    """Return the findings, with paths from the folder of the main file on."""
    file = main_file(folder)
    texts = [problem_text(file, problem) for problem in read(file).problems]
    return [text.replace(f"{folder.parent}/", "") for text in texts]


def test_tenants_of_the_folder_follow_those_of_the_file(folder: Path) -> None:
    main_file(folder).write_text(MINIMAL + "tenants: [{name: m}]\n")
    (folder / "b.yaml").write_text("name: b\nweight: 2\n")
    (folder / "a.yml").write_text("name: a\nquota: {tokens_per_minute: 500}\n")
    (folder / ".hidden.yaml").write_text("name: [")
    (folder / "README.md").write_text("not a tenant")
    tenants = load(main_file(folder)).tenants
    assert [(t.name, t.weight_milli) for t in tenants] == [("m", 1000), ("a", 1000), ("b", 2000)]
    assert tenants[1].quota is not None


def test_each_problem_names_its_file_and_place(folder: Path) -> None:
    main_file(folder).write_text(MINIMAL + "tenants: [{name: m, weight: 0}]\n")
    files = {
        "a.yaml": "name: a\nweight: no\n",
        "b.yaml": "name: b\ngroup: nope\n",
        "c.yaml": "weight: 1\n",
        "d.yaml": "- name: d\n",
        "e.yaml": "name: e\n  weight: [\n",
        "f.yaml": "name: f\nname: g\n",
        "h.yaml": "name: h\nwieght: 1\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "i.yaml").write_bytes(b"\xff")
    found = problems(folder)
    starts = [text.split(": ")[0] for text in found]
    assert starts == [
        "c.yaml:3:29",
        "tenants.d/a.yaml:2:9",
        "tenants.d/b.yaml:2:8",
        "tenants.d/c.yaml:1:1",
        "tenants.d/d.yaml:1:1",
        "tenants.d/e.yaml:2:9",
        "tenants.d/f.yaml:2:1",
        "tenants.d/h.yaml:2:1",
        "tenants.d/i.yaml:1:1",
    ]
    assert found[2] == (
        "tenants.d/b.yaml:2:8: group: 'nope' is no group; add it to groups (known: none)"
    )
    assert found[3] == "tenants.d/c.yaml:1:1: the key 'name' is missing; add it"
    assert "has to be a mapping with the keys of one tenant" in found[4]
    shown = json.loads(run("check", str(main_file(folder)), "--json").output)
    assert shown["errors"][1]["file"] == str(folder / "a.yaml")


def test_a_tenant_that_two_files_list_names_both(folder: Path) -> None:
    main_file(folder).write_text(MINIMAL + "tenants: [{name: a}]\n")
    (folder / "x.yaml").write_text("weight: 1\nname: a\n")
    (folder / "y.yaml").write_text("name: b\n")
    (folder / "z.yaml").write_text("name: b\n")
    assert problems(folder) == [
        "tenants.d/x.yaml:2:7: name: this tenant stands twice, first at c.yaml: tenants[0].name;"
        " remove one",
        "tenants.d/z.yaml:1:7: name: this tenant stands twice, first at tenants.d/y.yaml: name;"
        " remove one",
    ]


def test_a_folder_that_cannot_be_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (folder / f"{name}.yaml").write_text(f"name: {name}\n")
    monkeypatch.setattr(tenants_dir, "TENANT_FILES_MAX", 1)
    message = "c.yaml:2:14: tenants_dir: tenants.d has 2 files; at most 1 can be"
    assert problems(folder) == [message]
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    (found,) = problems(folder)
    assert found == (
        "c.yaml:2:14: tenants_dir: cannot read the folder tenants.d: No such file or directory"
    )


class Watched:
    """Watches a file and its folder with a reloader, which looks when it is asked to."""

    def __init__(self, file: Path) -> None:
        self.taken: list[list[str]] = []
        config, digest = load_version(file)
        assert config.tenants_dir is not None
        folder = config.resolve(config.tenants_dir)
        self.reloader = Reloader(file, self._take, digest=digest, tenants_dir=folder)

    def _take(self, config: Config) -> None:
        self.taken.append([tenant.name for tenant in config.tenants])

    async def look(self, times: int) -> list[list[str]]:
        for _ in range(times):
            await self.reloader.look()
        taken, self.taken = self.taken, []
        return taken


async def test_a_watched_folder_is_loaded_when_it_is_quiet(folder: Path) -> None:
    watched = Watched(main_file(folder))
    assert await watched.look(3) == []
    (folder / "a.yaml").write_text("name: a\n")
    assert await watched.look(1) == []
    (folder / "b.yaml").write_text("name: b\n")
    assert await watched.look(1) == []
    assert await watched.look(3) == [["a", "b"]]
    (folder / "b.yaml").write_text("name: c\n")
    assert await watched.look(3) == [["a", "c"]]
    (folder / "a.yaml").rename(folder / "z.yaml")
    assert await watched.look(3) == [["c", "a"]]
    (folder / "z.yaml").unlink()
    assert await watched.look(3) == [["c"]]


async def test_a_wrong_file_is_reported_once_and_mended(folder: Path) -> None:
    watched = Watched(main_file(folder))
    (folder / "a.yaml").write_text("name: a\nweight: 0\n")
    assert await watched.look(5) == []
    assert watched.reloader._loading.failures == 1
    assert "a.yaml:2:9" in watched.reloader._loading.problem
    (folder / "a.yaml").write_text("name: a\n")
    assert await watched.look(3) == [["a"]]
    main_file(folder).write_text("tenants_dir: [\n")
    assert await watched.look(5) == []
    assert watched.reloader._loading.failures == 2
    main_file(folder).write_text(MINIMAL)
    assert await watched.look(5) == [["a"]]


async def test_a_config_map_that_swaps_its_link_is_loaded(folder: Path) -> None:
    (folder / "..v1").mkdir()
    (folder / "..v1" / "a.yaml").write_text("name: a\n")
    (folder / "..data").symlink_to("..v1")
    (folder / "a.yaml").symlink_to("..data/a.yaml")
    watched = Watched(main_file(folder))
    assert [tenant.name for tenant in load(main_file(folder)).tenants] == ["a"]
    (folder / "..v2").mkdir()
    (folder / "..v2" / "a.yaml").write_text("name: b\n")
    (folder / "..new").symlink_to("..v2")
    (folder / "..new").rename(folder / "..data")
    assert await watched.look(3) == [["b"]]


async def test_another_folder_is_watched_after_a_reload(folder: Path) -> None:
    other = folder.parent / "other.d"
    other.mkdir()
    watched = Watched(main_file(folder))
    main_file(folder).write_text(MINIMAL.replace("tenants.d", "other.d"))
    assert await watched.look(5) == [[]]
    (other / "a.yaml").write_text("name: a\n")
    assert await watched.look(3) == [["a"]]
    (folder / "b.yaml").write_text("name: b\n")
    assert await watched.look(3) == []
