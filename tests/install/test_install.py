"""Installs from dist/ alone, in bare environments on each Python of this machine."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest
import tomllib

from deploy.release import DIST, PROJECTS, ROOT
from tests.waiting import wait_for_start

from .environments import (
    VERSION,
    Environment,
    clean,
    find_python,
    no_binary,
    unoptimised_compiler,
)
from .stranger import STRANGE, offer

pytestmark = [pytest.mark.install, pytest.mark.timeout(900)]

# The packages that only the extra `lab` needs.
LAB_PACKAGES = {"httptools", "matplotlib", "numpy", "starlette", "tokenizers", "uvicorn"}
#: The size of the compiled core on disk.
CORE_BYTES_MAX = 3_000_000
RELEASE_FLAGS = " ".join(tomllib.loads((ROOT / "_core/flags.toml").read_text())["release"]) + "\n"
PYTHONS = ("3.11", "3.12", "3.13")
# dist/ holds a compiled wheel for the Python that built it alone.
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
# The installs of the page: the scheduler, the laboratory, and the gate.
PAGE = (ROOT / "docs/use/install.md").read_text()
SHOWN = re.findall(r"pip install --find-links dist (.+)$", PAGE, re.MULTILINE)
LINES = [shlex.split(line) for line in SHOWN]


@pytest.fixture(autouse=True)
def built() -> None:
    if not any(DIST.glob("schedsvc-*.tar.gz")):
        pytest.skip("dist/ holds no packages; `make test-dist` builds them")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return where pip looks: our packages, and a stranger's of the names that ours require."""
    offer(tmp_path / "stranger", "schedsvc-client", "schedsvc-vllm", "schedsvc-lab")
    return DIST, tmp_path / "stranger"


