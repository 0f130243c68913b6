"""Tests the chart: what it renders for fourteen sets of values, and what it refuses."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.release import chart_version, package_chart, version
from schedsvc.config import Config, Reading, read
from tests.server.certificates import Authority
from tests.server.test_alerts import RULES, promtool

from .manifests import CHART, Object, not_restricted, only, pod_of, rendered, schema_problems
from .tools import page_blocks

pytestmark = [pytest.mark.install, pytest.mark.timeout(120)]

SETS: dict[str, Object] = {
    "defaults": {},
    "tenants": {
        "config": {
            "tenants": [
                {"name": "research", "weight": 1},
                {"name": "production", "weight": 4, "quota": {"tokens_per_minute": 2_000_000}},
            ],
            "scheduler": {"queue_ttl_ms": 60_000},
        },
        "tenantsConfigMap": "tenants",
        "serviceMonitor": {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "long drain": {"config": {"limits": {"drain_ms": 120_500}}},
    "no drain": {"config": {"limits": {"drain_ms": 0}}},
    "mutual TLS": {
        "tls": {"secretName": "schedsvc-tls"},
        "config": {"auth": {"principals": [{"name": "gate", "certificate": "gate.llm"}]}},
    },
    "TLS and tokens": {
        "tls": {"secretName": "schedsvc-tls", "clientCA": False},
        "config": {"auth": {"principals": [{"name": "gate", "env": "GATE_TOKEN"}]}},
        "extraEnv": [
            {"name": "GATE_TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "gate"}}}
        ],
    },
    "another image": {
        "image": {"repository": "registry.example/schedsvc", "tag": "1.2", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
    },
    "an image by digest": {"image": {"digest": "sha256:" + "a" * 64}},
    "IPv6 alone": {"service": {"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv6"]}},
    "no claim": {"persistence": {"enabled": False}},
    "a claim of its own": {"persistence": {"existingClaim": "mine"}},
    "a storage class": {"persistence": {"size": "500Mi", "storageClassName": "fast"}},
    "placed": {
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "affinity": {
            "podAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "labelSelector": {"matchLabels": {"app": "vllm"}},
                        "topologyKey": "topology.kubernetes.io/zone",
                    }
                ]
            }
        },
        "priorityClassName": "system-cluster-critical",
        "podLabels": {"team": "serving"},
        "podAnnotations": {"example.com/owner": "serving"},
        "resources": {"limits": {"cpu": 2, "memory": "2Gi"}},
    },
    "open and stopped": {
        "replicaCount": 0,
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "extraVolumes": [{"name": "tokens", "secret": {"secretName": "tokens"}}],
        "extraVolumeMounts": [{"name": "tokens", "mountPath": "/tokens", "readOnly": True}],
    },
}
GATE = {"name": "gate", "env": "GATE_TOKEN", "pools": ["*"]}
REFUSED: list[tuple[Object, str]] = [
    ({"replicaCount": 2}, "replicaCount is 2, and at most 1 is possible"),
    ({"replicaCount": "1"}, "replicaCount"),
    ({"config": {"listeners": []}}, "config.listeners: the chart writes it"),
    ({"config": {"state": {"file": "x"}}}, "config.state: the chart writes it"),
    ({"podDisruptionBudget": {"maxUnavailable": 2}}, "maxUnavailable"),
    (
        {"config": {"tenants_dir": "x"}, "tenantsConfigMap": "tenants"},
        "config.tenants_dir: tenantsConfigMap sets it",
    ),
    ({"serviceMonitor": {"interval": "often"}}, "interval"),
    ({"persistance": {"enabled": False}}, "persistance"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
]
by_set = pytest.mark.parametrize("name", list(SETS))


@pytest.fixture(scope="module")
def objects() -> dict[str, list[Object]]:
    return dict(zip(SETS, rendered(*SETS.values()), strict=True))


def config_of(objects: list[Object]) -> Any:
    return yaml.safe_load(only(objects, "ConfigMap")["data"]["schedsvc.yaml"])


def test_every_set_fits_the_newest_schema(objects: dict[str, list[Object]]) -> None:
    assert len(SETS) == 14
    # The Prometheus Operator's objects are in no schema of Kubernetes.
    everything = [
        each
        for found in objects.values()
        for each in found
        if not each["apiVersion"].startswith("monitoring.coreos.com/")
    ]
    assert schema_problems(everything) == []
    # A field that Kubernetes does not know is found.
    wrong = only(objects["defaults"], "StatefulSet") | {"specification": {}}
    assert schema_problems([wrong])


@by_set
def test_every_set_passes_the_restricted_profile(
    name: str, objects: dict[str, list[Object]]
) -> None:
    pod = pod_of(objects[name])
    assert list(not_restricted(pod)) == []
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_pod_beyond_the_restricted_profile_is_found(objects: dict[str, list[Object]]) -> None:
    [found] = rendered(
        {"securityContext": {"privileged": True, "capabilities": {"add": ["CHOWN"]}}}
    )
    wrong = list(not_restricted(pod_of(found)))
    assert wrong == ["schedsvc: capabilities.add", "schedsvc: privileged"]
    [bare] = rendered({"podSecurityContext": {"runAsNonRoot": False, "seccompProfile": None}})
    wrong = list(not_restricted(pod_of(bare)))
    assert wrong == ["schedsvc: runAsNonRoot", "schedsvc: seccompProfile"]


def read_in_pod(text: str, folder: Path) -> Reading:
    """Read a configuration in a folder that has the paths of a pod, certificates included."""
    for path in ("etc/schedsvc-tls", "etc/schedsvc-tenants", "run/schedsvc", "var/lib/schedsvc"):
        (folder / path).mkdir(parents=True)
    authority = Authority(folder)
    pair = authority.issue("schedsvc")
    for name, source in (("ca.crt", authority), ("tls.crt", pair)):
        (folder / "etc/schedsvc-tls" / name).write_bytes(source.cert)
    (folder / "etc/schedsvc-tls/tls.key").write_bytes(pair.key)
    file = folder / "schedsvc.yaml"
    file.write_text(re.sub(r"(?<=: )/(?=(?:etc|run|var)/)", f"{folder}/", text))
    return read(file)


@by_set
def test_scheduler_reads_the_configuration_of_every_set(
    name: str,
    objects: dict[str, list[Object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [container] = pod_of(objects[name])["containers"]
    for variable in container.get("env", []):
        monkeypatch.setenv(variable["name"], "a-token-of-a-test-a-token-of-a-test")
    reading = read_in_pod(only(objects[name], "ConfigMap")["data"]["schedsvc.yaml"], tmp_path)
    assert not reading.problems


@by_set
def test_configuration_of_every_set_fits_the_pod(
    name: str, objects: dict[str, list[Object]]
) -> None:
    given = config_of(objects[name])
    config = Config.model_validate(given)
    pod = pod_of(objects[name])
    [container] = pod["containers"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert config.state is not None
    tls = config.listeners[1].tls
    files = [config.state.file, config.listeners[0].unix, *([tls.cert, tls.key] if tls else [])]
    assert all(str(Path(str(file)).parent) in mounts for file in files)
    assert str(given.get("tenants_dir", mounts[0])) in mounts
    # The values arrive as they are, numbers included.
    assert SETS[name].get("config", {}).items() <= given.items()
    assert pod["terminationGracePeriodSeconds"] * 1_000 >= config.limits.drain_ms + 5_000


def test_grace_follows_the_drain(objects: dict[str, list[Object]]) -> None:
    seconds = {name: pod_of(objects[name])["terminationGracePeriodSeconds"] for name in SETS}
    assert (seconds["defaults"], seconds["long drain"], seconds["no drain"]) == (35, 131, 10)


@by_set
def test_ports_and_probes_of_every_set_agree(name: str, objects: dict[str, list[Object]]) -> None:
    [container] = pod_of(objects[name])["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    given = config_of(objects[name])
    assert given["listeners"][1]["tcp"].endswith(f":{ports['grpc']}")
    assert given["metrics"]["listen"].endswith(f":{ports['metrics']}")
    service = only(objects[name], "Service")["spec"]["ports"]
    assert {port["targetPort"]: port["port"] for port in service} == ports
    for probe, health in (("startup", "liveness"), ("liveness", "liveness"), ("readiness",) * 2):
        asked = container[f"{probe}Probe"]
        if "tls" in given["listeners"][1]:
            assert asked["exec"]["command"] == ["/opt/schedsvc/bin/schedsvc", "health", health]
        else:
            assert asked["grpc"] == {"port": ports["grpc"], "service": health}


@by_set
def test_selectors_of_every_set_select_the_pod(name: str, objects: dict[str, list[Object]]) -> None:
    found = objects[name]
    labels = only(found, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        only(found, "StatefulSet")["spec"]["selector"]["matchLabels"],
        only(found, "Service")["spec"]["selector"],
        *(each["spec"]["selector"]["matchLabels"] for each in found if "Budget" in each["kind"]),
        *(each["spec"]["podSelector"]["matchLabels"] for each in found if "Policy" in each["kind"]),
    ]
    assert len(selectors) == (2 if name == "open and stopped" else 4)
    assert all(selector.items() <= labels.items() for selector in selectors)


@pytest.mark.parametrize("name", ["defaults", "a storage class", "a claim of its own"])
def test_upgrade_keeps_the_claim_of_the_state(
    name: str, objects: dict[str, list[Object]], tmp_path: Path
) -> None:
    later = tmp_path / "schedsvc"
    shutil.copytree(CHART, later)
    text = (CHART / "Chart.yaml").read_text()
    version = yaml.safe_load(text)["version"]
    (later / "Chart.yaml").write_text(text.replace(version, "99.0.0"))
    changed = SETS[name] | {"config": {"tenants": [{"name": "new"}]}, "image": {"repository": "x"}}
    [found] = rendered(changed, chart=later)
    before, after = (only(each, "StatefulSet") for each in (objects[name], found))
    assert after["metadata"]["labels"]["app.kubernetes.io/version"] == "99.0.0"
    # A claim is named after these two, and Kubernetes refuses a change of the rest.
    assert after["metadata"]["name"] == before["metadata"]["name"]
    for field in ("volumeClaimTemplates", "selector", "serviceName"):
        assert after["spec"].get(field) == before["spec"].get(field)
    states = [
        [v for v in each["spec"]["template"]["spec"]["volumes"] if v["name"] == "state"]
        for each in (before, after)
    ]
    assert states[0] == states[1]
    # The default keeps a claim when the release goes.
    assert "persistentVolumeClaimRetentionPolicy" not in after["spec"]
    assert "annotations" not in after["spec"]["template"]["metadata"]


def test_image_has_tag_and_digest(objects: dict[str, list[Object]]) -> None:
    shown = {
        name: pod_of(objects[name])["containers"][0]["image"]
        for name in ("defaults", "another image", "an image by digest")
    }
    assert shown == {
        "defaults": f"schedsvc:{version()}",
        "another image": "registry.example/schedsvc:1.2",
        "an image by digest": f"schedsvc:{version()}@sha256:{'a' * 64}",
    }


def test_state_is_on_the_claim(objects: dict[str, list[Object]]) -> None:
    [claim] = only(objects["defaults"], "StatefulSet")["spec"]["volumeClaimTemplates"]
    [container] = pod_of(objects["defaults"])["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    file = config_of(objects["defaults"])["state"]["file"]
    assert Path(file).parent == Path(mounted[claim["metadata"]["name"]])


def test_services_have_the_families_of_the_values(objects: dict[str, list[Object]]) -> None:
    for name, families in (("IPv6 alone", ["IPv6"]), ("defaults", None)):
        services = [each for each in objects[name] if each["kind"] == "Service"]
        assert services
        assert [each["spec"].get("ipFamilies") for each in services] == [families] * len(services)
        policy = "SingleStack" if families else None
        assert {each["spec"].get("ipFamilyPolicy") for each in services} == {policy}


def test_network_policy_lets_clients_and_scrapers_in(objects: dict[str, list[Object]]) -> None:
    spec = only(objects["defaults"], "NetworkPolicy")["spec"]
    clients, scrapers = spec["ingress"]
    assert (clients["ports"], scrapers["ports"]) == ([{"port": "grpc"}], [{"port": "metrics"}])
    assert clients["from"] == [{"podSelector": {"matchLabels": {"schedsvc-client": "true"}}}]
    # The scheduler opens no connection.
    assert "Egress" in spec["policyTypes"]
    assert "egress" not in spec


def test_prometheus_finds_the_metrics(objects: dict[str, list[Object]]) -> None:
    found = objects["tenants"]
    monitor, service = only(found, "ServiceMonitor"), only(found, "Service")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    [endpoint] = monitor["spec"]["endpoints"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert config_of(found)["metrics"]["listen"].endswith(f":{ports[endpoint['port']]}")
    # The rules ask for this job.
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "schedsvc"}]
    assert endpoint["interval"] == "30s"


def test_rules_are_those_of_the_alerts(objects: dict[str, list[Object]], tmp_path: Path) -> None:
    rule = only(objects["tenants"], "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    if shutil.which("promtool"):
        file = tmp_path / "rules.yaml"
        file.write_text(yaml.safe_dump(rule["spec"]))
        checked = promtool("check", "rules", file)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_default_needs_no_prometheus_operator(objects: dict[str, list[Object]]) -> None:
    kinds = {each["kind"] for each in objects["defaults"]}
    assert not kinds & {"ServiceMonitor", "PrometheusRule"}


def test_documented_values_are_valid() -> None:
    texts = page_blocks("docs/use/install.md", "yaml", "Run it on Kubernetes")
    values = [yaml.safe_load(text) for text in texts]
    assert len(values) == 4
    for objects in rendered(*values):
        Config.model_validate(config_of(objects))
        assert list(not_restricted(pod_of(objects))) == []


def test_documented_configuration_of_a_container_is_valid() -> None:
    [text] = page_blocks("docs/use/install.md", "yaml", "Run it in a container")
    [objects] = rendered({})
    given, chart = yaml.safe_load(text), config_of(objects)
    Config.model_validate(given)
    # The chart's pod has the same paths and ports. A container has no names of a Service.
    # It makes its token, and a pod has one of a secret.
    proofs = {"token_file": "/var/lib/schedsvc-tokens/gate", "make_token": True}
    assert chart["auth"]["principals"] == [GATE]
    assert given["auth"].pop("principals") == [
        {key: GATE[key] for key in ("name", "pools")} | proofs
    ]
    del chart["auth"], given["auth"]
    assert chart["metrics"].pop("hosts") == ["schedsvc", "schedsvc.llm", "schedsvc.llm.svc"]
    assert {key: given[key] for key in chart if key != "tenants"} == {
        key: chart[key] for key in chart if key != "tenants"
    }


def test_archive_renders_what_the_folder_renders(tmp_path: Path) -> None:
    archive = package_chart(tmp_path)
    assert archive.name == f"schedsvc-{chart_version(version())}.tgz"
    assert rendered({}, chart=archive) == rendered({})


def test_wrong_values_are_refused_by_name() -> None:
    for (_, text), found in zip(REFUSED, rendered(*(v for v, _ in REFUSED)), strict=True):
        assert isinstance(found, str), text
        assert text in found
