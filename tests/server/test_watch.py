"""Tests a watched file: loaded when quiet, compared by content, and no edit is lost."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import structlog
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from schedsvc.config import Config, file_digest, load_version
from schedsvc.server.reload import Reloader
from tests.waiting import until, wait_until

from .test_cli import scheduler

MINIMAL = "listeners: [{unix: /tmp/unused}]\n"


class Watched:
    """Watches a file with a reloader, which looks when it is asked to."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.taken: list[list[str]] = []
        self._reloader = Reloader(file, self._take, digest=file_digest(file))

    def _take(self, config: Config) -> None:
        self.taken.append([tenant.name for tenant in config.tenants])

    async def look(self, times: int) -> list[list[str]]:
        """Look, and return what was loaded."""
        for _ in range(times):
            await self._reloader.look()
        taken, self.taken = self.taken, []
        return taken


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL)
    return Watched(file)


async def test_file_written_in_two_steps_is_loaded_whole(watched: Watched) -> None:
    assert await watched.look(3) == []
    with watched.file.open("w") as stream:
        stream.write(MINIMAL + "tenants:\n- {name: a}\n")
        stream.flush()
        assert await watched.look(1) == []
        stream.write("- {name: b}\n")
    assert await watched.look(1) == []
    assert await watched.look(3) == [["a", "b"]]


async def test_edit_with_same_size_and_time_is_loaded(watched: Watched) -> None:
    for name in "ab":
        watched.file.write_text(f"{MINIMAL}tenants: [{{name: {name}}}]\n")
        os.utime(watched.file, (1_000, 1_000))
        assert await watched.look(3) == [[name]]


async def test_touched_file_is_not_loaded_again(watched: Watched) -> None:
    os.utime(watched.file, (1_000, 1_000))
    assert await watched.look(3) == []


async def test_change_during_the_read_is_not_taken(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two equal looks and the read of the file a writer begins."""
    text = MINIMAL + "tenants:\n- {name: a}\n"
    watched.file.write_text(text)
    await watched.look(1)

    def append(*_: object, **__: object) -> None:
        watched.file.write_text(text + "- {name: b")

    # The log says `config_changed` right before the read.
    monkeypatch.setattr("schedsvc.server.reload._log.info", append)
    assert await watched.look(1) == []
    monkeypatch.undo()
    watched.file.write_text(text + "- {name: b}\n")
    assert await watched.look(2) == [["a", "b"]]


async def test_missing_file_is_reported_once(watched: Watched) -> None:
    watched.file.unlink()
    with structlog.testing.capture_logs() as logs:
        assert await watched.look(5) == []
    assert [entry["event"] for entry in logs] == [
        "config_changed",
        "config_problem",
        "config_rejected",
    ]
    watched.file.write_text(MINIMAL + "tenants: [{name: a}]\n")
    assert await watched.look(2) == [["a"]]


async def test_watcher_survives_a_reload_that_raises(watched: Watched) -> None:
    failing = [RuntimeError("a defect")]

    def take(config: Config) -> None:
        if failing:
            raise failing.pop()
        watched.taken.append([tenant.name for tenant in config.tenants])

    reloader = Reloader(watched.file, take, digest=file_digest(watched.file))
    watch = asyncio.ensure_future(reloader.watch(0.01))
    watched.file.write_text(MINIMAL + "tenants: [{name: a}]\n")
    await until(lambda: not failing, "the first reload failed")
    watched.file.write_text(MINIMAL + "tenants: [{name: b}]\n")
    await until(lambda: bool(watched.taken), "the second was taken")
    assert watched.taken == [["b"]]
    assert not watch.done()
    watch.cancel()


class Volume:
    """Mounts a ConfigMap as Kubernetes does: `..data` is swapped, the file's link stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "c.yaml"
        self.file.symlink_to(Path("..data") / "c.yaml")
        self._versions = 0

    def swap(self, text: str) -> None:
        version = self.folder / f"..v{self._versions}"
        self._versions += 1
        version.mkdir()
        (version / "c.yaml").write_text(text)
        os.utime(version / "c.yaml", (1_000, 1_000))
        link = self.folder / "..data_tmp"
        link.symlink_to(version.name)
        link.replace(self.folder / "..data")


async def test_swap_between_read_and_first_look_is_loaded(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    volume.swap(MINIMAL)
    _, digest = load_version(volume.file)
    volume.swap(MINIMAL + "tenants: [{name: a}]\n")
    taken: list[Config] = []
    reloader = Reloader(volume.file, taken.append, digest=digest)
    await reloader.look()
    await reloader.look()
    assert [tenant.name for config in taken for tenant in config.tenants] == ["a"]


def play_swaps(folder: Path, starts: int, swaps: int) -> None:
    """Swap the file as soon as a process has read it, and then while it runs; none is lost."""
    folder.mkdir()
    volume = Volume(folder)
    state = folder / "state.db"

    def text(weight: int) -> str:
        return (
            "listeners: [{unix: s.sock}]\nstate: {file: state.db}\n"
            f"tenants: [{{name: a, weight: {weight}}}]\n"
        )

    def wait_for(weight: int, ask: Callable[[], float]) -> None:
        wait_until(lambda: ask() == weight, f"weight {weight}")

    weight = 1
    for _ in range(starts):
        volume.swap(text(weight))
        state.unlink(missing_ok=True)

        def swap_early() -> bool:
            nonlocal weight
            # The state file is made after the read of the configuration.
            if not state.exists():
                return False
            weight += 1
            volume.swap(text(weight))
            return True

        with (
            scheduler(volume.file, "--watch-config", "0.1", early=swap_early) as (process, ready),
            grpc.insecure_channel(ready["targets"][0]) as channel,
        ):
            stub = stubs.SchedulerServiceStub(channel)

            def ask(stub: stubs.SchedulerServiceStub = stub) -> float:
                flows = stub.Stats(pb.StatsRequest(tenants=["a"])).flows
                return float(flows[0].weight_milli / 1_000)

            wait_for(weight, ask)
            for _ in range(swaps):
                weight += 1
                volume.swap(text(weight))
                wait_for(weight, ask)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
        (folder / "ready.json").unlink(missing_ok=True)


def test_swaps_during_start_and_run_are_not_lost(tmp_path: Path) -> None:
    play_swaps(tmp_path / "v", starts=1, swaps=4)


@pytest.mark.slow
def test_two_hundred_swaps_are_not_lost(tmp_path: Path) -> None:
    play_swaps(tmp_path / "v", starts=20, swaps=9)
