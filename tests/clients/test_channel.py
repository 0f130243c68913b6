"""Tests targets, options, credentials, and the mirrors of the contract's enumerations."""

from __future__ import annotations

import datetime
import ipaddress
from enum import IntEnum
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from schedsvc_client import (
    ClientOptions,
    InvalidRequest,
    LeaseState,
    LimitKind,
    Outcome,
    SchedulerUnavailable,
    TenantProof,
    api_key_hash,
    tls_credentials,
)
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.channel import backoff_ceiling_s, bearer_metadata, check_target
from schedsvc_client.requests import RequestIds, admit_request
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import quota_pb2, tenants_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (Outcome, pb.Outcome, "OUTCOME_"),
        (LeaseState, pb.LeaseState, "LEASE_STATE_"),
        (LimitKind, quota_pb2.LimitKind, "LIMIT_KIND_"),
        (TenantProof, tenants_pb2.TenantProof, "TENANT_PROOF_"),
    ],
)
def test_enums_mirror_the_contract(ours: type[IntEnum], theirs: object, prefix: str) -> None:
    items = theirs.items()  # type: ignore[attr-defined]
    assert {prefix + entry.name: entry.value for entry in ours} == dict(items)
    assert ours(9_999).name == "UNSPECIFIED"


@pytest.mark.parametrize(
    "target",
    [
        "localhost:50051",
        "10.0.0.1:1",
        "[::1]:65535",
        "unix:/a/b",
        "unix:s",
        "unix:///a",
        "dns:h:1",
        "ipv6:[::1]:1",
        "dns:///h:1",
    ],
)
def test_good_targets(target: str) -> None:
    assert check_target(target) == target


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("", "host:port"),
        ("localhost", "host:port or unix:/path, such as 127.0.0.1:7600"),
        ("/run/s.sock", "write unix:/run/s.sock"),
        ("unix://s", "write unix:s"),
        ("::1:7600", r"in brackets; write \[::1\]:7600"),
        ("[::1:7600", r"in brackets; write \[::1\]:7600"),
        (":1", "host:port"),
        ("h:x", "host:port"),
        ("h:0", "65535"),
        ("h:65536", "65535"),
        ("unix:", "socket"),
        ("http://127.0.0.1:7600", r"is a URL.*; write 127\.0\.0\.1:7600"),
        ("HTTPS://scheduler:7600/x", "is a URL.*; write scheduler:7600"),
    ],
)
def test_bad_targets_are_named(target: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_target(target)


def test_options_are_checked_and_backoff_is_bounded() -> None:
    with pytest.raises(ValueError, match="call_deadline_s"):
        ClientOptions(call_deadline_s=0)
    with pytest.raises(ValueError, match="backoff_max_s"):
        ClientOptions(backoff_min_s=3, backoff_max_s=2)
    with pytest.raises(ValueError, match="message_bytes_max"):
        ClientOptions(message_bytes_max=10)
    ceilings = [backoff_ceiling_s(ClientOptions(), failures) for failures in range(100)]
    assert ceilings[:3] == [0.05, 0.1, 0.2]
    assert ceilings == sorted(ceilings)
    assert ceilings[-1] == 2.0


def test_requests_are_checked_field_by_field() -> None:
    request = admit_request(request_id="r", input_tokens=3, max_output_tokens=4, n=2)
    assert list(request.message.input_tokens) == [3]
    for field, value in (
        ("max_output_tokens", 2**63),
        ("n", 2**31),
        ("n", 1.5),
        ("tenant", "\ud800"),
        ("input_tokens", [1, 2**63]),
        ("prefix_block_hashes", [-1]),
    ):
        values = {"request_id": "r", "input_tokens": 1, "max_output_tokens": 1} | {field: value}
        with pytest.raises(InvalidRequest) as caught:
            admit_request(**values)  # type: ignore[arg-type]
        assert caught.value.violations[0].field == field


def test_ids_are_unique_and_keys_are_hashed() -> None:
    first, second = RequestIds(), RequestIds()
    assert len({first.next(), first.next(), second.next()}) == 3
    assert len(first.next()) < 128
    assert api_key_hash("k").hex().startswith("8254c329")
    assert bearer_metadata(lambda: "t") == (("authorization", "Bearer t"),)
    assert bearer_metadata("") == ()


def _certificate(folder: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for this host, good for a server and a client."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    addresses = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "cert.pem", folder / "key.pem"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate_file, key_file


async def test_mutual_tls_with_a_token(tmp_path: Path) -> None:
    certificate_file, key_file = _certificate(tmp_path)
    server = grpc.ssl_server_credentials(
        [(key_file.read_bytes(), certificate_file.read_bytes())],
        certificate_file.read_bytes(),
        require_client_auth=True,
    )
    fake = FakeScheduler("127.0.0.1:0", server)
    fake.token = "t"
    await fake.start()
    ours = tls_credentials(
        ca_file=str(certificate_file),
        certificate_file=str(certificate_file),
        key_file=str(key_file),
    )
    async with (
        AsyncScheduler(fake.target, credentials=ours, token="t") as scheduler,
        scheduler.admission(input_tokens=1, max_output_tokens=1),
    ):
        pass
    assert len(fake.books[1].completes) == 1
    anonymous = tls_credentials(ca_file=str(certificate_file))
    async with AsyncScheduler(fake.target, credentials=anonymous, token="t") as scheduler:
        with pytest.raises(SchedulerUnavailable):
            await scheduler.stats()
    await fake.stop()


def test_credentials_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="key_file"):
        tls_credentials(certificate_file="c.pem")
    with pytest.raises(FileNotFoundError):
        tls_credentials(ca_file="/nowhere/ca.pem")
