"""Tests the compose file: valid, hardened, consistent with the configurations that it mounts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.release import ROOT
from schedsvc.config import Config

from .manifests import compose_problems

pytestmark = [pytest.mark.install, pytest.mark.timeout(120)]

FILE = ROOT / "deploy/compose.yaml"
TEXT = FILE.read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)


def test_file_fits_the_specification() -> None:
    assert compose_problems(TEXT) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("read_only:", "readonly:"),
        ("35s", "35 parsecs"),
        ("service_healthy", "good"),
        ("source: prometheus", "source: prom"),
    ],
)
def test_a_wrong_file_is_found(old: str, new: str) -> None:
    assert old in TEXT
    assert compose_problems(TEXT.replace(old, new))


@pytest.mark.parametrize("name", list(COMPOSE["services"]))
def test_every_service_is_hardened(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    # No port is open to other hosts.
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_addresses_agree_with_the_configurations() -> None:
    files = {name: FILE.parent / each["file"] for name, each in COMPOSE["configs"].items()}
    config = Config.model_validate(yaml.safe_load(files["scheduler"].read_text()))
    assert config.metrics is not None
    ports = {str(config.listeners[1].tcp).rpartition(":")[2]}
    environ = COMPOSE["services"]["engine"]["environment"]
    assert environ["SCHEDSVC_TARGET"] == f"scheduler:{ports.pop()}"
    jobs = yaml.safe_load(files["prometheus"].read_text())["scrape_configs"]
    targets = [job["static_configs"][0]["targets"][0] for job in jobs]
    words = COMPOSE["services"]["engine"]["command"]
    metrics = str(config.metrics.listen).rpartition(":")[2]
    assert targets == [f"scheduler:{metrics}", f"engine:{words[words.index('--port') + 1]}"]
    assert Path(str(config.state and config.state.file)).parent == Path("/var/lib/schedsvc")


def test_scheduler_has_time_to_drain() -> None:
    config = yaml.safe_load((FILE.parent / "compose/schedsvc.yaml").read_text())
    seconds = int(COMPOSE["services"]["scheduler"]["stop_grace_period"].removesuffix("s"))
    assert seconds * 1_000 >= Config.model_validate(config).limits.drain_ms + 5_000
