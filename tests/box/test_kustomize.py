"""Tests Kustomize: the same objects as the chart's defaults, and the gate as a vLLM patch."""

import shutil
from typing import Any

import pytest
import yaml

from deploy.release import version
from schedsvc.config import Config

from .manifests import (
    KUSTOMIZE,
    Object,
    kustomized,
    not_restricted,
    only,
    rendered,
    schema_problems,
)
from .tools import need, page_blocks

pytestmark = [pytest.mark.install, pytest.mark.timeout(120)]

HELM_LABELS = ("app.kubernetes.io/managed-by", "app.kubernetes.io/version", "helm.sh/chart")


@pytest.fixture(scope="module", autouse=True)
def kubectl() -> None:
    need("kubectl")


@pytest.fixture(scope="module")
def example() -> list[Object]:
    return kustomized(KUSTOMIZE / "example")


def plain(found: Any) -> Any:
    """Return an object without Helm's labels, and with the configuration as data."""
    if isinstance(found, list):
        return [plain(each) for each in found]
    if not isinstance(found, dict):
        return found
    kept = {key: plain(each) for key, each in found.items() if key not in HELM_LABELS}
    if isinstance(text := kept.get("schedsvc.yaml"), str):
        kept["schedsvc.yaml"] = yaml.safe_load(text)
    return kept


def by_kind(objects: list[Object]) -> dict[str, Any]:
    return {each["kind"]: plain(each) for each in objects}


def test_base_is_what_the_chart_renders_by_default() -> None:
    [chart] = rendered({})
    assert by_kind(kustomized(KUSTOMIZE / "base")) == by_kind(chart)


def test_base_differs_from_a_chart_with_other_values() -> None:
    [chart] = rendered({"config": {"limits": {"drain_ms": 40_000}}})
    base, other = by_kind(kustomized(KUSTOMIZE / "base")), by_kind(chart)
    assert {kind for kind in base if base[kind] != other[kind]} == {"ConfigMap", "StatefulSet"}


def test_example_fits_the_newest_schema(example: list[Object]) -> None:
    assert schema_problems(example) == []
    assert {each["metadata"]["namespace"] for each in example} == {"llm"}


def test_example_has_the_gate_in_front_of_vllm(example: list[Object]) -> None:
    template = only(example, "Deployment")["spec"]["template"]
    [vllm], [gate] = template["spec"]["containers"], template["spec"]["initContainers"]
    assert vllm["args"][-2:] == ["--middleware", "schedsvc_vllm.gate.Gate"]
    environ = {each["name"]: each.get("value") for each in vllm["env"]}
    mounted = {each["name"]: each["mountPath"] for each in vllm["volumeMounts"]}
    assert environ["PYTHONPATH"] == mounted["gate"]
    service = only(example, "Service")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert environ["SCHEDSVC_TARGET"] == f"{service['metadata']['name']}:{ports['grpc']}"
    # The scheduler knows the token that the gate shows.
    [token] = [each for each in vllm["env"] if each["name"] == "SCHEDSVC_TOKEN"]
    [serves] = only(example, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert [each["valueFrom"] for each in serves["env"]] == [token["valueFrom"]]
    # The image that copies the gate is the one that serves, also by version.
    [scheduler] = only(example, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert gate["image"] == scheduler["image"] == f"registry.example/schedsvc:{version()}"
    assert list(not_restricted({"containers": [gate]})) == []


def test_documented_sidecar_is_valid() -> None:
    [text] = page_blocks("docs/use/vllm.md", "yaml", "On Kubernetes")
    objects = list(yaml.safe_load_all(text))
    assert schema_problems(objects) == []
    Config.model_validate(yaml.safe_load(only(objects, "ConfigMap")["data"]["schedsvc.yaml"]))
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    images = {each["image"] for each in [*pod["initContainers"], *pod["containers"]]}
    assert f"registry.example/schedsvc:{version()}" in images
    named = {volume["name"] for volume in pod["volumes"]}
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= named


def test_network_policy_admits_the_gate(example: list[Object]) -> None:
    rules = only(example, "NetworkPolicy")["spec"]["ingress"]
    [rule] = [rule for rule in rules if rule["ports"] == [{"port": "grpc"}]]
    labels = only(example, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("folder", ["base", "example"])
def test_configuration_is_valid_and_under_a_fixed_name(folder: str) -> None:
    found = only(kustomized(KUSTOMIZE / folder), "ConfigMap")
    Config.model_validate(yaml.safe_load(found["data"]["schedsvc.yaml"]))
    assert found["metadata"]["name"] == "schedsvc"


def test_deployment_without_the_label_stays_as_it_is(tmp_path: Any) -> None:
    shutil.copytree(KUSTOMIZE, tmp_path / "k")
    file = tmp_path / "k/example/vllm.yaml"
    file.write_text(file.read_text().replace("schedsvc-gate", "other"))
    found = only(kustomized(tmp_path / "k/example"), "Deployment")
    assert "initContainers" not in found["spec"]["template"]["spec"]
