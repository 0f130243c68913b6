"""An empty Debian and the images that are built on it, once for all tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import image
from deploy.release import DIST

from .tools import SUITE, Containers, debian_sources, need, need_root, run

BASE = "localhost/base"


@pytest.fixture(scope="session")
def containers() -> Iterator[Containers]:
    """A storage that holds the image BASE: what `debian:bookworm-slim` holds, and no more."""
    need("mmdebstrap", "buildah", "podman", "runc")
    need_root()
    if not any(DIST.glob("schedsvc-*.whl")):
        pytest.fail("dist/ holds no packages; run `make dist`")
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
    """A folder that holds the wheels of our packages and of all that they need."""
    image.gather()
    return image.CONTEXT / "wheels"


@pytest.fixture(scope="session")
def service(containers: Containers, wheels: Path) -> str:
    """The name of the image with the scheduler."""
    run(image.build_command("service", containers.builder, BASE))
    return f"localhost/{image.tag('service')}"


@pytest.fixture(scope="session")
def lab(containers: Containers, wheels: Path) -> str:
    """The name of the image with the laboratory."""
    run(image.build_command("lab", containers.builder, BASE))
    return f"localhost/{image.tag('lab')}"
