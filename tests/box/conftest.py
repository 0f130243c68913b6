"""Builds an empty Debian and the images on it, once for all tests."""

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy import image
from deploy.release import DIST

from .tools import SUITE, Containers, debian_sources, need, need_root, run

BASE = "localhost/base"


@pytest.fixture(scope="session")
def containers() -> Iterator[Containers]:
    """Return a storage that holds BASE, an image with the files of `debian:bookworm-slim`."""
    need("mmdebstrap", "buildah", "podman", "runc")
    need_root()
    storage = Containers(Path(tempfile.mkdtemp(prefix="box")))
    try:
        archive = storage.folder / "base.tar"
        run(["mmdebstrap", "--quiet", "--variant=apt", SUITE, archive, *debian_sources()])
        storage.import_root(archive, BASE)
        archive.unlink()
        yield storage
    finally:
        storage.remove()


@pytest.fixture(scope="session")
def wheels() -> Path:
    """Return a folder that holds the wheels of our packages and of all that they need."""
    if not any(DIST.glob("schedsvc-*.whl")):
        pytest.fail("dist/ holds no packages; run `make dist`")
    image.gather()
    return image.CONTEXT / "wheels"


@dataclass(frozen=True)
class Images:
    """Names both images, and holds a demo of the laboratory that runs or has ended."""

    service: str
    lab: str
    demo: subprocess.Popen[bytes]
    shown: Path


@pytest.fixture(scope="session")
def images(
    containers: Containers, wheels: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Images]:
    service, lab = (f"localhost/{image.tag(stage)}" for stage in ("service", "lab"))
    shown = tmp_path_factory.mktemp("demo")
    shown.chmod(0o777)
    run(image.build_command("lab", containers.builder, BASE))
    # The demo waits for most of its half minute, so it runs while the other image is built.
    options = (f"--volume={shown}:/tmp/demo", "--name=demo")
    output = (shown / "log").open("wb")
    demo = subprocess.Popen(
        containers.command(lab, options=options), stdout=output, stderr=subprocess.STDOUT
    )
    try:
        run(image.build_command("service", containers.builder, BASE))
        yield Images(service, lab, demo, shown)
    finally:
        containers.podman("rm", "--force", "--ignore", "--time=0", "demo")
        demo.wait()
        output.close()


@pytest.fixture(scope="session")
def service(images: Images) -> str:
    """Return the name of the image with the scheduler."""
    return images.service


@pytest.fixture(scope="session")
def lab(images: Images) -> str:
    """Return the name of the image with the laboratory."""
    return images.lab
