"""Makes certificates for a test: a CA, and what it signed."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


def _san(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    return x509.RFC822Name(name) if "@" in name else x509.DNSName(name)


@dataclass(frozen=True)
class Pair:
    """Holds a certificate and its key, as PEM and as files."""

    cert_file: Path
    key_file: Path

    @property
    def cert(self) -> bytes:
        return self.cert_file.read_bytes()

    @property
    def key(self) -> bytes:
        return self.key_file.read_bytes()


class Authority:
    """Keeps a certificate authority in a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        ca = x509.BasicConstraints(ca=True, path_length=None)
        self._write(self.file, self._sign(self._name, self._key.public_key(), ca))

    @property
    def cert(self) -> bytes:
        return self.file.read_bytes()

    def issue(
        self,
        common_name: str,
        *sans: str | None,
        since: datetime.timedelta = -_DAY,
        until: datetime.timedelta = _DAY,
    ) -> Pair:
        """Sign a certificate under a common name.

        `sans`: names with :// are URIs, with @ mail addresses, others DNS names; none: the common
        name, localhost and 127.0.0.1; None alone: it has no SAN. `since`, `until`: its validity,
        from now.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else []
        local = [_san(name) for name in (common_name, "localhost") if name]
        local.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        given = [_san(san) for san in sans if san is not None]
        addresses = None if sans == (None,) else x509.SubjectAlternativeName(given or local)
        cert = self._sign(x509.Name(names), key.public_key(), addresses, (since, until))
        pair = Pair(self._folder / f"{common_name}.crt", self._folder / f"{common_name}.key")
        self._write(pair.cert_file, cert)
        pair.key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        extension: x509.ExtensionType | None,
        valid: tuple[datetime.timedelta, datetime.timedelta] = (-_DAY, _DAY),
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + valid[0])
            .not_valid_after(now + valid[1])
        )
        if extension is not None:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    @staticmethod
    def _write(file: Path, cert: x509.Certificate) -> None:
        file.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
