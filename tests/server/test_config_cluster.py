"""Tests the section `cluster`: what is valid, and the sentence for what is not."""

import socket
from pathlib import Path

import pytest

from schedsvc.config import read
from schedsvc.config.cluster import Cluster, ClusterStore

MINIMAL = "listeners: [{tcp: 127.0.0.1:7600}]\n"
URL = '"redis://schedsvc@127.0.0.1:6379"'


def messages(tmp_path: Path, section: str) -> list[str]:
    file = tmp_path / "schedsvc.yaml"
    file.write_text(f"{MINIMAL}cluster: {section}\n")
    found = read(file)
    assert (found.config is None) == bool(found.problems)
    return [problem.message for problem in found.problems]


def test_a_cluster_is_read(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    file = tmp_path / "schedsvc.yaml"
    store = f"{{urls: [{URL}], password_file: password}}"
    file.write_text(f"{MINIMAL}cluster: {{name: prod, member: a, store: {store}}}\n")
    found = read(file)
    assert found.config is not None, found.problems
    assert not found.warnings
    cluster = found.config.cluster
    assert cluster is not None
    assert (cluster.name, cluster.member_name, cluster.sync_ms) == ("prod", "a", "auto")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ('{name: p, store: {urls: ["redis://u:s3cret@h:1"]}}', "contains a password; remove it"),
        ('{name: p, store: {urls: ["http://u:s3cret@h:1"]}}', "pattern"),
        ('{name: p, store: {urls: ["redis://a:1,b:2"]}}', "names several servers; Redis Cluster"),
        ('{name: p, store: {urls: ["redis://h:99999"]}}', "has no valid port"),
        ('{name: p, store: {urls: ["redis://:1"]}}', "names no host"),
        ('{name: p, store: {urls: ["redis://h:1/3"]}}', "more than a host and a port"),
        (f"{{name: p, store: {{urls: [{URL}, {URL}]}}}}", "this server stands twice"),
        (f"{{name: p, store: {{urls: [{URL}], password_file: none}}}}", "cannot read"),
        (f"{{name: p, store: {{urls: [{URL}], tls: {{}}}}}}", "needs rediss:// in all of urls"),
        ('{name: p, store: {urls: ["rediss://h"], tls: {cert: c}}}', "needs tls.key beside it"),
        ('{name: p, store: {urls: ["rediss://h"], tls: {ca: c}}}', "cannot read"),
    ],
)
def test_a_wrong_store_is_refused(tmp_path: Path, section: str, message: str) -> None:
    found = messages(tmp_path, section)
    assert any(message in problem for problem in found), found
    assert "s3cret" not in "".join(found)


@pytest.mark.parametrize("name", ["{x}", "a b", "*", "''"])
def test_a_name_that_no_key_can_hold_is_refused(tmp_path: Path, name: str) -> None:
    assert messages(tmp_path, f'{{name: "{name}", store: {{urls: [{URL}]}}}}')


def test_a_store_in_clear_is_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "schedsvc.yaml"
    section = '{name: p, store: {urls: ["redis://store.example:6379"]}}'
    file.write_text(f"{MINIMAL}cluster: {section}\n")
    found = [problem.message for problem in read(file).warnings]
    assert found == ["store.example is reached without TLS: the password travels in clear"]


MEMBER = '{name: m, sha256: "' + "0" * 64 + '", member: true}'
ROLE = f"name: p, store: {{urls: [{URL}]}}, role: auto"


def test_a_set_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s" * 32)
    (tmp_path / "token").write_text("t" * 32)
    given = "set: main, advertise: 'h:7600', secret_file: secret, leader: {token_file: token}"
    section = f"{{{ROLE}, {given}}}"
    found = messages(
        tmp_path, f"{section}\nstate: {{file: state.db}}\nauth: {{principals: [{MEMBER}]}}"
    )
    assert not found


@pytest.mark.parametrize(
    ("member", "target"),
    [("a", "a.pods.svc:7600"), (None, f"{socket.gethostname()}.pods.svc:7600")],
)
def test_advertise_names_the_member(member: str | None, target: str) -> None:
    cluster = Cluster(
        name="p",
        member=member,
        store=ClusterStore(urls=["redis://127.0.0.1:6379"]),
        advertise="{member}.pods.svc:7600",
    )
    assert cluster.advertised == target


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (f"{{name: p, store: {{urls: [{URL}]}}, set: main}}", "needs cluster.role beside it"),
        (f"{{{ROLE}}}", "needs cluster.set, the pools that it leads or follows"),
        (f"{{{ROLE}}}", "needs cluster.advertise, the HOST:PORT"),
        (f"{{{ROLE}}}", "needs cluster.secret_file, the secret"),
        (f"{{{ROLE}}}", "needs the section state"),
        (f"{{{ROLE}}}", "needs a principal with `member: true`"),
        (f"{{{ROLE}, advertise: nowhere}}", "has to be HOST:PORT, such as scheduler-a"),
        (f"{{{ROLE}, advertise: '{{host}}:7600'}}", "only {member} stands for something"),
        (f"{{{ROLE}, secret_file: short}}", "holds fewer than 32 bytes; write `openssl rand"),
        (f"{{{ROLE}, secret_file: none}}", "cannot read"),
        (f"{{{ROLE}, leader: {{token_file: none}}}}", "cannot read"),
    ],
)
def test_a_role_lacks_what_it_needs(tmp_path: Path, section: str, message: str) -> None:
    (tmp_path / "short").write_text("s" * 31)
    found = messages(tmp_path, section)
    assert any(message in problem for problem in found), found


def test_callers_of_a_listener_are_no_members(tmp_path: Path) -> None:
    member = "{name: m, listener: '127.0.0.1:7600', member: true}"
    found = messages(
        tmp_path, f"{{name: p, store: {{urls: [{URL}]}}}}\nauth: {{principals: [{member}]}}"
    )
    assert found == ["is not for a listener's callers; give members a token or a certificate"]
