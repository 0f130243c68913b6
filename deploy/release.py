"""Builds the packages of a release, checks them, and prints what is left for a person to do.

`make dist` runs it in .venv. It writes wheels and source distributions of `schedsvc`,
`schedsvc-client`, `schedsvc-vllm`, `schedsvc-litellm` and `schedsvc-lab` to dist/, the Helm chart
to dist/chart/, and uploads nothing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
#: Distribution to its folder, in the order in which they have to be published and claimed:
#: each one requires only those before it. An extra of `schedsvc` requires the last.
PROJECTS = {
    "schedsvc-client": ROOT / "clients/python",
    "schedsvc-vllm": ROOT / "clients/vllm",
    "schedsvc-litellm": ROOT / "clients/litellm",
    "schedsvc": ROOT,
    "schedsvc-lab": ROOT / "lab",
}
#: The page that shows users which version to install.
PAGE = "docs/use/install.md"
CHART = "deploy/chart/schedsvc"
#: Other files that state the version: image, chart, Kustomize, compose, pages, npm, Maven, CMake.
OTHERS = (
    "deploy/Containerfile",
    f"{CHART}/Chart.yaml",
    "deploy/kustomize/base/kustomization.yaml",
    "deploy/kustomize/gate/kustomization.yaml",
    "deploy/kustomize/example/kustomization.yaml",
    "deploy/compose.yaml",
    "docs/use/vllm.md",
    "clients/node/package.json",
    "clients/java/pom.xml",
    "clients/java/README.md",
    "clients/cpp/CMakeLists.txt",
)
_FORM = re.compile(r"\d+(\.\d+){1,2}((a|b|rc|\.post|\.dev)\d+)?")
_VERSION = re.compile(r'(?m)^(version = )"[^"]*"')
# Without a version, `schedsvc` in quotation marks may be a folder.
_PIN = re.compile(r'"(?:(schedsvc-[a-z]+)|(schedsvc)(?=[=<>!~]))(?:[=<>!~][^"\[\]]*)?"')
_ARGUMENT = re.compile(r"(?m)^(ARG VERSION=).*$")
_NPM = re.compile(r'("name": "schedsvc",\n *"version": )"[^"]*"')
_MAVEN = re.compile(r"(<artifactId>schedsvc-client</artifactId>\n *<version>)[^<]*")
_CMAKE = re.compile(r"(project\(schedsvc VERSION )[\d.]+")
_CHART = re.compile(r"(?m)^(version: )[\d.]+\S*$")
_APP = re.compile(r'(?m)^(appVersion: )"[^"]*"')
_NEW_TAG = re.compile(r"(newTag: )[^\s,}]+")
_TAG = re.compile(r"\b(schedsvc(?:-lab)?:)\d+\.[\w.]*\w")
_DIGEST = r"sha256:[0-9a-f]{64}"
#: The files that name images, each by a tag and, in a release, by a digest.
IMAGE_FILES = (
    "deploy/Containerfile",
    "deploy/compose.yaml",
    "deploy/kustomize/example/vllm.yaml",
    "deploy/kustomize/example/kustomization.yaml",
    f"{CHART}/values.yaml",
)
_IMAGE = re.compile(rf"((?:image: |ARG BASE=)([\w./-]+):[\w.-]+)(@{_DIGEST})?")
_SHOWN = re.compile(r"'(schedsvc(?:-[a-z]+)?(?:\[[a-z]+\])?)==[^']*'")

CHECKLIST = """
Left to do, in this order:
 1. Claim these names on the package index before you publish the version or its documents:
    {names}.
    `schedsvc` and its extras require the others. If a name is free, a stranger can publish a
    package of that name and of the pinned version, and `pip install schedsvc` installs it.
 2. Check that the URLs in the pyproject.toml files lead to pages of yours.
 3. Check the contract: `buf breaking` with the FILE rules holds against the last release.
 4. Move what is under [Unreleased] in CHANGELOG.md below a heading `{version}`, and tag the commit.
 5. Build the wheels of all Python versions on the tag: `cibuildwheel --output-dir dist`, and
    `cibuildwheel --output-dir dist lab`. They replace dist/schedsvc*-{version}-*-linux_*.whl,
    which an index does not accept.
 6. `twine upload` the packages in the order of 1.
 7. Build the images on the tag: `make image`. Push {images}
    to your registry. Write its name to `image.repository` in deploy/chart/schedsvc/values.yaml and
    to `newName` in deploy/kustomize/example/kustomization.yaml. A tag may be moved to another
    image, so write the digest of each, as your registry shows it, by
    `deploy/release.py --set-digest NAME=sha256:...`. {unpinned}
 8. `npm run build && npm pack && npm publish ./schedsvc-*.tgz` in clients/node.
 9. `helm push dist/chart/schedsvc-{chart}.tgz` to your registry of charts.
