"""Starts HAProxy, nginx and Envoy with the configurations of docs/operate/fronts.md.

Only addresses, paths and the tenants' names become those of a test; each has to occur.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from schedsvc_lab.demo.processes import DIES_WITH_PARENT
from tests.clients.identity_matrix import DOMAIN, OWN, VICTIM, Connect, key_of
from tests.server.certificates import Authority
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
GUIDE, DUTIES = ROOT / "docs/operate/fronts.md", ROOT / "SECURITY.md"
#: Where `make test-fronts` installs Envoy.
ENVOY = ROOT / ".venv-fronts/bin/envoy"
_PLAIN_HTTP = """\
daemon off; master_process off; pid {0}/pid; error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {0}/body; proxy_temp_path {0}/proxy; fastcgi_temp_path {0}/fastcgi;
    uwsgi_temp_path {0}/uwsgi; scgi_temp_path {0}/scgi;
{1}}}
"""
_BUFFER = """\
                  - name: envoy.filters.http.buffer
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer
                      max_request_bytes: 33554432
"""

# Envoy waits a second for the client to close a connection that it ends.
_CLOSES_AT_ONCE = " " * 16 + "delayed_close_timeout: 0.01s\n"

Changes = tuple[tuple[str, str], ...]
_NAMES = (("acme", OWN), ("globex", VICTIM))


@dataclass(frozen=True)
class Program:
    """Describes a front: its section of the guide, and what a test changes there.

    `between`: the text between a directive and its value. `here`: addresses and names, with
    {socket}, {port} and {folder} of the test. `buffers`: how it waits for whole bodies; as written,
    it passes bytes on as they come.
    """

    title: str
    language: str
    between: str
    here: Changes
    buffers: Changes

    def as_written(self) -> str:
        """Return its configuration in the guide."""
        section = GUIDE.read_text().partition(f"\n## {self.title}\n")[2].partition("\n## ")[0]
        block = re.search(rf"```{self.language}\n(.*?)```", section, re.DOTALL)
        assert block, f"{GUIDE.name}: no {self.language} in {self.title}"
        return block[1]

    def duties(self) -> list[str]:
        """Return the directives of its table in SECURITY.md, as a configuration has them."""
        section = DUTIES.read_text().partition(f"\n### {self.title}\n")[2].partition("\n#")[0]
        rows = re.findall(r"^\| `([^`|]+)` \| `([^`|]+)` \|", section, re.MULTILINE)
        return [self.between.join(row) for row in rows]

    def without(self, duty: str) -> Changes:
        """Return the change that leaves a duty out. The configuration has to hold it once."""
        text = self.as_written()
        assert text.count(duty) == 1, f"{GUIDE.name}, {self.title}: not once {duty!r}"
        whole = next(each for each in (f"- {duty}", f"{duty};", duty) if each in text)
        return ((whole, ""),)

    def command(self, file: Path) -> list[str]:
        """Return the command that runs it in the foreground."""
        if self.title == "HAProxy":
            return [found("haproxy"), "-db", "-f", str(file)]
        if self.title == "nginx":
            return [found("nginx"), "-p", str(file.parent), "-e", "stderr", "-c", str(file)]
        program = str(ENVOY) if ENVOY.exists() else found("envoy")
        options = ("--disable-hot-restart", "--concurrency", "1", "-l", "error")
        return [program, "-c", str(file), *options]


_ROUTER = " " * 18 + "- name: envoy.filters.http.router\n"
_PORT = ("127.0.0.1:9000", "127.0.0.1:{port}")
PROGRAMS = {
    "haproxy": Program(
        title="HAProxy",
        language="haproxy",
        between=" ",
        here=((":443 ", "unix@{socket} "), ("/etc/haproxy", "{folder}"), _PORT),
        buffers=(("    mode http\n", "    mode http\n    option http-buffer-request\n"),),
    ),
    "nginx": Program(
        title="nginx",
        language="nginx",
        between=" ",
        here=(
            ("listen 443 ", "listen unix:{socket} "),
            ("/etc/nginx", "{folder}"),
            _PORT,
            *_NAMES,
        ),
        buffers=(
            ("        proxy_request_buffering off;\n", ""),
            ("        proxy_http_version 1.1;\n", ""),
            ('        proxy_set_header Connection "";\n', ""),
        ),
    ),
    "envoy": Program(
        title="Envoy",
        language="yaml",
        between=": ",
        here=(
            ("{socket_address: {address: 0.0.0.0, port_value: 443}}", "{pipe: {path: {socket}}}"),
            ("/etc/envoy", "{folder}"),
            ("port_value: 9000", "port_value: {port}"),
            ("stat_prefix: llm\n", f"stat_prefix: llm\n{_CLOSES_AT_ONCE}"),
            *_NAMES,
        ),
        buffers=((_ROUTER, _BUFFER + _ROUTER),),
    ),
}


def found(program: str) -> str:
    """Return the path of a program; skip the test without it, or fail in CI."""
    path = shutil.which(program)
    if path is None:
        (pytest.fail if "SCHEDSVC_CI" in os.environ else pytest.skip)(
            f"not found: {program}; `.ci/tools haproxy nginx` installs Debian's packages, and"
            " `make test-fronts` installs Envoy"
        )
    return str(path)


def changed(text: str, changes: Changes) -> str:
    """Replace parts of a configuration; each has to be in it."""
    for old, new in changes:
        assert old in text, f"the configuration has no {old!r}"
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class Running:
    """Holds a front that listens on a Unix socket."""

    socket: Path
    authority: Authority
    folder: Path

    def connect(self, tenant: str = "") -> Connect:
        """Return what opens a connection, with the certificate of a tenant or with none."""
        context = ssl.create_default_context(cafile=str(self.authority.file))
        if tenant:
            name = self.folder / tenant
            context.load_cert_chain(f"{name}.crt", f"{name}.key")

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_unix_connection(
                self.socket, ssl=context, server_hostname="localhost"
            )

        return connect


def _write_files(folder: Path, authority: Authority, *, is_haproxy: bool) -> None:
    """Write the certificates and maps that the configurations name."""
    for tenant in (OWN, VICTIM):
        authority.issue(tenant, f"{DOMAIN}/{tenant}")
    pair = authority.issue("server")
    key = pair.key_file.read_text()
    (folder / "server.pem").write_text(pair.cert_file.read_text() + (key if is_haproxy else ""))
    (folder / "clients.pem").write_bytes(authority.file.read_bytes())
    keys = {hashlib.sha256(key_of(each).encode()).hexdigest(): each for each in (OWN, VICTIM)}
    (folder / "keys.map").write_text("".join(f"{key} {each}\n" for key, each in keys.items()))
    (folder / "certificates.map").write_text(f"{OWN} {OWN}\n{VICTIM} {VICTIM}\n")


@asynccontextmanager
async def started(
    program: Program, port: int, folder: Path, changes: Changes = ()
) -> AsyncIterator[Running]:
    """Run a front before a server at a port of this machine, with changes of its configuration."""
    authority = Authority(folder)
    path = folder / "front"
    _write_files(folder, authority, is_haproxy=program.title == "HAProxy")
    text = changed(changed(program.as_written(), changes), program.here)
    for name, value in (("socket", path), ("folder", folder), ("port", port)):
        text = text.replace(f"{{{name}}}", str(value))
    if program.title == "nginx":
        text = _PLAIN_HTTP.format(folder, text)
    file, log = folder / "configuration.yaml", folder / "log"
    file.write_text(text)
    running = Running(path, authority, folder)
    process = _spawn(program.command(file), log)
    try:
        await until(lambda: _listens(running, process, log), log.read_text)
        yield running
    finally:
        process.kill()
        process.wait()


def _spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [*DIES_WITH_PARENT, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


def _check_runs(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.poll() is None, log.read_text()


async def _listens(running: Running, process: subprocess.Popen[bytes], log: Path) -> bool:
    _check_runs(process, log)
    try:
        _, writer = await running.connect()()
    except OSError:
        return False
    writer.close()
    return True
