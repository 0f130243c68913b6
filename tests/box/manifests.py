"""Reads Kubernetes objects, and checks them by the restricted Pod Security profile."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.release import ROOT

from .tools import IN_CI

CHART = ROOT / "deploy/chart/schedsvc"
KUSTOMIZE = ROOT / "deploy/kustomize"
# `make test-chart` makes it.
PYTHON = ROOT / ".venv-chart/bin/python"
#: The volumes that the restricted profile allows.
_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret"),
}
Object = dict[str, Any]


def _asked(requests: list[Object]) -> list[Any]:
    if not PYTHON.exists():
        text = f"{PYTHON.parent.parent.name} is missing; run `make test-chart`"
        (pytest.fail if IN_CI else pytest.skip)(text)
    command = [str(PYTHON), str(Path(__file__).with_name("render.py"))]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def rendered(*values: Object, chart: Path = CHART, name: str = "schedsvc") -> list[Any]:
    """Render a chart with each of these sets of values: yield its objects, or the error's text."""
    requests = [{"chart": str(chart), "name": name, "values": each} for each in values]
    return [found.get("objects", found.get("error")) for found in _asked(requests)]


def schema_problems(objects: list[Object]) -> list[str]:
    """Return violations of Kubernetes' newest schema, unknown fields included."""
    return list(_asked([{"objects": objects}])[0]["problems"])


def compose_problems(text: str) -> list[str]:
    """Return violations of the compose specification in a file, unknown keys included."""
    return list(_asked([{"compose": text}])[0]["problems"])


def kustomized(folder: Path) -> list[Object]:
    """Return the objects that kubectl makes of a folder."""
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def only(objects: list[Object], kind: str) -> Object:
    """Return the one object of a kind."""
    [found] = [each for each in objects if each["kind"] == kind]
    return found


def pod_of(objects: list[Object]) -> Object:
    """Return the pod's specification in the one StatefulSet."""
    spec: Object = only(objects, "StatefulSet")["spec"]["template"]["spec"]
    return spec


def not_restricted(pod: Object) -> Iterator[str]:
    """Yield what the restricted Pod Security profile forbids in a pod's specification."""
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield field
    for volume in pod.get("volumes", []):
        if kinds := volume.keys() - {"name"} - _VOLUMES:
            yield f"volume {volume['name']}: {kinds}"
    whole = pod.get("securityContext", {})
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = container.get("securityContext", {})
        both = whole | own
        wrong = {
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "capabilities.drop": own.get("capabilities", {}).get("drop") != ["ALL"],
            "capabilities.add": bool(own.get("capabilities", {}).get("add")),
            "hostPort": any("hostPort" in port for port in container.get("ports", [])),
            "privileged": bool(own.get("privileged")),
            "procMount": "procMount" in own,
            "runAsNonRoot": both.get("runAsNonRoot") is not True,
            "runAsUser": both.get("runAsUser") == 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type")
            not in ("RuntimeDefault", "Localhost"),
            "sysctls": bool(whole.get("sysctls")),
        }
        yield from (f"{container['name']}: {field}" for field, is_so in wrong.items() if is_so)
