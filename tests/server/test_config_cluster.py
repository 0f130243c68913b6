"""The section `cluster`: what is valid, and the sentence for what is not."""

from pathlib import Path

import pytest

from schedsvc.config import read

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


def test_a_deprecated_lift_is_refused(tmp_path: Path) -> None:
    found = messages(
        tmp_path, f"{{name: p, store: {{urls: [{URL}]}}}}\nscheduler: {{lift: active}}"
    )
    assert found == ["is active; a member of a cluster needs level, the default"]


@pytest.mark.parametrize("name", ["{x}", "a b", "*", "''"])
def test_a_name_that_no_key_can_hold_is_refused(tmp_path: Path, name: str) -> None:
    assert messages(tmp_path, f'{{name: "{name}", store: {{urls: [{URL}]}}}}')


def test_a_store_in_clear_is_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "schedsvc.yaml"
    section = '{name: p, store: {urls: ["redis://store.example:6379"]}}'
    file.write_text(f"{MINIMAL}cluster: {section}\n")
    found = [problem.message for problem in read(file).warnings]
    assert found == ["store.example is reached without TLS: the password travels in clear"]
