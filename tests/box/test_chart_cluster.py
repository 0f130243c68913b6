"""Tests the chart with a leader and a standby: what it renders, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from schedsvc.config import Config

from .manifests import Object, not_restricted, only, pod_of, rendered, schema_problems
from .test_chart import config_of, read_in_pod

pytestmark = [pytest.mark.install, pytest.mark.timeout(120)]

GATE = {"name": "gate", "env": "GATE_TOKEN", "pools": ["*"]}
CLUSTER: Object = {
    "enabled": True,
    "storeUrls": ["rediss://schedsvc@valkey.llm.svc:6380", "rediss://schedsvc@other.llm.svc"],
    "storeCA": True,
    "secretName": "schedsvc-cluster",
    "init": {"adminSecretName": "valkey"},
}
PAIR: Object = {
    "replicaCount": 2,
    "cluster": CLUSTER,
    "config": {"auth": {"principals": [GATE]}, "tenants": [{"name": "a"}]},
}
TLS: Object = PAIR | {"tls": {"secretName": "schedsvc-tls"}}
OPEN_TLS: Object = PAIR | {"tls": {"secretName": "schedsvc-tls", "clientCA": False}}
REFUSED: list[tuple[Object, str]] = [
    (PAIR | {"replicaCount": 6}, "replicaCount"),
    (PAIR | {"cluster": CLUSTER | {"storeUrls": []}}, "cluster.storeUrls is empty"),
    (PAIR | {"cluster": CLUSTER | {"storeUrls": ["valkey:6379"]}}, "storeUrls"),
    (PAIR | {"cluster": CLUSTER | {"secretName": ""}}, "cluster.secretName is empty"),
    (PAIR | {"persistence": {"existingClaim": "mine"}}, "persistence.existingClaim: each member"),
    (PAIR | {"config": {}}, "list the gates in config.auth.principals"),
    (PAIR | {"config": PAIR["config"] | {"cluster": {}}}, "config.cluster: the chart writes it"),
]


@pytest.fixture(scope="module")
def sets() -> dict[str, list[Object]]:
    given = {"pair": PAIR, "TLS": TLS, "open TLS": OPEN_TLS}
    return dict(zip(given, rendered(*given.values()), strict=True))


def named(objects: list[Object], kind: str, name: str) -> Object:
    [found] = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


@pytest.mark.parametrize("name", ["pair", "TLS", "open TLS"])
def test_objects_fit_schema_profile_and_scheduler(
    name: str, sets: dict[str, list[Object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = sets[name]
    assert schema_problems(objects) == []
    job = only(objects, "Job")["spec"]["template"]["spec"]
    assert [*not_restricted(pod_of(objects)), *not_restricted(job)] == []
    monkeypatch.setenv("GATE_TOKEN", "a-token-of-a-test-a-token-of-a-test")
    folder = tmp_path / "etc/schedsvc-cluster"
    folder.mkdir(parents=True)
    for key in ("store.password", "cluster.secret", "member.token"):
        (folder / key).write_text("s" * 32)
    (folder / "store-ca.crt").write_text("a certificate")
    reading = read_in_pod(only(objects, "ConfigMap")["data"]["schedsvc.yaml"], tmp_path)
    assert not reading.problems


def test_members_advertise_names_that_dns_has(sets: dict[str, list[Object]]) -> None:
    objects = sets["pair"]
    service, stateful = named(objects, "Service", "schedsvc-members"), only(objects, "StatefulSet")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert stateful["spec"]["serviceName"] == "schedsvc-members"
    config = Config.model_validate(config_of(objects))
    assert config.cluster is not None
    member = config.cluster.model_copy(update={"member": "schedsvc-1"})
    [port] = service["spec"]["ports"]
    assert member.advertised == f"schedsvc-1.schedsvc-members.llm.svc:{port['port']}"


def test_members_prove_themselves(sets: dict[str, list[Object]]) -> None:
    given = {name: config_of(objects) for name, objects in sets.items()}
    gate, member = given["pair"]["auth"]["principals"]
    assert gate == GATE
    assert member["member"] is True
    leaders = {name: each["cluster"]["leader"] for name, each in given.items()}
    assert all(each["token_file"] == member["token_file"] for each in leaders.values())
    assert "tls" not in leaders["pair"]
    assert leaders["open TLS"]["tls"] == {}  # the authorities of the system
    assert set(leaders["TLS"]["tls"]) == {"ca", "cert", "key"}


def test_upgrade_goes_past_a_standby(sets: dict[str, list[Object]]) -> None:
    stateful = only(sets["pair"], "StatefulSet")["spec"]
    [container] = pod_of(sets["pair"])["containers"]
    # A standby never passes `readiness`.
    assert container["readinessProbe"]["grpc"]["service"] == "liveness"
    assert stateful["minReadySeconds"] == 15
    assert stateful["podManagementPolicy"] == "Parallel"


def test_members_reach_store_each_other_and_dns(sets: dict[str, list[Object]]) -> None:
    objects = sets["pair"]
    spec = only(objects, "NetworkPolicy")["spec"]
    labels = spec["podSelector"]
    assert {"podSelector": labels} in spec["ingress"][0]["from"]
    dns, members, store = spec["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert members == {"ports": [{"port": 7600}], "to": [{"podSelector": labels}]}
    assert [port["port"] for port in store["ports"]] == [6380, 6379]


def test_init_job_reads_the_members_configuration(sets: dict[str, list[Object]]) -> None:
    job = only(sets["TLS"], "Job")
    assert "post-upgrade" in job["metadata"]["annotations"]["helm.sh/hook"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][:3] == ["cluster", "init", "--config=/etc/schedsvc/schedsvc.yaml"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    config: Any = yaml.safe_dump(config_of(sets["TLS"])["cluster"])
    for path in ("/etc/schedsvc", "/etc/schedsvc-cluster", "/etc/schedsvc-tls"):
        assert path in mounts
    assert "/etc/schedsvc-cluster/store.password" in config
    [without] = rendered(PAIR | {"cluster": CLUSTER | {"init": {}}})
    assert "Job" not in {each["kind"] for each in without}


def test_values_that_cannot_work_are_refused() -> None:
    for (_, text), found in zip(REFUSED, rendered(*(v for v, _ in REFUSED)), strict=True):
        assert isinstance(found, str), text
        assert text in found
