"""Real certificates: one private authority per cluster, keys that never leave its directory.

Elliptic curve keys, because a cluster needs about ten of them and each costs a millisecond.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_FOR = datetime.timedelta(days=7)
# Clocks of containers and hosts may differ by seconds; a certificate from the future is refused.
BACKDATED = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class KeyPair:
    """Paths of a PEM certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "job-reaper test authority")])
        builder = self._builder(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        usage = _usage(key_cert_sign=True)
        self.cert = directory / "ca.crt"
        self.key = directory / "ca.key"
        signed = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        _write_key(self.key, self._key)

    def issue(
        self,
        file_name: str,
        common_name: str,
        *,
        organization: str | None = None,
        hosts: tuple[str, ...] = (),
    ) -> KeyPair:
        """A certificate for both ends of TLS; `hosts` are names or addresses, `organization` a group."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if organization is not None:
            attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        builder = (
            self._builder(x509.Name(attributes), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(key_cert_sign=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
        )
        if hosts:
            names = [_general_name(host) for host in hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        pair = KeyPair(self.directory / f"{file_name}.crt", self.directory / f"{file_name}.key")
        signed = builder.sign(self._key, hashes.SHA256())
        pair.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        _write_key(pair.key, key)
        return pair

    def signing_key(self, file_name: str) -> KeyPair:
        """A bare key pair (no certificate) that signs ServiceAccount tokens."""
        key = ec.generate_private_key(ec.SECP256R1())
        pair = KeyPair(self.directory / f"{file_name}.pub", self.directory / f"{file_name}.key")
        _write_key(pair.key, key)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        pair.cert.write_bytes(public)
        return pair

    def _builder(self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATED)
            .not_valid_after(now + VALID_FOR)
            # Strict verifiers (Python 3.13 and later) refuse certificates without key identifiers.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, key_cert_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=not key_cert_sign,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.touch(mode=0o600)
    path.write_bytes(pem)
