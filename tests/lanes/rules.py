"""Stated rules for what the import graph cannot see: files that are not Python, and the lanes.

A rule maps files to what a change of them stands for. All rules that match a file hold. A file
that no rule matches, and that no Python file names, stands for everything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: The command `schedsvc`, whose table names modules by text.
CLI = "schedsvc/cli/__init__.py"
#: Files whose strings list modules that no test needs for its use: tables, and imports ahead.
LISTS = ("tests/tidy/", "tests/zygote.py")
#: Code that the service imports only if its configuration has `cluster`, as tests/tidy holds.
CLUSTER = "schedsvc/cluster/"
#: Folders whose files are no product: they test or run the files that they name.
TESTS_SIDE = ("tests/", "bench/", "deploy/", "lab/schedsvc_lab/demo/")
#: The interface of the compiled core, and the generated stubs of the contract.
COMPILED = ("schedsvc/_core", "clients/python/schedsvc_client/v1/")
#: The parts of the product that drive the core in virtual time.
_DRIVERS = ("lab/schedsvc_lab/sim/", "lab/schedsvc_lab/faults/", "lab/schedsvc_lab/advise/")

#: The tests that a change of the core or of the contract runs whole.
CORE_TESTS = ("tests/core/", "tests/lab/faults/", "tests/cluster/", "tests/recording/")

#: The tests of the clients that each have a lane.
UNARY_CLIENTS = ("tests/go/", "tests/java/", "tests/cpp/")


def drives_core(path: str) -> bool:
    """Return whether a file's use of the core makes its tests judge the core.

    Every program of the service leads to the core. So a change of the core would run every test
    of a process, which sees little of it. The tests of CORE_TESTS, of the simulators, and those
    that call the core themselves judge it.
    """
    return path.startswith((*TESTS_SIDE, *_DRIVERS)) or not path.startswith(
        ("schedsvc/", "clients/", "lab/")
    )


@dataclass(frozen=True)
class Rule:
    """Selects files by a pattern, and states what a change of one stands for."""

    pattern: str
    why: str
    tests: tuple[str, ...] = ()  # folders or files of tests
    files: tuple[str, ...] = ()  # Python files, of which this counts as a change
    lanes: tuple[str, ...] = ()
    all: bool = False
    alone: bool = False  # it is enough: files that name it do not depend on its content

    def matches(self, path: str) -> bool:
        """Return whether the rule is about this file."""
        return re.match(self.pattern, path) is not None


_PACKAGES = ("test-dist", "test-image")

RULES = (
    Rule(r"_core/|schedsvc/_core\w*\.pyi$", "the core", CORE_TESTS, ("schedsvc/_core.pyi",)),
    Rule(
        r"setup\.py$",
        "builds the core and the transport",
        CORE_TESTS,
        ("schedsvc/_core.pyi", "schedsvc/transport/connection.py"),
        _PACKAGES,
    ),
    Rule(
        r"proto/schedsvc/|clients/python/schedsvc_client/v1/",
        "the contract",
        (*CORE_TESTS, "tests/conformance/", *UNARY_CLIENTS, "tests/vllm/"),
    ),
    Rule(r"(Makefile|constraints\.txt|pyproject\.toml|\.ci/.*|\.gitignore)$", "runs CI", all=True),
    Rule(r"tests/(lanes|tidy/sources)\b", "chooses what runs", all=True),
    Rule(
        r"(clients/python|clients/vllm|clients/litellm|lab)/(pyproject\.toml|README\.md|LICENSE)$"
        r"|(lab/)?MANIFEST\.in$|LICENSE$|README\.md$"
        r"|(schedsvc|clients/\w+/\w+|lab/schedsvc_lab)/py\.typed$",
        "is in the packages",
        lanes=_PACKAGES,
    ),
    Rule(
        r"(schedsvc|clients/\w+/schedsvc_\w+|lab/schedsvc_lab)/.*(?<!\.py)(?<!\.pyi)$",
        "is data of a package",
        lanes=("test-dist",),
    ),
    Rule(r"deploy/(release|man|image|__init__)\.py$", "builds packages", lanes=_PACKAGES),
    Rule(r"docs/use/install\.md$", "is followed to the letter", lanes=_PACKAGES),
    Rule(
        r"docs/use/researcher\.md$", "its code is run", ("tests/lab/sim/test_researcher_page.py",)
    ),
    Rule(r"deploy/systemd/|deploy/alerts/|deploy/grafana/", "is installed", lanes=_PACKAGES),
    Rule(r"deploy/(Containerfile$|container/|compose)", "is in the images", lanes=("test-image",)),
    Rule(r"deploy/(chart|kustomize|compose|alerts)", "is deployed", lanes=("test-chart",)),
    Rule(r"tests/install/", "tests packages", lanes=("test-dist",)),
    Rule(r"tests/box/", "tests images and charts", lanes=("test-image", "test-chart")),
    Rule(
        r"schedsvc/data/console/",
        "the console's page",
        ("tests/browser/", "tests/server/"),
        alone=True,
    ),
    Rule(
        r"schedsvc/transport/\w+\.pxd$",
        "compiles the transport",
        files=("schedsvc/transport/connection.py",),
        lanes=_PACKAGES,
    ),
    Rule(
        r"lab/setup\.py$|lab/schedsvc_lab/(engine|sim)/\w+\.pxd$",
        "compiles the simulator",
        files=("lab/schedsvc_lab/engine/sequence.py", "lab/schedsvc_lab/sim/world.py"),
        lanes=_PACKAGES,
    ),
    Rule(
        r"lab/schedsvc_lab/engine/profiles/",
        "engines",
        files=("lab/schedsvc_lab/engine/__init__.py",),
    ),
    Rule(
        r"clients/conformance/",
        "the scripts of every client",
        ("tests/conformance/", *UNARY_CLIENTS),
    ),
    Rule(r"clients/go/", "the Go client", ("tests/go/",)),
    Rule(r"clients/java/", "the Java client", ("tests/java/",)),
    Rule(r"clients/cpp/", "the C++ client", ("tests/cpp/",)),
    Rule(
        r"clients/litellm/(sample/|schedsvc_litellm/plugin\.py$)",
        "is loaded by LiteLLM",
        ("tests/litellm/",),
    ),
    Rule(r"clients/node/", "the Node client", ("tests/conformance/", "tests/clients/")),
    Rule(r"(docs/operate/fronts|SECURITY)\.md$", "is run before the proxy", lanes=("test-fronts",)),
    Rule(r"docs/use/litellm\.md$", "is followed to the letter", ("tests/litellm/",)),
    Rule(r"(docs/|SECURITY|CHANGELOG|CONTRIBUTING|STYLE|ARCHITECTURE)|.*\.md$", "for readers"),
    Rule(r"proto/buf(\.gen)?\.yaml$|clients/node/package(-lock)?\.json$", "make check reads it"),
)

#: The lanes beside the slow tests, each with the tests whose needs are its subject.
LANES = {
    "test-browser": ("tests/browser/",),
    "test-fronts": ("tests/fronts/",),
    "test-go": ("tests/go/",),
    "test-java": ("tests/java/",),
    "test-cpp": ("tests/cpp/",),
    "test-dist": (),
    "test-image": (),
    "test-chart": (
        "tests/box/test_chart", "tests/box/test_kustomize.py", "tests/box/test_compose.py",
    ),
    "test-vllm": ("tests/vllm/",),
}  # fmt: skip
#: The stages of CI in their order. Those that are no lane run for every change: `check` and `test`
#: are the quick guard of all rooms, and `test-faults` and `test-fuzz` draw fresh seeds, so they may
#: find something on code that has not changed. `make test-litellm` is none: where two cores are
#: busy, LiteLLM takes too long to start.
STAGES = (
    "check", "test", "test-browser", "test-fronts", "test-go", "test-java", "test-cpp", "lane-slow",
    "lane-mutants", "test-dist", "test-image", "test-chart", "test-faults", "test-fuzz",
    "test-vllm",
)  # fmt: skip
#: The oracles of a mutant that the fault simulator has to catch.
ORACLES = ("lab/schedsvc_lab/faults/",)