@pytest.mark.parametrize(
    ("python", "kind"),
    [(OWN, "wheels"), (OWN, "sdists"), *((other, "") for other in PYTHONS if other != OWN)],
)
def test_packages_install_serve_and_show_the_demo(
    python: str, kind: str, tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    found = find_python(python)
    if found is None:
        pytest.skip(f"Python {python} with its headers is not on this machine")
    environment = Environment(tmp_path / "env", folders)
    environment.create(found)
    if kind == "wheels":
        environment.install("--only-binary=:all:", *LINES[0])
        check_the_service_alone(environment)
    else:
        # Without this, pip takes the wheel that it built from an archive of this name before.
        options = ["--no-cache-dir", "--no-deps", *([no_binary()] if kind else [])]
        pins = [f"{name}=={VERSION}" for name in PROJECTS]
        environment.install(*options, *pins, compiler=unoptimised_compiler(tmp_path))
    environment.install("--only-binary=:all:", *LINES[1])
    # The plug-in needs no LiteLLM to be installed.
    environment.install("--only-binary=:all:", f"schedsvc-litellm=={VERSION}")

    ours = {name: v for name, v in environment.installed().items() if name in PROJECTS}
    assert ours == dict.fromkeys(PROJECTS, VERSION)
    assert environment.run([environment.command, "--version"]) == f"schedsvc {VERSION}\n"
    assert "--config" in environment.run([environment.command, "serve", "--help"])
    show = "from schedsvc._core import BUILD_FLAGS; print(BUILD_FLAGS)"
    assert environment.run([str(environment.folder / "bin/python"), "-c", show]) == RELEASE_FLAGS
    for file in ("man/man1/schedsvc-serve.1", "schedsvc/systemd/schedsvc.service"):
        assert (environment.folder / "share" / file).exists()
    out = tmp_path / "demo"
    environment.run([environment.command, "demo", "--quick", "--out", str(out)])
    assert json.loads((out / "report.json").read_text())["with"]["tenants"]["quiet"]["completed"]


def check_the_service_alone(environment: Environment) -> None:
    """Check that the service serves without the laboratory, whose commands say what to install."""
    base = environment.installed()
    assert {base["schedsvc"], base["schedsvc-client"]} == {VERSION}
    assert not (LAB_PACKAGES | {"schedsvc-vllm", "schedsvc-lab"}) & base.keys()
    serve_and_ask(environment, environment.folder)
    for arguments in (["emulate"], ["demo", "--quick"]):
        refused = environment.run([environment.command, *arguments], fails=True)
        assert "pip install 'schedsvc[lab]'" in refused


def serve_and_ask(environment: Environment, folder: Path) -> None:
    """Run the scheduler of an environment, ask it for its state, and let it end."""
    config, ready = folder / "c.yaml", folder / "ready.json"
    address = "'127.0.0.1:0'"
    config.write_text(
        f"listeners: [{{tcp: {address}}}]\nmetrics: {{listen: {address}}}\ntenants: [{{name: a}}]\n"
    )
    command = [environment.command, "serve", "--config", str(config), "--ready-file", str(ready)]
    process = subprocess.Popen(command, env=clean(), stderr=subprocess.PIPE, text=True)
    try:
        wait_for_start(process, ready.exists)
        addresses = json.loads(ready.read_text())
        target = addresses["targets"][0]
        console = addresses["metrics"].removesuffix("metrics") + "console/"
        for name in ("", "console.mjs", "console.css", "state.json"):
            with urllib.request.urlopen(console + name, timeout=30) as answer:
                assert answer.status == 200
        shown = environment.run([environment.command, "stats", "--json", "--target", target])
        assert "a" in [flow["tenant"] for flow in json.loads(shown)["flows"]]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def beside_a_stranger(tmp_path: Path, folders: tuple[Path, Path]) -> Environment:
    environment = Environment(tmp_path / "env", folders)
    environment.create(sys.executable)
    return environment


def test_gate_line_installs_ours_beside_a_stranger(beside_a_stranger: Environment) -> None:
    found = beside_a_stranger.resolved(*LINES[2])
    ours = {"schedsvc-vllm": VERSION, "schedsvc-client": VERSION}
    assert {name: found[name] for name in ours} == ours


def test_name_without_version_installs_the_stranger(beside_a_stranger: Environment) -> None:
    assert beside_a_stranger.resolved("schedsvc-client") == {"schedsvc-client": STRANGE}


def tracked(folder: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.splitlines())


def test_wheels_hold_the_files_of_the_packages_alone() -> None:
    for name, folder in PROJECTS.items():
        module = name.replace("-", "_")
        [wheel] = DIST.glob(f"{module}-{VERSION}-*.whl")
        inside = set(zipfile.ZipFile(wheel).namelist())
        prefix = folder.relative_to(ROOT).as_posix()
        path = module if prefix == "." else f"{prefix}/{module}"
        wanted = {file[len(path) - len(module) :] for file in tracked(path)}
        # Compiled modules are the only files that are not in the tree.
        found = {file for file in inside if file.startswith(f"{module}/") and ".so" not in file}
        assert found == wanted
        assert any(file.endswith("licenses/LICENSE") for file in inside)


@pytest.mark.parametrize(
    ("name", "folder", "sources"),
    [
        ("schedsvc", "", "_core"),
        ("schedsvc", "", "schedsvc/transport"),
        ("schedsvc_lab", "lab/", "lab/schedsvc_lab"),
    ],
)
def test_sdist_holds_sources_alone_of_what_is_compiled(
    name: str, folder: str, sources: str
) -> None:
    with tarfile.open(DIST / f"{name}-{VERSION}.tar.gz") as archive:
        inside = {folder + name.partition("/")[2] for name in archive.getnames()}
    assert tracked(sources) <= inside
    assert not [name for name in inside if name.endswith((".c", ".so"))]


@pytest.mark.parametrize("name", ["schedsvc", "schedsvc_lab"])
def test_wheel_holds_each_module_with_c_types_compiled(name: str) -> None:
    [wheel] = DIST.glob(f"{name}-{VERSION}-*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    typed = {file.removesuffix(".pxd") for file in inside if file.endswith(".pxd")}
    assert typed
    compiled = {file.partition(".")[0] for file in inside if file.endswith(".so")}
    assert compiled - {"schedsvc/_core"} == typed


def sections(file: Path) -> set[str]:
    """Return the names of the sections of a binary."""
    shown = subprocess.run(["readelf", "-SW", file], capture_output=True, text=True, check=True)
    return set(re.findall(r"^ +\[ *\d+\] (\.\S+)", shown.stdout, re.MULTILINE))


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is missing")
def test_core_in_the_wheel_is_small_and_has_names_but_no_debug_sections(tmp_path: Path) -> None:
    """The names of its functions are read by profilers."""
    [wheel] = DIST.glob(f"schedsvc-{VERSION}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.startswith("schedsvc/_core.cpy")]
        core = Path(archive.extract(name, tmp_path))
    assert core.stat().st_size <= CORE_BYTES_MAX
    found = sections(core)
    assert {".text", ".symtab"} <= found
    assert not [section for section in found if section.startswith(".debug")]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is missing")
def test_sections_of_a_debugger_are_found(tmp_path: Path) -> None:
    source, compiled = tmp_path / "one.c", tmp_path / "one.so"
    source.write_text("int one(void) { return 1; }\n")
    subprocess.run(["cc", "-g", "-shared", "-o", compiled, source], check=True)
    assert ".debug_info" in sections(compiled)
