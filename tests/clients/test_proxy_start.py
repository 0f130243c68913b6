"""Tests `schedsvc-proxy` as a process: its files, its socket, its streams and signals."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from schedsvc_client import api_key_hash
from schedsvc_vllm import proxy_cli
from schedsvc_vllm.launcher import LaunchError
from schedsvc_vllm.settings import Settings, SettingsError

from tests import forked
from tests.waiting import wait_for_start

PROXY = (sys.executable, "-c", "from schedsvc_vllm.proxy_cli import main; main()")
POOL = {"SCHEDSVC_POOL_CAPACITY_TOKENS": "4096", "SCHEDSVC_POOL_BLOCK_SIZE_TOKENS": "16"}


class _Upstream(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Upstream) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def answers(path: Path) -> bool:
    with closing(socket.socket(socket.AF_UNIX)) as client:
        client.settimeout(10)
        try:
            client.connect(str(path))
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return client.recv(15).startswith(b"HTTP/1.1 ")
        except OSError:
            return False


@pytest.fixture
def proxy(upstream: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[str], Path]]:
    """A proxy on a Unix socket with closed standard streams, its command, and the socket."""
    path = folder / "p"
    command = [*PROXY, "--upstream", upstream, "--uds", str(path)]
    command += ["--schedsvc-target", f"unix:{folder}/none"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    words, environment = [*closed, *command], os.environ | POOL
    with forked.started(words, lambda: answers(path), env=environment) as process:
        yield process, command, path


def test_proxy_keeps_its_socket_and_survives_a_hangup(
    proxy: tuple[subprocess.Popen[bytes], list[str], Path],
) -> None:
    process, command, path = proxy
    at = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
    assert at == [os.devnull] * 3
    before = path.stat().st_ino
    second = forked.run(command, env=os.environ | POOL, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert f"--uds {path}: another server answers there; stop it first" in second.stderr
    assert path.stat().st_ino == before
    process.send_signal(signal.SIGHUP)
    assert answers(path)
    assert process.poll() is None
    process.terminate()
    assert process.wait(30) == 0


def ask(path: Path) -> int:
    """Ask for a completion; return the status."""
    body = b'{"model": "m", "prompt": "Hello", "max_tokens": 4}'
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    with closing(socket.socket(socket.AF_UNIX)) as client:
        client.settimeout(60)
        client.connect(str(path))
        client.sendall(head.encode() + body)
        return int(client.recv(15).split()[1])


@pytest.mark.parametrize(
    ("unreachable", "status", "does"),
    [
        ("open", 200, "requests run without admission (SCHEDSVC_UNREACHABLE=open)"),
        ("closed", 503, "requests get 503 (SCHEDSVC_UNREACHABLE=closed)"),
    ],
)
def test_proxy_without_a_scheduler_logs_what_it_does(
    upstream: str, folder: Path, unreachable: str, status: int, does: str
) -> None:
    path, log = folder / "p", folder / "log"
    command = [*PROXY, "--upstream", upstream, "--uds", str(path)]
    command += ["--schedsvc-target", f"unix:{folder}/none"]
    environment = {
        "SCHEDSVC_UNREACHABLE": unreachable,
        "SCHEDSVC_UNREACHABLE_AFTER": "0.1",
        "SCHEDSVC_TENANT_HEADERS": "x-tenant",
        "SCHEDSVC_HEADER_SET_BY": "nginx",
    }
    environment = os.environ | POOL | environment
    with forked.started(command, lambda: answers(path), log=log, env=environment) as process:
        assert ask(path) == status
        wait_for_start(process, lambda: "until the scheduler is back" in log.read_text())
    said = log.read_text()
    assert f"{does} until the scheduler is back: " in said
    assert "admissions fail" not in said
    offered = "pool default: 4096 tokens in blocks of 16, at most what fits at once"
    assert f"admission by the scheduler at unix:{folder}/none; {offered}" in said
    assert "tenants: by the header x-tenant, else by the hash of the API key\n" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_wildcard_of_the_proxy_means_both_families(upstream: str, host: str) -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as probe:
        port = probe.getsockname()[1]
    command = [*PROXY, "--upstream", upstream, "--host", host, "--port", str(port)]
    command += ["--schedsvc-target", "127.0.0.1:1"]
    process = forked.Popen(command, env=os.environ | POOL)

    def is_reached(by: str) -> bool:
        try:
            with socket.create_connection((by, port), 10) as client:
                client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return client.recv(15).startswith(b"HTTP/1.1 200")
        except ConnectionError:
            return False

    try:
        wait_for_start(process, lambda: is_reached("127.0.0.1"))
        assert is_reached("::1")
        second = forked.run(command, env=os.environ | POOL, capture_output=True, text=True)
        assert second.returncode == 2
        assert f"--host {host} --port {port}: address already in use" in second.stderr
    finally:
        process.kill()
        process.wait()


def test_socket_in_a_missing_folder_is_named(tmp_path: Path) -> None:
    path, folder = str(tmp_path / "nowhere" / "s"), tmp_path / "nowhere"
    with pytest.raises(LaunchError, match=rf"^--uds {path}: the folder {folder} does not exist"):
        proxy_cli.check_socket(path)


def test_socket_of_a_dead_server_and_a_file_at_its_path(folder: Path) -> None:
    path = folder / "p"
    proxy_cli.check_socket(str(path))
    with closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(path))
    proxy_cli.check_socket(str(path))
    path.unlink()
    path.touch()
    with pytest.raises(LaunchError, match="it is no socket"):
        proxy_cli.check_socket(str(path))


def settings_of(name: str, value: Path) -> Settings:
    return Settings.from_environment({"SCHEDSVC_TARGET": "unix:/s", name: str(value)})


KEYS_FILES = ["SCHEDSVC_API_KEYS_FILE", "SCHEDSVC_OPERATOR_KEYS_FILE"]


@pytest.mark.parametrize("name", [*KEYS_FILES, "SCHEDSVC_TOKEN_FILE", "SCHEDSVC_TLS_CA_FILE"])
def test_pipe_instead_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match=f"{name}: cannot read .*not a regular file"):
        settings_of(name, tmp_path / "pipe")


@pytest.mark.parametrize("name", [*KEYS_FILES, "SCHEDSVC_TOKEN_FILE"])
def test_file_that_is_not_utf_8_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("schlüssel".encode("latin-1"))
    with pytest.raises(SettingsError, match=f"{name}: cannot read .*not UTF-8"):
        settings_of(name, tmp_path / "latin")


def test_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfone-key\r\nanother-key\r\n")
    found = settings_of("SCHEDSVC_API_KEYS_FILE", file).api_keys_sha256
    assert found == {api_key_hash("one-key"), api_key_hash("another-key")}
    token = settings_of("SCHEDSVC_TOKEN_FILE", file).token
    assert callable(token)
    assert token().startswith("one-key")


def test_token_file_that_becomes_a_pipe_does_not_hang(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token")
    token = settings_of("SCHEDSVC_TOKEN_FILE", file).token
    file.unlink()
    os.mkfifo(file)
    assert callable(token)
    with pytest.raises(OSError, match="not a regular file"):
        token()
