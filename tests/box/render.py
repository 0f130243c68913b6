"""Renders charts by Helm's own library, and checks files by the schemas of Kubernetes and compose.

It runs in an environment of its own (`make test-chart`), because Helm's library takes 400 MB. It
reads a JSON list of requests and writes a list of results: `{"chart", "name", "values"}` becomes
`{"objects": [...]}` or `{"error": "..."}`; `{"objects"}` and `{"compose"}`, the text of a compose
file, become `{"problems": [...]}`.
"""

import json
import sys
from typing import Any

import compose_spec
import helm_python
import kubernetes_validate
import yaml


def render(chart: str, name: str, values: dict[str, Any]) -> dict[str, Any]:
    with helm_python.Chart.load(chart) as loaded:
        try:
            loaded.validate_schema(values)
            files = loaded.render(values, name=name, namespace="llm")
        except helm_python.HelmError as error:
            return {"error": str(error)}
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    return {"objects": [found for text in texts for found in yaml.safe_load_all(text) if found]}


def problems(objects: list[dict[str, Any]]) -> list[str]:
    found = []
    for each in objects:
        try:
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{each['kind']}: {error.message} at {list(error.path)}")
    return found


def compose_problems(compose: str) -> list[str]:
    try:
        found = compose_spec.PyCompose.from_yaml(compose)
        found.validate()
    except ValueError as error:
        return [str(error)]
    return []


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if "chart" in request:
        return render(**request)
    check = compose_problems if "compose" in request else problems
    return {"problems": check(**request)}


if __name__ == "__main__":
    json.dump([answer(request) for request in json.load(sys.stdin)], sys.stdout)
