"""Real certificates: one private authority per cluster, keys that never leave its directory.

Made with the openssl program, which every Linux machine has, so that the tests need no further package.
Elliptic curve keys, because a cluster needs about ten of them and each costs milliseconds.
"""

from __future__ import annotations

import ipaddress
import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.process import ClusterError

DAYS = "7"
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
# Strict verifiers (Python 3.13 and later) refuse certificates without key identifiers and key usage.
AUTHORITY_EXTENSIONS = """\
basicConstraints = critical, CA:true, pathlen:0
keyUsage = critical, digitalSignature, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""
LEAF_EXTENSIONS = """\
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature, keyEncipherment
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


@dataclass(frozen=True)
class KeyPair:
    """Paths of a PEM certificate (or public key) and its key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.cert = directory / "ca.crt"
        self.key = directory / "ca.key"
        self._request("ca", "/CN=job-reaper test authority")
        self._sign("ca", AUTHORITY_EXTENSIONS, "-signkey", str(self.key))

    def issue(
        self,
        file_name: str,
        common_name: str,
        *,
        organization: str | None = None,
        hosts: tuple[str, ...] = (),
    ) -> KeyPair:
        """A certificate for both ends of TLS; `hosts` are names or addresses, `organization` a group."""
        group = "" if organization is None else f"/O={organization}"
        self._request(file_name, f"{group}/CN={common_name}")
        names = f"subjectAltName = {','.join(map(_alternative, hosts))}\n" if hosts else ""
        self._sign(file_name, LEAF_EXTENSIONS + names, "-CA", str(self.cert), "-CAkey", str(self.key))
        return KeyPair(self.directory / f"{file_name}.crt", self.directory / f"{file_name}.key")

    def signing_key(self, file_name: str) -> KeyPair:
        """A bare key pair (no certificate) that signs ServiceAccount tokens."""
        pair = KeyPair(self.directory / f"{file_name}.pub", self.directory / f"{file_name}.key")
        curve = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        _openssl("genpkey", *curve, "-out", str(pair.key))
        _openssl("pkey", "-in", str(pair.key), "-pubout", "-out", str(pair.cert))
        return pair

    def _request(self, name: str, subject: str) -> None:
        key, request = self.directory / f"{name}.key", self.directory / f"{name}.csr"
        key.touch(mode=0o600)
        _openssl("req", "-new", *NEW_KEY, "-keyout", str(key), "-out", str(request), "-subj", subject)

    def _sign(self, name: str, extensions: str, *signer: str) -> None:
        request, described = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        described.write_text(extensions)
        serial = f"0x{secrets.token_hex(16)}"
        signed = ["-out", str(self.directory / f"{name}.crt"), "-extfile", str(described)]
        _openssl("x509", "-req", "-in", str(request), *signer, "-set_serial", serial, "-days", DAYS, *signed)


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def _openssl(*arguments: str) -> None:
    try:
        answer = subprocess.run(["openssl", *arguments], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        raise ClusterError("openssl is missing; install the openssl package") from None
    if answer.returncode != 0:
        raise ClusterError(f"openssl {arguments[0]} failed: {answer.stderr}")
