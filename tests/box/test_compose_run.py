"""Runs the compose file: its images, commands and configurations, in one network of podman."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from .test_compose import COMPOSE, FILE
from .tools import Containers, need, run

pytestmark = [pytest.mark.install, pytest.mark.timeout(900)]

NAMES = list(COMPOSE["services"])
WAIT_S_MAX = 60.0
# A client inside the network, which has no address outside.
ASK = """
import json, sys, urllib.request
body = json.dumps({"model": "emulated", "prompt": "Hi", "max_tokens": 8}).encode()
headers = {"content-type": "application/json", "x-tenant-id": "tenant-2"}
data = (body, headers) if sys.argv[2:] else (None, {})
answer = urllib.request.urlopen(urllib.request.Request(sys.argv[1], *data))
print(json.dumps([dict(answer.headers), answer.read().decode()]))
"""


def options_of(name: str) -> list[str]:
    """Return the options of podman for what the file says of a service."""
    service = COMPOSE["services"][name]
    options = [f"--env={key}={value}" for key, value in service.get("environment", {}).items()]
    options += [f"--tmpfs={path}" for path in service.get("tmpfs", [])]
    options += [f"--volume={volume}" for volume in service.get("volumes", [])]
    options += [f"--cap-drop={name}" for name in service["cap_drop"]]
    options += [f"--security-opt={each.partition(':')[0]}" for each in service["security_opt"]]
    for config in service.get("configs", []):
        file = FILE.parent / COMPOSE["configs"][config["source"]]["file"]
        options.append(f"--volume={file}:{config['target']}:ro")
    return options


@contextmanager
def running(containers: Containers, name: str, image: str, *options: str) -> Iterator[None]:
    network = "none" if name == NAMES[0] else f"container:{NAMES[0]}"
    # All names lead to one network, in which no port is used.
    hosts = containers.folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {' '.join(NAMES)}\n")
    fixed = (f"--network={network}", "--no-hosts", f"--volume={hosts}:/etc/hosts:ro")
    options = (*fixed, f"--name={name}", *options_of(name), *options)
    arguments = COMPOSE["services"][name].get("command", [])
    command = containers.command(image, *arguments, options=options)
    command.remove("--network=host")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
        containers.podman("stop", "--time=40", name)
    finally:
        containers.podman("rm", "--force", "--ignore", "--time=0", name)
        process.wait()


def until(answers: Callable[[], Any], what: str) -> Any:
    """Ask again and again; return the first answer that is not empty."""
    stops, problem = time.monotonic() + WAIT_S_MAX, ""
    while time.monotonic() < stops:
        try:
            if found := answers():
                return found
        except AssertionError as error:
            problem = str(error)
        time.sleep(0.2)
    pytest.fail(f"{what}: not within {WAIT_S_MAX} s; {problem}")


def test_requests_pass_the_gate_and_prometheus_sees_them(
    containers: Containers, service: str, lab: str
) -> None:
    need("prometheus")

    def ask(url: str, *words: str) -> Any:
        python = ("exec", "engine", "/opt/schedsvc/bin/python", "-c", ASK)
        return json.loads(containers.podman(*python, url, *words))

    def measured(query: str) -> list[Any]:
        text = ask(f"http://prometheus:9090/api/v1/query?query={query}")[1]
        return list(json.loads(text)["data"]["result"])

    def jobs_up() -> dict[str, str]:
        return {each["metric"]["job"]: each["value"][1] for each in measured("up")}

    # Debian's Prometheus, in the place of the image's.
    program = f"--volume={shutil.which('prometheus')}:/bin/prometheus:ro"
    health = ("exec", "scheduler", "schedsvc", "health", "liveness")
    with running(containers, "scheduler", service):
        until(lambda: containers.podman(*health), "the scheduler is healthy")
        with (
            running(containers, "engine", lab),
            running(containers, "prometheus", lab, program, "--entrypoint=/bin/prometheus"),
        ):
            url = "http://engine:8000/v1/completions"
            until(lambda: ask(url, "post"), "the engine answers")
            # Until its gate has reached the scheduler, it serves under a local limit.
            key = "x-schedsvc-mode"
            until(lambda: ask(url, "post")[0][key] == "enforced", "the gate asks the scheduler")
            found = until(
                lambda: measured('schedsvc_requests_completed_total{tenant="tenant-2"}>0'),
                "it is counted",
            )
            assert found[0]["metric"]["job"] == "schedsvc"
            until(lambda: jobs_up() == {"schedsvc": "1", "engine": "1"}, "both are scraped")


def test_prometheus_configuration_is_valid() -> None:
    need("promtool")
    run(["promtool", "check", "config", FILE.parent / COMPOSE["configs"]["prometheus"]["file"]])
