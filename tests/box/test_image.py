"""Tests the images: what they hold, how they start, and that a restart keeps the state."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.release import version
from tests.waiting import wait_until

from .conftest import Images
from .tools import Containers, run

pytestmark = [pytest.mark.install, pytest.mark.timeout(900)]

SIZE_MAX = 150_000_000
START_CPU_S_MAX = 1.0
#: The service may write its socket, its state, and the tokens that its first start makes.
VOLUMES = ("run/schedsvc", "var/lib/schedsvc", "var/lib/schedsvc-tokens")


@pytest.fixture(scope="session")
def root(containers: Containers, service: str) -> Iterator[Path]:
    """Return the files of the service's image."""
    container = containers.buildah("from", service).strip()
    yield Path(containers.buildah("mount", container).strip())
    containers.buildah("rm", container)


@contextmanager
def serving(
    containers: Containers, service: str, *options: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the service until the block ends; its container's name, and the line of `ready`."""
    # With the same name two of them could not run at once.
    options = ("--name=serving", *options)
    command = containers.command(service, options=options)
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if '"event": "ready"' in line:
                yield "serving", json.loads(line)
                break
        else:
            pytest.fail("".join(seen))
        containers.podman("stop", "--time=40", "serving")
    finally:
        containers.podman("rm", "--force", "--ignore", "--time=0", "serving")
        process.wait()
        process.stderr.close()


def test_service_is_small_and_has_no_shell(root: Path) -> None:
    files = [path.lstat() for path in root.rglob("*") if path.is_symlink() or path.is_file()]
    assert sum(file.st_size for file in files) < SIZE_MAX
    assert not [name for name in ("sh", "bash", "apt-get", "dpkg", "pip") if in_path(root, name)]
    # `cluster` in the configuration needs it.
    assert (root / "opt/schedsvc/lib/python3.11/site-packages/redis/asyncio").is_dir()
    # Scanners read these.
    assert "Version: 3.11" in (root / "var/lib/dpkg/status.d/python3.11-minimal").read_text()


def in_path(root: Path, name: str) -> bool:
    return any(
        (root / folder / name).exists() for folder in ("usr/bin", "usr/sbin", "opt/schedsvc/bin")
    )


def test_service_runs_as_a_user_without_rights(containers: Containers, service: str) -> None:
    [found] = json.loads(containers.podman("image", "inspect", service))
    settings, check = found["Config"], found["Healthcheck"]["Test"]
    assert settings["User"] == "65532:65532"
    assert check == ["CMD", "/opt/schedsvc/bin/schedsvc", "health", "liveness"]
    assert settings["Labels"]["org.opencontainers.image.version"] == version()
    assert settings["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert set(settings["Volumes"]) == {f"/{volume}" for volume in VOLUMES}


def test_every_writable_file_is_in_a_volume(root: Path) -> None:
    theirs = {p.relative_to(root) for p in root.rglob("*") if p.lstat().st_uid == 65532}
    assert theirs == set(map(Path, VOLUMES))


def test_service_starts_with_little_cpu(containers: Containers, service: str) -> None:
    with serving(containers, service):
        fields = (
            Path(f"/proc/{serving_pid(containers)}/stat").read_text().rpartition(")")[2].split()
        )
    ticks = int(fields[11]) + int(fields[12])  # time of the user and of the system
    assert ticks / os.sysconf("SC_CLK_TCK") < START_CPU_S_MAX


def serving_pid(containers: Containers) -> int:
    """Return the scheduler's process on this host, the child of process 1; 0: not there yet."""
    init = containers.podman("inspect", "--format={{.State.Pid}}", "serving").strip()
    return int(Path(f"/proc/{init}/task/{init}/children").read_text() or 0)


@pytest.mark.parametrize("wait_s", [0.0, 0.1, 0.3, 0.6, 1.0, 1.5])
def test_stop_during_the_start_is_not_lost(
    containers: Containers, service: str, wait_s: float
) -> None:
    command = containers.command(service, options=("--name=serving",))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_running(containers) and serving_pid(containers))
        time.sleep(wait_s)
        containers.podman("stop", "--time=60", "serving")
    finally:
        containers.podman("rm", "--force", "--ignore", "--time=0", "serving")
    # Before Python's first line the default action ends it. If the signal is lost, 137 remains.
    assert process.wait() in (0, 128 + signal.SIGTERM)


def is_running(containers: Containers) -> bool:
    return "serving" in containers.podman("ps", "--format={{.Names}}").split()


def test_health_command_sees_a_drain(containers: Containers, service: str) -> None:
    with serving(containers, service) as (name, ready):
        # Process 1 is an init, which loses no signal.
        assert ready["pid"] > 1
        ask = ("exec", name, "schedsvc", "health")
        assert containers.podman(*ask, "readiness") == "readiness: SERVING\n"
        assert containers.podman("healthcheck", "run", name).strip() in ("", "healthy")
        containers.podman("exec", name, "schedsvc", "drain", "--all")
        with pytest.raises(AssertionError, match="readiness: NOT_SERVING"):
            containers.podman(*ask, "readiness")
        # So a drain does not restart the container.
        assert containers.podman("healthcheck", "run", name).strip() in ("", "healthy")


def test_new_container_on_the_volume_keeps_the_state(containers: Containers, service: str) -> None:
    options = ("--volume=kept:/var/lib/schedsvc",)
    with serving(containers, service, *options) as (name, _):
        containers.podman("exec", name, "schedsvc", "mode", "dry_run")
    with serving(containers, service, *options) as (name, _):
        shown = json.loads(containers.podman("exec", name, "schedsvc", "mode", "--json"))
    assert shown["overlay"] == "dry_run"


def test_gate_folder_is_found_on_pythonpath(containers: Containers, service: str) -> None:
    code = (
        "import schedsvc_vllm.gate, schedsvc_client; from importlib.metadata import entry_points;"
        "print(schedsvc_vllm.gate.__file__, schedsvc_client.__file__,"
        " *entry_points(group='vllm.stat_logger_plugins').names)"
    )
    options = ("--env=PYTHONPATH=/opt/gate", "--entrypoint=/opt/schedsvc/bin/python")
    gate, client, *plugins = run(containers.command(service, "-c", code, options=options)).split()
    assert {gate, client} == {
        "/opt/gate/schedsvc_vllm/gate.py",
        "/opt/gate/schedsvc_client/__init__.py",
    }
    assert plugins == ["schedsvc"]


def test_lab_shows_the_demo(images: Images) -> None:
    assert images.demo.wait(120) == 0, (images.shown / "log").read_text()
    report = json.loads((images.shown / "report.json").read_text())
    assert report["with"]["tenants"]["quiet"]["completed"]
    assert (images.shown / "demo.png").stat().st_size > 10_000
