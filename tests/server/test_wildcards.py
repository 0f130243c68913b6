"""Tests that both wildcards mean IPv4 and IPv6 for every listener; without IPv6, IPv4."""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from schedsvc.cli import main
from tests import forked

WILDCARDS = ("0.0.0.0", "[::]")
LOOPBACKS = ("127.0.0.1", "[::1]")
has_ipv6 = pytest.mark.skipif(
    not socket.has_dualstack_ipv6() or not Path("/proc/net/if_inet6").read_text(),
    reason="this host has no IPv6",
)


def config(folder: Path, host: str) -> Path:
    file = folder / "c.yaml"
    digest = "a" * 64
    file.write_text(
        f"listeners: [{{tcp: '{host}:0'}}, {{unix: s.sock, auth: token}}]\n"
        f"metrics: {{listen: '{host}:0'}}\nedge: {{tcp: '{host}:0'}}\n"
        f"auth: {{principals: [{{name: a, sha256: {digest}}}]}}\n"
    )
    return file


@contextmanager
def running(file: Path, command: str, **environment: str) -> Iterator[tuple[str, str | None]]:
    """Run a command of ours; give its first target, and the URL of its metrics."""
    ready = file.parent / f"{command}.json"
    words = [sys.executable, "-m", "schedsvc", command, "--config", str(file)]
    words += ["--ready-file", str(ready)]
    start = subprocess.Popen if environment else forked.Popen
    log = file.parent / f"{command}.log"
    with forked.started(words, ready, log=log, start=start, env=os.environ | environment):
        found = json.loads(ready.read_text())
        yield found["targets"][0], found["metrics"]


def lives(target: str) -> bool:
    with grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = health_pb2.HealthCheckRequest(service="liveness")
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def scrapes(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return b"schedsvc_up 1" in answer.read()
    except OSError:
        return False


def port_of(address: str) -> str:
    return address.removesuffix("/metrics").rpartition(":")[2]


def reached(target: str, metrics: str | None) -> list[tuple[bool, bool]]:
    """Return whether gRPC and metrics are reached, by IPv4 and by IPv6."""
    return [
        (
            lives(f"{host}:{port_of(target)}"),
            metrics is not None and scrapes(f"http://{host}:{port_of(metrics)}/metrics"),
        )
        for host in LOOPBACKS
    ]


@has_ipv6
@pytest.mark.parametrize("host", WILDCARDS)
def test_wildcard_of_the_scheduler_means_both_families(host: str, tmp_path: Path) -> None:
    with running(config(tmp_path, host), "serve") as (target, metrics):
        assert reached(target, metrics) == [(True, True), (True, True)]


@has_ipv6
@pytest.mark.parametrize("host", WILDCARDS)
def test_wildcard_of_the_edge_means_both_families(host: str, tmp_path: Path) -> None:
    with running(config(tmp_path, host), "edge") as (target, _):
        assert reached(target, None) == [(True, False), (True, False)]


@has_ipv6
@pytest.mark.parametrize(("host", "by"), [("127.0.0.1", 0), ("[::1]", 1)])
def test_a_real_address_has_one_family(host: str, by: int, tmp_path: Path) -> None:
    with running(config(tmp_path, host), "serve") as (target, metrics):
        assert reached(target, metrics) == [(by == 0, by == 0), (by == 1, by == 1)]


@pytest.fixture(scope="module")
def no_ipv6(tmp_path_factory: pytest.TempPathFactory) -> str:
    library = tmp_path_factory.mktemp("preload") / "no_ipv6.so"
    source = Path(__file__).with_name("no_ipv6.c")
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    subprocess.run(list(map(str, command)), check=True)
    return str(library)


@pytest.mark.parametrize("host", WILDCARDS)
def test_wildcard_without_ipv6_means_ipv4(host: str, no_ipv6: str, tmp_path: Path) -> None:
    with running(config(tmp_path, host), "serve", LD_PRELOAD=no_ipv6) as (target, metrics):
        assert reached(target, metrics) == [(True, True), (False, False)]


@pytest.mark.parametrize("host", WILDCARDS)
@pytest.mark.parametrize("taken", ["127.0.0.1", "::1"])
def test_wildcard_names_a_port_that_one_family_lacks(host: str, taken: str, tmp_path: Path) -> None:
    family = socket.AF_INET6 if ":" in taken else socket.AF_INET
    with socket.create_server((taken, 0), family=family) as other:
        file, port = config(tmp_path, host), other.getsockname()[1]
        for key, field in (("listeners: [{tcp", "listeners[0].tcp"), ("listen", "metrics.listen")):
            text = file.read_text()
            file.write_text(text.replace(f"{key}: '{host}:0'", f"{key}: '{host}:{port}'"))
            words = [sys.executable, "-m", "schedsvc", "serve", "--config", str(file)]
            done = forked.run(words, capture_output=True, text=True, timeout=60)
            file.write_text(text)
            assert done.returncode == 1
            assert f"Error: {field}: cannot listen on {host}:{port}: address already" in done.stderr


@pytest.mark.parametrize("host", WILDCARDS)
def test_check_says_that_a_wildcard_opens_both_families(host: str, tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["check", str(config(tmp_path, host)), "--json"])
    summary = json.loads(shown.stdout)["summary"]
    for key in ("listeners", "metrics", "edge"):
        assert ": all addresses of this host, IPv4 and IPv6" in summary[key]
    real = CliRunner().invoke(main, ["check", str(config(tmp_path, "127.0.0.1")), "--json"])
    assert "all addresses" not in real.stdout