"""


def version() -> str:
    """Return the version, which the top pyproject.toml states for all packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def with_version(file: Path, new: str) -> str:
    """Return the text of a file with this version, and pins to our packages of this version."""
    text = file.read_text()
    if file.suffix == ".toml":
        pinned = _PIN.sub(rf'"\1\2=={new}"', text)
        # The package's own name stands in quotation marks too, and gets no version.
        named = re.sub(r'(?m)^name = "(schedsvc-[a-z]+)==[^"]*"', r'name = "\1"', pinned)
        return _VERSION.sub(rf'\1"{new}"', named, count=1)
    text = _NPM.sub(rf'\1"{chart_version(new)}"', text)
    text = _CHART.sub(rf"\g<1>{chart_version(new)}", text)
    text = _APP.sub(rf'\1"{new}"', text)
    # \g<1>, because a digit follows. CMake knows numbers alone.
    text = _CMAKE.sub(rf"\g<1>{re.sub(r'[a-z.]*[a-z].*', '', new)}", text)
    for pattern in (_MAVEN, _ARGUMENT, _NEW_TAG, _TAG):
        text = pattern.sub(rf"\g<1>{new}", text)
    return _SHOWN.sub(rf"'\1=={new}'", text)


def set_digest(name: str, digest: str) -> None:
    """Let each file name an image by a digest, beside its tag; "": by the tag alone.

    Raises ValueError if no file names the image.
    """
    at = digest and f"@{digest}"
    named = 0
    for path in IMAGE_FILES:
        text = (ROOT / path).read_text()
        found = _IMAGE.sub(lambda m: m[1] + at if m[2] == name else m[0], text)
        if name == "schedsvc":
            # The chart and Kustomize put name, tag and digest together themselves.
            found = re.sub(rf'(?m)^(  digest: )"(?:{_DIGEST})?"', rf'\1"{digest}"', found)
            entry = rf"({{name: schedsvc, .*newTag: [^\s,}}]+)(?:, digest: {_DIGEST})?}}"
            more = digest and f", digest: {digest}"
            found = re.sub(entry, rf"\g<1>{more}}}", found)
        named += found != text or bool(at and at in text)
        (ROOT / path).write_text(found)
    if not named and digest:
        raise ValueError(f"no file names the image {name}; write {', '.join(sorted(images()))}")


def images() -> dict[str, bool]:
    """Return the images that the files name, and whether all of them name a digest too."""
    found: dict[str, bool] = {}
    for path in IMAGE_FILES:
        for match in _IMAGE.finditer((ROOT / path).read_text()):
            found[match[2]] = found.get(match[2], True) and match[3] is not None
    return found


def chart_version(version: str) -> str:
    """Return a version in the form that Helm and npm ask for: 1.2rc1 is 1.2.0-rc1 there."""
    numbers, rest = re.fullmatch(r"([\d.]*\d)(.*)", version).groups()  # type: ignore[union-attr]
    padded = ".".join([*numbers.split("."), "0", "0"][:3])
    return f"{padded}-{rest.lstrip('.')}" if rest else padded


def stating() -> list[Path]:
    """Return the files that state the version."""
    projects = [folder / "pyproject.toml" for folder in PROJECTS.values()]
    return [*projects, *(ROOT / path for path in (PAGE, *OTHERS))]


def set_version(new: str) -> None:
    """Write the version to each place that states it; a new one has no images yet."""
    for name in ("schedsvc", "schedsvc-lab") if new != version() else ():
        set_digest(name, "")
    for file in stating():
        file.write_text(with_version(file, new))


def stale() -> list[str]:
    """Return the files that state another version than the top pyproject.toml."""
    wrong = [file for file in stating() if file.read_text() != with_version(file, version())]
    return [str(file.relative_to(ROOT)) for file in wrong]


