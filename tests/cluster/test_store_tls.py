"""Members reach the store by TLS, which Debian's Redis speaks and the Valkey here does not."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from schedsvc.cli import main
from schedsvc.cluster.errors import StoreError
from schedsvc.cluster.member import Member
from schedsvc.config import load
from schedsvc.driver import Driver, new_core
from schedsvc.driver.clock import SteadyClock
from schedsvc_lab.demo.processes import free_port
from tests.server.certificates import Authority

from .store_server import ADMIN_PASSWORD, StoreServer, running_store, store_program

pytestmark = pytest.mark.slow


class TlsStore:
    """Runs a store whose port takes TLS only, from clients with a certificate of its authority."""

    def __init__(self, server: StoreServer, port: int, authority: Authority) -> None:
        self.server, self.port, self.authority = server, port, authority
        self.folder = server.folder.parent

    def config(self, host: str = "127.0.0.1", **tls: Any) -> Path:
        """Write the configuration of a member; `tls`: files instead of those that fit."""
        own = self.authority.issue("member")
        files = {"ca": self.authority.file, "cert": own.cert_file, "key": own.key_file} | tls
        section = {
            "urls": [f"rediss://members@{host}:{self.port}"],
            "password_file": "password",
            "tls": {name: str(file) for name, file in files.items() if file},
        }
        path = self.folder / "schedsvc.yaml"
        cluster = {"name": "prod", "member": "a", "store": section}
        path.write_text(json.dumps({"listeners": [{"tcp": "127.0.0.1:0"}], "cluster": cluster}))
        return path


@pytest.fixture
def tls_store(tmp_path: Path) -> Iterator[TlsStore]:
    (tmp_path / "password").write_text("secret\n")
    (tmp_path / "admin").write_text(ADMIN_PASSWORD + "\n")
    authority, port = Authority(tmp_path), free_port()
    pair = authority.issue("store")
    options = (
        *("--tls-port", str(port), "--tls-ca-cert-file", str(authority.file)),
        *("--tls-cert-file", str(pair.cert_file), "--tls-key-file", str(pair.key_file)),
    )
    with running_store(tmp_path / "store", *options, program=store_program("redis")) as server:
        yield TlsStore(server, port, authority)


async def init(config_file: Path) -> Result:
    words = ["cluster", "init", "--config", str(config_file)]
    admin = str(config_file.parent / "admin")
    arguments = [*words, "--admin-password-file", admin]
    return await asyncio.to_thread(CliRunner().invoke, main, arguments)


async def exchanged(config_file: Path) -> tuple[str, ...]:
    """Exchange totals once as this member; return the members that the store knows."""
    config, clock = load(config_file), SteadyClock()
    assert config.cluster is not None
    driver = Driver(new_core(config, clock.now_ns()), clock)
    member = Member(driver, config, config.cluster, 1)
    try:
        await member.exchange()
        return member.sharing.members
    finally:
        await member._drop()
        driver.close()


async def test_members_exchange_totals_by_tls(tls_store: TlsStore) -> None:
    for host in ("127.0.0.1", "localhost"):
        config_file = tls_store.config(host)
        done = await init(config_file)
        assert done.exit_code == 0, done.output
        assert f"store {host}:{tls_store.port}: functions loaded" in done.output
        assert await exchanged(config_file) == ("a",)


async def test_a_store_of_another_authority_is_refused(tls_store: TlsStore, tmp_path: Path) -> None:
    assert (await init(tls_store.config())).exit_code == 0
    other = Authority(tmp_path, "stranger")
    with pytest.raises(StoreError, match=r"cannot connect: .*certificate verify failed"):
        await exchanged(tls_store.config(ca=other.file))


async def test_a_member_without_a_certificate_is_refused(tls_store: TlsStore) -> None:
    assert (await init(tls_store.config())).exit_code == 0
    with pytest.raises(StoreError, match=f"store 127.0.0.1:{tls_store.port}: "):
        await exchanged(tls_store.config(cert=None, key=None))


async def test_a_store_without_tls_is_refused(tls_store: TlsStore) -> None:
    """The URL of TLS names the port without TLS."""
    tls_store.port = tls_store.server.port
    with pytest.raises(StoreError, match="cannot connect: "):
        await exchanged(tls_store.config())
