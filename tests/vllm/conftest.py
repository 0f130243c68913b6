from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.otlp import Collector

from . import programs
from .stack import Stack

# The lengths of the LMSYS arena trace.
CLIENTS = [f"client-{number:02}" for number in range(27)]
# Each test file has separate tenants, so none learns the lengths of another's.
TENANTS = [
    *(
        f"{part}-{number}"
        for part in ("usage", "truth", "charge", "leave", "busy", "sdk", "away", "bench", "traces")
        for number in range(4)
    ),
    *CLIENTS,
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the real vLLM."""
    for item in items:
        if item.nodeid.startswith("tests/vllm/"):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(240))
            # Two engines run at a time: the one that most files share, and that of one file.
            shares = "stack" in getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group("stack" if shares else item.path.name))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not programs.installed():
        pytest.skip("the real vLLM is not installed; `make test-vllm` does it")
    return tmp_path_factory.mktemp("v")


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Take the spans of gate and engine."""
    made = Collector()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def stack(folder: Path, collector: Collector) -> Iterator[Stack]:
    """Run the scheduler, and vLLM behind the gate. Only traces that a client samples have spans."""
    variables = {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_BSP_SCHEDULE_DELAY": "20",
        # Serves the endpoints that only operators may reach.
        "VLLM_SERVER_DEV_MODE": "1",
    }
    options = ("--enable-scale-out", "--otlp-traces-endpoint", collector.url)
    with (
        programs.Scheduler(folder, TENANTS) as scheduler,
        programs.vllm(folder, gated=True, arguments=options, variables=variables) as server,
    ):
        made = Stack(server, scheduler)
        made.connected()
        yield made


@pytest.fixture(autouse=True)
def at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test engine and scheduler are at rest, and nothing has expired."""
    yield
    if "stack" in request.fixturenames:
        stack = request.getfixturevalue("stack")
        stack.rest()
        assert stack.stats().totals.expired == 0