def build() -> None:
    """Make the man pages, and build a source distribution and a wheel of each package."""
    shutil.rmtree(DIST, ignore_errors=True)
    # setuptools would put modules into the wheel that are no longer in the tree.
    for stale_module in (ROOT / "build").glob("lib*/**/*.py*"):
        stale_module.unlink()
    shutil.rmtree(ROOT / "deploy/man", ignore_errors=True)
    _run(str(ROOT / "deploy/man.py"), str(ROOT / "deploy/man"))
    for folder in PROJECTS.values():
        # The compiled wheel comes from the tree, which keeps what it has compiled.
        kinds = ("--sdist", "--wheel") if folder == ROOT else ()
        # This environment has the versions of constraints.txt, so the build needs none of its own.
        command = ("-m", "build", "--quiet", "--no-isolation", "--outdir", str(DIST))
        _run(*command, *kinds, str(folder))


def package_chart(folder: Path) -> Path:
    """Write the archive of the chart to a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"schedsvc-{chart_version(version())}.tgz"
    # The rules for Prometheus are a link in the folder, and Helm reads no links in an archive.
    with tarfile.open(archive, "w:gz", dereference=True) as written:
        written.add(ROOT / CHART, arcname="schedsvc")
    return archive


def check() -> None:
    """Check metadata and descriptions, and which manylinux tag the compiled wheels could have."""
    packages = sorted(str(file) for file in DIST.iterdir() if file.suffix in (".gz", ".whl"))
    _run("-m", "twine", "check", "--strict", *packages)
    if sys.platform != "linux":
        print("auditwheel: skipped, because it reads wheels of Linux alone")
        return
    for name in ("schedsvc", "schedsvc_lab"):
        [wheel] = DIST.glob(f"{name}-*-linux_*.whl")
        shown = _run("-m", "auditwheel", "show", str(wheel), capture=True)
        print(shown.strip())
        if "manylinux" not in shown:
            sys.exit(f"{wheel.name}: needs libraries that no manylinux policy allows; see above")


def _run(*arguments: str, capture: bool = False) -> str:
    """Run Python with these arguments; end if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "SCHEDSVC_CORE": "release"},
        text=True,
        stdout=subprocess.PIPE if capture else None,
    )
    if done.returncode:
        sys.exit(
            f"failed with status {done.returncode}: {' '.join(arguments)}\n{done.stdout or ''}"
        )
    return done.stdout or ""


def main(arguments: list[str] | None = None) -> None:
    """Run the steps that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--set-version",
        metavar="VERSION",
        help="write VERSION and the pins of it to each file that states it, and end",
    )
    parser.add_argument(
        "--set-digest",
        metavar="NAME=DIGEST",
        help="write the digest of an image to each file that names the image, and end",
    )
    given = parser.parse_args(arguments)
    if given.set_digest is not None:
        name, _, digest = given.set_digest.partition("=")
        if not re.fullmatch(_DIGEST, digest):
            parser.error(f"--set-digest: {digest!r} is no digest; write it as sha256:64 hex digits")
        try:
            set_digest(name, digest)
        except ValueError as error:
            parser.error(f"--set-digest: {error}")
        return
    if given.set_version is not None:
        if not _FORM.fullmatch(given.set_version):
            parser.error(
                f"--set-version: {given.set_version!r} is no version; write it as 1.2.3 or 1.2.3rc1"
            )
        set_version(given.set_version)
        return
    if wrong := stale():
        sys.exit(
            f"{', '.join(wrong)}: not version {version()}, which pyproject.toml states; run"
            f" deploy/release.py --set-version {version()}"
        )
    build()
    # Not in dist/ itself: pip would take it for a source distribution of schedsvc.
    package_chart(DIST / "chart")
    check()
    pushed = f"schedsvc:{version()} and schedsvc-lab:{version()}"
    tagged = ", ".join(name for name, is_pinned in images().items() if not is_pinned)
    unpinned = f"By a tag alone: {tagged}." if tagged else "All have one."
    chart = chart_version(version())
    names = ", ".join(PROJECTS)
    print(
        CHECKLIST.format(
            names=names, version=version(), images=pushed, chart=chart, unpinned=unpinned
        )
    )


if __name__ == "__main__":
    main()
